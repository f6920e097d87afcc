import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.parser.SelectorParser;

/** Asks RocketMQ's own filter. In: a line of hex words, the expression, then names and values. */
public final class Oracle {
    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        PrintStream out = new PrintStream(System.out, false);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.println(answer(line.split("\t", -1)));
        }
        out.flush();
    }

    private static String answer(String[] words) {
        Map<String, String> properties = new HashMap<>();
        for (int i = 1; i + 1 < words.length; i += 2) {
            properties.put(text(words[i]), text(words[i + 1]));
        }
        Expression expression;
        try {
            expression = SelectorParser.parse(text(words[0]));
        } catch (Throwable refused) {
            return "=P";
        }
        try {
            Object found = expression.evaluate(new EvaluationContext() {
                public Object get(String name) {
                    return properties.get(name);
                }

                public Map<String, Object> keyValues() {
                    return null;
                }
            });
            return found == null ? "=N" : found == Boolean.TRUE ? "=T" : "=F";
        } catch (Throwable thrown) {
            return "=E";
        }
    }

    private static String text(String hex) {
        byte[] bytes = new byte[hex.length() / 2];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = (byte) Integer.parseInt(hex.substring(2 * i, 2 * i + 2), 16);
        }
        return new String(bytes, StandardCharsets.UTF_8);
    }
}
