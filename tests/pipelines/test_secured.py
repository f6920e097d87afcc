"""Pipelines against clusters that want TLS and signed requests: keys come from a file or from the
environment, every request is signed with those of its own cluster, and nobody else sees them.

Relays in front of name server and broker end TLS and read every request.
"""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

sys.path.insert(0, str(Path(__file__).parents[1]))

from cometmq import Admin, Consumer, Later, Message, Producer
from cometmq.cli.main import main
from cometmq.client.connection import Credentials
from cometmq.errors import UsageError
from cometmq.pipelines import aggregate, archive, dedupe, dlq, mirror, read_spec, replay, trace
from cometmq.pipelines.reaching import access_options, client_keywords, variable_of
from cometmq.pipelines.running import PipelineFailed
from cometmq.pipelines.spec import run_spec
from cometmq.spark.tls import TLS_OPTIONS, read_access_file, with_access_file
from cometmq.testing.local import LocalBroker
from cometmq.wire.codes import RequestCode
from relays import Relay, make_certificate

WAIT_S = 300


class Cluster:
    """A broker that is reached over TLS only, with the keys that its requests must have."""

    def __init__(self, folder: Path, name: str) -> None:
        pem = make_certificate(folder, name)
        self.keys = {"accessKey": f"KEY-{name}", "secretKey": f"SECRET-OF-{name}"}
        self.tls = {"tls": "true", "tlsCaFile": f"{pem}.crt"}
        self.access = folder / f"{name}.access"
        lines = [f"{key} = {value}" for key, value in (self.keys | self.tls).items()]
        self.access.write_text("# keys\n" + "\n".join(lines) + "\n")
        self.words: dict[str, Any] = {
            "credentials": Credentials(self.keys["accessKey"], self.keys["secretKey"]),
            "tls": ssl.create_default_context(cafile=f"{pem}.crt"),
        }
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        self.broker = LocalBroker(store="memory", settings={"brokerIP1": "127.0.0.2"})
        self.broker.start()
        self.relays = [
            Relay(address, context) for address in (self.broker.namesrv, self.broker.broker_address)
        ]
        for relay in self.relays:
            relay.__enter__()
        self.namesrv = self.relays[0].address

    def close(self) -> None:
        for relay in self.relays:
            relay.__exit__()
        self.broker.stop()

    def send(self, topic: str, bodies: list[bytes], **more: Any) -> None:
        self.broker.create_topic(topic, 2)
        with Producer("shop", namesrv=self.namesrv, **self.words, **more) as producer:
            for n, body in enumerate(bodies):
                message = Message(topic, body, keys=f"k{n}", sharding_key=f"s{n % 3}")
                producer.send(message)

    def bodies(self, topic: str) -> list[bytes]:
        return sorted(one.body for one in self.messages(topic))

    def messages(self, topic: str) -> list[Any]:
        with Admin(self.namesrv, **self.words) as admin:
            queues = admin.topic_route(topic).to_read
            return [one for queue in queues for one in admin.queue_messages(queue, most=1000)]

    def check(self) -> set[int]:
        """All requests are signed with this cluster's keys and no other; their codes."""
        codes = set()
        for relay in self.relays:
            for frame in relay.frames:
                plain = {key: value for key, value in frame.ext.items() if key != "Signature"}
                wanted = self.words["credentials"].sign(plain, frame.body)
                assert frame.ext.get("AccessKey") == self.keys["accessKey"], frame
                assert frame.ext["Signature"] == wanted["Signature"], frame
                codes.add(frame.code)
            relay.frames.clear()
        return codes


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    folder = tmp_path_factory.mktemp("keys")
    made = [Cluster(folder, name) for name in ("one", "two")]
    yield made
    for cluster in made:
        cluster.close()


BODIES = [b'{"id": %d, "country": "NL", "amount": 2.5}' % n for n in range(20)]


def test_archive_and_replay(spark: SparkSession, clusters: list[Cluster], tmp_path: Path) -> None:
    one, two = clusters
    one.send("kept", BODIES)
    lake = str(tmp_path / "lake")
    lines: list[str] = []
    words: Any = {"namesrv": one.namesrv, "topic": "kept", "tell": lines.append}
    archive(spark, lake=lake, access=str(one.access), before_retention=True, **words)
    assert RequestCode.GET_BROKER_CONFIG in one.check(), "by the watch of retention"
    replay(
        spark,
        namesrv=two.namesrv,
        access=str(two.access),
        lake=lake,
        to_topic="again",
        queues=2,
        checkpoint=str(tmp_path / "c"),
        tell=lines.append,
    )
    assert two.bodies("again") == sorted(BODIES)
    two.check()
    replay(
        spark,
        namesrv=two.namesrv,
        access=str(two.access),
        from_namesrv=one.namesrv,
        from_access=str(one.access),
        topic="kept",
        to_topic="from-topic",
        queues=2,
        checkpoint=str(tmp_path / "d"),
        tell=lines.append,
    )
    assert two.bodies("from-topic") == sorted(BODIES)
    one.check()
    two.check()
    assert_hidden(tmp_path, clusters, lines)


