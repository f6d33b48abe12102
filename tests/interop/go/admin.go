package main

import (
	"context"
	"fmt"
	"sync"

	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

var adminHandlers = map[string]handler{
	"admin.createTopic": func(args arguments) (fields, error) {
		client, err := adminOf(args)
		if err != nil {
			return nil, err
		}
		queues := args.number("queues", 4)
		return nil, client.CreateTopic(context.Background(),
			admin.WithTopicCreate(args.text("topic", "")), admin.WithBrokerAddrCreate(args.text("brokerAddr", "")),
			admin.WithReadQueueNums(queues), admin.WithWriteQueueNums(queues))
	},
	"admin.deleteTopic": func(args arguments) (fields, error) {
		client, err := adminOf(args)
		if err != nil {
			return nil, err
		}
		return nil, client.DeleteTopic(context.Background(),
			admin.WithTopicDelete(args.text("topic", "")), admin.WithBrokerAddrDelete(args.text("brokerAddr", "")))
	},
	"admin.topics": func(args arguments) (fields, error) {
		client, err := adminOf(args)
		if err != nil {
			return nil, err
		}
		topics, err := client.FetchAllTopicList(context.Background())
		if err != nil {
			return nil, err
		}
		return fields{"topics": topics.TopicList}, nil
	},
	"admin.queues": func(args arguments) (fields, error) {
		client, err := adminOf(args)
		if err != nil {
			return nil, err
		}
		queues, err := client.FetchPublishMessageQueues(context.Background(), args.text("topic", ""))
		if err != nil {
			return nil, err
		}
		described := []fields{}
		for _, queue := range queues {
			described = append(described, describeQueue(queue))
		}
		return fields{"queues": described}, nil
	},
	"admin.groups": func(args arguments) (fields, error) {
		client, err := adminOf(args)
		if err != nil {
			return nil, err
		}
		groups, err := client.GetAllSubscriptionGroup(context.Background(), args.text("brokerAddr", ""), patience)
		if err != nil {
			return nil, err
		}
		names := []string{}
		for name := range groups.SubscriptionGroupTable {
			names = append(names, name)
		}
		return fields{"groups": names}, nil
	},
}

var (
	adminLock sync.Mutex
	admins    = map[string]admin.Admin{}
)

// adminOf gives the one admin client of a name server.
func adminOf(args arguments) (admin.Admin, error) {
	adminLock.Lock()
	defer adminLock.Unlock()
	namesrv := args.text("namesrv", "")
	if client, found := admins[namesrv]; found {
		return client, nil
	}
	client, err := admin.NewAdmin(admin.WithResolver(primitive.NewPassthroughResolver([]string{namesrv})))
	if err == nil {
		admins[namesrv] = client
	}
	return client, err
}

// awaitTopic waits until the name server knows the topic: the Go client's consumers do not start without a route.
func awaitTopic(args arguments, topic string) error {
	client, err := adminOf(args)
	if err != nil {
		return err
	}
	return until(func() (bool, error) {
		topics, err := client.FetchAllTopicList(context.Background())
		if err != nil {
			return false, err
		}
		for _, name := range topics.TopicList {
			if name == topic {
				return true, nil
			}
		}
		return false, fmt.Errorf("the name server has no topic %s", topic)
	})
}

func describeQueue(queue *primitive.MessageQueue) fields {
	return fields{"topic": queue.Topic, "broker": queue.BrokerName, "queue": queue.QueueId}
}

func describe(message *primitive.MessageExt) fields {
	described := fields{
		"topic": message.Topic, "offset": message.QueueOffset, "logOffset": message.CommitLogOffset,
		"msgId": message.MsgId, "offsetMsgId": message.OffsetMsgId, "body": string(message.Body), "flag": message.Flag,
		"sysFlag": message.SysFlag, "reconsumeTimes": message.ReconsumeTimes, "bornTimestamp": message.BornTimestamp,
		"storeTimestamp": message.StoreTimestamp, "storeHost": message.StoreHost, "keys": nil, "tags": nil,
	}
	properties := message.GetProperties()
	described["properties"] = properties
	for name, property := range map[string]string{"keys": primitive.PropertyKeys, "tags": primitive.PropertyTags} {
		if value, found := properties[property]; found {
			described[name] = value
		}
	}
	if message.Queue != nil {
		described["broker"], described["queue"] = message.Queue.BrokerName, message.Queue.QueueId
	}
	return described
}
