package interop;

import java.nio.charset.StandardCharsets;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.RequestTimeoutException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** Request and reply: two askers get their own answers, waiting or called back, or a time-out. */
final class Requests {
    private static final int COUNT = 10;
    private static final long TTL_MS = 30_000;

    private Requests() {
    }

    static void play(Run run) throws Exception {
        run.createTopic(run.topic, 2);
        DefaultMQProducer answering = run.producer();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        consumer.registerMessageListener((MessageListenerConcurrently) (batch, context) -> {
            for (MessageExt request : batch) {
                String body = Run.text(request);
                if (body.equals("silence")) {
                    continue;
                }
                try {
                    byte[] answer = ("re: " + body).getBytes(StandardCharsets.UTF_8);
                    answering.send(MessageUtil.createReplyMessage(request, answer));
                } catch (Exception failure) {
                    run.fact("reply_failed", failure.toString());
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.subscribe(run.topic, "*");
        consumer.start();
        DefaultMQProducer[] askers = {run.producer(), run.producer()};
        for (int i = 0; i < COUNT; i++) {
            String body = "wait-" + i;
            Message answer = askers[i % 2].request(Run.message(run.topic, "r", "", body), TTL_MS);
            run.equal("the answer", "re: " + body, Run.text(answer));
        }
        Set<String> answers = new ConcurrentSkipListSet<>();
        Set<String> wanted = new TreeSet<>();
        for (int i = 0; i < COUNT; i++) {
            String body = "call-" + i;
            wanted.add(body + " re: " + body);
            askers[i % 2].request(Run.message(run.topic, "r", "", body), new RequestCallback() {
                @Override
                public void onSuccess(Message message) {
                    answers.add(body + " " + Run.text(message));
                }

                @Override
                public void onException(Throwable failure) {
                    answers.add(body + " " + failure);
                }
            }, TTL_MS);
        }
        run.await("all called back", 40, () -> answers.equals(wanted));
        try {
            askers[0].request(Run.message(run.topic, "r", "", "silence"), 2_000);
            throw new IllegalStateException("silence was answered");
        } catch (RequestTimeoutException expected) {
            run.fact("silence", expected.getClass().getSimpleName());
        }
        run.check(!run.facts().containsKey("reply_failed"), "" + run.facts().get("reply_failed"));
    }
}