@pytest.mark.parametrize("way", ["file", "environment"])
def test_mirror_to_another_cluster(
    spark: SparkSession,
    clusters: list[Cluster],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    one, two = clusters
    topic = f"moved-{way}"
    one.send(topic, BODIES)
    words: Any = {"namesrv": one.namesrv, "topic": topic, "to_topic": topic, "queues": 3}
    words |= {"to_namesrv": two.namesrv, "checkpoint": str(tmp_path / "c")}
    if way == "file":
        words |= {"access": str(one.access), "to_access": str(two.access)}
    else:
        for which, cluster in (("", one), ("TO", two)):
            for name, value in (cluster.keys | cluster.tls).items():
                monkeypatch.setenv(variable_of(name, which), value)
    lines: list[str] = []
    assert mirror(spark, tell=lines.append, **words).rows == 20
    assert two.bodies(topic) == sorted(BODIES)
    assert RequestCode.PULL_MESSAGE in one.check()
    assert {RequestCode.SEND_BATCH_MESSAGE, RequestCode.UPDATE_AND_CREATE_TOPIC} <= two.check()
    assert_hidden(tmp_path, clusters, lines)


def test_keys_of_one_cluster_are_not_shown_to_another(
    spark: SparkSession, clusters: list[Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = clusters
    one.send("private", BODIES)
    words: Any = {"namesrv": one.namesrv, "topic": "private", "to_topic": "private"}
    words |= {"to_namesrv": two.namesrv, "checkpoint": str(tmp_path / "c"), "queues": 2}
    with pytest.raises(Exception, match=r"TLS|closed|lost"):  # it speaks in plain words to it
        mirror(spark, access=str(one.access), **words)
    assert not [frame for relay in two.relays for frame in relay.frames]
    monkeypatch.setenv("COMETMQ_TO_ACCESS_FILE", str(two.access))
    assert mirror(spark, access=str(one.access), tell=print, **words).rows == 20
    two.check()
    one.check()


def test_dead_letters(spark: SparkSession, clusters: list[Cluster], tmp_path: Path) -> None:
    cluster = clusters[0]
    cluster.send("dying", BODIES[:5])
    with (
        Consumer("billing", namesrv=cluster.namesrv, start="first", **cluster.words) as consumer,
        Admin(cluster.namesrv, **cluster.words) as admin,
    ):
        consumer.subscribe("dying", lambda _: Later(delay_level=-1))
        consumer.start()
        give_up = time.monotonic() + WAIT_S
        while len(admin.dead_letters("billing")) < 5:
            assert time.monotonic() < give_up
            time.sleep(0.05)
    cluster.check()
    lines: list[str] = []
    words: Any = {"namesrv": cluster.namesrv, "lake": str(tmp_path / "lake"), "tell": lines.append}
    outcome = dlq(spark, groups=["billing"], access=str(cluster.access), redrive=True, **words)
    assert outcome.figures["re-drive: sent"] == 5
    assert cluster.bodies("dying") == sorted(BODIES[:5] * 2)
    assert RequestCode.SEND_MESSAGE_V2 in cluster.check()
    assert_hidden(tmp_path, clusters, lines)


def test_trace_dedupe_and_aggregate(
    spark: SparkSession, clusters: list[Cluster], tmp_path: Path
) -> None:
    cluster = clusters[0]
    cluster.send("sales", BODIES, trace=True)
    lines: list[str] = []
    words: Any = {"namesrv": cluster.namesrv, "access": str(cluster.access), "tell": lines.append}
    assert trace(spark, lake=str(tmp_path / "trace"), **words).figures["records"] == 20
    words["topic"] = "sales"
    dedupe(spark, to_topic="once", checkpoint=str(tmp_path / "d"), **words)
    assert cluster.bodies("once") == sorted(BODIES)
    for message in cluster.messages("once"):
        number = int(message.properties["KEYS"].removeprefix("k"))
        assert message.properties["__SHARDINGKEY"] == f"s{number % 3}", "it comes along"
    schema = "country string, amount double"
    words |= {"schema": schema, "by": ["country"], "late": "0 seconds", "window": "1 second"}
    cluster.broker.create_topic("sums", 1)
    aggregate(spark, to_topic="sums", checkpoint=str(tmp_path / "a"), **words)
    time.sleep(1.2)  # the clock of the messages goes past the window
    cluster.send("sales", BODIES[:1])
    aggregate(spark, to_topic="sums", checkpoint=str(tmp_path / "a"), **words)
    assert cluster.bodies("sums")
    cluster.check()
    assert_hidden(tmp_path, clusters, lines)


def test_a_spec_file(
    spark: SparkSession, clusters: list[Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = clusters
    one.send("written-down", BODIES)
    two.broker.create_topic("written-down", 2)
    spec = tmp_path / "job.toml"
    spec.write_text(
        f"""
        name = "job"
        [source]
        namesrv = "{one.namesrv}"
        topic = "written-down"
        startingOffsets = "earliest"
        accessFile = "{one.access}"
        [transform]
        sql = "SELECT body FROM source"
        [sink]
        format = "rocketmq"
        options = {{ namesrv = "{two.namesrv}", topic = "written-down" }}
        [run]
        checkpoint = "{tmp_path}/c"
        """
    )
    monkeypatch.setenv("COMETMQ_ACCESS_KEY", "of-nobody")  # the file says something else
    monkeypatch.setenv("COMETMQ_TO_ACCESS_FILE", str(two.access))
    lines: list[str] = []
    assert run_spec(spark, read_spec(spec), tell=lines.append).rows == 20
    assert two.bodies("written-down") == sorted(BODIES)
    one.check()
    two.check()
    assert_hidden(tmp_path, clusters, lines)
    with pytest.raises(UsageError, match=r"job.toml: \[source\] accessFile 'none' can't be read"):
        read_spec(spec, ["source.accessFile=none"])


def assert_hidden(folder: Path, clusters: list[Cluster], lines: list[str]) -> None:
    """Neither in what was told nor in what was written."""
    texts = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    everything = "\n".join([*texts, *lines])
    for cluster in clusters:
        for value in cluster.keys.values():
            assert value not in everything
    assert lines


def test_wrong_keys_are_told_without_them(
    spark: SparkSession, clusters: list[Cluster], tmp_path: Path
) -> None:
    cluster = clusters[0]
    words: Any = {"namesrv": cluster.namesrv, "topic": "t", "lake": str(tmp_path), "tell": print}
    wrong = tmp_path / "wrong"
    for text, said in (
        ("accessKey = A-KEY\n", "accessKey and secretKey go together"),
        ("secret = A-SECRET\n", "unknown option 'secret' of the file .* mean 'secretKey'"),
        ("A-SECRET\n", r"wrong:1: write a line as name = value"),
        ("accessKey = 1\nACCESSKEY: A-SECRET\n", "wrong:2: ACCESSKEY is there twice"),
        ("tls = A-LIE", "option 'tls' of the file .* must be true or false"),
        (None, "No such file"),
    ):
        wrong.unlink(missing_ok=True)
        if text is not None:
            wrong.write_text(text)
        with pytest.raises((UsageError, PipelineFailed), match=said) as caught:
            archive(spark, access=str(wrong), **words)
        assert "A-SECRET" not in str(caught.value) and "A-KEY" not in str(caught.value)


def test_where_keys_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in TLS_OPTIONS:
        monkeypatch.delenv(variable_of(option.name), raising=False)
    assert variable_of("tlsCaFile") == "COMETMQ_TLS_CA_FILE"
    assert variable_of("accessKey", "TO") == "COMETMQ_TO_ACCESS_KEY"
    assert access_options(None) == {}
    monkeypatch.setenv("COMETMQ_ACCESS_KEY", "k")
    monkeypatch.setenv("COMETMQ_SECRET_KEY", "s")
    monkeypatch.setenv("COMETMQ_SECURITY_TOKEN", "")
    assert access_options(None) == {"accessKey": "k", "secretKey": "s"}
    assert access_options(None, "TO") == {}
    # RocketMQ's own file of keys, and quotes.
    tools = tmp_path / "tools.yml"
    tools.write_text('# of mqadmin\naccessKey: rocketmq2\nsecretKey: "a=b:c#d"\n')
    assert access_options(str(tools)) == {"accessFile": str(tools)}
    assert read_access_file(str(tools)) == {"accessKey": "rocketmq2", "secretKey": "a=b:c#d"}
    keywords = client_keywords({"accessFile": str(tools), "topic": "t"})
    assert keywords["credentials"] == Credentials("rocketmq2", "a=b:c#d")
    with pytest.raises(UsageError, match="secretKey is given twice: as an option and in"):
        with_access_file({"ACCESSFILE": str(tools), "SecretKey": "x"})
    tools.write_bytes(b"x" * 70_000)
    with pytest.raises(UsageError, match="larger than 65536 bytes"):
        read_access_file(str(tools))


@pytest.mark.parametrize(
    "words",
    [
        ["archive", "--set", "source_options=tags=a,secretKey=S-1"],
        ["mirror", "--set", "sink-options=SECRETKEY=S-1"],
        ["job.toml", "--set", "source.secretKey=S-1"],
        ["job.toml", "--set", "sink.options.tlsKeyPassword=S-1"],
    ],
)
def test_secrets_on_a_command_line_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "run", *words]) == 2
    said = capsys.readouterr().err
    assert "does not belong on a command line" in said and "S-1" not in said
