package interop;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Callable;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * One run of a scenario: its options, the facts it reports, the checks it makes, and the clients it
 * opened. Clients never retry and wait long, so that a slow machine makes no duplicates.
 */
final class Run {
    /**
     * How long a push consumer may take. A rebalance gives its subscription a new version and tells
     * it by a heartbeat; if the periodic heartbeat is under way just then, the client leaves that one
     * out, and the broker refuses its pulls until the next, 30 s later.
     */
    static final int PUSH_SECONDS = 50;

    static final int READ_WRITE = 6;
    private static final int REQUEST_TIMEOUT_MS = 15_000;
    private static final int CLOSE_TIMEOUT_MS = 1_500;

    final String topic;
    final String group;
    private final Map<String, String> options = new HashMap<>();
    private final Map<String, Object> facts = Collections.synchronizedMap(new LinkedHashMap<>());
    private final List<Runnable> closers = new ArrayList<>();
    private volatile String waitingFor = "nothing";
    private int clients;
    private DefaultMQAdminExt admin;
    private DefaultMQPullConsumer reader;

    Run(String[] args) {
        for (int i = 1; i + 1 < args.length; i += 2) {
            options.put(args[i].substring("--".length()), args[i + 1]);
        }
        topic = option("topic");
        group = option("group");
    }

    String option(String name) {
        return Objects.requireNonNull(options.get(name), "missing option --" + name);
    }

    int number(String name, int otherwise) {
        return Integer.parseInt(options.getOrDefault(name, String.valueOf(otherwise)));
    }

    void fact(String name, Object value) {
        facts.put(name, value);
    }

    Map<String, Object> facts() {
        return facts;
    }

    String waitingFor() {
        return waitingFor;
    }

    void check(boolean holds, String what) {
        if (!holds) {
            throw new AssertionError(what);
        }
    }

    void equal(String what, Object expected, Object actual) {
        check(Objects.equals(expected, actual),
            what + ": expected " + expected + ", got " + actual);
    }

    /** Polls until the condition holds; a server that says "no" for now only delays it. */
    void await(String what, int seconds, Callable<Boolean> condition) throws Exception {
        waitingFor = what;
        Exception refusal = null;
        long deadline = System.nanoTime() + seconds * 1_000_000_000L;
        while (System.nanoTime() < deadline) {
            try {
                if (condition.call()) {
                    waitingFor = "nothing";
                    return;
                }
            } catch (MQClientException | MQBrokerException refused) {
                refusal = refused;
            }
            Thread.sleep(30);
        }
        throw new AssertionError("still not after " + seconds + " s: " + what, refusal);
    }

