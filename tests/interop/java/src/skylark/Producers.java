package skylark;

import static skylark.Commands.map;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;

/**
 * Sends in every way that the client has. A send command makes {@code count} messages; the i-th has body and keys
 * {@code name-i} (the bare name when count is absent), the tag number i of the list {@code tags}, and in mode
 * {@code ordered} goes to queue {@code i % shards}.
 */
final class Producers {
    private final Commands commands;
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();

    Producers(Commands commands) {
        this.commands = commands;
    }

    void register() {
        commands.on("producer", args -> {
            DefaultMQProducer producer = new DefaultMQProducer(args.text("group"), args.has("trace"), args.text("trace", null));
            Driver.configure(producer, args);
            producer.setDefaultTopicQueueNums(args.number("topicQueues", 4));
            producer.setSendMsgTimeout(args.number("timeoutMs", Driver.PATIENCE_MS));
            producer.start();
            producers.put(args.text("name"), producer);
            return map();
        });
        commands.on("producer.stop", args -> {
            producers.remove(args.text("name")).shutdown();
            return map();
        });
        commands.on("topic", args -> {
            producer(args).getDefaultMQProducerImpl()
                .createTopic("TBW102", args.text("topic"), args.number("queues", 4));
            return map();
        });
        commands.on("producer.heartbeat", args -> {
            producer(args).getDefaultMQProducerImpl().getMqClientFactory().sendHeartbeatToAllBrokerWithLock();
            return map();
        });
        commands.on("producer.queues", args ->
            map("queues", Driver.queueList(producer(args).fetchPublishMessageQueues(args.text("topic")))));
        commands.on("send", args -> {
            List<Message> messages = messages(args);
            switch (args.text("mode", "sync")) {
                case "sync":
                    return sendEach(messages, message -> producer(args).send(message));
                case "ordered":
                    return sendOrdered(producer(args), messages, args.number("shards", 1));
                case "batch":
                    return map("results", List.of(describe(producer(args).send(messages))));
                case "oneway":
                    for (Message message : messages) {
                        producer(args).sendOneway(message);
                    }
                    return map("results", List.of());
                case "async":
                    return sendAsync(producer(args), messages);
                default:
                    throw new IllegalArgumentException("no such mode: " + args.text("mode"));
            }
        });
    }

    private interface Send {
        SendResult run(Message message) throws Exception;
    }

    private static Map<String, Object> sendEach(List<Message> messages, Send send) throws Exception {
        List<Object> results = new ArrayList<>();
        for (Message message : messages) {
            results.add(describe(send.run(message)));
        }
        return map("results", results);
    }

    private static Map<String, Object> sendOrdered(DefaultMQProducer producer, List<Message> messages, int shards)
        throws Exception {
        int[] next = {0};
        return sendEach(messages, message -> producer.send(message,
            (queues, same, shard) -> queues.get((Integer) shard % queues.size()), next[0]++ % shards));
    }

    private static Map<String, Object> sendAsync(DefaultMQProducer producer, List<Message> messages) throws Exception {
        List<Object> results = Collections.synchronizedList(new ArrayList<>());
        List<Object> errors = Collections.synchronizedList(new ArrayList<>());
        CountDownLatch pending = new CountDownLatch(messages.size());
        for (Message message : messages) {
            producer.send(message, new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    results.add(describe(result));
                    pending.countDown();
                }

                @Override
                public void onException(Throwable failure) {
                    errors.add(String.valueOf(failure));
                    pending.countDown();
                }
            });
        }
        if (!pending.await(2 * Driver.PATIENCE_MS, TimeUnit.MILLISECONDS)) {
            errors.add(pending.getCount() + " callbacks never came");
        }
        return map("results", results, "errors", errors);
    }

    private static List<Message> messages(Commands.Args args) {
        List<String> tags = new ArrayList<>();
        args.list("tags").forEach(tags::add);
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < args.number("count", 1); i++) {
            String suffix = args.has("count") ? "-" + i : "";
            String body = args.text("body", "") + suffix;
            if (args.has("size")) {
                body = body + "x".repeat(args.number("size", 0) - body.length());
            }
            Message message = new Message(args.text("topic"), body.getBytes(StandardCharsets.UTF_8));
            message.setFlag(args.number("flag", 0));
            if (!tags.isEmpty()) {
                message.setTags(tags.get(i % tags.size()));
            }
            if (args.has("keys")) {
                message.setKeys(args.text("keys") + suffix);
            }
            if (args.has("delayLevel")) {
                message.setDelayTimeLevel(args.number("delayLevel", 0));
            }
            if (args.has("priority")) {
                MessageAccessor.putProperty(message, "_SYS_MSG_PRIORITY_", args.text("priority"));
            }
            if (args.has("shardingKey")) {
                MessageAccessor.putProperty(message, "__SHARDINGKEY", args.text("shardingKey"));
            }
            args.under("property.").forEach(message::putUserProperty);
            messages.add(message);
        }
        return messages;
    }

    private static Map<String, Object> describe(SendResult result) {
        return map("status", result.getSendStatus(), "msgId", result.getMsgId(),
            "offsetMsgId", result.getOffsetMsgId(), "topic", result.getMessageQueue().getTopic(),
            "broker", result.getMessageQueue().getBrokerName(), "queue", result.getMessageQueue().getQueueId(),
            "offset", result.getQueueOffset());
    }

    private DefaultMQProducer producer(Commands.Args args) {
        return Driver.named(producers, args);
    }
}
