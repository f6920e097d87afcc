package interop;

import java.util.ArrayList;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * One server's turn with a store directory: verify all that earlier owners left, append more,
 * commit offsets, verify again.
 *
 * <p>Message number n of a topic with q queues goes to queue n % q and must get queue offset n / q,
 * and its body, tag and keys follow from n. So whoever opens the store later knows what every
 * offset must hold, and a gap, a repeat or a lost message shows at once.
 * {@code --expect N} messages per topic are there before, {@code --append N} are added.
 */
final class Interchange {
    private static final String[] SUFFIXES = {"_four", "_three", "_batched"};
    private static final int[] QUEUES = {4, 3, 1};
    private static final int BATCH = 10;
    private static final int KEY_SAMPLE = 41;
    private static final String[] TAGS = {"red", "green", null};

    private Interchange() {
    }

    static void play(Run run) throws Exception {
        int expected = run.number("expect", 0);
        int total = expected + run.number("append", 0);
        DefaultMQPullConsumer consumer = run.pullConsumer(run.group);
        for (int t = 0; t < SUFFIXES.length; t++) {
            String topic = run.topic + SUFFIXES[t];
            if (expected == 0) {
                run.createTopic(topic, QUEUES[t]);
            } else {
                verify(run, consumer, topic, QUEUES[t], expected);
                run.equal("committed offsets of " + topic,
                    offsetsToCommit(run.queues(topic), expected), committed(run, consumer, topic));
            }
        }
        Map<String, Map<String, Long>> committed = new LinkedHashMap<>();
        for (int t = 0; t < SUFFIXES.length; t++) {
            String topic = run.topic + SUFFIXES[t];
            append(run, topic, QUEUES[t], expected, total);
            verify(run, consumer, topic, QUEUES[t], total);
            committed.put(topic, commit(run, consumer, topic, total));
        }
        run.fact("total", total);
        run.fact("committed", committed);
    }

    private static void append(Run run, String topic, int queues, int from, int to)
        throws Exception {
        DefaultMQProducer producer = run.producer();
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        List<MessageQueue> targets = run.queues(topic);
        run.equal("queues of " + topic, queues, targets.size());
        if (queues > 1) {
            for (int n = from; n < to; n++) {
                long offset = producer.send(numbered(topic, n), targets.get(n % queues))
                    .getQueueOffset();
                run.equal("queue offset of message " + n, (long) (n / queues), offset);
            }
            return;
        }
        for (int n = from; n < to; n += BATCH) {
            List<Message> batch = new ArrayList<>();
            for (int i = n; i < Math.min(n + BATCH, to); i++) {
                batch.add(numbered(topic, i));
            }
            long offset = producer.send(batch, targets.get(0)).getQueueOffset();
            run.equal("queue offset of batch at " + n, (long) n, offset);
        }
    }

    private static Message numbered(String topic, int n) {
        Message message = Run.message(topic, TAGS[n % 3], own(n) + " " + shared(n), body(topic, n));
        message.setFlag(n);
        message.putUserProperty("number", String.valueOf(n));
        return message;
    }

    private static String own(int n) {
        return "own-" + n;
    }

    private static String shared(int n) {
        return "ten-" + n / 10;
    }

    private static String body(String topic, int n) {
        return topic + "|" + n + "|" + "x".repeat(100 + n * 37 % 1500);
    }

    private static void verify(
        Run run, DefaultMQPullConsumer consumer, String topic, int queues, int total)
        throws Exception {
        run.equal("queues on the route of " + topic, queues, run.queuesOnRoute(topic));
        run.await("all of " + topic + " in the queues", 20, () -> run.total(topic) == total);
        Set<Long> places = new HashSet<>();
        for (MessageQueue queue : run.queues(topic)) {
            List<MessageExt> stored = run.stored(queue);
            long previous = -1;
            for (MessageExt message : stored) {
                int n = (int) message.getQueueOffset() * queues + queue.getQueueId();
                String where = topic + " message " + n + ": ";
                run.equal(where + "body", body(topic, n), Run.text(message));
                run.equal(where + "tag", TAGS[n % 3], message.getTags());
                run.equal(where + "keys", own(n) + " " + shared(n), message.getKeys());
                run.equal(where + "flag", n, message.getFlag());
                run.equal(where + "property", String.valueOf(n), message.getUserProperty("number"));
                run.check(message.getCommitLogOffset() > previous, where + "commit log order");
                previous = message.getCommitLogOffset();
                places.add(previous);
            }
            verifyTagFilter(run, consumer, queue, queues, stored.size());
            verifyTime(run, queue, stored);
        }
        run.equal("different messages of " + topic, total, places.size());
        run.await("last message of " + topic + " indexed", 15, () -> numbers(run, topic,
            own(total - 1)).equals(Set.of(total - 1)));
        for (int n = 0; n < total; n += KEY_SAMPLE) {
            verifyLookup(run, topic, n, total);
        }
    }

