package interop;

import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;

/** One message that is sent and consumed with tracing on; mqadmin reads its story afterwards. */
final class Traces {
    private Traces() {
    }

    static void play(Run run) throws Exception {
        run.createTopic(run.topic, 1);
        Seen seen = new Seen();
        DefaultMQPushConsumer consumer = run.tracedConsumer();
        seen.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "*");
        consumer.start();
        DefaultMQProducer producer = run.tracedProducer();
        SendResult sent = producer.send(Run.message(run.topic, "traced", "order-77", "followed"));
        run.await("consumed", Run.PUSH_SECONDS, () -> seen.count() == 1);
        run.fact("id", sent.getMsgId());
        // Traces leave in batches of their own thread, within seconds.
        run.await("two traces stored", 40, () -> run.total("RMQ_SYS_TRACE_TOPIC") >= 2);
        Thread.sleep(6_000);
    }
}
