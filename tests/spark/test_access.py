"""TLS and ACL keys of source and sink, through a relay that ends TLS and sees every request; and
what nobody may see: secrets, in whatever Spark prints, keeps or sends to listeners."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming import StreamingQueryListener
from streams import WAIT_S

from cometmq import Message, Producer
from cometmq.client.connection import Credentials
from cometmq.testing import LocalBroker
from cometmq.wire.codes import RequestCode
from relays import Relay, make_certificate

SECRETS = {"accessKey": "KEY-7f3a", "secretKey": "SEC-91bc", "securityToken": "TOK-55de"}
KEY_PASSWORD = "PWD-12ef"
HIDDEN = [*SECRETS.values(), KEY_PASSWORD]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tls")
    return {
        "server": make_certificate(folder, "server"),
        "client": make_certificate(folder, "client", password=KEY_PASSWORD),
    }


@pytest.fixture(scope="module")
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory", settings={"brokerIP1": "127.0.0.2"}) as running:
        running.create_topic("from", 2)
        running.create_topic("to", 2)
        yield running


@pytest.fixture(scope="module")
def relays(broker: LocalBroker, files: dict[str, Path]) -> Iterator[tuple[Relay, Relay]]:
    """In front of name server and broker; they ask for the client's certificate, too."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["server"])
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(f"{files['client']}.crt")
    with Relay(broker.namesrv, context) as names, Relay(broker.broker_address, context) as relay:
        tls = ssl.create_default_context(cafile=f"{files['server']}.crt")
        tls.load_cert_chain(files["client"], password=KEY_PASSWORD)
        with Producer("p", namesrv=names.address, tls=tls) as producer:
            for number in range(100):
                producer.send(Message("from", str(number).encode()))
        names.frames.clear()
        relay.frames.clear()
        yield names, relay


@pytest.fixture
def options(relays: tuple[Relay, Relay], files: dict[str, Path]) -> dict[str, str]:
    return {
        "namesrv": relays[0].address,
        "tls": "true",
        "tlsCaFile": f"{files['server']}.crt",
        "tlsCertFile": f"{files['client']}.crt",
        "tlsKeyFile": str(files["client"]),
        "tlsKeyPassword": KEY_PASSWORD,
        **SECRETS,
    }


def signed_codes(relay: Relay) -> set[int]:
    """The codes of all requests, each of which must be signed as the ACL of a broker wants it."""
    keys = Credentials(SECRETS["accessKey"], SECRETS["secretKey"], SECRETS["securityToken"])
    for frame in relay.frames:
        plain = {key: value for key, value in frame.ext.items() if key != "Signature"}
        assert frame.ext["Signature"] == keys.sign(plain, frame.body)["Signature"], frame
    return {frame.code for frame in relay.frames}


def test_source_and_sink_over_tls_with_every_request_signed(
    spark: Any,
    relays: tuple[Relay, Relay],
    options: dict[str, str],
    tmp_path: Path,
) -> None:
    names, relay = relays
    bodies = [str(number) for number in range(100)]
    read = spark.read.format("rocketmq").options(**options).option("topic", "from").load()
    rows = read.selectExpr("cast(body as string) as body")
    assert sorted((row.body for row in rows.collect()), key=int) == bodies
    rows.write.format("rocketmq").options(**options).option("topic", "to").mode("append").save()
    stream = spark.readStream.format("rocketmq").options(**options).option("topic", "to")
    stream = stream.option("startingOffsets", "earliest").option("commitOffsetsToGroup", "true")
    query = (
        stream.option("group", "g")
        .load()
        .selectExpr("body", "'again' as tags")
        .writeStream.format("rocketmq")
        .options(**options, topic="from")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)
    again = spark.read.format("rocketmq").options(**options).option("topic", "from")
    assert again.option("tags", "again").load().count() == 100
    assert signed_codes(relay) >= {
        RequestCode.PULL_MESSAGE,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.END_PRODUCERS,
    }
    assert RequestCode.GET_ROUTEINFO_BY_TOPIC in signed_codes(names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tlsCaFile": None}, "TLS with 127.0.0.2:.* failed"),
        ({"tlsKeyPassword": "PWD-12ef-wrong"}, "tlsCertFile .* and its key can't be used"),
        ({"tlsCertFile": "/nowhere.pem"}, "'/nowhere.pem' and its key can't be used"),
    ],
    ids=["unknown authority", "wrong password", "no such file"],
)
@pytest.mark.parametrize("side", ["source", "sink"])
def test_what_is_wrong_with_tls_is_said_without_secrets(
    spark: Any, options: dict[str, str], change: dict[str, str | None], said: str, side: str
) -> None:
    wrong = {key: value for key, value in (options | change).items() if value is not None}
    if side == "source":
        with pytest.raises(Exception, match=said) as caught:
            spark.read.format("rocketmq").options(**wrong, topic="from").load().count()
    else:
        rows = spark.range(1, numPartitions=1).selectExpr("cast(id as string) as body")
        writer = rows.write.format("rocketmq").options(**wrong, topic="to", sendTimeout="2s")
        with pytest.raises(Exception, match=said) as caught:
            writer.mode("append").save()
    assert not shown_in(_whole(caught.value))


