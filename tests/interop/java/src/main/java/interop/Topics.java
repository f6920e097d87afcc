package interop;

import java.util.Map;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;

/** How topics come to be: by sending to an unknown one, by createTopic, by an admin's update. */
final class Topics {
    private static final int TOPIC_NOT_EXIST = 17;
    private static final String TEMPLATE = "TBW102";

    private Topics() {
    }

    static void play(Run run) throws Exception {
        String auto = run.topic + "_auto";
        try {
            run.queuesOnRoute(auto);
            run.check(false, "a topic nobody made has a route");
        } catch (MQClientException missing) {
            run.equal("code for a missing topic", TOPIC_NOT_EXIST, missing.getResponseCode());
        }
        DefaultMQProducer producer = run.producer();
        SendResult result = producer.send(Run.message(auto, "tag", "", "first"));
        run.equal("status", SendStatus.SEND_OK, result.getSendStatus());
        run.await("route of the topic made by sending", 15, () -> run.queuesOnRoute(auto) == 4);
        run.equal("stored", 1L, run.total(auto));

        String created = run.topic + "_created";
        createTopic(producer, created, 6);
        run.await("route of the created topic", 15, () -> run.queuesOnRoute(created) == 6);
        run.createTopic(created, 7);
        run.equal("queues after the update", 7, run.queues(created).size());
        run.check(run.admin().fetchAllTopicList().getTopicList().contains(created), "topic list");
    }

    /** The client's own createTopic; release 5 gave it one more argument, the attributes. */
    private static void createTopic(DefaultMQProducer producer, String name, int queues)
        throws Exception {
        Class<?> type = producer.getClass();
        try {
            type.getMethod("createTopic", String.class, String.class, int.class)
                .invoke(producer, TEMPLATE, name, queues);
        } catch (NoSuchMethodException release5) {
            type.getMethod("createTopic", String.class, String.class, int.class, Map.class)
                .invoke(producer, TEMPLATE, name, queues, Map.of());
        }
    }
}
