// A load generator for RocketMQ servers that costs far less than they do.
//
// It reads one job, a JSON object, from its standard input, prints {"ready": true} when everything is connected and the
// load begins, and a result when it has ended. Requests are encoded before the load begins; only their opaque and the
// messages' unique keys are patched. One thread does everything: replies that arrive together are worked off together,
// and the requests that follow from them leave in one write. At a fixed rate a request has a time at which it is due,
// and its latency counts from there, however late a slow server lets it leave.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
)

type queue struct {
	ID   int   `json:"id"`
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

type job struct {
	Kind         string      `json:"kind"`    // send, pull, push, idle, transactions
	Address      string      `json:"address"` // or several, separated by semicolons, among which connections are shared out
	Encoding     string      `json:"encoding"`
	Topic        string      `json:"topic"`
	Topics       int         `json:"topics"` // more than one: "topic-0", "topic-1", ...
	Queues       []queue     `json:"queues"`
	Group        string      `json:"group"`
	Groups       int         `json:"groups"`
	BodyBytes    int         `json:"body_bytes"`
	Properties   [][2]string `json:"properties"`
	Connections  int         `json:"connections"`
	InFlight     int         `json:"in_flight"` // of each connection
	Batch        int         `json:"batch"`
	OneWay       int         `json:"one_way"` // so many of these before each request that is answered
	Rate         int         `json:"rate"`    // messages a second; 0 is as fast as the answers come
	DelayMs      int         `json:"delay_ms"`
	PullMessages int         `json:"pull_messages"`
	Subscription string      `json:"subscription"`
	Once         bool        `json:"once"` // pull: end when everything was read
	WarmSeconds  float64     `json:"warm_seconds"`
	Seconds      float64     `json:"seconds"`
	Messages     int         `json:"messages"` // send: end after so many, whatever the time
}

type result struct {
	Messages   int64          `json:"messages"`
	LookedAt   int64          `json:"looked_at"`
	Seconds    float64        `json:"seconds"`
	Errors     map[string]int `json:"errors"`
	Remark     string         `json:"remark"`
	Latency    *latency       `json:"latency_ms"`
	CPUSeconds float64        `json:"cpu_seconds"`
}

// tally is what one connection counts.
type tally struct {
	messages, lookedAt int64
	histogram          histogram
	errors             map[string]int
	remark             string
	failure            error
}

// refused counts an answer that is an error.
func (t *tally) refused(r reply) {
	if t.errors == nil {
		t.errors = map[string]int{}
	}
	t.errors[fmt.Sprint(r.code)]++
	if t.remark == "" {
		t.remark = r.remark()
	}
}

// together runs a worker on each of the connections and adds up what they counted.
func together(workers []func(*tally) error) (result, error) {
	begin, cpu := now(), cpuSeconds()
	announce()
	done := make(chan *tally)
	for _, worker := range workers {
		go func(work func(*tally) error) {
			t := &tally{}
			t.failure = work(t)
			done <- t
		}(worker)
	}
	whole, sum := result{Errors: map[string]int{}}, &histogram{}
	for range workers {
		t := <-done
		if t.failure != nil {
			return whole, t.failure
		}
		whole.Messages += t.messages
		whole.LookedAt += t.lookedAt
		for code, count := range t.errors {
			whole.Errors[code] += count
		}
		if whole.Remark == "" {
			whole.Remark = t.remark
		}
		sum.add(&t.histogram)
	}
	whole.Seconds = float64(now()-begin) / 1e9
	whole.Latency = sum.latency()
	whole.CPUSeconds = cpuSeconds() - cpu
	return whole, nil
}

func announce() { fmt.Println(`{"ready": true}`) }

func cpuSeconds() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / float64(time.Second)
}

func run() error {
	var j job
	if err := json.NewDecoder(os.Stdin).Decode(&j); err != nil {
		return err
	}
	kinds := map[string]func(*job) (result, error){
		"send": sendJob, "pull": pullJob, "push": pushJob, "idle": idleJob, "transactions": transactionsJob,
	}
	work, known := kinds[j.Kind]
	if !known {
		return fmt.Errorf("unknown kind %q", j.Kind)
	}
	whole, err := work(&j)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(whole)
}

func main() {
	runtime.GOMAXPROCS(1)
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}
