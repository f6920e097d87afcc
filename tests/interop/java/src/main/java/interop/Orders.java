package interop;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.exception.RemotingException;

/** Ordered consumption that is disturbed: by failures, by a new member, by a broker that restarts. */
final class Orders {
    private static final int QUEUES = 4;
    private static final int COUNT = 200;
    private static final int MOST_TRIES = 3;

    private Orders() {
    }

    /** What all members handle, queue by queue, and every step out of order. */
    private static final class Steps {
        private final Map<Integer, Long> last = new HashMap<>();
        private final Set<Integer> busy = new HashSet<>();
        private final Set<String> handled = new HashSet<>();
        private final List<String> faults = new ArrayList<>();
        private int repeated;

        synchronized void begin(MessageExt message) {
            long before = last.getOrDefault(message.getQueueId(), -1L);
            if (!busy.add(message.getQueueId())) {
                faults.add("two members in queue " + message.getQueueId());
            }
            if (message.getQueueOffset() > before + 1) {
                faults.add(message.getQueueOffset() + " after " + before + " in queue "
                    + message.getQueueId());
            }
            repeated += message.getQueueOffset() <= before ? 1 : 0;
        }

        synchronized void end(MessageExt message) {
            busy.remove(message.getQueueId());
            last.merge(message.getQueueId(), message.getQueueOffset(), Math::max);
            handled.add(Run.text(message));
        }

        synchronized int count() {
            return handled.size();
        }
    }

    private static DefaultMQPushConsumer member(Run run, Steps steps, long pauseMs) throws Exception {
        DefaultMQPushConsumer consumer = run.pushConsumer();
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.setConsumeThreadMin(QUEUES);
        consumer.setConsumeThreadMax(QUEUES);
        consumer.registerMessageListener((MessageListenerOrderly) (batch, context) -> {
            steps.begin(batch.get(0));
            try {
                Thread.sleep(pauseMs);
            } catch (InterruptedException stopped) {
                Thread.currentThread().interrupt();
            }
            steps.end(batch.get(0));
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.subscribe(run.topic, "*");
        consumer.start();
        return consumer;
    }

    /** One message of a queue fails twice, one always: the first holds up its queue, the second is a
     * dead letter in the end, and the rest comes in order. */
    static void failing(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        Consumes.sendToAllQueues(run, "step", 20);
        Seen tried = new Seen();
        Map<String, List<Integer>> counts = new HashMap<>();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        consumer.setConsumeMessageBatchMaxSize(1);
        consumer.setSuspendCurrentQueueTimeMillis(200);
        consumer.setMaxReconsumeTimes(MOST_TRIES);
        consumer.registerMessageListener((MessageListenerOrderly) (batch, context) -> {
            MessageExt message = batch.get(0);
            String body = Run.text(message);
            synchronized (counts) {
                counts.computeIfAbsent(body, any -> new ArrayList<>())
                    .add(message.getReconsumeTimes());
            }
            boolean isBad = body.equals("step-8");
            if (isBad || body.equals("step-5") && message.getReconsumeTimes() < 2) {
                return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            }
            tried.add(batch);
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.subscribe(run.topic, "*");
        consumer.start();
        run.await("all but one handled", Run.PUSH_SECONDS, () -> tried.count() == 19);
        synchronized (counts) {
            run.equal("tries of one that fails twice", List.of(0, 1, 2), counts.get("step-5"));
            run.equal("tries of one that always fails", List.of(0, 1, 2, 3), counts.get("step-8"));
        }
        for (Map.Entry<Integer, List<Long>> queue : tried.offsetsByQueue().entrySet()) {
            List<Long> wanted = new ArrayList<>();
            for (long offset = 0; offset < 10; offset++) {
                if (queue.getKey() != 0 || offset != 4) {  // step-8
                    wanted.add(offset);
                }
            }
            run.equal("order in queue " + queue.getKey(), wanted, queue.getValue());
        }
        run.equal("messages handled", 19, tried.count());
        if (run.number("is-dead-letter-delayed", 0) == 1) {
            return;
        }
        String dead = "%DLQ%" + run.group;
        run.await("a dead letter", 20, () -> run.total(dead) == 1);
        List<MessageExt> letters = run.stored(run.queues(dead).get(0));
        run.equal("the dead letter", List.of("step-8"), run.bodies(letters));
        run.fact("dead_count", letters.get(0).getReconsumeTimes());
    }

    /** A second member comes while the first is at work, and goes again. */
    static void rebalance(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        Steps steps = new Steps();
        Consumes.sendToAllQueues(run, "early", COUNT);
        member(run, steps, 5);
        run.await("some handled", Run.PUSH_SECONDS, () -> steps.count() > 20);
        DefaultMQPushConsumer second = member(run, steps, 5);
        Consumes.sendToAllQueues(run, "late", COUNT);
        run.await("the second member has queues", Run.PUSH_SECONDS, () ->
            second.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable()
                .values().stream().filter(queue -> queue.isLocked()).count() == QUEUES / 2);
        Consumes.sendToAllQueues(run, "shared", COUNT);
        second.shutdown();
        Consumes.sendToAllQueues(run, "alone", COUNT);
        run.await("all handled", 2 * Run.PUSH_SECONDS, () -> steps.count() == 4 * COUNT);
        run.equal("steps out of order", List.of(), steps.faults);
        run.fact("repeated", steps.repeated);
    }

    /**
     * The broker goes away, cleanly or not, and comes back, when the file `marker` appears; its name
     * server does not come back to the same place, so all that is needed is asked for before.
     */
    static void restart(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        Steps steps = new Steps();
        List<MessageQueue> queues = run.queues(run.topic);
        DefaultMQProducer producer = run.producer();
        for (int i = 0; i < COUNT; i++) {
            producer.send(
                Run.message(run.topic, "early", "", "early-" + i), queues.get(i % QUEUES));
        }
        member(run, steps, 40);
        run.await("some handled", Run.PUSH_SECONDS, () -> steps.count() > COUNT / 4);
        Files.createFile(Path.of(run.option("marker")));
        Path back = Path.of(run.option("marker") + ".back");
        run.await("the broker is back", 100, () -> Files.exists(back));
        for (int i = 0; i < COUNT; i++) {
            Message message = Run.message(run.topic, "late", "", "late-" + i);
            MessageQueue queue = queues.get(i % QUEUES);
            run.await("a send", 40, () -> {
                try {
                    return producer.send(message, queue).getQueueOffset() > 0;
                } catch (RemotingException early) {
                    return false;
                }
            });
        }
        run.await("all handled", 70, () -> steps.count() == 2 * COUNT);
        run.equal("steps out of order", List.of(), steps.faults);
        run.fact("repeated", steps.repeated);
    }
}
