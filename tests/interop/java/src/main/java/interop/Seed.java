package interop;

import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;

/** Data for mqadmin to look at: a topic with ten messages and a group that has read them. */
final class Seed {
    static final int COUNT = 10;

    private Seed() {
    }

    static void play(Run run) throws Exception {
        run.createTopic(run.topic, 4);
        DefaultMQProducer producer = run.producer();
        SendResult last = null;
        for (int i = 0; i < COUNT; i++) {
            last = producer.send(Run.message(run.topic, "tag-" + i, "key-" + i, "body-" + i));
        }
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "*");
        consumer.start();
        run.await("everything seen", Run.PUSH_SECONDS, () -> seen.bodies().size() == COUNT);
        run.await("offsets committed", 20, () -> Seen.committed(run, consumer) == COUNT);
        String key = "key-" + (COUNT - 1);
        run.await("last message indexed", 15, () -> run.admin().queryMessage(
            run.topic, key, 1, 0, Long.MAX_VALUE).getMessageList().size() == 1);
        run.fact("topic", run.topic);
        run.fact("group", run.group);
        run.fact("key", key);
        run.fact("body", "body-" + (COUNT - 1));
        run.fact("tag", "tag-" + (COUNT - 1));
        run.fact("unique_id", last.getMsgId());
        run.fact("offset_id", last.getOffsetMsgId());
        run.fact("queue", last.getMessageQueue().getQueueId());
    }
}
