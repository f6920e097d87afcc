package interop;

import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.common.message.MessageExt;

/** What a push consumer was given, in arrival order; safe to ask while messages still come in. */
final class Seen {
    private final List<MessageExt> messages = new ArrayList<>();

    void listenConcurrently(DefaultMQPushConsumer consumer) {
        consumer.registerMessageListener((MessageListenerConcurrently) (batch, context) -> {
            add(batch);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
    }

    void listenOrderly(DefaultMQPushConsumer consumer) {
        consumer.registerMessageListener((MessageListenerOrderly) (batch, context) -> {
            add(batch);
            return ConsumeOrderlyStatus.SUCCESS;
        });
    }

    synchronized void add(List<MessageExt> batch) {
        messages.addAll(batch);
    }

    synchronized int count() {
        return messages.size();
    }

    synchronized Set<String> bodies() {
        Set<String> bodies = new TreeSet<>();
        for (MessageExt message : messages) {
            bodies.add(Run.text(message));
        }
        return bodies;
    }

    synchronized int times(String body) {
        int times = 0;
        for (MessageExt message : messages) {
            times += Run.text(message).equals(body) ? 1 : 0;
        }
        return times;
    }

    synchronized Map<Integer, List<Long>> offsetsByQueue() {
        Map<Integer, List<Long>> offsets = new HashMap<>();
        for (MessageExt message : messages) {
            offsets.computeIfAbsent(message.getQueueId(), id -> new ArrayList<>())
                .add(message.getQueueOffset());
        }
        return offsets;
    }

    /** The sum of the group's offsets at the broker, right after the consumer reported its own. */
    static long committed(Run run, DefaultMQPushConsumer consumer) throws Exception {
        consumer.getDefaultMQPushConsumerImpl().persistConsumerOffset();
        return run.admin().examineConsumeStats(run.group, run.topic).getOffsetTable().values()
            .stream().mapToLong(offset -> offset.getConsumerOffset()).sum();
    }
}
