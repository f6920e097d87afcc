package interop;

import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Delay levels: none early, none much later, all once, as themselves. */
final class Delays {
    private static final int COUNT = 20;
    private static final long[] LEVELS_MS = {1_000, 5_000, 10_000};
    private static final long PATIENCE_MS = 5_000;

    private Delays() {
    }

    static void play(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        Map<String, Long> sent = new ConcurrentHashMap<>();
        Map<String, Long> late = new ConcurrentHashMap<>();
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        consumer.registerMessageListener((MessageListenerConcurrently) (batch, context) -> {
            long now = System.currentTimeMillis();
            for (MessageExt message : batch) {
                int level = message.getDelayTimeLevel();
                long due = sent.get(Run.text(message)) + LEVELS_MS[level - 1];
                late.put(Run.text(message), now - due);
            }
            seen.add(batch);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.subscribe(run.topic, "delayed");
        consumer.start();
        DefaultMQProducer producer = run.producer();
        for (int i = 0; i < COUNT; i++) {
            for (int level = 1; level <= LEVELS_MS.length; level++) {
                String body = level + "-" + i;
                Message message = Run.message(run.topic, "delayed", "key-" + body, body);
                message.setDelayTimeLevel(level);
                sent.put(body, System.currentTimeMillis());
                producer.send(message);
            }
        }
        run.await("all delivered", Run.PUSH_SECONDS,
            () -> seen.bodies().equals(new TreeSet<>(sent.keySet())));
        Thread.sleep(1_000);
        run.equal("each once", sent.size(), seen.count());
        for (Map.Entry<String, Long> one : late.entrySet()) {
            run.check(one.getValue() >= 0, one.getKey() + " is early by " + -one.getValue());
            run.check(one.getValue() <= PATIENCE_MS, one.getKey() + " is late by " + one.getValue());
        }
        run.fact("latest_ms", late.values().stream().mapToLong(Long::longValue).max().getAsLong());
    }
}
