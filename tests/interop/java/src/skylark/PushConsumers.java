package skylark;

import static skylark.Commands.map;

import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Push consumers that tell every delivery as an event. The listener refuses a message that was delivered fewer than
 * {@code fail} times before, so {@code fail=0} (the default) accepts everything and {@code fail=99} nothing.
 */
final class PushConsumers {
    private static final long POLL_MS = 20;

    private final Commands commands;
    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();

    PushConsumers(Commands commands) {
        this.commands = commands;
    }

    void register() {
        commands.on("consumer", args -> {
            DefaultMQPushConsumer consumer = create(args);
            consumer.start();
            consumers.put(args.text("name"), consumer);
            return map();
        });
        commands.on("consumer.queues", args -> map("queues", Driver.queueList(queues(args))));
        commands.on("consumer.awaitQueues", this::awaitQueues);
        commands.on("consumer.persist", args -> {
            consumer(args).getDefaultMQPushConsumerImpl().persistConsumerOffset();
            return map();
        });
        commands.on("consumer.stop", args -> {
            consumers.remove(args.text("name")).shutdown();
            return map();
        });
    }

    private DefaultMQPushConsumer create(Commands.Args args) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args.text("group"), args.has("trace"), args.text("trace", null));
        Driver.configure(consumer, args);
        consumer.setConsumeFromWhere(Driver.fromWhere(args));
        consumer.setConsumeThreadMin(args.number("threads", 4));
        consumer.setConsumeThreadMax(args.number("threads", 4));
        // Finish what was delivered before leaving, so that a successor does not get it again.
        consumer.setAwaitTerminationMillisWhenShutdown(args.big("awaitMs", Driver.PATIENCE_MS));
        if (args.has("maxReconsumeTimes")) {
            consumer.setMaxReconsumeTimes(args.number("maxReconsumeTimes", -1));
        }
        if (args.text("model", "clustering").equals("broadcasting")) {
            // The enum's package differs between client versions, so it is never named here.
            consumer.setMessageModel(Enum.valueOf(consumer.getMessageModel().getDeclaringClass(), "BROADCASTING"));
        }
        if (args.has("filterClass")) {
            consumer.subscribe(args.text("topic"), args.text("filterClass"), args.text("source"));
        } else if (args.has("sql")) {
            consumer.subscribe(args.text("topic"), MessageSelector.bySql(args.text("sql")));
        } else {
            consumer.subscribe(args.text("topic"), args.text("expression", "*"));
        }
        if (args.has("alsoTopic")) {
            consumer.subscribe(args.text("alsoTopic"), "*");
        }
        if (args.text("mode", "concurrent").equals("orderly")) {
            consumer.setSuspendCurrentQueueTimeMillis(args.big("suspendMs", 100));
            consumer.registerMessageListener(orderly(args));
        } else {
            consumer.registerMessageListener(concurrent(args));
        }
        return consumer;
    }

    private MessageListenerConcurrently concurrent(Commands.Args args) {
        String name = args.text("name");
        Predicate<MessageExt> accepts = accepts(args);
        int delayLevel = args.number("delayLevel", 0);
        return (messages, context) -> {
            tell(name, messages);
            if (messages.stream().allMatch(accepts)) {
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            context.setDelayLevelWhenNextConsume(delayLevel);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        };
    }

    private MessageListenerOrderly orderly(Commands.Args args) {
        String name = args.text("name");
        Predicate<MessageExt> accepts = accepts(args);
        return (messages, context) -> {
            tell(name, messages);
            return messages.stream().allMatch(accepts)
                ? ConsumeOrderlyStatus.SUCCESS
                : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
        };
    }

    private static Predicate<MessageExt> accepts(Commands.Args args) {
        int failures = args.number("fail", 0);
        return message -> message.getReconsumeTimes() >= failures;
    }

    private void tell(String consumer, List<MessageExt> messages) {
        for (MessageExt message : messages) {
            Map<String, Object> event = map("event", "consumed", "consumer", consumer, "at", System.currentTimeMillis());
            event.putAll(Driver.describe(message));
            commands.emit(event);
        }
    }

    /** Waits until the consumer holds {@code count} queues of the topic, and fails with what it holds after that. */
    private Map<String, Object> awaitQueues(Commands.Args args) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(2 * Driver.PATIENCE_MS);
        while (queues(args).size() != args.number("count", 0)) {
            if (System.nanoTime() > deadline) {
                throw new IllegalStateException(args.text("name") + " holds " + Driver.queueList(queues(args)));
            }
            Thread.sleep(POLL_MS);
        }
        return map("queues", Driver.queueList(queues(args)));
    }

    private List<MessageQueue> queues(Commands.Args args) {
        return consumer(args).getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet().stream()
            .filter(queue -> queue.getTopic().equals(args.text("topic")))
            .collect(Collectors.toList());
    }

    private DefaultMQPushConsumer consumer(Commands.Args args) {
        return Driver.named(consumers, args);
    }
}
