package skylark;

import static skylark.Commands.map;

import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Messages in transactions. A transactor decides by {@code state} of the command when it sends; when the broker asks,
 * it tells so as an event and answers what {@code transactor.answer} set for the body, else that it does not know.
 */
final class Transactions {
    private final Commands commands;
    private final Map<String, TransactionMQProducer> transactors = new ConcurrentHashMap<>();
    private final Map<String, LocalTransactionState> answers = new ConcurrentHashMap<>();

    Transactions(Commands commands) {
        this.commands = commands;
    }

    void register() {
        commands.on("transactor", args -> {
            TransactionMQProducer transactor = new TransactionMQProducer(args.text("group"));
            Driver.configure(transactor, args);
            transactor.setTransactionListener(new Listener(args.text("name")));
            transactor.setSendMsgTimeout(args.number("timeoutMs", Driver.PATIENCE_MS));
            transactor.start();
            if (args.has("topic")) {
                transactor.fetchPublishMessageQueues(args.text("topic"));
                transactor.getDefaultMQProducerImpl().getMqClientFactory().sendHeartbeatToAllBrokerWithLock();
            }
            transactors.put(args.text("name"), transactor);
            return map();
        });
        commands.on("transactor.stop", args -> {
            transactors.remove(args.text("name")).shutdown();
            return map();
        });
        commands.on("transactor.answer", args -> {
            answers.put(args.text("body"), LocalTransactionState.valueOf(args.text("state")));
            return map();
        });
        commands.on("transact", args -> {
            Message message = new Message(args.text("topic"), args.text("tags", ""), args.text("keys", ""),
                args.text("body").getBytes(StandardCharsets.UTF_8));
            args.under("property.").forEach(message::putUserProperty);
            TransactionSendResult result = Driver.named(transactors, args).sendMessageInTransaction(
                message, LocalTransactionState.valueOf(args.text("state")));
            return map("status", result.getSendStatus(), "msgId", result.getMsgId(),
                "transactionId", result.getTransactionId(), "state", result.getLocalTransactionState(),
                "queue", result.getMessageQueue().getQueueId(), "offset", result.getQueueOffset());
        });
    }

    private final class Listener implements TransactionListener {
        private final String name;

        Listener(String name) {
            this.name = name;
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object state) {
            return (LocalTransactionState) state;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            Map<String, Object> event = map("event", "consumed", "consumer", name);
            event.putAll(Driver.describe(message));
            commands.emit(event);
            String body = new String(message.getBody(), StandardCharsets.UTF_8);
            return answers.getOrDefault(body, LocalTransactionState.UNKNOW);
        }
    }
}
