// The traffic whose frames are recorded: every request family once, sent by Apache's own client and admin tools.
// Run by tools/record_golden.py: java -cp <Apache's jars> Traffic.java names | rich <namesrv> <broker> | plain <namesrv>
// `names` prints "request|response <number> <NAME>" lines, which the recorder uses to name what it sees.

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RemotingClient;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.ResponseCode;
import org.apache.rocketmq.remoting.protocol.header.SendMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.heartbeat.MessageModel;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

public class Traffic {
    static final String TOPIC = "golden-topic";
    static final String ORDERED = "golden-ordered";
    static final String GROUP = "golden-group";
    static final String ORDERED_GROUP = "golden-ordered-group";
    static final int TIMEOUT_MS = 20_000;
    static String namesrv;
    static String broker;
    static int serial;

    public static void main(String[] args) throws Exception {
        if (args[0].equals("names")) {
            names("request", RequestCode.class);
            names("response", ResponseCode.class);
            return;
        }
        namesrv = args[1];
        int status = 0;
        try {
            if (args[0].equals("plain")) {
                plainSends();
            } else {
                broker = args[2];
                rich();
            }
        } catch (Exception failure) {
            failure.printStackTrace();
            status = 1;
        }
        System.exit(status);
    }

    static void names(String kind, Class<?> codes) throws Exception {
        for (var field : codes.getFields()) {
            if (field.getType() == int.class) {
                System.out.println(kind + " " + field.getInt(null) + " " + field.getName());
            }
        }
    }

    interface Step {
        void run() throws Exception;
    }

    // Some steps are refused by the broker, and the refusal is what is recorded.
    static void attempt(String what, Step step) {
        try {
            step.run();
        } catch (Exception refused) {
            System.out.println(what + ": " + refused.getMessage());
        }
    }

    static void await(CountDownLatch latch, String what) throws Exception {
        if (!latch.await(120, TimeUnit.SECONDS)) {
            throw new IllegalStateException("nothing happened: " + what);
        }
    }

    // Client ids and unique keys are set, because Apache's own contain the machine's address and process id.
    static <C extends ClientConfig> C named(C client, String name) {
        client.setNamesrvAddr(namesrv);
        client.setPollNameServerInterval(1000);
        client.setClientIP("127.0.0.1");
        client.setInstanceName(name);
        return client;
    }

    static Message message(String topic, String tags, String keys, String body) {
        Message message = new Message(topic, tags, keys, body.getBytes(StandardCharsets.UTF_8));
        String unique = String.format("7F00000100017A0F5C9D%012X", ++serial);
        MessageAccessor.putProperty(message, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX, unique);
        return message;
    }

    static void plainSends() throws Exception {
        serial = 1000;
        DefaultMQProducer producer = named(new DefaultMQProducer("golden-plain-producer"), "plain");
        producer.setSendMsgTimeout(TIMEOUT_MS);
        producer.start();
        producer.send(message(TOPIC, "plain", "plain-key", "sent with long field names"));
        producer.sendOneway(message(TOPIC, "plain", null, "one way, long field names"));
        producer.shutdown();
    }

    static void rich() throws Exception {
        DefaultMQAdminExt admin = named(new DefaultMQAdminExt(TIMEOUT_MS), "admin");
        admin.start();
        createTopics(admin);
        DefaultMQProducer producer = named(new DefaultMQProducer("golden-producer"), "producer");
        producer.setSendMsgTimeout(TIMEOUT_MS);
        producer.start();
        SendResult first = send(producer);
        refused(producer);
        DefaultMQPushConsumer concurrent = consume();
        DefaultMQPushConsumer ordered = consumeOrderly();
        DefaultMQPushConsumer second = secondMember();
        pull();
        litePull();
        transaction();
        query(admin, producer, first);
        inspect(admin);
        change(admin);
        second.shutdown();
        ordered.shutdown();
        concurrent.shutdown();
        producer.shutdown();
        admin.shutdown();
    }

    static void createTopics(DefaultMQAdminExt admin) throws Exception {
        admin.createAndUpdateTopicConfig(broker, new TopicConfig(TOPIC, 4, 4));
        TopicConfig ordered = new TopicConfig(ORDERED, 2, 2);
        ordered.setOrder(true);
        admin.createAndUpdateTopicConfig(broker, ordered);
        admin.createOrUpdateOrderConf(ORDERED, "broker-a:2", true);
        for (String group : List.of(GROUP, ORDERED_GROUP)) {
            SubscriptionGroupConfig config = new SubscriptionGroupConfig();
            config.setGroupName(group);
            config.setRetryMaxTimes(1);
            admin.createAndUpdateSubscriptionGroupConfig(broker, config);
        }
        attempt("bad topic", () -> admin.createAndUpdateTopicConfig(broker, new TopicConfig("bad topic!", 1, 1)));
    }

