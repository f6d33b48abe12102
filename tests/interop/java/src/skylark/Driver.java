package skylark;

import static skylark.Commands.map;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.BiConsumer;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Apache's Java client, steered by a test over standard input (see {@link Commands}). The same source is compiled
 * against every client version that the tests use, so it stays within the API that they share.
 *
 * Clients are kept under the name that the test gave them; each has an instance name of its own, so that several
 * members of one group live in this process as if they were processes apart.
 */
public final class Driver {
    static final int PATIENCE_MS = 60_000;

    private final Commands commands = new Commands();
    private final Map<String, DefaultMQPullConsumer> pullers = new ConcurrentHashMap<>();
    private final Map<String, DefaultLitePullConsumer> lites = new ConcurrentHashMap<>();

    /** What only some client versions can be told; set before the first client is made. */
    static BiConsumer<ClientConfig, Commands.Args> more = (client, args) -> { };

    public static void main(String[] argv) throws Exception {
        commands().serve();
    }

    /** What every client version can do. */
    static Commands commands() {
        Driver driver = new Driver();
        new Producers(driver.commands).register();
        new PushConsumers(driver.commands).register();
        new Dialogue(driver.commands).register();
        new Transactions(driver.commands).register();
        driver.registerPullers();
        driver.registerLites();
        return driver.commands;
    }

    private void registerPullers() {
        commands.on("puller", args -> {
            DefaultMQPullConsumer puller = new DefaultMQPullConsumer(args.text("group"));
            configure(puller, args);
            puller.setConsumerPullTimeoutMillis(PATIENCE_MS);
            puller.start();
            pullers.put(args.text("name"), puller);
            return map();
        });
        commands.on("puller.queues", args ->
            map("queues", queueList(puller(args).fetchSubscribeMessageQueues(args.text("topic")))));
        commands.on("pull", args -> {
            DefaultMQPullConsumer puller = puller(args);
            MessageQueue queue = queue(args);
            String expression = args.text("expression", "*");
            long offset = args.big("offset", 0);
            int max = args.number("max", 32);
            if (args.has("sql")) {
                // Only a broker whose version is known is asked, and that comes with the answer to a heartbeat.
                MQClientInstance client = puller.getDefaultMQPullConsumerImpl().getRebalanceImpl().getmQClientFactory();
                client.updateTopicRouteInfoFromNameServer(queue.getTopic());
                client.sendHeartbeatToAllBrokerWithLock();
            }
            PullResult result = args.has("sql")
                ? puller.pull(queue, MessageSelector.bySql(args.text("sql")), offset, max)
                : args.flag("block", false)
                ? puller.pullBlockIfNotFound(queue, expression, offset, max)
                : puller.pull(queue, expression, offset, max);
            List<Object> messages = new ArrayList<>();
            if (result.getMsgFoundList() != null) {
                result.getMsgFoundList().forEach(message -> messages.add(describe(message)));
            }
            return map("status", result.getPullStatus(), "next", result.getNextBeginOffset(),
                "min", result.getMinOffset(), "max", result.getMaxOffset(), "messages", messages);
        });
        commands.on("puller.offsets", args -> {
            DefaultMQPullConsumer puller = puller(args);
            MessageQueue queue = queue(args);
            return map("min", puller.minOffset(queue), "max", puller.maxOffset(queue),
                "atTime", args.has("time") ? puller.searchOffset(queue, args.big("time", 0)) : null,
                "earliest", puller.earliestMsgStoreTime(queue),
                "committed", puller.fetchConsumeOffset(queue, true));
        });
        commands.on("puller.commit", args -> {
            puller(args).getOffsetStore().updateConsumeOffsetToBroker(queue(args), args.big("offset", 0), false);
            return map();
        });
        commands.on("puller.view", args ->
            map("message", describe(puller(args).viewMessage(args.text("topic"), args.text("msgId")))));
        commands.on("puller.query", args -> {
            QueryResult result = puller(args).queryMessage(args.text("topic"), args.text("key"),
                args.number("max", 32), args.big("begin", 0), args.big("end", Long.MAX_VALUE));
            return map("messages", result.getMessageList().stream().map(Driver::describe).collect(Collectors.toList()));
        });
        commands.on("puller.back", args -> {
            DefaultMQPullConsumer puller = puller(args);
            MessageExt message = puller.viewMessage(args.text("topic"), args.text("msgId"));
            puller.sendMessageBack(message, args.number("level", 1), args.text("broker"), args.text("group"));
            return map();
        });
        commands.on("puller.stop", args -> {
            pullers.remove(args.text("name")).shutdown();
            return map();
        });
    }

