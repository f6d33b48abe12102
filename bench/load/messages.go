package main

import (
	"bytes"
	"encoding/binary"
	"strconv"
	"strings"
	"time"
)

const (
	preparedSysFlag = 4
	committed       = "8"

	pullCommit       = 1
	pullSuspend      = 2
	pullSubscription = 4

	// How long Apache's push consumer lets a pull wait at the server.
	suspendMs = 15_000
)

// properties as Apache's client writes them: its unique key, that it waits for the store, and what the job adds.
func (j *job) properties() string {
	text := "UNIQ_KEY\x01" + keyPrefix + keyMark + "\x02WAIT\x01true\x02"
	for _, each := range j.Properties {
		text += each[0] + "\x01" + each[1] + "\x02"
	}
	return text
}

func (j *job) payload() []byte { return bytes.Repeat([]byte("x"), j.BodyBytes) }

// send is one request to store a message, or a batch of them.
func (j *job) send(topic string, queue int) request {
	r := request{code: sendMessageV2, body: j.payload()}
	properties, sysFlag := j.properties(), 0
	if j.Batch > 1 {
		r.code, r.body, properties = sendBatch, batch(j.Batch, j.payload(), properties), ""
	}
	if j.Kind == "transactions" {
		properties += "TRAN_MSG\x01true\x02PGROUP\x01" + j.Group + "\x02"
		sysFlag = preparedSysFlag
	}
	r.fields = []field{
		{"a", j.Group}, {"b", topic}, {"c", "TBW102"}, {"d", "8"}, {"e", strconv.Itoa(queue)},
		{"f", strconv.Itoa(sysFlag)}, {"g", strconv.FormatInt(time.Now().UnixMilli(), 10)}, {"h", "0"},
		{"i", properties}, {"j", "0"}, {"k", "false"}, {"m", strconv.FormatBool(j.Batch > 1)},
	}
	return r
}

// A batch is the messages one after the other:
// 4 size, 4 magic, 4 checksum, 4 flag, 4+n body, 2+n properties; magic and checksum are not looked at.
func batch(count int, body []byte, properties string) []byte {
	one := binary.BigEndian.AppendUint32(nil, uint32(22+len(body)+len(properties)))
	one = append(one, make([]byte, 12)...)
	one = binary.BigEndian.AppendUint32(one, uint32(len(body)))
	one = append(one, body...)
	one = binary.BigEndian.AppendUint16(one, uint16(len(properties)))
	one = append(one, properties...)
	return bytes.Repeat(one, count)
}

// templates are the frames that a sending job goes through in turn: every queue of every topic.
func (j *job) templates(flag int) []*template {
	var all []*template
	for _, queue := range j.Queues {
		for _, topic := range j.topics() {
			r := j.send(topic, queue.ID)
			r.flag = flag
			all = append(all, newTemplate(r, j.Encoding))
		}
	}
	return all
}

// topics: one that has the job's name, or as many as the job wants, numbered from 0.
func (j *job) topics() []string {
	if j.Topics < 2 {
		return []string{j.Topic}
	}
	names := make([]string, j.Topics)
	for i := range names {
		names[i] = j.Topic + "-" + strconv.Itoa(i)
	}
	return names
}

func (j *job) pull(group string, queue int, offset int64, sysFlag int, suspendMs int) request {
	expression := "TAG"
	if strings.ContainsAny(j.Subscription, "=<>") {
		expression = "SQL92"
	}
	return request{code: pullMessage, fields: []field{
		{"consumerGroup", group}, {"topic", j.Topic}, {"queueId", strconv.Itoa(queue)},
		{"queueOffset", strconv.FormatInt(offset, 10)}, {"maxMsgNums", strconv.Itoa(j.PullMessages)},
		{"sysFlag", strconv.Itoa(sysFlag)}, {"commitOffset", strconv.FormatInt(offset, 10)},
		{"suspendTimeoutMillis", strconv.Itoa(suspendMs)}, {"subscription", j.Subscription}, {"subVersion", "0"},
		{"expressionType", expression},
	}}
}

// A stored message begins with its size; behind 84 bytes of numbers and two IPv4 addresses comes the body:
// 4 size ... 4 body size, body.
const bodySizeAt = 84

// records calls `each` with the body of every message in a pull's answer and returns how many there were.
func records(stored []byte, each func(body []byte)) int {
	count := 0
	for len(stored) >= 4 {
		size := int(binary.BigEndian.Uint32(stored))
		if size < bodySizeAt+4 || size > len(stored) {
			break
		}
		if each != nil {
			length := int(binary.BigEndian.Uint32(stored[bodySizeAt:]))
			each(stored[bodySizeAt+4 : bodySizeAt+4+length])
		}
		stored = stored[size:]
		count++
	}
	return count
}