    static SendResult send(DefaultMQProducer producer) throws Exception {
        SendResult first = producer.send(message(TOPIC, "tag-a", "key-1", "first"));
        producer.send(message(TOPIC, null, null, "neither tag nor key"));
        Message rich = message(TOPIC, "tag-b", "key-2 key-3", "body with ünïcödé and properties 消息");
        rich.setFlag(7);
        rich.putUserProperty("colour", "grün");
        rich.putUserProperty("long", "x".repeat(300));
        rich.setBuyerId("buyer");
        rich.setWaitStoreMsgOK(false);
        producer.send(rich);
        producer.sendOneway(message(TOPIC, "tag-a", null, "one way"));
        CountDownLatch sent = new CountDownLatch(1);
        producer.send(message(TOPIC, "tag-a", null, "asynchronous"),
            new org.apache.rocketmq.client.producer.SendCallback() {
                @Override public void onSuccess(SendResult result) {
                    sent.countDown();
                }

                @Override public void onException(Throwable failure) {
                    failure.printStackTrace();
                }
            });
        await(sent, "asynchronous send");
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 3; i++) {
            batch.add(message(TOPIC, "tag-batch", "batch-key-" + i, "batch " + i));
        }
        producer.send(batch);
        Message delayed = message(TOPIC, "tag-a", "delayed-key", "delayed by one level");
        delayed.setDelayTimeLevel(1);
        producer.send(delayed);
        producer.setCompressMsgBodyOverHowmuch(512);
        producer.send(message(TOPIC, "tag-big", null, "compressible ".repeat(100)));
        for (int i = 0; i < 4; i++) {
            producer.send(message(ORDERED, "step-" + i, "order-1", "step " + i), (queues, m, key) -> queues.get(0), 1);
        }
        producer.send(message("golden-created-by-sending", "tag-a", null, "creates its topic"));
        return first;
    }

    static void refused(DefaultMQProducer producer) throws Exception {
        RemotingClient client = producer.getDefaultMQProducerImpl().getMqClientFactory().getMQClientAPIImpl().getRemotingClient();
        for (String address : List.of(broker, namesrv)) {
            System.out.println(client.invokeSync(address, RemotingCommand.createRequestCommand(9999, null), TIMEOUT_MS));
        }
        attempt("no route", () -> producer.fetchPublishMessageQueues("golden-nowhere"));
        attempt("too long", () -> client.invokeSync(broker, send("golden-" + "x".repeat(130)), TIMEOUT_MS));
        attempt("bad name", () -> client.invokeSync(broker, send("golden topic"), TIMEOUT_MS));
        attempt("system topic", () -> client.invokeSync(broker, send("SCHEDULE_TOPIC_XXXX"), TIMEOUT_MS));
        attempt("retry topic of no group", () -> client.invokeSync(broker, send("%RETRY%" + "g".repeat(150)), TIMEOUT_MS));
        attempt("bad queue", () -> producer.send(message(TOPIC, null, null, "x"), new MessageQueue(TOPIC, "broker-a", 99)));
    }

    static RemotingCommand send(String topic) {
        SendMessageRequestHeader header = new SendMessageRequestHeader();
        header.setProducerGroup("golden-producer");
        header.setTopic(topic);
        header.setDefaultTopic("TBW102");
        header.setDefaultTopicQueueNums(4);
        header.setQueueId(0);
        header.setSysFlag(0);
        header.setBornTimestamp(System.currentTimeMillis());
        header.setFlag(0);
        header.setProperties(MessageDecoder.messageProperties2String(Map.of("UNIQ_KEY", "7F00000100017A0F5C9D0000000F0000")));
        header.setReconsumeTimes(0);
        RemotingCommand request = RemotingCommand.createRequestCommand(RequestCode.SEND_MESSAGE, header);
        request.setBody("hand-made".getBytes(StandardCharsets.UTF_8));
        return request;
    }

    static DefaultMQPushConsumer consume() throws Exception {
        DefaultMQPushConsumer consumer = named(new DefaultMQPushConsumer(GROUP), "concurrent");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(TOPIC, "tag-a || tag-b || tag-batch");
        consumer.setMaxReconsumeTimes(1);
        CountDownLatch retried = new CountDownLatch(1);
        CountDownLatch delayed = new CountDownLatch(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            context.setDelayLevelWhenNextConsume(1);
            for (MessageExt message : messages) {
                String body = new String(message.getBody(), StandardCharsets.UTF_8);
                if (body.equals("first")) {
                    if (message.getReconsumeTimes() > 0) {
                        retried.countDown();
                    }
                    return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                }
                if (body.startsWith("delayed")) {
                    delayed.countDown();
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        await(delayed, "delayed message");
        await(retried, "retry");
        return consumer;
    }

    static DefaultMQPushConsumer consumeOrderly() throws Exception {
        DefaultMQPushConsumer consumer = named(new DefaultMQPushConsumer(ORDERED_GROUP), "orderly");
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(ORDERED, "*");
        CountDownLatch consumed = new CountDownLatch(4);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            messages.forEach(message -> consumed.countDown());
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        await(consumed, "ordered messages");
        return consumer;
    }

    // Joining the group makes the broker notify the first member, which gives half of its locked queues away.
    static DefaultMQPushConsumer secondMember() throws Exception {
        DefaultMQPushConsumer consumer = named(new DefaultMQPushConsumer(ORDERED_GROUP), "orderly-2");
        consumer.subscribe(ORDERED, "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> ConsumeOrderlyStatus.SUCCESS);
        consumer.start();
        for (int i = 0; i < 300 && consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().isEmpty(); i++) {
            TimeUnit.MILLISECONDS.sleep(100);
        }
        return consumer;
    }

    @SuppressWarnings("deprecation")
    static void pull() throws Exception {
        DefaultMQPullConsumer consumer = named(new DefaultMQPullConsumer("golden-pull-group"), "pull");
        consumer.setBrokerSuspendMaxTimeMillis(500);
        consumer.start();
        MessageQueue ordered = new MessageQueue(ORDERED, "broker-a", 0);
        System.out.println(consumer.pull(ordered, "*", 0, 2));
        System.out.println(consumer.pull(ordered, "step-3", 0, 32));
        System.out.println(consumer.pull(ordered, "nothing-has-this-tag", 0, 32));
        System.out.println(consumer.pull(ordered, "*", 4, 32));
        System.out.println(consumer.pull(ordered, "*", 1000, 32));
        System.out.println(consumer.pullBlockIfNotFound(ordered, "*", 4, 32));
        System.out.println(consumer.pull(new MessageQueue(ORDERED, "broker-a", 1), "*", 0, 32));
        attempt("unknown topic", () -> consumer.pull(new MessageQueue("golden-nowhere", "broker-a", 0), "*", 0, 1));
        attempt("unknown queue", () -> consumer.pull(new MessageQueue(ORDERED, "broker-a", 77), "*", 0, 1));
        consumer.updateConsumeOffset(ordered, 2);
        consumer.getDefaultMQPullConsumerImpl().getOffsetStore().persist(ordered);
        System.out.println(consumer.fetchConsumeOffset(ordered, true));
        System.out.println(consumer.fetchConsumeOffset(new MessageQueue(TOPIC, "broker-a", 3), true));
        System.out.println(consumer.minOffset(ordered) + " " + consumer.maxOffset(ordered) + " "
            + consumer.searchOffset(ordered, 0) + " " + consumer.earliestMsgStoreTime(ordered));
        consumer.shutdown();
    }

    static void litePull() throws Exception {
        DefaultLitePullConsumer consumer = named(new DefaultLitePullConsumer("golden-lite-group"), "lite");
        consumer.setMessageModel(MessageModel.CLUSTERING);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(TOPIC, "*");
        consumer.start();
        for (int i = 0; i < 20 && consumer.poll(1000).isEmpty(); i++) {
            System.out.println("polling");
        }
        consumer.commit();
        consumer.shutdown();
    }

    static void transaction() throws Exception {
        TransactionMQProducer producer = named(new TransactionMQProducer("golden-transaction-producer"), "transaction");
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object decision) {
                return (LocalTransactionState) decision;
            }

            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return LocalTransactionState.COMMIT_MESSAGE;
            }
        });
        producer.start();
        producer.sendMessageInTransaction(message(TOPIC, "tag-tx", "tx-1", "committed"), LocalTransactionState.COMMIT_MESSAGE);
        producer.sendMessageInTransaction(message(TOPIC, "tag-tx", "tx-2", "rolled back"), LocalTransactionState.ROLLBACK_MESSAGE);
        producer.shutdown();
    }

    static void query(DefaultMQAdminExt admin, DefaultMQProducer producer, SendResult first) throws Exception {
        long now = System.currentTimeMillis();
        System.out.println(admin.queryMessage(TOPIC, "key-1", 10, 0, now));
        attempt("no such key", () -> admin.queryMessage(TOPIC, "no-such-key", 10, 0, now));
        System.out.println(admin.viewMessage(TOPIC, first.getOffsetMsgId()));
        System.out.println(admin.viewMessage(TOPIC, first.getMsgId()));
        String beyond = first.getOffsetMsgId().substring(0, 16) + "0000000000FFFFFF";
        attempt("no such id", () -> admin.viewMessage(TOPIC, beyond));
        MessageQueue queue = first.getMessageQueue();
        System.out.println(admin.searchLowerBoundaryOffset(queue, now) + " " + admin.searchUpperBoundaryOffset(queue, now));
    }

    static void inspect(DefaultMQAdminExt admin) throws Exception {
        admin.examineBrokerClusterInfo();
        admin.fetchAllTopicList();
        admin.fetchTopicsByCLuster("golden-cluster");
        admin.examineTopicRouteInfo(TOPIC);
        admin.examineTopicStats(ORDERED);
        admin.examineTopicConfig(broker, TOPIC);
        admin.examineConsumeStats(ORDERED_GROUP);
        admin.examineConsumeStats(GROUP, TOPIC);
        attempt("no such group", () -> admin.examineConsumeStats("golden-nobody"));
        admin.examineConsumerConnectionInfo(ORDERED_GROUP);
        attempt("not online", () -> admin.examineConsumerConnectionInfo("golden-nobody"));
        admin.examineProducerConnectionInfo("golden-producer", TOPIC);
        admin.getAllProducerInfo(broker);
        admin.getConsumerRunningInfo(ORDERED_GROUP, "127.0.0.1@orderly", false);
        admin.getConsumeStatus(ORDERED, ORDERED_GROUP, "");
        admin.queryTopicConsumeByWho(ORDERED);
        admin.queryTopicsByConsumer(ORDERED_GROUP);
        admin.querySubscription(ORDERED_GROUP, ORDERED);
        admin.queryConsumeTimeSpan(ORDERED, ORDERED_GROUP);
        admin.queryConsumeQueue(broker, ORDERED, 0, 0, 4, ORDERED_GROUP);
        admin.fetchConsumeStatsInBroker(broker, true, TIMEOUT_MS);
        admin.fetchBrokerRuntimeStats(broker);
        admin.getBrokerConfig(broker);
        admin.getNameServerConfig(List.of(namesrv));
        admin.getAllSubscriptionGroup(broker, TIMEOUT_MS);
        admin.examineSubscriptionGroupConfig(broker, GROUP);
        admin.getAllTopicConfig(broker, TIMEOUT_MS);
        admin.getKVListByNamespace("ORDER_TOPIC_CONFIG");
        attempt("stats item", () -> admin.viewBrokerStatsData(broker, "TOPIC_PUT_NUMS", TOPIC));
        attempt("no stats item", () -> admin.viewBrokerStatsData(broker, "TOPIC_PUT_NUMS", "golden-nowhere"));
    }

    static void change(DefaultMQAdminExt admin) throws Exception {
        java.util.Properties properties = new java.util.Properties();
        properties.put("fileReservedTime", "71");
        admin.updateBrokerConfig(broker, properties);
        attempt("reset", () -> System.out.println(admin.resetOffsetByTimestamp(ORDERED, ORDERED_GROUP, 0, true)));
        admin.wipeWritePermOfBroker(namesrv, "broker-a");
        admin.addWritePermOfBroker(namesrv, "broker-a");
        Set<String> brokers = new HashSet<>(Set.of(broker));
        admin.deleteTopicInBroker(brokers, "golden-created-by-sending");
        admin.deleteTopicInNameServer(new HashSet<>(Set.of(namesrv)), "golden-created-by-sending");
        admin.createAndUpdateSubscriptionGroupConfig(broker, groupToDelete());
        admin.deleteSubscriptionGroup(broker, "golden-short-lived", true);
        admin.deleteKvConfig("ORDER_TOPIC_CONFIG", ORDERED);
    }

    static SubscriptionGroupConfig groupToDelete() {
        SubscriptionGroupConfig config = new SubscriptionGroupConfig();
        config.setGroupName("golden-short-lived");
        return config;
    }
}
