package interop;

import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Bodies at the size limit, beyond it, and compressed by the client. */
final class Bodies {
    private static final int LIMIT = 4 * 1024 * 1024;
    private static final int MESSAGE_ILLEGAL = 13;

    private Bodies() {
    }

    static void big(Run run) throws Exception {
        run.createTopic(run.topic, 1);
        MessageQueue queue = run.queues(run.topic).get(0);
        DefaultMQProducer producer = run.producer();
        producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        byte[] justBelow = noise(LIMIT - 1024);
        producer.send(new Message(run.topic, "big", justBelow), queue);
        producer.send(new Message(run.topic, "big", justBelow), queue);
        run.await("big messages dispatched", 15, () -> run.reader().maxOffset(queue) == 2);
        for (MessageExt message : run.stored(queue)) {
            run.check(Arrays.equals(justBelow, message.getBody()), "big body came back changed");
        }

        producer.setMaxMessageSize(2 * LIMIT);
        try {
            producer.send(new Message(run.topic, "huge", noise(LIMIT + LIMIT / 4)), queue);
            run.check(false, "the broker took a body above its limit");
        } catch (MQBrokerException refused) {
            run.equal("code for a body above the limit",
                MESSAGE_ILLEGAL, refused.getResponseCode());
        }
        run.equal("nothing of it stored", 2L, run.reader().maxOffset(queue));
        producer.send(new Message(run.topic, "small", new byte[] {1}), queue);
        run.await("the queue goes on", 10, () -> run.reader().maxOffset(queue) == 3);
    }

    static void compressed(Run run) throws Exception {
        run.createTopic(run.topic, 1);
        MessageQueue queue = run.queues(run.topic).get(0);
        byte[] body = new byte[300_000];
        Arrays.fill(body, (byte) 'c');
        run.producer().send(new Message(run.topic, "compressed", body), queue);
        run.await("message dispatched", 10, () -> run.reader().maxOffset(queue) == 1);
        List<MessageExt> stored = run.stored(queue);
        MessageExt message = stored.get(0);
        run.check(Arrays.equals(body, message.getBody()), "compressed body came back changed");
        int size = message.getStoreSize();
        run.check(size < body.length / 10, "stored size " + size);
        run.fact("sys_flag", message.getSysFlag());
    }

    private static byte[] noise(int length) {
        byte[] bytes = new byte[length];
        new Random(length).nextBytes(bytes);
        return bytes;
    }
}