def _whole(error: BaseException) -> str:
    """All that an error says, the JVM's part included."""
    java = getattr(error, "_origin", None)
    texts = [str(error), repr(error), str(getattr(error, "_stackTrace", ""))]
    while java is not None:
        texts.append(str(java.toString()))
        java = java.getCause()
    return "\n".join(texts)


def shown_in(text: str) -> list[str]:
    return [secret for secret in HIDDEN if secret in text]


@contextmanager
def jvm_log(spark: Any, path: Path) -> Iterator[None]:
    """All that the JVM logs, into a file: its own output is not this test's to capture."""
    log4j = spark.sparkContext._jvm.org.apache.logging.log4j
    context = log4j.LogManager.getContext(False)
    root = context.getConfiguration().getRootLogger()
    layout = log4j.core.layout.PatternLayout.newBuilder().withPattern("%p %c %m%n%ex").build()
    builder = log4j.core.appender.FileAppender.newBuilder().withFileName(str(path))
    appender = builder.setName("to-a-file").setLayout(layout).build()
    appender.start()
    root.addAppender(appender, None, None)
    spark.sparkContext.setLogLevel("INFO")
    try:
        yield
    finally:
        spark.sparkContext.setLogLevel("OFF")
        root.removeAppender("to-a-file")
        context.updateLoggers()
        appender.stop()


class Events(StreamingQueryListener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def _note(self, event: Any) -> None:
        self.texts += [str(vars(event)), str(getattr(event, "json", ""))]
        progress = getattr(event, "progress", None)
        if progress is not None:
            self.texts.append(progress.json)

    onQueryStarted = onQueryProgress = onQueryIdle = onQueryTerminated = _note  # noqa: N815


def test_secrets_are_in_nothing_that_is_shown_or_kept(
    spark: Any,
    options: dict[str, str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    events = Events()
    texts: list[str] = []
    spark.streams.addListener(events)
    try:
        with jvm_log(spark, tmp_path / "jvm.log"):
            texts += _use_all(spark, options, tmp_path)
    finally:
        spark.streams.removeListener(events)
    texts += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    out, err = capfd.readouterr()
    everything = "\n".join([*texts, *events.texts, *caplog.messages, out, err])
    for something in (
        "== Physical Plan ==",
        "INFO org.apache.spark",
        "MicroBatchExecution",
        "secret [id",
    ):
        assert something in everything, "there was something to see"
    found = [line for line in everything.splitlines() if shown_in(line)]
    assert not found, found[:5]


def _use_all(spark: Any, options: dict[str, str], tmp_path: Path) -> list[str]:
    """Reads and writes, by batch and stream; returns what can be asked for about them."""
    texts: list[str] = []
    read = spark.read.format("rocketmq").options(**options).option("topic", "from").load()
    for mode in ("simple", "extended", "codegen", "cost", "formatted"):
        read.explain(mode)
    texts.append(read._jdf.queryExecution().toString())
    texts.append(read._jdf.queryExecution().logical().toJSON())
    read.createOrReplaceTempView("the_topic")
    texts.append(str(spark.sql("describe extended the_topic").collect()))
    assert read.count() >= 100
    rows = read.selectExpr("body")
    rows.write.format("rocketmq").options(**options, topic="to").mode("append").save()
    stream = spark.readStream.format("rocketmq").options(**options).option("topic", "from")
    stream = stream.option("startingOffsets", "earliest").load()
    stream.explain(True)
    query = (
        stream.selectExpr("body")
        .writeStream.format("rocketmq")
        .options(**options, topic="to")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .queryName("secret")
        .start()
    )
    assert query.awaitTermination(WAIT_S)
    query.explain(True)
    texts += [query.lastProgress.json, json.dumps(query.status), repr(query.recentProgress)]
    return texts


def test_what_a_driver_may_print_of_itself(options: dict[str, str]) -> None:
    from cometmq.spark.sink_options import SinkOptions
    from cometmq.spark.source import RocketMQDataSource
    from cometmq.spark.source_options import SourceOptions

    parsed: list[Callable[[], object]] = [
        lambda: SourceOptions.parse({**options, "topic": "t"}),
        lambda: SinkOptions.read({**options, "topic": "t"}),
        lambda: RocketMQDataSource(options),
    ]
    for make in parsed:
        assert not shown_in(repr(make()) + str(make()))
