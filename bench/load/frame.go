package main

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
)

// Frames of the remoting protocol, as far as a load generator needs them: requests are encoded once and patched, replies
// are cut out of the stream and only those fields are looked for that decide what is sent next.
//
//	4 bytes   length of everything after this field
//	4 bytes   header encoding (1 byte: 0 JSON, 1 binary) and header length (3 bytes)
//	header    JSON, or: 2 code, 1 language, 2 version, 4 opaque, 4 flag, 4+n remark, 4+n fields (2+n key, 4+n value)
//	body      the rest

const (
	jsonEncoding   = "json"
	binaryEncoding = "binary"

	sendMessageV2  = 310
	sendBatch      = 320
	pullMessage    = 11
	heartBeat      = 34
	endTransaction = 37

	oneWayFlag = 2
	version    = 513

	// Every opaque has ten digits, so that it can be replaced in a JSON header without moving a byte.
	firstOpaque = 1_000_000_000
	// Where the opaque is in a frame with a binary header.
	binaryOpaqueAt = 8 + 5
)

type field struct{ key, value string }

type request struct {
	code   int
	flag   int
	fields []field
	body   []byte
}

func (r request) encode(encoding string, opaque int32) []byte {
	var header []byte
	mark := uint32(0)
	if encoding == binaryEncoding {
		header = r.binaryHeader(opaque)
		mark = 1 << 24
	} else {
		header = r.jsonHeader(opaque)
	}
	frame := binary.BigEndian.AppendUint32(nil, uint32(4+len(header)+len(r.body)))
	frame = binary.BigEndian.AppendUint32(frame, mark|uint32(len(header)))
	frame = append(frame, header...)
	return append(frame, r.body...)
}

func (r request) binaryHeader(opaque int32) []byte {
	var fields []byte
	for _, each := range r.fields {
		fields = binary.BigEndian.AppendUint16(fields, uint16(len(each.key)))
		fields = append(fields, each.key...)
		fields = binary.BigEndian.AppendUint32(fields, uint32(len(each.value)))
		fields = append(fields, each.value...)
	}
	header := binary.BigEndian.AppendUint16(nil, uint16(r.code))
	header = append(header, 0) // Java
	header = binary.BigEndian.AppendUint16(header, version)
	header = binary.BigEndian.AppendUint32(header, uint32(opaque))
	header = binary.BigEndian.AppendUint32(header, uint32(r.flag))
	header = binary.BigEndian.AppendUint32(header, 0)
	header = binary.BigEndian.AppendUint32(header, uint32(len(fields)))
	return append(header, fields...)
}

func (r request) jsonHeader(opaque int32) []byte {
	fields := make(map[string]string, len(r.fields))
	for _, each := range r.fields {
		fields[each.key] = each.value
	}
	text, err := json.Marshal(fields)
	if err != nil {
		panic(err) // a map of strings can always be written
	}
	return []byte(fmt.Sprintf(
		`{"code":%d,"extFields":%s,"flag":%d,"language":"JAVA","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":%d}`,
		r.code, text, r.flag, opaque, version))
}

// keyMark stands for the counting part of a message's unique key: eight digits of those 32.
const (
	keyPrefix = "7F0000010A1B2C3D4E5F6071"
	keyMark   = "ABADCAFE"
)

// A template is a frame and the places in it that differ from one sending to the next.
type template struct {
	frame    []byte
	binary   bool
	opaqueAt int
	keysAt   []int
	bodyAt   int
}

func newTemplate(r request, encoding string) *template {
	frame := r.encode(encoding, firstOpaque)
	t := &template{frame: frame, binary: encoding == binaryEncoding, opaqueAt: binaryOpaqueAt, bodyAt: len(frame) - len(r.body)}
	if !t.binary {
		t.opaqueAt = bytes.LastIndex(frame[:t.bodyAt], []byte(`"opaque":`)) + len(`"opaque":`)
	}
	whole := []byte(keyPrefix + keyMark)
	for from := 0; ; {
		at := bytes.Index(frame[from:], whole)
		if at < 0 {
			return t
		}
		t.keysAt = append(t.keysAt, from+at+len(keyPrefix))
		from += at + len(whole)
	}
}

