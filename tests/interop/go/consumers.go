package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// Push consumers tell every delivery as an event. The listener refuses a message that was delivered fewer than `fail`
// times before, so fail=0 (the default) accepts everything and fail=99 nothing.
var consumerHandlers = map[string]handler{
	"consumer": func(args arguments) (fields, error) {
		if err := awaitTopic(args, args.text("topic", "")); err != nil {
			return nil, err
		}
		held := newHolding(args)
		client, err := rocketmq.NewPushConsumer(consumerOptions(args, held)...)
		if err != nil {
			return nil, err
		}
		if err := client.Subscribe(args.text("topic", ""), expression(args), listener(args)); err != nil {
			return nil, err
		}
		consumers.put(args.text("name", ""), pushConsumer{client, held})
		return nil, client.Start()
	},
	"consumer.stop": func(args arguments) (fields, error) {
		return nil, consumers.get(args).client.Shutdown()
	},
	"consumer.awaitQueues": func(args arguments) (fields, error) {
		held, topic, count := consumers.get(args).held, args.text("topic", ""), args.number("count", 0)
		var described []fields
		err := until(func() (bool, error) {
			described = held.describe(topic)
			return len(described) == count, fmt.Errorf("%s holds %v", args.text("name", ""), described)
		})
		return fields{"queues": described}, err
	},
}

type pushConsumer struct {
	client rocketmq.PushConsumer
	held   *holding
}

var consumers registry[pushConsumer]

// holding is what a consumer's rebalance last gave it; the client has no call that tells.
type holding struct {
	lock   sync.Mutex
	share  map[string]bool
	queues map[string][]*primitive.MessageQueue
}

// newHolding reads `share`, a list of queue numbers to hold instead of an equal part of all.
func newHolding(args arguments) *holding {
	held := &holding{share: map[string]bool{}, queues: map[string][]*primitive.MessageQueue{}}
	if args.has("share") {
		for _, number := range strings.Split(args.text("share", ""), ",") {
			held.share[number] = true
		}
	}
	return held
}

func (h *holding) allocate(group, client string, all []*primitive.MessageQueue, members []string) []*primitive.MessageQueue {
	mine := consumer.AllocateByAveragely(group, client, all, members)
	if len(h.share) > 0 {
		mine = nil
		for _, queue := range all {
			if h.share[strconv.Itoa(queue.QueueId)] {
				mine = append(mine, queue)
			}
		}
	}
	h.lock.Lock()
	defer h.lock.Unlock()
	h.queues[all[0].Topic] = mine
	return mine
}

func (h *holding) describe(topic string) []fields {
	h.lock.Lock()
	defer h.lock.Unlock()
	described := []fields{}
	for _, queue := range h.queues[topic] {
		described = append(described, describeQueue(queue))
	}
	return described
}

func expression(args arguments) consumer.MessageSelector {
	return consumer.MessageSelector{Type: consumer.TAG, Expression: args.text("expression", "*")}
}

func consumerOptions(args arguments, held *holding) []consumer.Option {
	options := []consumer.Option{
		consumer.WithNameServer(primitive.NamesrvAddr{args.text("namesrv", "")}),
		consumer.WithGroupName(args.text("group", "")),
		consumer.WithInstance(args.text("name", "")),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithStrategy(held.allocate),
		consumer.WithConsumeGoroutineNums(args.number("threads", 4)),
		consumer.WithSuspendCurrentQueueTimeMillis(100 * time.Millisecond),
		consumer.WithConsumerOrder(args.text("mode", "concurrent") == "orderly"),
	}
	if args.text("from", "first") == "last" {
		options = append(options, consumer.WithConsumeFromWhere(consumer.ConsumeFromLastOffset))
	}
	if args.text("model", "clustering") == "broadcasting" {
		options = append(options, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	if args.has("maxReconsumeTimes") {
		options = append(options, consumer.WithMaxReconsumeTimes(int32(args.number("maxReconsumeTimes", -1))))
	}
	return options
}

type listen = func(context.Context, ...*primitive.MessageExt) (consumer.ConsumeResult, error)

func listener(args arguments) listen {
	name, orderly := args.text("name", ""), args.text("mode", "concurrent") == "orderly"
	failures, delayLevel := int32(args.number("fail", 0)), args.number("delayLevel", 0)
	return func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		accepted := true
		for _, message := range messages {
			accepted = accepted && message.ReconsumeTimes >= failures
			event := describe(message)
			event["event"], event["consumer"] = "consumed", name
			emit(event)
		}
		switch {
		case accepted:
			return consumer.ConsumeSuccess, nil
		case orderly:
			return consumer.SuspendCurrentQueueAMoment, nil
		}
		if concurrent, found := primitive.GetConcurrentlyCtx(ctx); found {
			concurrent.DelayLevelWhenNextConsume = delayLevel
		}
		return consumer.ConsumeRetryLater, nil
	}
}
