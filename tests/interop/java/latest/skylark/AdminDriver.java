package skylark;

import static skylark.Commands.map;

import java.io.ByteArrayOutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Apache's mqadmin, one command after the other in one process: {@code op=admin&args=topicList\n-n\nhost:port}.
 * The answer holds what the command printed.
 */
public final class AdminDriver {
    public static void main(String[] argv) throws Exception {
        Commands commands = new Commands();
        commands.on("admin", args -> {
            synchronized (commands) {
                return map("output", capture(args.text("args").split("\n")));
            }
        });
        commands.serve();
    }

    private static String capture(String[] args) throws Exception {
        PrintStream out = System.out;
        PrintStream err = System.err;
        ByteArrayOutputStream captured = new ByteArrayOutputStream();
        PrintStream both = new PrintStream(captured, true, StandardCharsets.UTF_8);
        System.setOut(both);
        System.setErr(both);
        try {
            MQAdminStartup.main0(args, null);
        } finally {
            System.setOut(out);
            System.setErr(err);
        }
        return captured.toString(StandardCharsets.UTF_8);
    }
}
