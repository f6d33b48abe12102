package main

import (
	"errors"
	"fmt"
	"os"
	"time"
)

const (
	heartbeatInterval = 30 * time.Second
	groupMembers      = 10
)

// idleJob keeps consumers connected that wait for messages which do not come: each has a pull waiting at the server and
// says every half minute that it is there. The first pulls wait for different times, so that from the beginning as many
// run out in every second as ever. The count is of the pulls that the server let run out.
func idleJob(j *job) (result, error) {
	workers := make([]func(*tally) error, j.Connections)
	for i := range workers {
		c, err := dial(j.Address, i)
		if err != nil {
			return result{}, err
		}
		defer c.close()
		w := &waiter{job: j, c: c, number: i, group: fmt.Sprintf("%s-%d", j.Group, i/groupMembers)}
		if err := w.begin(); err != nil {
			return result{}, err
		}
		workers[i] = w.wait
	}
	return together(workers)
}

type waiter struct {
	job    *job
	c      *connection
	number int
	group  string
}

const (
	heartbeatOpaque = firstOpaque
	pullOpaque      = firstOpaque + 1
)

func (w *waiter) beat() {
	body := fmt.Sprintf(`{"clientID":"127.0.0.1@%d","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET",`+
		`"consumeType":"CONSUME_PASSIVELY","groupName":"%s","messageModel":"CLUSTERING","subscriptionDataSet":`+
		`[{"classFilterMode":false,"codeSet":[],"expressionType":"TAG","subString":"*","subVersion":0,"tagsSet":[],`+
		`"topic":"%s"}],"unitMode":false}],"heartbeatFingerprint":0,"producerDataSet":[],"withoutSub":false}`,
		w.number, w.group, w.job.Topic)
	w.c.out = append(w.c.out, request{code: heartBeat, body: []byte(body)}.encode(w.job.Encoding, heartbeatOpaque)...)
}

func (w *waiter) ask(suspendMs int) {
	each := w.job.Queues[w.number%len(w.job.Queues)]
	pull := w.job.pull(w.group, each.ID, each.From, pullSuspend|pullSubscription, suspendMs)
	w.c.out = append(w.c.out, pull.encode(w.job.Encoding, pullOpaque)...)
}

func (w *waiter) begin() error {
	w.beat()
	for {
		r, err := w.c.next()
		if err != nil {
			return err
		}
		if r.opaque == heartbeatOpaque {
			if r.code != 0 {
				return fmt.Errorf("heartbeat refused: %d %s", r.code, r.remark())
			}
			w.ask(suspendMs * (w.number + 1) / w.job.Connections)
			return w.c.flush()
		}
	}
}

func (w *waiter) wait(t *tally) error {
	end := time.Now().Add(time.Duration(w.job.Seconds * 1e9))
	beat := time.Now().Add(time.Duration(w.number) * heartbeatInterval / time.Duration(w.job.Connections))
	for time.Now().Before(end) {
		if !time.Now().Before(beat) {
			w.beat()
			beat = beat.Add(heartbeatInterval)
		}
		if err := w.c.flush(); err != nil {
			return err
		}
		until := end
		if beat.Before(end) {
			until = beat
		}
		if err := w.hear(until, t); err != nil {
			return err
		}
	}
	return nil
}

// hear reads until then; the notices of the server that its group has changed are let pass.
func (w *waiter) hear(until time.Time, t *tally) error {
	for {
		for w.c.complete() {
			r, err := w.c.next()
			if err != nil {
				return err
			}
			switch {
			case r.opaque != pullOpaque:
			case r.code == notFound:
				t.messages++
				w.ask(suspendMs)
			default:
				return fmt.Errorf("a pull was answered with %d %s", r.code, r.remark())
			}
		}
		if len(w.c.out) > 0 {
			return nil
		}
		if err := w.c.makeRoom(); err != nil {
			return err
		}
		if err := w.c.conn.SetReadDeadline(until); err != nil {
			return err
		}
		count, err := w.c.conn.Read(w.c.in[w.c.end:])
		w.c.end += count
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
