package main

import "strconv"

const (
	found       = 0
	notFound    = 19
	retryAtOnce = 20
	movedOffset = 21
)

// pullJob reads queues from end to end, one pull of each queue under way, and begins again until the time is over.
func pullJob(j *job) (result, error) {
	workers := make([]func(*tally) error, j.Connections)
	for i := range workers {
		c, err := dial(j.Address, i)
		if err != nil {
			return result{}, err
		}
		defer c.close()
		var mine []queue
		for at, each := range j.Queues {
			if at%j.Connections == i {
				mine = append(mine, each)
			}
		}
		workers[i] = func(t *tally) error { return j.read(c, mine, t) }
	}
	return together(workers)
}

// read: the opaque of a pull tells its queue.
func (j *job) read(c *connection, queues []queue, t *tally) error {
	end := now() + int64(j.Seconds*1e9)
	offsets, sentAt := make([]int64, len(queues)), make([]int64, len(queues))
	ask := func(i int) {
		request := j.pull(j.Group, queues[i].ID, offsets[i], pullSubscription, suspendMs)
		c.out = append(c.out, request.encode(j.Encoding, firstOpaque+int32(i))...)
		sentAt[i] = now()
	}
	for i, each := range queues {
		offsets[i] = each.From
		ask(i)
	}
	for open := len(queues); open > 0; {
		r, err := c.next()
		if err != nil {
			return err
		}
		i := int(r.opaque - firstOpaque)
		t.histogram.record(c.arrived - sentAt[i])
		next := offsets[i]
		switch r.code {
		case found, retryAtOnce, movedOffset, notFound:
			t.messages += int64(records(r.body, nil))
			if next, err = strconv.ParseInt(r.field("nextBeginOffset"), 10, 64); err != nil {
				return err
			}
			if next > offsets[i] {
				t.lookedAt += next - offsets[i]
			}
		default:
			t.refused(r)
		}
		offsets[i] = next
		if next >= queues[i].To || r.code == notFound {
			offsets[i] = queues[i].From
			if j.Once {
				open--
				continue
			}
		}
		if c.arrived >= end {
			open--
			continue
		}
		ask(i)
	}
	return nil
}
