package interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;

/**
 * A clustering group of two members, the second one in a JVM of its own that is killed without a
 * goodbye: the broker must notice the dead connection and tell the survivor to rebalance.
 */
final class Membership {
    private static final int QUEUES = 8;
    private static final int COUNT = 80;

    private Membership() {
    }

    static void rebalanceWhenAMemberDies(Run run) throws Exception {
        run.createTopic(run.topic, QUEUES);
        Seen mine = new Seen();
        DefaultMQPushConsumer consumer = run.pushConsumer();
        mine.listenConcurrently(consumer);
        consumer.subscribe(run.topic, "*");
        consumer.start();
        run.await("the first member owns all queues", 30, () -> owned(run, consumer) == QUEUES);

        Process second = startSecondMember(run);
        try {
            Set<String> theirs = collectLines(second);
            run.await("the members share the queues", 40, () -> owned(run, consumer) == QUEUES / 2);
            Set<String> shared = new TreeSet<>(Consumes.sendToAllQueues(run, "shared", COUNT));
            run.await("all shared messages seen", Run.PUSH_SECONDS, () -> {
                Set<String> union = new TreeSet<>(theirs);
                union.addAll(mine.bodies());
                return union.equals(shared);
            });
            run.equal("share of the first member", COUNT / 2, mine.count());
            run.equal("share of the second member", COUNT / 2, theirs.size());
        } finally {
            second.destroyForcibly().waitFor();
        }
        long died = System.nanoTime();
        run.await("the survivor owns all queues", 30, () -> owned(run, consumer) == QUEUES);
        run.fact("rebalanced_after_ms", (System.nanoTime() - died) / 1_000_000);
        List<String> alone = Consumes.sendToAllQueues(run, "alone", COUNT);
        run.await("the survivor sees everything", Run.PUSH_SECONDS, () -> mine.bodies().containsAll(alone));
        run.fact("survivor_saw", mine.bodies().size());
    }

    private static long owned(Run run, DefaultMQPushConsumer consumer) {
        return consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable()
            .keySet().stream().filter(queue -> queue.getTopic().equals(run.topic)).count();
    }

    private static Process startSecondMember(Run run) throws Exception {
        List<String> command = new ArrayList<>();
        command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
        command.addAll(ManagementFactory.getRuntimeMXBean().getInputArguments());
        command.addAll(List.of("-cp", System.getProperty("java.class.path"),
            Scenario.class.getName(), "rebalance-member", "--namesrv", run.option("namesrv"),
            "--topic", run.topic, "--group", run.group));
        return new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.INHERIT).start();
    }

    private static Set<String> collectLines(Process process) {
        Set<String> lines = new ConcurrentSkipListSet<>();
        Thread reader = new Thread(() -> {
            new BufferedReader(new InputStreamReader(process.getInputStream())).lines()
                .filter(line -> line.startsWith("shared-")).forEach(lines::add);
        }, "second member's output");
        reader.setDaemon(true);
        reader.start();
        return lines;
    }

    /** The second member: prints what it is given until it is killed or its parent is gone. */
    static void member(Run run) throws Exception {
        DefaultMQPushConsumer consumer = run.pushConsumer();
        consumer.registerMessageListener((MessageListenerConcurrently) (batch, context) -> {
            batch.forEach(message -> System.out.println(Run.text(message)));
            System.out.flush();
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.subscribe(run.topic, "*");
        consumer.start();
        while (System.in.read() >= 0) {
            Thread.sleep(10);
        }
    }
}
