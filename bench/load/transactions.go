package main

import (
	"fmt"
	"strconv"
)

// transactionsJob: a half message is sent, its acknowledgement is answered with a commit, and when that is acknowledged
// too the transaction counts and the next one begins. Its latency is that of both together.
func transactionsJob(j *job) (result, error) {
	all := j.templates(0)
	workers := make([]func(*tally) error, j.Connections)
	for i := range workers {
		c, err := dial(j.Address, i)
		if err != nil {
			return result{}, err
		}
		defer c.close()
		s := &sender{job: j, c: c, templates: all, turn: i, key: uint32(i) << 20}
		workers[i] = s.transact
	}
	return together(workers)
}

// transact: even opaques are half messages, the odd one behind is its commit; slot i has the opaques 2i and 2i+1.
func (s *sender) transact(t *tally) error {
	begunAt := make([]int64, s.job.InFlight)
	end := now() + int64(s.job.Seconds*1e9)
	for slot := range begunAt {
		s.next(firstOpaque + 2*int32(slot))
		begunAt[slot] = now()
	}
	for open := s.job.InFlight; open > 0; {
		r, err := s.c.next()
		if err != nil {
			return err
		}
		slot := (r.opaque - firstOpaque) / 2
		if r.code != 0 {
			t.refused(r)
		} else if r.opaque%2 == 0 {
			if err := s.commit(r); err != nil {
				return err
			}
			continue
		} else {
			t.messages++
			t.histogram.record(s.c.arrived - begunAt[slot])
		}
		if s.c.arrived >= end {
			open--
			continue
		}
		s.next(firstOpaque + 2*slot)
		begunAt[slot] = now()
	}
	return nil
}

// commit: a message's id is the server's address and, in its last 16 digits, the place in the log.
func (s *sender) commit(half reply) error {
	id := half.field("msgId")
	if len(id) < 16 {
		return fmt.Errorf("message id %q", id)
	}
	place, err := strconv.ParseInt(id[len(id)-16:], 16, 64)
	if err != nil {
		return err
	}
	request := request{code: endTransaction, fields: []field{
		{"topic", s.job.Topic}, {"producerGroup", s.job.Group}, {"tranStateTableOffset", half.field("queueOffset")},
		{"commitLogOffset", strconv.FormatInt(place, 10)}, {"commitOrRollback", committed},
		{"fromTransactionCheck", "false"}, {"msgId", half.field("transactionId")},
		{"transactionId", half.field("transactionId")},
	}}
	s.c.out = append(s.c.out, request.encode(s.job.Encoding, half.opaque+1)...)
	return nil
}
