package interop;

import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Finding messages by key, id and time, and moving a group back in time. */
final class Lookups {
    private static final int MAX_FOUND = 32;
    private static final long PAUSE_MS = 1_200;
    /** Asked for a time between two messages, release 4 answers the nearer, release 5 the later. */
    private static final long NEAR_THE_END_MS = 200;

    private Lookups() {
    }

    static void byKeyAndId(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        DefaultMQProducer producer = run.producer();
        SendResult last = null;
        for (int i = 0; i < 30; i++) {
            last = producer.send(
                Run.message(run.topic, "tag", "own-" + i + " third-" + i % 3, "body-" + i));
        }
        String uniqueId = last.getMsgId();
        run.await("last message indexed", 15,
            () -> query(run, "own-29").getMessageList().size() == 1);
        for (int i = 0; i < 30; i++) {
            List<MessageExt> found = query(run, "own-" + i).getMessageList();
            run.equal("bodies of own-" + i, List.of("body-" + i), run.bodies(found));
        }
        for (int third = 0; third < 3; third++) {
            Set<String> expected = new TreeSet<>();
            for (int i = third; i < 30; i += 3) {
                expected.add("body-" + i);
            }
            List<MessageExt> found = query(run, "third-" + third).getMessageList();
            run.equal("shared key", expected, new TreeSet<>(run.bodies(found)));
        }
        List<MessageExt> two = run.admin().queryMessage(
            run.topic, "third-0", 2, 0, Long.MAX_VALUE).getMessageList();
        run.equal("at most two asked for", 2, two.size());

        MessageExt byOffsetId = run.admin().viewMessage(run.topic, last.getOffsetMsgId());
        run.equal("body by offset id", "body-29", Run.text(byOffsetId));
        MessageExt byUniqueId = run.admin().viewMessage(run.topic, uniqueId);
        run.equal("body by unique id", "body-29", Run.text(byUniqueId));
        run.equal("one message, one place",
            byOffsetId.getCommitLogOffset(), byUniqueId.getCommitLogOffset());
        run.fact("unique_id", uniqueId);
        run.fact("offset_id", last.getOffsetMsgId());
    }

    private static QueryResult query(Run run, String key) throws Exception {
        return run.admin().queryMessage(run.topic, key, MAX_FOUND, 0, Long.MAX_VALUE);
    }

    static void offsetsByTime(Run run) throws Exception {
        run.createTopic(run.topic, 1);
        MessageQueue queue = run.queues(run.topic).get(0);
        run.equal("min offset of an empty queue", 0L, run.reader().minOffset(queue));
        run.equal("max offset of an empty queue", 0L, run.reader().maxOffset(queue));
        Consumes.sendToAllQueues(run, "early", 10);
        Thread.sleep(PAUSE_MS);
        Consumes.sendToAllQueues(run, "late", 10);
        run.await("messages dispatched", 10, () -> run.reader().maxOffset(queue) == 20);
        run.equal("min offset", 0L, run.reader().minOffset(queue));

        List<MessageExt> stored = run.stored(queue);
        long first = stored.get(0).getStoreTimestamp();
        long lateBegins = stored.get(10).getStoreTimestamp();
        run.check(lateBegins - stored.get(9).getStoreTimestamp() >= PAUSE_MS - 100, "the pause");
        run.equal("earliest store time", first, run.reader().earliestMsgStoreTime(queue));
        run.equal("search before all", 0L, run.reader().searchOffset(queue, first - 60_000));
        long inThePause = lateBegins - NEAR_THE_END_MS;
        run.equal("search in the pause", 10L, run.reader().searchOffset(queue, inThePause));
        long beyond = run.reader().searchOffset(queue, System.currentTimeMillis() + 60_000);
        run.fact("search_beyond_all", beyond);
        long exact = run.reader().searchOffset(queue, lateBegins);
        run.equal("time at the found offset",
            lateBegins, stored.get((int) exact).getStoreTimestamp());
    }

    /** A group that has read everything is sent back to the pause and sees the late half again. */
    static void resetByTime(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        List<String> early = Consumes.sendToAllQueues(run, "early", 10);
        Thread.sleep(PAUSE_MS);
        long pause = System.currentTimeMillis() - NEAR_THE_END_MS;
        List<String> late = Consumes.sendToAllQueues(run, "late", 10);
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "*");
        consumer.start();
        run.await("everything seen once", Run.PUSH_SECONDS, () -> seen.bodies().size() == 20);
        run.await("offsets committed", 20, () -> Seen.committed(run, consumer) == 20);

        Map<MessageQueue, Long> reset =
            run.admin().resetOffsetByTimestamp(run.topic, run.group, pause, true);
        run.equal("queues reset", 2, reset.size());
        reset.forEach((queue, offset) -> run.equal("offset of " + queue, 5L, offset));
        run.await("the late half seen again", Run.PUSH_SECONDS,
            () -> late.stream().allMatch(body -> seen.times(body) == 2));
        run.await("offsets committed again", 20, () -> Seen.committed(run, consumer) == 20);
        for (String body : early) {
            run.equal("times " + body + " was seen", 1, seen.times(body));
        }
        run.fact("seen", seen.count());
    }
}
