package interop;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.MessageQueue;

/** Push consumers: concurrent, orderly, filtered by tag, broadcasting. */
final class Consumes {
    private static final int QUEUES = 4;
    private static final int COUNT = 100;

    private Consumes() {
    }

    /** Half is there before the consumer comes, half arrives while its pulls are held. */
    static void concurrent(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        Set<String> sent = new TreeSet<>(sendToAllQueues(run, "early", COUNT));
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "*");
        consumer.start();
        run.await("early messages pushed", Run.PUSH_SECONDS, () -> seen.bodies().equals(sent));

        long before = System.nanoTime();
        sent.addAll(sendToAllQueues(run, "late", COUNT));
        run.await("late messages pushed", 15, () -> seen.bodies().equals(sent));
        run.fact("late_ms", (System.nanoTime() - before) / 1_000_000);
        run.await("offsets committed", 20, () -> Seen.committed(run, consumer) == 2 * COUNT);
        run.equal("messages pushed", 2 * COUNT, seen.count());
        run.fact("seen", seen.count());
    }

    static void orderly(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        sendToAllQueues(run, "early", COUNT);
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        seen.listenOrderly(consumer);
        consumer.subscribe(run.topic, "*");
        consumer.start();
        run.await("early messages pushed", Run.PUSH_SECONDS, () -> seen.count() == COUNT);
        sendToAllQueues(run, "late", COUNT);
        run.await("late messages pushed", 20, () -> seen.count() == 2 * COUNT);

        Map<Integer, List<Long>> offsets = seen.offsetsByQueue();
        run.equal("queues seen", QUEUES, offsets.size());
        for (Map.Entry<Integer, List<Long>> queue : offsets.entrySet()) {
            for (int i = 0; i < queue.getValue().size(); i++) {
                run.equal("order in queue " + queue.getKey(), (long) i, queue.getValue().get(i));
            }
        }
        run.fact("seen", seen.count());
    }

    static void tagFilter(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        DefaultMQProducer producer = run.producer();
        Set<String> wanted = new TreeSet<>();
        String[] tags = {"A", "B", "C", "AB", ""};
        for (int i = 0; i < COUNT; i++) {
            String tag = tags[i % tags.length];
            String body = tag + "-" + i;
            producer.send(Run.message(run.topic, tag, "", body));
            if (tag.equals("A") || tag.equals("B")) {
                wanted.add(body);
            }
        }
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "A || B");
        consumer.start();
        run.await("all A and B pushed", Run.PUSH_SECONDS, () -> seen.bodies().equals(wanted));
        for (MessageQueue queue : run.queues(run.topic)) {
            producer.send(Run.message(run.topic, "A", "", "last-" + queue.getQueueId()), queue);
            wanted.add("last-" + queue.getQueueId());
        }
        run.await("the last A pushed", 15, () -> seen.bodies().equals(wanted));
        run.await("offsets past all others", 20, () -> Seen.committed(run, consumer) == COUNT + 2);
        run.equal("only A and B pushed", wanted.size(), seen.count());
        run.fact("seen", seen.count());
    }

    static void broadcast(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        List<Seen> members = new ArrayList<>();
        for (int i = 0; i < 2; i++) {
            Seen seen = new Seen();
            DefaultMQPushConsumer consumer = run.pushConsumer();
            var model = consumer.getMessageModel();
            consumer.setMessageModel(Enum.valueOf(model.getDeclaringClass(), "BROADCASTING"));
            seen.listenConcurrently(consumer);
            consumer.subscribe(run.topic, "*");
            consumer.start();
            members.add(seen);
        }
        Set<String> sent = new TreeSet<>(sendToAllQueues(run, "all", COUNT));
        for (Seen seen : members) {
            run.await("a member saw everything", Run.PUSH_SECONDS, () -> seen.bodies().equals(sent));
            run.equal("messages of a member", COUNT, seen.count());
        }
        run.fact("members", members.size());
    }

    /** The same number of messages into every queue, in order; returns their bodies. */
    static List<String> sendToAllQueues(Run run, String prefix, int count) throws Exception {
        DefaultMQProducer producer = run.producer();
        List<MessageQueue> queues = run.queues(run.topic);
        List<String> bodies = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            String body = prefix + "-" + i;
            producer.send(Run.message(run.topic, prefix, "", body), queues.get(i % queues.size()));
            bodies.add(body);
        }
        return bodies;
    }
}
