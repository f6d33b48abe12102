package skylark;

import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.compression.CompressionType;

/** Apache's newest Java client: what all versions can do ({@link Driver}), and what only this one can. */
public final class LatestDriver {
    public static void main(String[] argv) throws Exception {
        Driver.more = (client, args) -> {
            if (args.has("namespaceV2")) {
                client.setNamespaceV2(args.text("namespaceV2"));
            }
            if (args.has("compressType")) {
                ((DefaultMQProducer) client).setCompressType(CompressionType.of(args.text("compressType")));
            }
            Pops.configure(client, args);
        };
        Commands commands = Driver.commands();
        Selectors.register(commands);
        new Timers().register(commands);
        Pops.register(commands);
        commands.serve();
    }
}