    private void registerLites() {
        commands.on("lite", args -> {
            DefaultLitePullConsumer lite = new DefaultLitePullConsumer(args.text("group"));
            configure(lite, args);
            lite.setAutoCommit(args.flag("autoCommit", true));
            lite.setConsumeFromWhere(fromWhere(args));
            if (args.has("sql")) {
                lite.subscribe(args.text("subscribe"), MessageSelector.bySql(args.text("sql")));
            } else if (args.has("subscribe")) {
                lite.subscribe(args.text("subscribe"), args.text("expression", "*"));
            }
            lite.start();
            if (args.has("assign")) {
                Collection<MessageQueue> all = lite.fetchMessageQueues(args.text("assign"));
                lite.assign(all.stream()
                    .filter(queue -> !args.has("queue") || queue.getQueueId() == args.number("queue", 0))
                    .collect(Collectors.toList()));
            }
            lites.put(args.text("name"), lite);
            return map();
        });
        commands.on("lite.poll", args -> {
            List<MessageExt> found = lite(args).poll(args.big("timeout", 5000));
            return map("messages", found.stream().map(Driver::describe).collect(Collectors.toList()));
        });
        commands.on("lite.assignment", args -> map("queues", queueList(lite(args).assignment())));
        commands.on("lite.seek", args -> {
            MessageQueue queue = queue(args);
            if (args.text("to").equals("begin")) {
                lite(args).seekToBegin(queue);
            } else if (args.text("to").equals("end")) {
                lite(args).seekToEnd(queue);
            } else {
                lite(args).seek(queue, args.big("to", 0));
            }
            return map();
        });
        commands.on("lite.commit", args -> {
            // commitSync() alone only takes a note of it.
            DefaultLitePullConsumer lite = lite(args);
            lite.commit(lite.assignment(), true);
            return map();
        });
        commands.on("lite.committed", args -> map("offset", lite(args).committed(queue(args))));
        commands.on("lite.offsetAt", args ->
            map("offset", lite(args).offsetForTimestamp(queue(args), args.big("time", 0))));
        commands.on("lite.stop", args -> {
            lites.remove(args.text("name")).shutdown();
            return map();
        });
    }

    private DefaultMQPullConsumer puller(Commands.Args args) {
        return named(pullers, args);
    }

    private DefaultLitePullConsumer lite(Commands.Args args) {
        return named(lites, args);
    }

    static <T> T named(Map<String, T> clients, Commands.Args args) {
        T client = clients.get(args.text("name"));
        if (client == null) {
            throw new IllegalArgumentException("no client named " + args.text("name"));
        }
        return client;
    }

    /**
     * What every client of a test needs: its name server, a name of its own, a quick look at new routes, and patience:
     * a server on a busy machine is not one that fails.
     */
    static void configure(ClientConfig client, Commands.Args args) {
        client.setNamesrvAddr(args.text("namesrv"));
        client.setInstanceName(args.text("instance", args.text("name")));
        client.setPollNameServerInterval(args.number("pollNameServerMs", 250));
        client.setMqClientApiTimeout(PATIENCE_MS);
        if (args.has("namespace")) {
            client.setNamespace(args.text("namespace"));
        }
        if (args.has("unit")) {
            client.setUnitName(args.text("unit"));
        }
        client.setUnitMode(args.flag("unitMode", false));
        client.setVipChannelEnabled(args.flag("vip", false));
        more.accept(client, args);
    }

    static ConsumeFromWhere fromWhere(Commands.Args args) {
        return args.text("from", "first").equals("last")
            ? ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET
            : ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET;
    }

    static MessageQueue queue(Commands.Args args) {
        return new MessageQueue(args.text("topic"), args.text("broker"), args.number("queue", 0));
    }

    static List<Object> queueList(Collection<MessageQueue> queues) {
        return queues.stream().sorted()
            .map(queue -> map("topic", queue.getTopic(), "broker", queue.getBrokerName(), "queue", queue.getQueueId()))
            .collect(Collectors.toList());
    }

    static Map<String, Object> describe(MessageExt message) {
        return map(
            "topic", message.getTopic(),
            "broker", message.getBrokerName(),
            "queue", message.getQueueId(),
            "offset", message.getQueueOffset(),
            "logOffset", message.getCommitLogOffset(),
            "msgId", message.getMsgId(),
            "offsetMsgId", message instanceof MessageClientExt ? ((MessageClientExt) message).getOffsetMsgId() : null,
            "keys", message.getKeys(),
            "tags", message.getTags(),
            "body", new String(message.getBody(), StandardCharsets.UTF_8),
            "flag", message.getFlag(),
            "sysFlag", message.getSysFlag(),
            "reconsumeTimes", message.getReconsumeTimes(),
            "bornTimestamp", message.getBornTimestamp(),
            "storeTimestamp", message.getStoreTimestamp(),
            "storeHost", String.valueOf(message.getStoreHost()),
            "properties", message.getProperties());
    }
}
