package skylark;

import static skylark.Commands.map;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.filter.SqlFilter;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.expression.MQFilterException;

/**
 * Apache's own SQL92 filter, many expressions a call: {@code op=selectors&cases=...}, one case a line, its fields in
 * base64 separated by commas: the expression, then names and values of properties in turn. The answers are in order:
 * true, false, null, refused (it does not compile) or failed (it can't be evaluated).
 */
final class Selectors {
    static void register(Commands commands) {
        commands.on("selectors", args -> {
            List<String> outcomes = new ArrayList<>();
            for (String line : args.text("cases").split("\n")) {
                outcomes.add(outcome(line.split(",")));
            }
            return map("outcomes", outcomes);
        });
    }

    private static String outcome(String[] fields) {
        Map<String, Object> properties = new HashMap<>();
        for (int i = 1; i + 1 < fields.length; i += 2) {
            properties.put(text(fields[i]), text(fields[i + 1]));
        }
        try {
            Expression expression = new SqlFilter().compile(text(fields[0]));
            return String.valueOf(expression.evaluate(new EvaluationContext() {
                @Override
                public Object get(String name) {
                    return properties.get(name);
                }

                @Override
                public Map<String, Object> keyValues() {
                    return properties;
                }
            }));
        } catch (MQFilterException refused) {
            return "refused";
        } catch (Exception failed) {
            return "failed";
        }
    }

    private static String text(String field) {
        return new String(Base64.getDecoder().decode(field), StandardCharsets.UTF_8);
    }
}
