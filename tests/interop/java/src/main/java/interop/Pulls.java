package interop;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Consumers that ask: the classic pull consumer and the lite pull consumer in both modes. */
final class Pulls {
    private static final int QUEUES = 2;
    private static final int COUNT = 60;
    private static final int PER_QUEUE = COUNT / QUEUES;

    private Pulls() {
    }

    static void classic(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        List<String> sent = Consumes.sendToAllQueues(run, "tag", COUNT);
        DefaultMQPullConsumer consumer = run.pullConsumer(run.group);
        MessageQueue queue = run.queues(run.topic).get(0);
        run.await("messages dispatched", 10, () -> consumer.maxOffset(queue) == PER_QUEUE);

        PullResult first = consumer.pull(queue, "*", 0, 10);
        run.equal("status", PullStatus.FOUND, first.getPullStatus());
        run.equal("messages in one pull", 10, first.getMsgFoundList().size());
        run.equal("next offset", 10L, first.getNextBeginOffset());
        run.equal("first body", sent.get(0), Run.text(first.getMsgFoundList().get(0)));
        PullResult none = consumer.pull(queue, "absent", 0, 10);
        run.equal("status without a match", PullStatus.NO_MATCHED_MSG, none.getPullStatus());
        run.equal("status at the end", PullStatus.NO_NEW_MSG,
            consumer.pull(queue, "*", PER_QUEUE, 10).getPullStatus());
        PullResult beyond = consumer.pull(queue, "*", PER_QUEUE + 10, 10);
        run.equal("status beyond the end", PullStatus.OFFSET_ILLEGAL, beyond.getPullStatus());
        run.equal("corrected offset", (long) PER_QUEUE, beyond.getNextBeginOffset());

        run.equal("offset of a new group", 0L, consumer.fetchConsumeOffset(queue, true));
        run.await("offset committed", 10, () -> {
            // Each time anew: a rebalance that comes just now makes the client forget it.
            consumer.updateConsumeOffset(queue, 17);
            consumer.getDefaultMQPullConsumerImpl().getOffsetStore().persistAll(Set.of(queue));
            return consumer.fetchConsumeOffset(queue, true) == 17;
        });
        holdUntilAMessageArrives(run, consumer, queue);
    }

    private static void holdUntilAMessageArrives(
        Run run, DefaultMQPullConsumer consumer, MessageQueue queue) throws Exception {
        CompletableFuture<PullResult> held = CompletableFuture.supplyAsync(() -> {
            try {
                return consumer.pullBlockIfNotFound(queue, "*", PER_QUEUE, 10);
            } catch (Exception failure) {
                throw new IllegalStateException(failure);
            }
        });
        Thread.sleep(700);
        run.check(!held.isDone(), "a pull at the end must be held");
        run.producer().send(Run.message(run.topic, "late", "", "late"), queue);
        long sent = System.nanoTime();
        PullResult woken = held.get(10, TimeUnit.SECONDS);
        run.fact("woken_after_ms", (System.nanoTime() - sent) / 1_000_000);
        run.equal("held pull", PullStatus.FOUND, woken.getPullStatus());
        run.equal("held pull body", "late", Run.text(woken.getMsgFoundList().get(0)));
    }

    static void lite(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        Set<String> sent = new TreeSet<>(Consumes.sendToAllQueues(run, "tag", COUNT));
        liteSubscribed(run, sent);
        liteAssigned(run);
    }

    private static void liteSubscribed(Run run, Set<String> sent) throws Exception {
        DefaultLitePullConsumer consumer = run.litePullConsumer();
        consumer.subscribe(run.topic, "*");
        consumer.start();
        Set<String> polled = new TreeSet<>();
        run.await("everything polled", 30, () -> {
            polled.addAll(run.bodies(consumer.poll(500)));
            return polled.size() >= COUNT;
        });
        run.equal("polled bodies", sent, polled);
        run.equal("assigned queues", QUEUES, consumer.assignment().size());
        consumer.commitSync();
        DefaultMQPullConsumer sameGroup = run.pullConsumer(run.group);
        for (MessageQueue queue : run.queues(run.topic)) {
            run.await("lite offset committed", 10, () -> {
                consumer.getOffsetStore().persistAll(consumer.assignment());
                return sameGroup.fetchConsumeOffset(queue, true) == PER_QUEUE;
            });
        }
        consumer.shutdown();
    }

    private static void liteAssigned(Run run) throws Exception {
        DefaultLitePullConsumer consumer = run.litePullConsumer();
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues(run.topic));
        Collections.sort(queues);
        MessageQueue queue = queues.get(1);
        consumer.assign(List.of(queue));
        consumer.seek(queue, 20);
        List<Long> offsets = new ArrayList<>();
        run.await("queue polled from offset 20", 30, () -> {
            for (MessageExt message : consumer.poll(500)) {
                run.equal("assigned queue", queue.getQueueId(), message.getQueueId());
                offsets.add(message.getQueueOffset());
            }
            return offsets.size() >= PER_QUEUE - 20;
        });
        for (int i = 0; i < offsets.size(); i++) {
            run.equal("offset after seek", 20L + i, offsets.get(i));
        }
        consumer.shutdown();
        run.fact("assigned_polled", offsets.size());
    }
}
