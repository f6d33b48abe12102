package skylark;

import static skylark.Commands.map;

import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Request and reply. A responder answers every request with {@code re: } and its body, as often as {@code times} says,
 * and tells as an event how each reply went.
 */
final class Dialogue {
    private final Commands commands;
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, DefaultMQPushConsumer> consumers = new ConcurrentHashMap<>();

    Dialogue(Commands commands) {
        this.commands = commands;
    }

    void register() {
        commands.on("requester", args -> {
            startProducer(args);
            return map();
        });
        commands.on("requester.stop", args -> {
            producers.remove(args.text("name")).shutdown();
            return map();
        });
        commands.on("request", args -> {
            byte[] body = args.text("body").getBytes(StandardCharsets.UTF_8);
            Message reply = Driver.named(producers, args)
                .request(new Message(args.text("topic"), body), args.big("timeoutMs", Driver.PATIENCE_MS));
            return map("body", new String(reply.getBody(), StandardCharsets.UTF_8), "topic", reply.getTopic(),
                "properties", reply.getProperties());
        });
        commands.on("responder", args -> {
            DefaultMQProducer producer = startProducer(args);
            DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args.text("group"));
            Driver.configure(consumer, args);
            consumer.setConsumeFromWhere(Driver.fromWhere(args));
            consumer.subscribe(args.text("topic"), "*");
            consumer.registerMessageListener(
                (List<MessageExt> messages, ConsumeConcurrentlyContext context) -> {
                    for (MessageExt message : messages) {
                        for (int i = 0; i < args.number("times", 1); i++) {
                            reply(args.text("name"), producer, message);
                        }
                    }
                    return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
                });
            consumer.start();
            consumers.put(args.text("name"), consumer);
            return map();
        });
        commands.on("responder.stop", args -> {
            consumers.remove(args.text("name")).shutdown();
            producers.remove(args.text("name")).shutdown();
            return map();
        });
    }

    private void reply(String name, DefaultMQProducer producer, MessageExt message) {
        Map<String, Object> event = map("event", "consumed", "consumer", name);
        event.putAll(Driver.describe(message));
        try {
            byte[] body = ("re: " + new String(message.getBody(), StandardCharsets.UTF_8))
                .getBytes(StandardCharsets.UTF_8);
            event.put("reply", producer.send(MessageUtil.createReplyMessage(message, body)).getSendStatus());
        } catch (Exception failure) {
            event.put("reply", failure + ", because " + failure.getCause());
        }
        commands.emit(event);
    }

    private DefaultMQProducer startProducer(Commands.Args args) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(args.text("group") + "-asks");
        Driver.configure(producer, args);
        producer.start();
        producers.put(args.text("name"), producer);
        return producer;
    }
}
