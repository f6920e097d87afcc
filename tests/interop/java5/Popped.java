import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Two push consumers of a group that the broker lets pop; prints `name=value` lines for the test.
 * Every tenth message fails the first time: it is hidden for another while and comes again.
 */
public class Popped {
    static final int COUNT = 200;

    public static void main(String[] words) throws Exception {
        String topic = words[1];
        String group = words[2];
        Map<String, List<Integer>> tries = new ConcurrentHashMap<>();
        Map<String, Boolean> clients = new ConcurrentHashMap<>();
        List<String> problems = new CopyOnWriteArrayList<>();
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (int at = 0; at < 2; at++) {
            DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
            String name = "client-" + at;
            consumer.setNamesrvAddr(words[0]);
            consumer.setInstanceName(name);
            consumer.setClientRebalance(false);
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            consumer.setPopInvisibleTime(20_000);
            consumer.subscribe(topic, "wanted");
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                for (MessageExt message : messages) {
                    String body = new String(message.getBody());
                    if (!topic.equals(message.getTopic()) || message.getProperty("POP_CK") == null) {
                        problems.add(message.toString());
                    }
                    clients.put(name, true);
                    List<Integer> mine =
                        tries.computeIfAbsent(body, key -> new CopyOnWriteArrayList<>());
                    mine.add(message.getReconsumeTimes());
                    if (Integer.parseInt(body) % 10 == 0 && mine.size() == 1) {
                        return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                    }
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            consumers.add(consumer);
        }
        DefaultMQProducer producer = new DefaultMQProducer("popped");
        producer.setNamesrvAddr(words[0]);
        producer.setSendMsgTimeout(20_000);
        producer.start();
        Thread.sleep(3_000); // both ask for messages by then
        for (int number = 0; number < COUNT; number++) {
            Thread.sleep(5);
            producer.send(new Message(topic, "wanted", ("" + number).getBytes()));
            producer.send(new Message(topic, "other", "-1".getBytes()));
        }
        long end = System.currentTimeMillis() + 70_000;
        while (System.currentTimeMillis() < end && handled(tries) < COUNT) {
            Thread.sleep(200);
        }
        Thread.sleep(5_000);
        int once = 0;
        int twice = 0;
        for (Map.Entry<String, List<Integer>> entry : tries.entrySet()) {
            if (Integer.parseInt(entry.getKey()) % 10 != 0 && entry.getValue().equals(List.of(0))) {
                once++;
            } else if (entry.getValue().equals(List.of(0, 1))) {
                twice++;
            } else {
                problems.add(entry.toString());
            }
        }
        System.out.println("seen=" + tries.size());
        System.out.println("once=" + once);
        System.out.println("twice=" + twice);
        System.out.println("clients=" + clients.size());
        System.out.println("problems=" + problems.size());
        for (String problem : problems.subList(0, Math.min(3, problems.size()))) {
            System.out.println(problem);
        }
        for (DefaultMQPushConsumer consumer : consumers) {
            consumer.shutdown();
        }
        producer.shutdown();
        System.exit(0);
    }

    static int handled(Map<String, List<Integer>> tries) {
        int found = 0;
        for (Map.Entry<String, List<Integer>> entry : tries.entrySet()) {
            boolean isTwice = Integer.parseInt(entry.getKey()) % 10 == 0;
            found += entry.getValue().size() >= (isTwice ? 2 : 1) ? 1 : 0;
        }
        return found;
    }
}
