package skylark;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/**
 * The conversation between a test and a driver process.
 *
 * In, one command a line, written as a query string: {@code id=7&op=send&topic=t&body=hello}.
 * Out, one JSON object a line: the answer {@code {"id":"7","ok":true,...}} or {@code {"id":"7","ok":false,"error":...}},
 * and events that nobody asked for by id: {@code {"event":"consumed",...}}. End of input ends the process.
 * Commands run side by side; a caller that needs an order waits for the answer.
 */
final class Commands {
    interface Handler {
        Map<String, Object> run(Args args) throws Exception;
    }

    private final Map<String, Handler> handlers = new LinkedHashMap<>();
    private final PrintStream out;

    Commands() {
        // Libraries print to System.out now and then; the event stream keeps the real one for itself.
        this.out = System.out;
        System.setOut(System.err);
    }

    void on(String op, Handler handler) {
        handlers.put(op, handler);
    }

    void emit(Map<String, Object> event) {
        StringBuilder line = new StringBuilder();
        writeJson(line, event);
        byte[] bytes = line.append('\n').toString().getBytes(StandardCharsets.UTF_8);
        synchronized (out) {
            out.write(bytes, 0, bytes.length);
            out.flush();
        }
    }

    void serve() throws IOException {
        ExecutorService workers = Executors.newCachedThreadPool();
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        Haste.start();
        emit(map("event", "ready"));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            Args args = Args.parse(line);
            workers.execute(() -> answer(args));
        }
        // Clients leave non-daemon threads behind when a test did not shut them down.
        Runtime.getRuntime().halt(0);
    }

    private void answer(Args args) {
        Map<String, Object> reply = map("id", args.text("id"));
        try {
            Handler handler = handlers.get(args.text("op"));
            if (handler == null) {
                throw new IllegalArgumentException("no such op: " + args.text("op"));
            }
            reply.put("ok", true);
            reply.putAll(handler.run(args));
        } catch (Throwable failure) {
            reply.put("ok", false);
            StringBuilder reasons = new StringBuilder(String.valueOf(failure));
            for (Throwable cause = failure.getCause(); cause != null; cause = cause.getCause()) {
                reasons.append(", because ").append(cause);
            }
            reply.put("error", reasons);
            reply.put("type", failure.getClass().getSimpleName());
        }
        emit(reply);
    }

    static Map<String, Object> map(Object... keysAndValues) {
        Map<String, Object> result = new LinkedHashMap<>();
        for (int i = 0; i < keysAndValues.length; i += 2) {
            result.put((String) keysAndValues[i], keysAndValues[i + 1]);
        }
        return result;
    }

    private static void writeJson(StringBuilder to, Object value) {
        if (value == null || value instanceof Boolean || value instanceof Number) {
            to.append(value);
        } else if (value instanceof Map) {
            char separator = '{';
            for (Map.Entry<?, ?> entry : ((Map<?, ?>) value).entrySet()) {
                to.append(separator);
                writeText(to, String.valueOf(entry.getKey()));
                to.append(':');
                writeJson(to, entry.getValue());
                separator = ',';
            }
            to.append(separator == '{' ? "{}" : "}");
        } else if (value instanceof Collection) {
            char separator = '[';
            for (Object item : (Collection<?>) value) {
                to.append(separator);
                writeJson(to, item);
                separator = ',';
            }
            to.append(separator == '[' ? "[]" : "]");
        } else {
            writeText(to, String.valueOf(value));
        }
    }

    private static void writeText(StringBuilder to, String text) {
        to.append('"');
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                to.append('\\').append(c);
            } else if (c < ' ' || Character.isSurrogate(c)) {
                to.append(String.format("\\u%04x", (int) c));
            } else {
                to.append(c);
            }
        }
        to.append('"');
    }

    /** The arguments of one command, by name. */
    static final class Args {
        private final Map<String, String> values = new LinkedHashMap<>();

        static Args parse(String line) {
            Args args = new Args();
            for (String pair : line.split("&")) {
                int equals = pair.indexOf('=');
                args.values.put(
                    URLDecoder.decode(pair.substring(0, equals), StandardCharsets.UTF_8),
                    URLDecoder.decode(pair.substring(equals + 1), StandardCharsets.UTF_8));
            }
            return args;
        }

        boolean has(String name) {
            return values.containsKey(name);
        }

        String text(String name) {
            String value = values.get(name);
            if (value == null) {
                throw new IllegalArgumentException("missing argument: " + name);
            }
            return value;
        }

        String text(String name, String otherwise) {
            return values.getOrDefault(name, otherwise);
        }

        int number(String name, int otherwise) {
            return values.containsKey(name) ? Integer.parseInt(values.get(name)) : otherwise;
        }

        long big(String name, long otherwise) {
            return values.containsKey(name) ? Long.parseLong(values.get(name)) : otherwise;
        }

        boolean flag(String name, boolean otherwise) {
            return values.containsKey(name) ? Boolean.parseBoolean(values.get(name)) : otherwise;
        }

        /** The arguments whose names start with the prefix, without it. */
        Map<String, String> under(String prefix) {
            Map<String, String> result = new LinkedHashMap<>();
            values.forEach((name, value) -> {
                if (name.startsWith(prefix)) {
                    result.put(name.substring(prefix.length()), value);
                }
            });
            return result;
        }

        /** A comma separated list, empty when absent. */
        Iterable<String> list(String name) {
            return values.containsKey(name) ? Arrays.asList(values.get(name).split(",")) : Arrays.asList();
        }
    }
}
