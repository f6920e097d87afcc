import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Timed messages as only the 5.x client knows them; prints `name=value` lines for the test. */
public class Timed {
    static final long WATCHED_MS = 12_000;

    public static void main(String[] words) throws Exception {
        String topic = "JavaTimed";
        DefaultMQProducer producer = new DefaultMQProducer("timed");
        producer.setNamesrvAddr(words[0]);
        producer.setSendMsgTimeout(20_000);
        producer.start();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("timed-consumer");
        consumer.setNamesrvAddr(words[0]);
        consumer.subscribe(topic, "timed");
        List<String> late = new CopyOnWriteArrayList<>();
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                long due = Long.parseLong(message.getUserProperty("due"));
                late.add(new String(message.getBody()) + ":" + (System.currentTimeMillis() - due));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        producer.send(new Message(topic, "made", "the topic".getBytes()));
        consumer.start();

        long now = System.currentTimeMillis();
        Message seconds = message(topic, "seconds", now + 3000);
        seconds.setDelayTimeSec(3);
        Message millis = message(topic, "millis", now + 4500);
        millis.setDelayTimeMs(4500);
        Message at = message(topic, "at", now + 6000);
        at.setDeliverTimeMs(now + 6000);
        Message gone = message(topic, "gone", now + 7000);
        gone.setDeliverTimeMs(now + 7000);
        producer.send(seconds);
        producer.send(millis);
        producer.send(at);
        SendResult result = producer.send(gone);
        String recalled = producer.recallMessage(topic, result.getRecallHandle());
        System.out.println("recalled=" + recalled.equals(result.getMsgId()));
        Message far = message(topic, "far", 0);
        far.setDelayTimeSec(30L * 86_400);
        try {
            producer.send(far);
            System.out.println("far=taken");
        } catch (Exception error) {
            System.out.println("far=" + error.getMessage().replaceAll("(?s)CODE: (\\d+).*", "$1"));
        }
        Thread.sleep(WATCHED_MS);
        System.out.println("late=" + String.join(",", late));
        consumer.shutdown();
        producer.shutdown();
        System.exit(0);
    }

    static Message message(String topic, String body, long due) {
        Message message = new Message(topic, "timed", body.getBytes());
        message.putUserProperty("due", String.valueOf(due));
        return message;
    }
}
