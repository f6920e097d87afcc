import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * The official client, put through the shapes of benchmarks/client.py.
 *
 * Reads one shape a line from standard input ("async namesrv=... window=256 seconds=3") and answers
 * each with one line of JSON. One process for all of them, so that its code is compiled once; every
 * shape has a client of its own, which is closed when the line is written. The CPU time is that of
 * the whole process: Netty, garbage collection and compilation included.
 */
public final class ClientBench {
    private static final OperatingSystemMXBean SYSTEM =
        (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
    private static final int KEYS = 4096;
    private static final int THREADS = 20;
    private static final int LIMIT_S = 300;

    private final Map<String, String> words = new HashMap<>();
    private final AtomicLong errors = new AtomicLong();
    private final AtomicLong done = new AtomicLong();
    private final byte[] body;
    private final String[] keys = new String[KEYS];
    private final String topic;
    private volatile String firstError = "";
    private long number;
    private long startedAt;
    private long cpuAtStart;
    private long doneAtStart;
    private long messages;
    private double seconds;
    private double cpuSeconds;
    private String latency = "";

    private ClientBench(String[] given) {
        for (int i = 1; i < given.length; i++) {
            String[] pair = given[i].split("=", 2);
            words.put(pair[0], pair[1]);
        }
        topic = words.get("topic");
        body = new byte[number("body")];
        Arrays.fill(body, (byte) 'x');
        for (int i = 0; i < KEYS; i++) {
            keys[i] = "key-" + i;
        }
    }

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] given = line.trim().split(" ");
            String answer;
            try {
                answer = new ClientBench(given).run(given[0]);
            } catch (Exception error) {
                error.printStackTrace();
                answer = "{\"failed\":\"" + clean(error.toString()) + "\"}";
            }
            System.out.println(answer);
        }
        System.exit(0); // the client leaves threads behind that are no daemons
    }

    private String run(String shape) throws Exception {
        switch (shape) {
            case "async":
            case "sync":
            case "batch":
                send(shape);
                break;
            case "push":
                push();
                break;
            case "poll":
                poll();
                break;
            default:
                throw new IllegalArgumentException("unknown shape " + shape);
        }
        String wrong = errors.get() == 0
            ? "" : "\"" + clean(firstError) + "\":" + errors.get();
        return "{\"messages\":" + messages + ",\"seconds\":" + seconds + ",\"cpu_s\":" + cpuSeconds
            + ",\"errors\":{" + wrong + "}" + latency + "}";
    }

    private int number(String name) {
        return Integer.parseInt(words.get(name));
    }

    private Message message() {
        return new Message(topic, "bench", keys[(int) (number++ & (KEYS - 1))], body);
    }

    private void begin() {
        doneAtStart = done.get();
        cpuAtStart = SYSTEM.getProcessCpuTime();
        startedAt = System.nanoTime();
    }

    private void end() {
        seconds = (System.nanoTime() - startedAt) / 1e9;
        cpuSeconds = (SYSTEM.getProcessCpuTime() - cpuAtStart) / 1e9;
        messages = done.get() - doneAtStart;
    }

    private void failed(Throwable error) {
        errors.incrementAndGet();
        firstError = error.toString();
    }

    private static String clean(String text) {
        return text.replaceAll("[^\\x20-\\x7e]", " ").replace("\\", "/").replace("\"", "'");
    }

    // ----------------------------------------------------------------------------------- sending

    private void send(String shape) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench-java");
        producer.setNamesrvAddr(words.get("namesrv"));
        producer.setInstanceName("bench-" + System.nanoTime());
        producer.start();
        try {
            Semaphore window = new Semaphore(number("window"));
            Latencies found = new Latencies();
            produce(producer, shape, window, found, Double.parseDouble(words.get("warmup")));
            found.clear();
            begin();
            produce(producer, shape, window, found, Double.parseDouble(words.get("seconds")));
            end();
            latency = shape.equals("sync") ? found.json() : "";
            window.acquire(number("window"));
        } finally {
            producer.shutdown();
        }
    }

    private void produce(
        DefaultMQProducer producer, String shape, Semaphore window, Latencies found, double forSeconds
    ) throws Exception {
        long until = System.nanoTime() + (long) (forSeconds * 1e9);
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                done.incrementAndGet();
                window.release();
            }

            @Override
            public void onException(Throwable error) {
                failed(error);
                window.release();
            }
        };
        int batch = number("batch");
        for (long now = System.nanoTime(); now < until;) {
            if (shape.equals("async")) {
                window.acquire();
                producer.send(message(), callback);
                now = System.nanoTime();
                continue;
            }
            try {
                if (shape.equals("sync")) {
                    producer.send(message());
                    done.incrementAndGet();
                } else {
                    List<Message> many = new ArrayList<>(batch);
                    for (int i = 0; i < batch; i++) {
                        many.add(message());
                    }
                    producer.send(many);
                    done.addAndGet(batch);
                }
            } catch (Exception error) {
                failed(error);
            }
            long then = System.nanoTime();
            found.add(then - now);
            now = then;
        }
    }

    private static final class Latencies {
        private long[] nanos = new long[1 << 16];
        private int count;

        void add(long one) {
            if (count == nanos.length) {
                nanos = Arrays.copyOf(nanos, count * 2);
            }
            nanos[count++] = one;
        }

        void clear() {
            count = 0;
        }

        String json() {
            if (count == 0) {
                return "";
            }
            Arrays.sort(nanos, 0, count);
            return ",\"p50_us\":" + nanos[count / 2] / 1e3
                + ",\"p99_us\":" + nanos[(int) (count * 0.99)] / 1e3;
        }
    }

    // --------------------------------------------------------------------------------- consuming

    /** Counts; the first message begins the measurement and the last one ends it. */
    private boolean handled(long count, long last) {
        long before = done.getAndAdd(count);
        if (before == 0) {
            begin();
            doneAtStart = 0;
        }
        if (before < last && before + count >= last) {
            end();
            return true;
        }
        return false;
    }

    private void push() throws Exception {
        long last = number("count");
        CountDownLatch all = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(words.get("group"));
        consumer.setNamesrvAddr(words.get("namesrv"));
        consumer.setInstanceName("bench-" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(THREADS);
        consumer.setConsumeThreadMax(THREADS);
        consumer.setPullBatchSize(32);
        consumer.setConsumeMessageBatchMaxSize(number("batch"));
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            if (handled(messages.size(), last)) {
                all.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        boolean isWhole = all.await(LIMIT_S, TimeUnit.SECONDS);
        consumer.shutdown();
        if (!isWhole) {
            throw new IllegalStateException("only " + done.get() + " of " + last + " came");
        }
    }

    private void poll() throws Exception {
        long last = number("count");
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(words.get("group"));
        consumer.setNamesrvAddr(words.get("namesrv"));
        consumer.setInstanceName("bench-" + System.nanoTime());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullBatchSize(32);
        consumer.subscribe(topic, "*");
        consumer.start();
        try {
            long giveUp = System.nanoTime() + LIMIT_S * 1_000_000_000L;
            boolean isWhole = false;
            while (!isWhole) {
                List<MessageExt> some = consumer.poll(1000);
                isWhole = !some.isEmpty() && handled(some.size(), last);
                if (System.nanoTime() > giveUp) {
                    throw new IllegalStateException("only " + done.get() + " of " + last + " came");
                }
            }
        } finally {
            consumer.shutdown();
        }
    }
}
