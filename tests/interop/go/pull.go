package main

import (
	"context"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// The Go pull consumer both polls what a rebalance gave it (lite.poll) and reads any queue from any offset (pull).
var pullHandlers = map[string]handler{
	"lite": func(args arguments) (fields, error) {
		topic := args.text("subscribe", "")
		if err := awaitTopic(args, topic); err != nil {
			return nil, err
		}
		client, err := rocketmq.NewPullConsumer(consumerOptions(args, newHolding(args))...)
		if err != nil {
			return nil, err
		}
		if err := client.Subscribe(topic, expression(args)); err != nil {
			return nil, err
		}
		pullers.put(args.text("name", ""), client)
		return nil, client.Start()
	},
	"lite.poll": func(args arguments) (fields, error) {
		client := pullers.get(args)
		timeout := time.Duration(args.number("timeout", 5000)) * time.Millisecond
		request, err := client.Poll(context.Background(), timeout)
		if consumer.IsNoNewMsgError(err) {
			return fields{"messages": []fields{}}, nil
		}
		if err != nil {
			return nil, err
		}
		described := describeAll(request.GetMsgList())
		client.ACK(context.Background(), request, consumer.ConsumeSuccess)
		return fields{"messages": described}, nil
	},
	"lite.commit": func(args arguments) (fields, error) {
		return nil, pullers.get(args).PersistOffset(context.Background(), args.text("topic", ""))
	},
	"lite.stop": func(args arguments) (fields, error) {
		return nil, pullers.get(args).Shutdown()
	},
	"pull": func(args arguments) (fields, error) {
		offset, max := int64(args.number("offset", 0)), args.number("max", 32)
		result, err := pullers.get(args).PullFrom(context.Background(), queueOf(args), offset, max)
		if err != nil {
			return nil, err
		}
		return fields{
			"status": pullStatus[result.Status], "next": result.NextBeginOffset, "min": result.MinOffset,
			"max": result.MaxOffset, "messages": describeAll(result.GetMessageExts()),
		}, nil
	},
	"puller.commit": func(args arguments) (fields, error) {
		client := pullers.get(args)
		if err := client.UpdateOffset(queueOf(args), int64(args.number("offset", 0))); err != nil {
			return nil, err
		}
		return nil, client.PersistOffset(context.Background(), args.text("topic", ""))
	},
	"puller.offset": func(args arguments) (fields, error) {
		offset, err := pullers.get(args).CurrentOffset(queueOf(args))
		return fields{"offset": offset}, err
	},
}

var pullers registry[rocketmq.PullConsumer]

var pullStatus = map[primitive.PullStatus]string{
	primitive.PullFound: "FOUND", primitive.PullNoNewMsg: "NO_NEW_MSG", primitive.PullNoMsgMatched: "NO_MATCHED_MSG",
	primitive.PullOffsetIllegal: "OFFSET_ILLEGAL", primitive.PullBrokerTimeout: "BROKER_TIMEOUT",
}

func queueOf(args arguments) *primitive.MessageQueue {
	return &primitive.MessageQueue{
		Topic: args.text("topic", ""), BrokerName: args.text("broker", ""), QueueId: args.number("queue", 0),
	}
}

func describeAll(messages []*primitive.MessageExt) []fields {
	described := []fields{}
	for _, message := range messages {
		described = append(described, describe(message))
	}
	return described
}
