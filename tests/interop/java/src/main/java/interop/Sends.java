package interop;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Every way to send; each is judged by what a pull finds in the queues afterwards. */
final class Sends {
    private static final int QUEUES = 4;
    private static final int COUNT = 40;

    private Sends() {
    }

    static void syncAsyncOneway(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        DefaultMQProducer producer = run.producer();
        sendSync(run, producer);
        sendAsync(run, producer);
        for (int i = 0; i < COUNT; i++) {
            producer.sendOneway(Run.message(run.topic, "oneway", "", "oneway-" + i));
        }
        run.await("all oneway messages stored", 15, () -> run.total(run.topic) == 3 * COUNT);

        Set<String> found = new TreeSet<>();
        for (MessageQueue queue : run.queues(run.topic)) {
            for (MessageExt message : run.stored(queue)) {
                String body = Run.text(message);
                run.check(found.add(body), "stored twice: " + body);
                run.equal("tag of " + body, body.split("-")[0], message.getTags());
            }
        }
        run.equal("stored messages", 3 * COUNT, found.size());
        run.fact("stored", found.size());
    }

    private static void sendSync(Run run, DefaultMQProducer producer) throws Exception {
        for (int i = 0; i < COUNT; i++) {
            Message message = Run.message(run.topic, "sync", "key-" + i, "sync-" + i);
            message.setFlag(i);
            message.putUserProperty("colour", "blue-" + i);
            SendResult result = producer.send(message);
            run.equal("sync status", SendStatus.SEND_OK, result.getSendStatus());
            run.equal("topic in result", run.topic, result.getMessageQueue().getTopic());

            MessageExt stored = run.admin().viewMessage(run.topic, result.getOffsetMsgId());
            run.equal("queue", result.getMessageQueue().getQueueId(), stored.getQueueId());
            run.equal("queue offset", result.getQueueOffset(), stored.getQueueOffset());
            run.equal("flag", i, stored.getFlag());
            run.equal("keys", "key-" + i, stored.getKeys());
            run.equal("user property", "blue-" + i, stored.getUserProperty("colour"));
            run.equal("reconsume times", 0, stored.getReconsumeTimes());
            run.check(stored.getBornTimestamp() > 0, "born timestamp");
            run.check(stored.getStoreTimestamp() > 0, "store timestamp");
        }
    }

    private static void sendAsync(Run run, DefaultMQProducer producer) throws Exception {
        CountDownLatch answers = new CountDownLatch(COUNT);
        List<Throwable> failures = Collections.synchronizedList(new ArrayList<>());
        for (int i = 0; i < COUNT; i++) {
            producer.send(Run.message(run.topic, "async", "", "async-" + i), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    answers.countDown();
                }

                @Override
                public void onException(Throwable failure) {
                    failures.add(failure);
                    answers.countDown();
                }
            });
        }
        run.check(answers.await(20, TimeUnit.SECONDS), "not every async send was answered");
        run.equal("async failures", Collections.emptyList(), failures);
    }

    static void batch(Run run) throws Exception {
        run.createTopic(run.topic, 1);
        MessageQueue queue = run.queues(run.topic).get(0);
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < COUNT; i++) {
            batch.add(Run.message(run.topic, "batch", "key-" + i, "batch-" + i));
        }
        DefaultMQProducer producer = run.producer();
        producer.send(Run.message(run.topic, "single", "", "before"), queue);
        SendResult result = producer.send(batch, queue);
        run.equal("first queue offset of the batch", 1L, result.getQueueOffset());
        String[] uniqueIds = result.getMsgId().split(",");
        run.equal("unique ids", COUNT, uniqueIds.length);
        String[] offsetIds = result.getOffsetMsgId().split(",");
        run.equal("offset ids", COUNT, offsetIds.length);

        run.await("batch dispatched", 10, () -> run.total(run.topic) == COUNT + 1);
        List<MessageExt> stored = run.stored(queue);
        for (int i = 0; i < COUNT; i++) {
            MessageExt message = stored.get(i + 1);
            run.equal("body", "batch-" + i, Run.text(message));
            run.equal("keys", "key-" + i, message.getKeys());
            run.equal("tags", "batch", message.getTags());
            run.equal("unique id", uniqueIds[i], Run.uniqueId(message));
            MessageExt byId = run.admin().viewMessage(run.topic, offsetIds[i]);
            run.equal("body by offset id", "batch-" + i, Run.text(byId));
        }
        run.fact("stored", stored.size());
    }

    static void bySelector(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        DefaultMQProducer producer = run.producer();
        for (int step = 0; step < 10; step++) {
            for (int order = 0; order < 6; order++) {
                Message message = Run.message(run.topic, "", "", order + ":" + step);
                SendResult result = producer.send(message,
                    (queues, sending, id) -> queues.get((Integer) id % queues.size()), order);
                run.equal("selected queue", order % QUEUES, result.getMessageQueue().getQueueId());
            }
        }
        for (MessageQueue queue : run.queues(run.topic)) {
            int[] nextStep = new int[6];
            for (MessageExt message : run.stored(queue)) {
                String[] parts = Run.text(message).split(":");
                int order = Integer.parseInt(parts[0]);
                run.equal("queue of order " + order, order % QUEUES, message.getQueueId());
                run.equal("step of order " + order, nextStep[order]++, Integer.parseInt(parts[1]));
            }
        }
        run.fact("stored", run.total(run.topic));
    }
}
