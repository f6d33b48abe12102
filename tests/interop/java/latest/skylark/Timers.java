package skylark;

import static skylark.Commands.map;

import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/** Messages for a time of their own, and their recall. */
final class Timers {
    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();

    void register(Commands commands) {
        commands.on("timers", args -> {
            DefaultMQProducer producer = new DefaultMQProducer(args.text("group"));
            Driver.configure(producer, args);
            producer.setSendMsgTimeout(Driver.PATIENCE_MS);
            producer.start();
            producers.put(args.text("name"), producer);
            return map();
        });
        commands.on("timers.stop", args -> {
            producers.remove(args.text("name")).shutdown();
            return map();
        });
        commands.on("timers.send", args -> {
            Message message = new Message(args.text("topic"), args.text("body").getBytes(StandardCharsets.UTF_8));
            if (args.has("delaySec")) {
                message.setDelayTimeSec(args.big("delaySec", 0));
            }
            if (args.has("delayMs")) {
                message.setDelayTimeMs(args.big("delayMs", 0));
            }
            if (args.has("deliverMs")) {
                message.setDeliverTimeMs(args.big("deliverMs", 0));
            }
            SendResult result = Driver.named(producers, args).send(message);
            return map("msgId", result.getMsgId(), "handle", result.getRecallHandle());
        });
        commands.on("timers.recall", args ->
            map("msgId", Driver.named(producers, args).recallMessage(args.text("topic"), args.text("handle"))));
    }
}
