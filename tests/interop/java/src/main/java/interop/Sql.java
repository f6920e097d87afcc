package interop;

import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/** SQL92 filters: pushed, pulled, held, and refused. */
final class Sql {
    private static final int COUNT = 60;

    private Sql() {
    }

    static void push(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        DefaultMQProducer producer = run.producer();
        Set<String> wanted = new TreeSet<>();
        for (int i = 0; i < COUNT; i++) {
            String city = i % 3 == 0 ? "Rome" : "Oslo";
            producer.send(message(run, "early-" + i, String.valueOf(i), city));
            if (i > 10 && city.equals("Rome")) {
                wanted.add("early-" + i);
            }
        }
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, MessageSelector.bySql("amount > 10 AND city = 'Rome'"));
        consumer.start();
        run.await("early ones pushed", Run.PUSH_SECONDS, () -> seen.bodies().equals(wanted));

        for (MessageQueue queue : run.queues(run.topic)) {
            String last = "last-" + queue.getQueueId();
            producer.send(message(run, "other-" + queue.getQueueId(), "5", "Rome"), queue);
            producer.send(message(run, "broken-" + queue.getQueueId(), "5.5", "Rome"), queue);
            producer.send(message(run, last, "500", "Rome"), queue);
            wanted.add(last);
        }
        run.await("last ones pushed", 15, () -> seen.bodies().equals(wanted));
        run.await("offsets past all others", 20, () -> Seen.committed(run, consumer) == COUNT + 6);
        run.equal("only those pushed", wanted.size(), seen.count());
        run.fact("seen", seen.count());
    }

    /** Each expression with the messages that it finds: amount 7, amount 5.5, none. */
    static void pull(Run run) throws Exception {
        run.createTopic(run.topic, 1);
        DefaultMQProducer producer = run.producer();
        producer.send(message(run, "seven", "7", "Rome"));
        producer.send(message(run, "decimal", "5.5", "Rome"));
        producer.send(message(run, "none", null, "Oslo"));
        Map<String, Set<String>> wanted = new LinkedHashMap<>();
        wanted.put("amount > 5", Set.of("seven"));
        wanted.put("amount > 5.0", Set.of("seven", "decimal"));
        wanted.put("amount <> 7", Set.of());
        wanted.put("7 <> amount", Set.of("none"));
        wanted.put("amount IS NULL", Set.of("none"));
        wanted.put("amount NOT IN ('7')", Set.of("decimal"));
        wanted.put("amount between 6 and 8 trailing words", Set.of("seven"));
        wanted.put("NOT city", Set.of("seven", "decimal", "none"));
        wanted.put("nothing = nowhere", Set.of("seven", "decimal", "none"));
        wanted.put("TAGS = 'tag' AND city in ('Rome', 'it''s')", Set.of("seven", "decimal"));
        DefaultMQPullConsumer consumer = run.pullConsumer(run.group);
        MessageQueue queue = run.queues(run.topic).get(0);
        // The client asks for SQL92 only where a heartbeat's answer has told it the version, and
        // sends heartbeats only to brokers that it has a route to.
        run.equal("messages", 3, consumer.pull(queue, "*", 0, 32).getMsgFoundList().size());
        run.await("the client knows the broker's version", 40, () -> {
            consumer.getDefaultMQPullConsumerImpl().getRebalanceImpl().getmQClientFactory()
                .sendHeartbeatToAllBrokerWithLock();
            try {
                return consumer.pull(queue, MessageSelector.bySql("TRUE"), 0, 32) != null;
            } catch (MQClientException early) {
                return false;
            }
        });
        for (Map.Entry<String, Set<String>> one : wanted.entrySet()) {
            PullResult found = consumer.pull(queue, MessageSelector.bySql(one.getKey()), 0, 32);
            Set<String> bodies = new TreeSet<>();
            if (found.getMsgFoundList() != null) {
                bodies.addAll(run.bodies(found.getMsgFoundList()));
            }
            run.equal(one.getKey(), new TreeSet<>(one.getValue()), bodies);
            run.equal("next offset of " + one.getKey(), 3L, found.getNextBeginOffset());
        }
        refused(run);
        run.fact("expressions", wanted.size());
    }

    /** A consumer with an expression that means nothing must not start. */
    private static void refused(Run run) throws Exception {
        DefaultMQPushConsumer consumer = run.pushConsumer();
        new Seen().listenConcurrently(consumer);
        consumer.subscribe(run.topic, MessageSelector.bySql("amount > 'x'"));
        try {
            consumer.start();
        } catch (MQClientException expected) {
            run.fact("refusal", expected.getMessage());
            return;
        }
        throw new IllegalStateException("it started with an expression that means nothing");
    }

    private static Message message(Run run, String body, String amount, String city) {
        Message message = Run.message(run.topic, "tag", "", body);
        if (amount != null) {
            message.putUserProperty("amount", amount);
        }
        message.putUserProperty("city", city);
        return message;
    }
}
