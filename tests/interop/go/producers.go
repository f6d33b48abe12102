package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// A send makes `count` messages; the i-th has body and keys `name-i` (the bare name when count is absent) and the tag
// number i of the list `tags`. In mode `ordered` it has the sharding key i % shards, by which a producer with the hash
// selector chooses the queue; a producer with the manual selector sends to the `queue` of the `broker` that is named.
var producerHandlers = map[string]handler{
	"producer": func(args arguments) (fields, error) {
		client, err := rocketmq.NewProducer(
			producer.WithNameServer(primitive.NamesrvAddr{args.text("namesrv", "")}),
			producer.WithGroupName(args.text("group", "")),
			producer.WithInstanceName(args.text("name", "")),
			producer.WithDefaultTopicQueueNums(args.number("topicQueues", 4)),
			producer.WithSendMsgTimeout(patience),
			producer.WithQueueSelector(selector(args.text("selector", "roundRobin"))))
		if err != nil {
			return nil, err
		}
		producers.put(args.text("name", ""), client)
		return nil, client.Start()
	},
	"producer.stop": func(args arguments) (fields, error) {
		return nil, producers.get(args).Shutdown()
	},
	"send": func(args arguments) (fields, error) {
		client, messages := producers.get(args), messagesToSend(args)
		switch mode := args.text("mode", "sync"); mode {
		case "sync", "ordered":
			results := []fields{}
			for _, message := range messages {
				result, err := client.SendSync(context.Background(), message)
				if err != nil {
					return nil, err
				}
				results = append(results, describeResult(result))
			}
			return fields{"results": results}, nil
		case "batch":
			result, err := client.SendSync(context.Background(), messages...)
			if err != nil {
				return nil, err
			}
			return fields{"results": []fields{describeResult(result)}}, nil
		case "oneway":
			for _, message := range messages {
				if err := client.SendOneWay(context.Background(), message); err != nil {
					return nil, err
				}
			}
			return fields{"results": []fields{}}, nil
		case "async":
			return sendAsync(client, messages)
		default:
			return nil, fmt.Errorf("no such mode: %s", mode)
		}
	},
}

var producers registry[rocketmq.Producer]

func selector(name string) producer.QueueSelector {
	switch name {
	case "manual":
		return producer.NewManualQueueSelector()
	case "hash":
		return producer.NewHashQueueSelector()
	case "roundRobin":
		return producer.NewRoundRobinQueueSelector()
	}
	panic("no such selector: " + name)
}

func messagesToSend(args arguments) []*primitive.Message {
	messages := []*primitive.Message{}
	for i := 0; i < args.number("count", 1); i++ {
		suffix := ""
		if args.has("count") {
			suffix = "-" + strconv.Itoa(i)
		}
		body := args.text("body", "") + suffix
		if args.has("size") {
			body += strings.Repeat("x", args.number("size", 0)-len(body))
		}
		message := primitive.NewMessage(args.text("topic", ""), []byte(body))
		message.Flag = int32(args.number("flag", 0))
		if args.has("tags") {
			tags := strings.Split(args.text("tags", ""), ",")
			message.WithTag(tags[i%len(tags)])
		}
		if args.has("keys") {
			message.WithKeys([]string{args.text("keys", "") + suffix})
		}
		if args.has("delayLevel") {
			message.WithDelayTimeLevel(args.number("delayLevel", 0))
		}
		if args.has("shards") {
			message.WithShardingKey("shard-" + strconv.Itoa(i%args.number("shards", 1)))
		}
		if args.has("broker") {
			queue := primitive.MessageQueue{
				Topic: message.Topic, BrokerName: args.text("broker", ""), QueueId: args.number("queue", 0),
			}
			message.Queue = &queue
		}
		for name, value := range args.under("property.") {
			message.WithProperty(name, value)
		}
		messages = append(messages, message)
	}
	return messages
}

func sendAsync(client rocketmq.Producer, messages []*primitive.Message) (fields, error) {
	results, errors := []fields{}, []string{}
	var lock sync.Mutex
	done := make(chan struct{}, len(messages))
	for _, message := range messages {
		err := client.SendAsync(context.Background(), func(_ context.Context, result *primitive.SendResult, err error) {
			lock.Lock()
			defer lock.Unlock()
			if err != nil {
				errors = append(errors, err.Error())
			} else {
				results = append(results, describeResult(result))
			}
			done <- struct{}{}
		}, message)
		if err != nil {
			return nil, err
		}
	}
	deadline := time.After(waitDeadline)
	for range messages {
		select {
		case <-done:
		case <-deadline:
			return nil, fmt.Errorf("callbacks never came")
		}
	}
	return fields{"results": results, "errors": errors}, nil
}

func describeResult(result *primitive.SendResult) fields {
	status := map[primitive.SendStatus]string{
		primitive.SendOK: "SEND_OK", primitive.SendFlushDiskTimeout: "FLUSH_DISK_TIMEOUT",
		primitive.SendFlushSlaveTimeout: "FLUSH_SLAVE_TIMEOUT", primitive.SendSlaveNotAvailable: "SLAVE_NOT_AVAILABLE",
	}[result.Status]
	described := describeQueue(result.MessageQueue)
	described["status"], described["msgId"] = status, result.MsgID
	described["offsetMsgId"], described["offset"] = result.OffsetMsgID, result.QueueOffset
	return described
}
