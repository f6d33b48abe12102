package skylark;

import static skylark.Commands.map;

import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.AckCallback;
import org.apache.rocketmq.client.consumer.AckResult;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PopCallback;
import org.apache.rocketmq.client.consumer.PopResult;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.impl.consumer.DefaultMQPushConsumerImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageRequestMode;
import org.apache.rocketmq.remoting.protocol.header.AckMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ChangeInvisibleTimeRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.ExtraInfoUtil;
import org.apache.rocketmq.remoting.protocol.header.PopMessageRequestHeader;

/** POP consumption: push consumers whose broker says what they consume and how, and the requests one by one. */
final class Pops {
    private final Commands commands;
    private final Map<String, DefaultMQProducer> clients = new ConcurrentHashMap<>();

    private Pops(Commands commands) {
        this.commands = commands;
    }

    static void register(Commands commands) {
        new Pops(commands).register();
    }

    /** What a push consumer is told that leaves the rebalance to the broker. */
    static void configure(ClientConfig client, Commands.Args args) {
        if (args.has("popInvisibleMs")) {
            DefaultMQPushConsumer consumer = (DefaultMQPushConsumer) client;
            consumer.setClientRebalance(false);
            consumer.setPopInvisibleTime(args.big("popInvisibleMs", 60_000));
            Arrays.fill(popDelays(consumer.getDefaultMQPushConsumerImpl()), args.number("popDelaySeconds", 10));
        }
    }

    /** After how many seconds a refused message comes back, the first time, the second time...; nobody offers them. */
    private static int[] popDelays(DefaultMQPushConsumerImpl consumer) {
        try {
            Method delays = DefaultMQPushConsumerImpl.class.getDeclaredMethod("getPopDelayLevel");
            delays.setAccessible(true);
            return (int[]) delays.invoke(consumer);
        } catch (ReflectiveOperationException failure) {
            throw new IllegalStateException(failure);
        }
    }

    private void register() {
        commands.on("popper", args -> {
            DefaultMQProducer client = new DefaultMQProducer(args.text("group"));
            Driver.configure(client, args);
            client.start();
            clients.put(args.text("name"), client);
            return map();
        });
        commands.on("popper.stop", args -> {
            clients.remove(args.text("name")).shutdown();
            return map();
        });
        commands.on("popper.mode", args -> {
            api(args).setMessageRequestMode(args.text("broker"), args.text("topic"), args.text("group"),
                MessageRequestMode.valueOf(args.text("mode")), args.number("share", 0), Driver.PATIENCE_MS);
            return map();
        });
        commands.on("popper.pop", this::pop);
        commands.on("popper.ack", this::ack);
        commands.on("popper.batchAck", args -> {
            Acked acked = new Acked();
            List<String> handles = new ArrayList<>(List.of(args.text("handles").split(",")));
            api(args).batchAckMessageAsync(
                args.text("broker"), Driver.PATIENCE_MS, acked, args.text("topic"), args.text("group"), handles);
            return acked.told();
        });
        commands.on("popper.extend", this::extend);
    }

    private Map<String, Object> pop(Commands.Args args) throws Exception {
        PopMessageRequestHeader header = new PopMessageRequestHeader();
        header.setConsumerGroup(args.text("group"));
        header.setTopic(args.text("topic"));
        header.setQueueId(args.number("queue", -1));
        header.setMaxMsgNums(args.number("max", 32));
        header.setInvisibleTime(args.big("invisibleMs", 60_000));
        header.setPollTime(args.big("pollMs", 5_000));
        header.setBornTime(System.currentTimeMillis());
        header.setInitMode(args.number("initMode", 0));
        header.setOrder(args.flag("order", false));
        header.setExpType("TAG");
        header.setExp(args.text("expression", "*"));
        if (args.has("attempt")) {
            header.setAttemptId(args.text("attempt"));
        }
        CompletableFuture<PopResult> found = new CompletableFuture<>();
        api(args).popMessageAsync(args.text("brokerName"), args.text("broker"), header, Driver.PATIENCE_MS, new PopCallback() {
            @Override
            public void onSuccess(PopResult result) {
                found.complete(result);
            }

            @Override
            public void onException(Throwable failure) {
                found.completeExceptionally(failure);
            }
        });
        PopResult result = found.get(Driver.PATIENCE_MS, TimeUnit.MILLISECONDS);
        List<Object> messages = new ArrayList<>();
        if (result.getMsgFoundList() != null) {
            for (MessageExt message : result.getMsgFoundList()) {
                Map<String, Object> told = Driver.describe(message);
                told.put("handle", message.getProperty(MessageConst.PROPERTY_POP_CK));
                messages.add(told);
            }
        }
        return map("status", result.getPopStatus(), "rest", result.getRestNum(), "messages", messages);
    }

    private Map<String, Object> ack(Commands.Args args) throws Exception {
        String handle = args.text("handle");
        String[] parts = handle.split(" ");
        AckMessageRequestHeader header = new AckMessageRequestHeader();
        header.setConsumerGroup(args.text("group"));
        header.setTopic(real(parts, args));
        header.setQueueId(args.number("queue", parts.length > 6 ? Integer.parseInt(parts[6]) : 0));
        header.setOffset(args.big("offset", parts.length > 7 ? Long.parseLong(parts[7]) : 0));
        header.setExtraInfo(handle);
        Acked acked = new Acked();
        api(args).ackMessageAsync(args.text("broker"), Driver.PATIENCE_MS, acked, header);
        return acked.told();
    }

    private Map<String, Object> extend(Commands.Args args) throws Exception {
        String handle = args.text("handle");
        String[] parts = ExtraInfoUtil.split(handle);
        ChangeInvisibleTimeRequestHeader header = new ChangeInvisibleTimeRequestHeader();
        header.setConsumerGroup(args.text("group"));
        header.setTopic(real(parts, args));
        header.setQueueId(ExtraInfoUtil.getQueueId(parts));
        header.setOffset(ExtraInfoUtil.getQueueOffset(parts));
        header.setExtraInfo(handle);
        header.setInvisibleTime(args.big("invisibleMs", 60_000));
        Acked acked = new Acked();
        api(args).changeInvisibleTimeAsync(
            ExtraInfoUtil.getBrokerName(parts), args.text("broker"), header, Driver.PATIENCE_MS, acked);
        return acked.told();
    }

    private static String real(String[] parts, Commands.Args args) {
        String topic = args.text("topic");
        return parts.length > 4 ? ExtraInfoUtil.getRealTopic(parts, topic, args.text("group")) : topic;
    }

    private MQClientAPIImpl api(Commands.Args args) {
        return Driver.named(clients, args).getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl();
    }

    private static final class Acked implements AckCallback {
        private final CompletableFuture<AckResult> result = new CompletableFuture<>();

        @Override
        public void onSuccess(AckResult ack) {
            result.complete(ack);
        }

        @Override
        public void onException(Throwable failure) {
            result.completeExceptionally(failure);
        }

        Map<String, Object> told() throws Exception {
            AckResult ack = result.get(Driver.PATIENCE_MS, TimeUnit.MILLISECONDS);
            return map("status", ack.getStatus(), "handle", ack.getExtraInfo());
        }
    }
}
