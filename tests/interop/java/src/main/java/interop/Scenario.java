package interop;

import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicBoolean;

/**
 * The driver's entry: {@code Scenario <name> --namesrv H:P --broker H:P --topic T --group G ...}.
 *
 * <p>Owns the table of scenarios and the contract with the caller: the last line on stdout is one
 * JSON object with {@code ok}, {@code error} when it failed, and the scenario's facts; the exit
 * status is 0 or 1; the whole run ends within {@code --limit} seconds whatever happens.
 */
public final class Scenario {
    private interface Body {
        void play(Run run) throws Exception;
    }

    private static final Map<String, Body> SCENARIOS = new LinkedHashMap<>();

    static {
        SCENARIOS.put("core", Core::play);
        SCENARIOS.put("sync-async-oneway", Sends::syncAsyncOneway);
        SCENARIOS.put("batch", Sends::batch);
        SCENARIOS.put("ordered-send", Sends::bySelector);
        SCENARIOS.put("push-concurrent", Consumes::concurrent);
        SCENARIOS.put("push-orderly", Consumes::orderly);
        SCENARIOS.put("tag-filter", Consumes::tagFilter);
        SCENARIOS.put("sql-push", Sql::push);
        SCENARIOS.put("sql-pull", Sql::pull);
        SCENARIOS.put("broadcast", Consumes::broadcast);
        SCENARIOS.put("retries", Retries::play);
        SCENARIOS.put("delay-levels", Delays::play);
        SCENARIOS.put("orderly-failing", Orders::failing);
        SCENARIOS.put("orderly-rebalance", Orders::rebalance);
        SCENARIOS.put("orderly-restart", Orders::restart);
        SCENARIOS.put("transactions", Transactions::play);
        SCENARIOS.put("request-reply", Requests::play);
        SCENARIOS.put("trace", Traces::play);
        SCENARIOS.put("classic-pull", Pulls::classic);
        SCENARIOS.put("lite-pull", Pulls::lite);
        SCENARIOS.put("rebalance", Membership::rebalanceWhenAMemberDies);
        SCENARIOS.put("rebalance-member", Membership::member);
        SCENARIOS.put("lookup", Lookups::byKeyAndId);
        SCENARIOS.put("offsets-by-time", Lookups::offsetsByTime);
        SCENARIOS.put("reset-offset", Lookups::resetByTime);
        SCENARIOS.put("topics", Topics::play);
        SCENARIOS.put("big-bodies", Bodies::big);
        SCENARIOS.put("compressed-bodies", Bodies::compressed);
        SCENARIOS.put("seed", Seed::play);
        SCENARIOS.put("interchange", Interchange::play);
    }

    private static final AtomicBoolean finished = new AtomicBoolean();

    private Scenario() {
    }

    public static void main(String[] args) {
        if (args.length == 0 || !SCENARIOS.containsKey(args[0])) {
            throw new IllegalArgumentException("the first argument: one of " + SCENARIOS.keySet());
        }
        Run run = new Run(args);
        haltAfter(run);
        try {
            SCENARIOS.get(args[0]).play(run);
            finish(run, null);
        } catch (Throwable failure) {
            failure.printStackTrace();
            finish(run, failure.toString());
        }
    }

    private static void haltAfter(Run run) {
        int seconds = run.number("limit", 60);
        Thread watchdog = new Thread(() -> {
            try {
                Thread.sleep(seconds * 1000L);
            } catch (InterruptedException stopped) {
                return;
            }
            finish(run, "not finished after " + seconds + " s; waiting for: " + run.waitingFor());
        }, "watchdog");
        watchdog.setDaemon(true);
        watchdog.start();
    }

    /** Clients are closed first: a clean goodbye is part of what the server must handle. */
    private static void finish(Run run, String error) {
        if (!finished.compareAndSet(false, true)) {
            return;
        }
        if (error == null) {
            run.close();
        }
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("ok", error == null);
        if (error != null) {
            result.put("error", error);
        }
        result.putAll(run.facts());
        System.out.println(Json.write(result));
        System.out.flush();
        Runtime.getRuntime().halt(error == null ? 0 : 1);
    }
}
