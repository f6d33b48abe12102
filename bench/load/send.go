package main

import "time"

// sendJob: on each connection so many requests are under way at any time, or, with a rate, one is sent whenever it is due.
func sendJob(j *job) (result, error) {
	all, silent := j.templates(0), j.templates(oneWayFlag)
	workers := make([]func(*tally) error, j.Connections)
	for i := range workers {
		c, err := dial(j.Address, i)
		if err != nil {
			return result{}, err
		}
		defer c.close()
		s := &sender{job: j, c: c, templates: all, silent: silent, turn: i, key: uint32(i) << 20}
		workers[i] = s.closedLoop
		if j.Rate > 0 {
			workers[i] = s.fixedRate
		}
	}
	return together(workers)
}

type sender struct {
	job       *job
	c         *connection
	templates []*template
	silent    []*template
	turn      int
	key       uint32
}

// next collects one request, and the one-way requests that go before it.
func (s *sender) next(opaque int32) {
	for i := 0; i < s.job.OneWay; i++ {
		s.c.out = s.silent[s.turn%len(s.silent)].appendTo(s.c.out, opaque, s.key)
		s.turn++
		s.key++
	}
	s.c.out = s.templates[s.turn%len(s.templates)].appendTo(s.c.out, opaque, s.key)
	s.turn++
	s.key += uint32(s.job.Batch)
}

// closedLoop: the request with opaque o is answered, the request with opaque o+n takes its place.
func (s *sender) closedLoop(t *tally) error {
	n := int32(s.job.InFlight)
	sentAt := make([]int64, n)
	perAnswer := int64(s.job.Batch + s.job.OneWay)
	begin := now()
	end := begin + int64(s.job.Seconds*1e9)
	for slot := int32(0); slot < n; slot++ {
		s.next(firstOpaque + slot)
		sentAt[slot] = begin
	}
	for open := n; open > 0; {
		r, err := s.c.next()
		if err != nil {
			return err
		}
		slot := (r.opaque - firstOpaque) % n
		if r.code != 0 {
			t.refused(r)
		} else {
			t.messages += perAnswer
			t.histogram.record(s.c.arrived - sentAt[slot])
		}
		if s.c.arrived >= end || (s.job.Messages > 0 && t.messages >= int64(s.job.Messages)) {
			open--
			continue
		}
		s.next(r.opaque + n)
		sentAt[slot] = now()
	}
	return nil
}

// pace writes requests when they are due, until the time is over; request i is due at begin + i/rate.
func (s *sender) pace(begin int64, fill func(i int64)) error {
	total := int64(float64(s.job.Rate) * (s.job.WarmSeconds + s.job.Seconds))
	for i := int64(0); i < total; {
		due := (now() - begin) * int64(s.job.Rate) / int64(time.Second)
		for ; i <= due && i < total; i++ {
			fill(i)
		}
		if err := s.c.flush(); err != nil {
			return err
		}
		if wait := s.dueAt(begin, i) - now(); wait > 0 {
			time.Sleep(time.Duration(wait))
		}
	}
	return nil
}

func (s *sender) dueAt(begin, i int64) int64 { return begin + i*int64(time.Second)/int64(s.job.Rate) }

func (s *sender) fixedRate(t *tally) error {
	begin := now()
	warm := begin + int64(s.job.WarmSeconds*1e9)
	total := int64(float64(s.job.Rate) * (s.job.WarmSeconds + s.job.Seconds))
	written := make(chan error, 1)
	go func() {
		written <- s.pace(begin, func(i int64) { s.next(firstOpaque + int32(i)) })
	}()
	answers := &connection{conn: s.c.conn, in: s.c.in} // what is to be written belongs to the other side
	for i := int64(0); i < total; i++ {
		r, err := answers.next()
		if err != nil {
			return err
		}
		due := s.dueAt(begin, int64(r.opaque-firstOpaque))
		if r.code != 0 {
			t.refused(r)
			continue
		}
		t.messages++
		if due >= warm {
			t.histogram.record(answers.arrived - due)
		}
	}
	return <-written
}
