package skylark;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.util.Map;
import org.apache.rocketmq.client.impl.MQClientManager;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.remoting.netty.NettyEvent;
import org.apache.rocketmq.remoting.netty.NettyEventType;
import org.apache.rocketmq.remoting.netty.NettyRemotingAbstract;

/**
 * Lets clients end at once. A client that is shut down waits for its thread of connection events, which looks every 3 s
 * whether it is to end, unless there is an event; so it gets one. Commands of mqadmin make a client each.
 */
final class Haste {
    private static final long LOOK_MS = 20;

    static void start() {
        Thread thread = new Thread(Haste::run, "haste");
        thread.setDaemon(true);
        thread.start();
    }

    private static void run() {
        try {
            Field clients = open(MQClientManager.class, "factoryTable");
            Field events = open(NettyRemotingAbstract.class, "nettyEventExecutor");
            while (true) {
                for (Object client : ((Map<?, ?>) clients.get(MQClientManager.getInstance())).values()) {
                    hasten((NettyRemotingAbstract) ((MQClientInstance) client).getMQClientAPIImpl().getRemotingClient(), events);
                }
                Thread.sleep(LOOK_MS);
            }
        } catch (ReflectiveOperationException | InterruptedException failure) {
            throw new IllegalStateException(failure);
        }
    }

    private static void hasten(NettyRemotingAbstract connections, Field events) throws ReflectiveOperationException {
        Object thread = events.get(connections);
        Method isStopped = thread.getClass().getSuperclass().getMethod("isStopped");
        if ((Boolean) isStopped.invoke(thread)) {
            connections.putNettyEvent(new NettyEvent(NettyEventType.IDLE, "", null));
        }
    }

    private static Field open(Class<?> owner, String name) throws ReflectiveOperationException {
        Field field = owner.getDeclaredField(name);
        field.setAccessible(true);
        return field;
    }
}
