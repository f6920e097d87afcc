package interop;

import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Transactions: committed and rolled back at once, or left open, asked about, and ended then. The
 * first answer to each question is that nobody knows yet.
 */
final class Transactions {
    private static final int COUNT = 8;

    private Transactions() {
    }

    static void play(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        Map<String, Integer> asked = new ConcurrentHashMap<>();
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "*");
        consumer.start();
        TransactionMQProducer producer = run.transactionProducer(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object fate) {
                return (LocalTransactionState) fate;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String body = Run.text(message);
                if (!message.getTopic().equals(run.topic) || asked.merge(body, 1, Integer::sum) < 2) {
                    return LocalTransactionState.UNKNOW;
                }
                return body.startsWith("open-commit")
                    ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
            }
        });
        Map<String, LocalTransactionState> fates = Map.of(
            "commit", LocalTransactionState.COMMIT_MESSAGE,
            "rollback", LocalTransactionState.ROLLBACK_MESSAGE,
            "open-commit", LocalTransactionState.UNKNOW,
            "open-rollback", LocalTransactionState.UNKNOW);
        Set<String> visible = new TreeSet<>();
        Set<String> open = new TreeSet<>();
        for (int i = 0; i < COUNT; i++) {
            for (Map.Entry<String, LocalTransactionState> fate : fates.entrySet()) {
                String body = fate.getKey() + "-" + i;
                TransactionSendResult result = producer.sendMessageInTransaction(
                    Run.message(run.topic, "t", "key-" + body, body), fate.getValue());
                run.equal("fate of " + body, fate.getValue(), result.getLocalTransactionState());
                if (fate.getKey().endsWith("commit")) {
                    visible.add(body);
                }
                if (fate.getKey().startsWith("open")) {
                    open.add(body);
                }
            }
        }
        run.await("the producer was asked twice", Run.PUSH_SECONDS, () ->
            open.stream().allMatch(body -> asked.getOrDefault(body, 0) >= 2));
        run.await("all commits pushed", Run.PUSH_SECONDS, () -> seen.bodies().containsAll(visible));
        Thread.sleep(4_000);
        run.equal("what is visible", visible, seen.bodies());
        run.equal("each once", visible.size(), seen.count());
        run.fact("asked", asked.values().stream().mapToInt(Integer::intValue).sum());
    }
}
