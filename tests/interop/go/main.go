// A driver around Apache's Go client, steered by a test.
//
// In, one command a line as a query string: id=7&op=send&topic=t&body=hello. Out, one JSON object a line: the answer
// {"id":"7","ok":true,...} or {"id":"7","ok":false,"error":...}, and events: {"event":"consumed",...}. Commands run side
// by side; a caller that needs an order waits for the answer. End of input ends the process. Operations have the names
// and arguments of the Java driver; a "lite" is the Go pull consumer, which polls.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const (
	pollInterval   = 20 * time.Millisecond
	patience       = 60 * time.Second // a server on a busy machine is not one that fails
	waitDeadline   = 2 * patience
	longestCommand = 8 << 20
)

type fields = map[string]interface{}

type handler func(arguments) (fields, error)

var (
	stdout = os.Stdout
	output sync.Mutex
)

func emit(event fields) {
	line, err := json.Marshal(event)
	if err != nil {
		panic(err)
	}
	output.Lock()
	defer output.Unlock()
	stdout.Write(append(line, '\n'))
}

func main() {
	// Libraries print now and then; the event stream keeps the real output for itself.
	os.Stdout = os.Stderr
	rlog.SetLogLevel("error")
	handlers := map[string]handler{}
	for _, family := range []map[string]handler{adminHandlers, producerHandlers, consumerHandlers, pullHandlers} {
		for op, run := range family {
			handlers[op] = run
		}
	}
	emit(fields{"event": "ready"})
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, longestCommand)
	for lines.Scan() {
		values, err := url.ParseQuery(lines.Text())
		if err != nil {
			panic(err)
		}
		go answer(handlers, arguments{values})
	}
	// Clients that a test did not shut down hold nothing that must be written.
	os.Exit(0)
}

func answer(handlers map[string]handler, args arguments) {
	reply := fields{"id": args.text("id", ""), "ok": true}
	result, err := run(handlers, args)
	if err != nil {
		reply["ok"], reply["error"] = false, err.Error()
	}
	for key, value := range result {
		reply[key] = value
	}
	emit(reply)
}

func run(handlers map[string]handler, args arguments) (result fields, err error) {
	defer func() {
		if failure := recover(); failure != nil {
			err = fmt.Errorf("panic: %v", failure)
		}
	}()
	found, known := handlers[args.text("op", "")]
	if !known {
		return nil, fmt.Errorf("no such op: %s", args.text("op", ""))
	}
	return found(args)
}

// until polls a condition, and fails with what it says when the deadline passes.
func until(condition func() (bool, error)) error {
	deadline := time.Now().Add(waitDeadline)
	for {
		done, err := condition()
		if done {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %s: %v", waitDeadline, err)
		}
		time.Sleep(pollInterval)
	}
}

// arguments of one command, by name.
type arguments struct {
	values url.Values
}

func (args arguments) has(name string) bool {
	return args.values.Has(name)
}

func (args arguments) text(name, otherwise string) string {
	if args.has(name) {
		return args.values.Get(name)
	}
	return otherwise
}

func (args arguments) number(name string, otherwise int) int {
	if !args.has(name) {
		return otherwise
	}
	value, err := strconv.Atoi(args.values.Get(name))
	if err != nil {
		panic(err)
	}
	return value
}

// under gives the arguments whose names start with the prefix, without it.
func (args arguments) under(prefix string) map[string]string {
	found := map[string]string{}
	for name := range args.values {
		if strings.HasPrefix(name, prefix) {
			found[strings.TrimPrefix(name, prefix)] = args.values.Get(name)
		}
	}
	return found
}

// registry keeps clients under the names that the test gave them.
type registry[T any] struct {
	lock    sync.Mutex
	clients map[string]T
}

func (r *registry[T]) put(name string, client T) {
	r.lock.Lock()
	defer r.lock.Unlock()
	if r.clients == nil {
		r.clients = map[string]T{}
	}
	r.clients[name] = client
}

func (r *registry[T]) get(args arguments) T {
	r.lock.Lock()
	defer r.lock.Unlock()
	client, found := r.clients[args.text("name", "")]
	if !found {
		panic("no client named " + args.text("name", ""))
	}
	return client
}