    private static void verifyTagFilter(
        Run run, DefaultMQPullConsumer consumer, MessageQueue queue, int queues, int count)
        throws Exception {
        int found = 0;
        long next = 0;
        while (next < count) {
            PullResult pulled = consumer.pull(queue, "red", next, 32);
            for (MessageExt message : pulled.getMsgFoundList() == null
                ? List.<MessageExt>of() : pulled.getMsgFoundList()) {
                run.equal("filtered tag", "red", message.getTags());
                found++;
            }
            run.check(pulled.getNextBeginOffset() > next, "a filtered pull must move on");
            next = pulled.getNextBeginOffset();
        }
        int expected = 0;
        for (int i = 0; i < count; i++) {
            expected += (i * queues + queue.getQueueId()) % 3 == 0 ? 1 : 0;
        }
        run.equal("red messages in " + queue, expected, found);
    }

    private static void verifyTime(Run run, MessageQueue queue, List<MessageExt> stored)
        throws Exception {
        run.equal("earliest store time of " + queue,
            stored.get(0).getStoreTimestamp(), run.reader().earliestMsgStoreTime(queue));
        if (run.option("search-by-time").equals("exact")) {
            long middle = stored.get(stored.size() / 2).getStoreTimestamp();
            long found = run.reader().searchOffset(queue, middle);
            run.equal("store time found in " + queue,
                middle, stored.get((int) found).getStoreTimestamp());
        }
    }

    private static void verifyLookup(Run run, String topic, int n, int total) throws Exception {
        run.equal("found by own key", Set.of(n), numbers(run, topic, own(n)));
        Set<Integer> ten = new HashSet<>();
        for (int i = n / 10 * 10; i < Math.min(n / 10 * 10 + 10, total); i++) {
            ten.add(i);
        }
        run.equal("found by shared key", ten, numbers(run, topic, shared(n)));
        MessageExt found = query(run, topic, own(n)).get(0);
        MessageExt byUniqueId = run.admin().viewMessage(topic, Run.uniqueId(found));
        run.equal("found by unique id", body(topic, n), Run.text(byUniqueId));
    }

    private static Set<Integer> numbers(Run run, String topic, String key) throws Exception {
        Set<Integer> numbers = new HashSet<>();
        for (MessageExt message : query(run, topic, key)) {
            numbers.add(message.getFlag());
        }
        return numbers;
    }

    private static List<MessageExt> query(Run run, String topic, String key) throws Exception {
        return run.admin().queryMessage(topic, key, 32, 0, Long.MAX_VALUE).getMessageList();
    }

    private static Map<String, Long> commit(
        Run run, DefaultMQPullConsumer consumer, String topic, int total) throws Exception {
        List<MessageQueue> queues = run.queues(topic);
        Map<String, Long> offsets = offsetsToCommit(queues, total);
        // Said again until it shows: the client forgets offsets of queues it was just assigned.
        run.await("offsets of " + topic + " committed", 10, () -> {
            for (MessageQueue queue : queues) {
                consumer.updateConsumeOffset(
                    queue, offsets.get(String.valueOf(queue.getQueueId())));
            }
            consumer.getDefaultMQPullConsumerImpl().getOffsetStore().persistAll(Set.copyOf(queues));
            return committed(run, consumer, topic).equals(offsets);
        });
        return offsets;
    }

    /** What the broker holds for the group: queue number to offset. */
    private static Map<String, Long> committed(
        Run run, DefaultMQPullConsumer consumer, String topic) throws Exception {
        Map<String, Long> offsets = new TreeMap<>();
        for (MessageQueue queue : run.queues(topic)) {
            offsets.put(String.valueOf(queue.getQueueId()),
                consumer.fetchConsumeOffset(queue, true));
        }
        return offsets;
    }

    private static Map<String, Long> offsetsToCommit(List<MessageQueue> queues, int total) {
        Map<String, Long> offsets = new TreeMap<>();
        for (MessageQueue queue : queues) {
            offsets.put(String.valueOf(queue.getQueueId()),
                total / queues.size() * 2L / 3 + queue.getQueueId());
        }
        return offsets;
    }
}
