"""The demo: an embedded server, messages in, messages out, told step by step.

Starts `cometmq up` on free ports with a temporary store, sends and receives with the smallest
client there is, stops the server and leaves nothing behind. Exit code 0 if all of it worked.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

from cometmq.client.remote import Remote
from cometmq.wire import headers, properties, record
from cometmq.wire.codes import PullFlag, RequestCode, ResponseCode

TOPIC = "demo-orders"
GROUP = "demo-billing"


def say(text: str) -> None:
    print(f"  {text}", flush=True)


@contextlib.contextmanager
def server(folder: str) -> Iterator[dict[str, str]]:
    """`cometmq up` as a child process; yields the places that its ready line names."""
    began = time.monotonic()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cometmq", "up", "--namesrv-port", "0", "--broker-port", "0"),
            *("--store", folder, "--log-level", "WARNING"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.startswith("ready "):
            raise SystemExit(f"the server did not start: {line!r}")
        say(f"{line}   ({(time.monotonic() - began) * 1000:.0f} ms)")
        yield dict(part.split("=", 1) for part in line.split()[1:])
    finally:
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(10)
        say(f"server stopped with exit code {code} in {(time.monotonic() - began) * 1000:.0f} ms")
    if code != 0:
        raise SystemExit(code)


def send(broker: Remote, number: int, tag: str, queue_id: int) -> str:
    header = headers.SendHeader(
        producerGroup="demo-shop",
        topic=TOPIC,
        defaultTopic="TBW102",
        defaultTopicQueueNums=4,
        queueId=queue_id,
        sysFlag=0,
        bornTimestamp=int(time.time() * 1000),
        flag=0,
        properties=properties.build({"TAGS": tag, "KEYS": f"order-{number}"}),
    )
    body = json.dumps({"order": number, "state": tag}).encode()
    answer = broker.call(RequestCode.SEND_MESSAGE_V2, headers.send_v2_ext(header), body)
    return answer.ext["msgId"]


def pull_header(queue_id: int, offset: int, expression: str, suspend_ms: int) -> dict[str, str]:
    flags = PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if suspend_ms else 0)
    return headers.to_ext(
        headers.PullHeader(
            consumerGroup=GROUP,
            topic=TOPIC,
            queueId=queue_id,
            queueOffset=offset,
            maxMsgNums=32,
            sysFlag=int(flags),
            suspendTimeoutMillis=suspend_ms,
            subscription=expression,
        )
    )


def main() -> None:
    print("CometMQ demo")
    with (
        tempfile.TemporaryDirectory(prefix="cometmq-demo-") as folder,
        server(folder) as places,
    ):
        use(places)
    print("done")


def use(places: dict[str, str]) -> None:
    """Send, look up, pull, filter, find, wait."""
    with Remote(places["broker"]) as broker, Remote(places["namesrv"]) as name_server:
        ids = [send(broker, n, "paid" if n % 3 else "refunded", n % 4) for n in range(12)]
        say(f"sent 12 messages to {TOPIC!r}; the broker created the topic; first id {ids[0]}")

        route = name_server.call(
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            {"topic": TOPIC, "acceptStandardJsonOnly": "true"},
        )
        queues = json.loads(route.body)["queueDatas"][0]
        say(
            f"name server knows {TOPIC!r}: {queues['writeQueueNums']} queues on "
            f"{queues['brokerName']}"
        )

        found = []
        for queue_id in range(4):
            answer = broker.call(RequestCode.PULL_MESSAGE, pull_header(queue_id, 0, "*", 0))
            found += record.decode_all(answer.body)
        say(f"pulled {len(found)} messages from 4 queues")
        assert sorted(json.loads(m.body)["order"] for m in found) == list(range(12))

        some = []
        for queue_id in range(4):
            answer = broker.ask(RequestCode.PULL_MESSAGE, pull_header(queue_id, 0, "refunded", 0))
            some += record.decode_all(answer.body)
        say(f"with the tag filter 'refunded': {len(some)} messages")
        assert len(some) == 4

        answer = broker.call(
            RequestCode.QUERY_MESSAGE,
            {"topic": TOPIC, "key": "order-7", "maxNum": "8", "beginTimestamp": "0"}
            | {"endTimestamp": str(2**62)},
        )
        say(f"by key 'order-7': {record.decode(answer.body).body.decode()}")

        with Remote(places["broker"], timeout_ms=20_000) as waiting:
            held = waiting.send(RequestCode.PULL_MESSAGE, pull_header(0, 3, "*", 15_000))
            sent_at: list[float] = []

            def late() -> None:
                sent_at.append(time.monotonic())
                with Remote(places["broker"]) as other:
                    send(other, 99, "paid", 0)

            threading.Timer(0.3, late).start()
            answer = waiting.wait(held, 20_000)
            took = (time.monotonic() - sent_at[0]) * 1000
            assert answer.code == ResponseCode.SUCCESS
            say(
                f"a waiting pull woke {took:.1f} ms after the next send: "
                f"{record.decode(answer.body).body.decode()}"
            )


if __name__ == "__main__":
    main()
