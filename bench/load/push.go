package main

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"sync/atomic"
)

// pushJob sends at a fixed rate and consumes as a push consumer does: every group has a pull of every queue waiting at
// the server. A body begins with the time at which its message was due; the latency counts from there to the arrival at
// a group, less the delay that was asked for. What the server refuses to take is counted and not waited for.
func pushJob(j *job) (result, error) {
	c, err := dial(j.Address, 0)
	if err != nil {
		return result{}, err
	}
	defer c.close()
	s := &sender{job: j, c: c, templates: j.templates(0)}
	var begin, expected atomic.Int64
	expected.Store(int64(float64(j.Rate) * (j.WarmSeconds + j.Seconds)))
	workers := []func(*tally) error{func(t *tally) error { return s.produce(&begin, &expected, t) }}
	for group := 0; group < j.Groups; group++ {
		consumer, err := dial(j.Address, group)
		if err != nil {
			return result{}, err
		}
		defer consumer.close()
		name := j.Group + "-" + strconv.Itoa(group)
		workers = append(workers, func(t *tally) error { return j.consume(consumer, name, &begin, &expected, t) })
	}
	return together(workers)
}

func (s *sender) produce(begin, expected *atomic.Int64, t *tally) error {
	begin.Store(now())
	total := expected.Load()
	written := make(chan error, 1)
	go func() {
		written <- s.pace(begin.Load(), func(i int64) {
			at := len(s.c.out)
			body := s.templates[s.turn%len(s.templates)].bodyAt
			s.next(firstOpaque + int32(i))
			binary.BigEndian.PutUint64(s.c.out[at+body:], uint64(s.dueAt(begin.Load(), i)))
		})
	}()
	answers := &connection{conn: s.c.conn, in: s.c.in}
	for i := int64(0); i < total; i++ {
		r, err := answers.next()
		if err != nil {
			return err
		}
		if r.code != 0 {
			t.refused(r)
			expected.Add(-1)
		}
	}
	return <-written
}

func (j *job) consume(c *connection, group string, begin, expected *atomic.Int64, t *tally) error {
	offsets := make([]int64, len(j.Queues))
	ask := func(i int) {
		request := j.pull(group, j.Queues[i].ID, offsets[i], pullCommit|pullSuspend|pullSubscription, suspendMs)
		c.out = append(c.out, request.encode(j.Encoding, firstOpaque+int32(i))...)
	}
	for i, each := range j.Queues {
		offsets[i] = each.From
		ask(i)
	}
	delay := int64(j.DelayMs) * 1e6
	latest := now()
	for t.messages < expected.Load() {
		r, err := c.next()
		if err != nil {
			return fmt.Errorf("%d of %d messages came: %w", t.messages, expected.Load(), err)
		}
		if len(r.body) > 0 {
			latest = c.arrived
		} else if c.arrived-latest > int64(silence) {
			return fmt.Errorf("%d of %d messages came to %s, and no more for %s", t.messages, expected.Load(), group, silence)
		}
		warm := begin.Load() + int64(j.WarmSeconds*1e9)
		i := int(r.opaque - firstOpaque)
		t.messages += int64(records(r.body, func(body []byte) {
			if due := int64(binary.BigEndian.Uint64(body)); due >= warm {
				t.histogram.record(c.arrived - due - delay)
			}
		}))
		switch r.code {
		case found, retryAtOnce, notFound:
			if offsets[i], err = strconv.ParseInt(r.field("nextBeginOffset"), 10, 64); err != nil {
				return err
			}
		default:
			t.refused(r)
		}
		ask(i)
	}
	return nil
}
