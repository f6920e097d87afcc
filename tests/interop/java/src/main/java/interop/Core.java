package interop;

import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * The short way through everything a client needs: topic, send, push, committed offset, look-up.
 * Played again with other JVM settings (binary headers, the old send code) to cover those.
 */
final class Core {
    private static final int COUNT = 20;

    private Core() {
    }

    static void play(Run run) throws Exception {
        run.createTopic(run.topic, 4);
        DefaultMQProducer producer = run.producer();
        Set<String> sent = new TreeSet<>();
        SendResult last = null;
        for (int i = 0; i < COUNT; i++) {
            String body = "grüße-" + i;
            last = producer.send(Run.message(run.topic, "tag", "key-" + i, body));
            run.equal("send status", SendStatus.SEND_OK, last.getSendStatus());
            sent.add(body);
        }
        DefaultMQPushConsumer consumer = run.pushConsumer();
        Seen seen = new Seen();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "tag");
        consumer.start();
        run.await("all messages pushed", Run.PUSH_SECONDS, () -> seen.bodies().size() == COUNT);
        run.equal("pushed bodies", sent, seen.bodies());
        run.await("offsets committed", 20, () -> Seen.committed(run, consumer) == COUNT);

        MessageExt byId = run.admin().viewMessage(run.topic, last.getOffsetMsgId());
        run.equal("body by offset id", "grüße-" + (COUNT - 1), Run.text(byId));
        run.equal("unique id", last.getMsgId(), Run.uniqueId(byId));
        run.fact("messages", seen.count());
    }
}