    DefaultMQProducer producer() throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group + "_producer");
        connect(producer);
        producer.setSendMsgTimeout(REQUEST_TIMEOUT_MS);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.start();
        closers.add(producer::shutdown);
        return producer;
    }

    TransactionMQProducer transactionProducer(TransactionListener listener) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group + "_transactions");
        connect(producer);
        producer.setSendMsgTimeout(REQUEST_TIMEOUT_MS);
        producer.setTransactionListener(listener);
        producer.start();
        closers.add(producer::shutdown);
        return producer;
    }

    /** A producer whose sends are written to the trace topic. */
    DefaultMQProducer tracedProducer() throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group + "_traced", true, null);
        connect(producer);
        producer.setSendMsgTimeout(REQUEST_TIMEOUT_MS);
        producer.start();
        closers.add(producer::shutdown);
        return producer;
    }

    DefaultMQPushConsumer tracedConsumer() {
        return ready(new DefaultMQPushConsumer(group, true, null));
    }

    /** A push consumer that reads from the first message on; the caller subscribes, starts it. */
    DefaultMQPushConsumer pushConsumer() {
        return ready(new DefaultMQPushConsumer(group));
    }

    private DefaultMQPushConsumer ready(DefaultMQPushConsumer consumer) {
        connect(consumer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        closers.add(consumer::shutdown);
        return consumer;
    }

    DefaultMQPullConsumer pullConsumer(String consumerGroup) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(consumerGroup);
        connect(consumer);
        consumer.start();
        closers.add(consumer::shutdown);
        return consumer;
    }

    /** A lite consumer that reads from the first message on; the caller starts and closes it. */
    DefaultLitePullConsumer litePullConsumer() {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
        connect(consumer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setAutoCommit(false);
        return consumer;
    }

    DefaultMQAdminExt admin() throws Exception {
        if (admin == null) {
            admin = new DefaultMQAdminExt(REQUEST_TIMEOUT_MS);
            connect(admin);
            admin.start();
            closers.add(admin::shutdown);
        }
        return admin;
    }

    /** The consumer through which scenarios look at what is stored; it has a group of its own. */
    DefaultMQPullConsumer reader() throws Exception {
        if (reader == null) {
            reader = pullConsumer(group + "_reader");
        }
        return reader;
    }

    private void connect(ClientConfig client) {
        clients++;
        client.setNamesrvAddr(option("namesrv"));
        client.setInstanceName("run" + ProcessHandle.current().pid() + "n" + clients);
    }

    void createTopic(String name, int queues) throws Exception {
        admin().createAndUpdateTopicConfig(
            option("broker"), new TopicConfig(name, queues, queues, READ_WRITE));
        await("route of " + name, 15, () -> queuesOnRoute(name) == queues);
    }

    /** How many write queues the name server reports for a topic. */
    int queuesOnRoute(String name) throws Exception {
        return admin().examineTopicRouteInfo(name).getQueueDatas().stream()
            .mapToInt(queue -> queue.getWriteQueueNums()).sum();
    }

    /** The topic's queues as a consumer sees them, by number. */
    List<MessageQueue> queues(String name) throws Exception {
        List<MessageQueue> queues = new ArrayList<>(reader().fetchSubscribeMessageQueues(name));
        Collections.sort(queues);
        return queues;
    }

    long total(String name) throws Exception {
        long sum = 0;
        for (MessageQueue queue : queues(name)) {
            sum += reader().maxOffset(queue);
        }
        return sum;
    }

    /** Everything in a queue from its first offset; checks that queue offsets have no gap. */
    List<MessageExt> stored(MessageQueue queue) throws Exception {
        List<MessageExt> messages = new ArrayList<>();
        long next = reader().minOffset(queue);
        long end = reader().maxOffset(queue);
        while (next < end) {
            PullResult pulled = reader().pull(queue, "*", next, 32, REQUEST_TIMEOUT_MS);
            equal("pull status at " + queue + " offset " + next,
                PullStatus.FOUND, pulled.getPullStatus());
            for (MessageExt message : pulled.getMsgFoundList()) {
                equal("queue offset in " + queue, next, message.getQueueOffset());
                messages.add(message);
                next++;
            }
            equal("next offset of " + queue, next, pulled.getNextBeginOffset());
        }
        return messages;
    }

    List<String> bodies(Collection<MessageExt> messages) {
        List<String> bodies = new ArrayList<>();
        for (MessageExt message : messages) {
            bodies.add(text(message));
        }
        return bodies;
    }

    static Message message(String topic, String tags, String keys, String body) {
        return new Message(topic, tags, keys, body.getBytes(StandardCharsets.UTF_8));
    }

    /** The id the sending client gave the message, whatever the receiving one makes of it. */
    static String uniqueId(MessageExt message) {
        return message.getProperty(MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX);
    }

    static String text(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    /**
     * All at once, and not to the end: the goodbye to the server comes first, and then a 5.x client
     * waits up to 3 s for a thread of its own.
     */
    void close() {
        List<Thread> closing = new ArrayList<>();
        for (Runnable closer : closers) {
            Thread thread = new Thread(closer, "closing");
            thread.setDaemon(true);
            thread.start();
            closing.add(thread);
        }
        long deadline = System.currentTimeMillis() + CLOSE_TIMEOUT_MS;
        try {
            for (Thread thread : closing) {
                thread.join(Math.max(1, deadline - System.currentTimeMillis()));
            }
        } catch (InterruptedException stopped) {
            Thread.currentThread().interrupt();
        }
    }
}
