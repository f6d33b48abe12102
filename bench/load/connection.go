package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"time"
)

const (
	// A server that says nothing for so long has failed.
	silence     = 60 * time.Second
	maxFrame    = 16 << 20
	inputBuffer = 256 << 10
)

// now counts nanoseconds from the start of the program; the clock never goes back.
var started = time.Now()

func now() int64 { return int64(time.Since(started)) }

// A connection that collects what is to be written until everything that had arrived is worked off.
type connection struct {
	conn       net.Conn
	in         []byte
	start, end int
	out        []byte
	arrived    int64 // when the bytes came that replies are cut from now
}

// dial makes the connection with that number; the addresses are separated by semicolons and take turns.
func dial(addresses string, number int) (*connection, error) {
	all := strings.Split(addresses, ";")
	conn, err := net.DialTimeout("tcp", all[number%len(all)], silence)
	if err != nil {
		return nil, err
	}
	return &connection{conn: conn, in: make([]byte, inputBuffer)}, nil
}

func (c *connection) flush() error {
	if len(c.out) == 0 {
		return nil
	}
	if err := c.conn.SetWriteDeadline(time.Now().Add(silence)); err != nil {
		return err
	}
	_, err := c.conn.Write(c.out)
	c.out = c.out[:0]
	return err
}

// complete tells whether a whole reply is there already.
func (c *connection) complete() bool {
	have := c.end - c.start
	return have >= 4 && have-4 >= int(binary.BigEndian.Uint32(c.in[c.start:]))
}

// next gives the next reply and waits for it; before it waits, it writes what was collected.
func (c *connection) next() (reply, error) {
	for !c.complete() {
		if err := c.flush(); err != nil {
			return reply{}, err
		}
		if err := c.read(); err != nil {
			return reply{}, err
		}
	}
	size := int(binary.BigEndian.Uint32(c.in[c.start:]))
	frame := c.in[c.start+4 : c.start+4+size]
	c.start += 4 + size
	return parseReply(frame)
}

func (c *connection) read() error {
	if err := c.makeRoom(); err != nil {
		return err
	}
	if err := c.conn.SetReadDeadline(time.Now().Add(silence)); err != nil {
		return err
	}
	count, err := c.conn.Read(c.in[c.end:])
	c.arrived = now()
	c.end += count
	return err
}

func (c *connection) makeRoom() error {
	have := c.end - c.start
	copy(c.in, c.in[c.start:c.end])
	c.start, c.end = 0, have
	if have < 4 {
		return nil
	}
	size := int(binary.BigEndian.Uint32(c.in))
	if size < 4 || size > maxFrame {
		return fmt.Errorf("a frame of %d bytes", size)
	}
	if size+4 > len(c.in) {
		larger := make([]byte, size+4+inputBuffer)
		copy(larger, c.in[:have])
		c.in = larger
	}
	return nil
}

func (c *connection) close() { _ = c.conn.Close() }
