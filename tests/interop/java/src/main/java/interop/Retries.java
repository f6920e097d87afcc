package interop;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * A consumer that fails: messages come again with a growing count, and are dead letters after the
 * last try. Most ask for a second's delay; one takes what the broker gives a first retry, ten.
 */
final class Retries {
    private static final int COUNT = 10;
    private static final int MOST_TRIES = 2;
    private static final long FIRST_RETRY_MS = 10_000;

    private Retries() {
    }

    static void play(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        DefaultMQProducer producer = run.producer();
        Map<String, String> ids = new ConcurrentHashMap<>();
        for (int i = 0; i < COUNT; i++) {
            for (String kind : List.of("good", "bad", "hopeless")) {
                String body = kind + "-" + i;
                ids.put(body, producer.send(
                    Run.message(run.topic, kind, "", body)).getOffsetMsgId());
            }
        }
        ids.put("slow", producer.send(
            Run.message(run.topic, "slow", "", "slow")).getOffsetMsgId());
        Map<String, List<MessageExt>> seen = new ConcurrentHashMap<>();
        Map<String, List<Long>> times = new ConcurrentHashMap<>();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        consumer.setMaxReconsumeTimes(MOST_TRIES);
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (batch, context) -> {
            MessageExt message = batch.get(0);
            String body = Run.text(message);
            seen.computeIfAbsent(body, any -> Collections.synchronizedList(new ArrayList<>()))
                .add(message);
            times.computeIfAbsent(body, any -> Collections.synchronizedList(new ArrayList<>()))
                .add(System.currentTimeMillis());
            if (body.startsWith("good") || message.getReconsumeTimes() > 0 && body.equals("slow")) {
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            }
            if (!body.equals("slow")) {
                context.setDelayLevelWhenNextConsume(body.startsWith("bad") ? 1 : -1);
            }
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.subscribe(run.topic, "*");
        consumer.start();
        run.await("everything tried", Run.PUSH_SECONDS, () -> {
            for (String body : ids.keySet()) {
                List<MessageExt> tries = seen.getOrDefault(body, List.of());
                int wanted = body.startsWith("bad") ? 1 + MOST_TRIES : body.equals("slow") ? 2 : 1;
                if (tries.size() < wanted) {
                    return false;
                }
            }
            return true;
        });
        for (Map.Entry<String, List<MessageExt>> one : seen.entrySet()) {
            checkTries(run, one.getKey(), one.getValue(), ids.get(one.getKey()));
        }
        long waited = times.get("slow").get(1) - times.get("slow").get(0);
        run.check(waited >= FIRST_RETRY_MS, "the first retry came after " + waited + " ms");
        run.fact("first_retry_ms", waited);
        checkDead(run, ids);
        run.fact("dead", 2 * COUNT);
    }

    private static void checkTries(Run run, String body, List<MessageExt> tries, String id) {
        List<Integer> counts = new ArrayList<>();
        for (MessageExt one : tries) {
            counts.add(one.getReconsumeTimes());
            run.equal("topic of " + body, run.topic, one.getTopic());
            if (one.getReconsumeTimes() > 0) {
                run.equal("origin of " + body, id,
                    one.getProperty(MessageConst.PROPERTY_ORIGIN_MESSAGE_ID));
            }
        }
        List<Integer> wanted = body.startsWith("bad") ? List.of(0, 1, 2)
            : body.equals("slow") ? List.of(0, 1) : List.of(0);
        run.equal("counts of " + body, wanted, counts);
    }

    private static void checkDead(Run run, Map<String, String> ids) throws Exception {
        String topic = "%DLQ%" + run.group;
        run.await("dead letters stored", 20, () -> run.total(topic) >= 2 * COUNT);
        Thread.sleep(1_500);
        List<MessageExt> dead = new ArrayList<>();
        for (MessageQueue queue : run.queues(topic)) {
            dead.addAll(run.stored(queue));
        }
        TreeSet<String> wanted = new TreeSet<>();
        for (int i = 0; i < COUNT; i++) {
            wanted.add("bad-" + i);
            wanted.add("hopeless-" + i);
        }
        run.equal("dead letters", wanted, new TreeSet<>(run.bodies(dead)));
        run.equal("dead letters, each once", 2 * COUNT, dead.size());
        for (MessageExt one : dead) {
            String body = Run.text(one);
            run.equal("count of dead " + body, body.startsWith("bad") ? MOST_TRIES + 1 : 1,
                one.getReconsumeTimes());
            run.equal("topic that " + body + " came from", run.topic,
                one.getProperty(MessageConst.PROPERTY_RETRY_TOPIC));
            run.equal("origin of dead " + body, ids.get(body),
                one.getProperty(MessageConst.PROPERTY_ORIGIN_MESSAGE_ID));
        }
    }
}