// appendTo adds the frame to what is to be written, with its opaque and with unique keys that count on from `key`.
func (t *template) appendTo(out []byte, opaque int32, key uint32) []byte {
	start := len(out)
	out = append(out, t.frame...)
	frame := out[start:]
	if t.binary {
		binary.BigEndian.PutUint32(frame[t.opaqueAt:], uint32(opaque))
	} else {
		strconv.AppendInt(frame[t.opaqueAt:t.opaqueAt], int64(opaque), 10)
	}
	var number [4]byte
	for i, at := range t.keysAt {
		binary.BigEndian.PutUint32(number[:], key+uint32(i))
		hex.Encode(frame[at:], number[:])
	}
	return out
}

// A reply, valid until the next one is read.
type reply struct {
	binary bool
	code   int
	opaque int32
	header []byte
	body   []byte
}

func parseReply(frame []byte) (reply, error) {
	mark := binary.BigEndian.Uint32(frame)
	size := int(mark & 0xFFFFFF)
	if size > len(frame)-4 {
		return reply{}, fmt.Errorf("a header of %d bytes in a frame of %d", size, len(frame))
	}
	r := reply{binary: mark>>24 == 1, header: frame[4 : 4+size], body: frame[4+size:]}
	if r.binary {
		if size < 21 {
			return reply{}, fmt.Errorf("a binary header of %d bytes", size)
		}
		r.code = int(int16(binary.BigEndian.Uint16(r.header)))
		r.opaque = int32(binary.BigEndian.Uint32(r.header[5:]))
		return r, nil
	}
	// The last of its name: a value of a field may not contain it unescaped, but fields come before it.
	code, opaque := r.number(`"code":`, bytes.Index), r.number(`"opaque":`, bytes.LastIndex)
	if opaque < 0 || code < 0 {
		return reply{}, fmt.Errorf("no code and opaque in %q", r.header)
	}
	r.code, r.opaque = int(code), int32(opaque)
	return r, nil
}

func (r reply) number(name string, find func(text, part []byte) int) int64 {
	at := find(r.header, []byte(name))
	if at < 0 {
		return -1
	}
	value := int64(0)
	for _, digit := range r.header[at+len(name):] {
		if digit < '0' || digit > '9' {
			break
		}
		value = value*10 + int64(digit-'0')
	}
	return value
}

// field gives a field of the reply, or "".
func (r reply) field(name string) string {
	if !r.binary {
		// What is asked for are numbers and ids, in which nothing is escaped.
		mark := `"` + name + `":"`
		at := bytes.Index(r.header, []byte(mark))
		if at < 0 {
			return ""
		}
		value := r.header[at+len(mark):]
		return string(value[:bytes.IndexByte(value, '"')])
	}
	at := 17 + int(binary.BigEndian.Uint32(r.header[13:])) + 4
	for at+2 <= len(r.header) {
		keyEnd := at + 2 + int(binary.BigEndian.Uint16(r.header[at:]))
		if keyEnd+4 > len(r.header) {
			break
		}
		end := keyEnd + 4 + int(binary.BigEndian.Uint32(r.header[keyEnd:]))
		if end > len(r.header) {
			break
		}
		if string(r.header[at+2:keyEnd]) == name {
			return string(r.header[keyEnd+4 : end])
		}
		at = end
	}
	return ""
}

// remark says what went wrong, as the server put it.
func (r reply) remark() string {
	if r.binary {
		size := int(binary.BigEndian.Uint32(r.header[13:]))
		if size > len(r.header)-17 {
			size = len(r.header) - 17
		}
		return string(r.header[17 : 17+size])
	}
	var header struct{ Remark string }
	if err := json.Unmarshal(r.header, &header); err != nil {
		return err.Error()
	}
	return header.Remark
}
