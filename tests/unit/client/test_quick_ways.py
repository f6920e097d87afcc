"""Every quick way of the client comes to the same as its plain way."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from cometmq.client import outgoing
from cometmq.client.connection import Connection, Stored
from cometmq.client.outgoing import SendTemplate
from cometmq.client.producer import Producer
from cometmq.client.session import UniqueIds, World
from cometmq.errors import SendFailed, UsageError
from cometmq.message import Message, MessageQueue, SendResult
from cometmq.wire.frame import Frame, FrameReader, decode_frame, encode_frame

BORN_MS = 1_763_290_000_123


# --------------------------------------------------------------------------------------- properties

TAGS = ["", "paid", "a|b", "a\x01b", "\x02", "ümläut", " "]
KEYS: list[Any] = ["", "k-1", "two words", "a|b", "x\x02", "\x01", ["a", "b"], [], ("é",), ["a b"]]
OTHERS: list[dict[str, Any]] = [
    {},
    {"properties": {"color": "red"}},
    {"sharding_key": "s"},
    {"delay_level": 3},
    {"deliver_at": datetime.fromtimestamp(BORN_MS / 1000, UTC)},
    {"ttl": timedelta(seconds=5)},
    {"waits_for_storage": False},
    {"deliver_at": datetime(2026, 3, 1, tzinfo=UTC)},
    {"ttl": timedelta(seconds=5)},
]


def test_every_field_of_a_message_is_tried() -> None:
    """One that the quick way does not know of would be left out without a word."""
    tried = {"topic", "body", "tags", "keys", *(name for one in OTHERS for name in one)}
    elsewhere = {"flag", "unique_id"}  # in the header; a parameter of its own
    assert {field.name for field in msgspec.structs.fields(Message)} == tried | elsewhere


def _said(act: Any, *arguments: Any) -> object:
    try:
        return act(*arguments)
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("more", OTHERS, ids=str)
def test_properties(more: dict[str, Any]) -> None:
    for tags, keys, extra in itertools.product(TAGS, KEYS, ("", "INSTANCE_ID\x01n\x02")):
        message = Message("t", b"x", tags=tags, keys=keys, **more)
        quick = _said(outgoing.properties_of, message, "ID", extra)
        assert quick == _said(outgoing._properties_of_any, message, "ID", extra)


# --------------------------------------------------------------------------------------- unique ids


def test_unique_ids_count_on_and_tell_their_time() -> None:
    times = [BORN_MS, BORN_MS, BORN_MS + 1, BORN_MS, BORN_MS - 40 * 86_400_000, BORN_MS]
    ids = UniqueIds(World(lambda: 0, random.Random(3), "10.1.2.3", 0x12345))
    first = int(ids.next(BORN_MS)[-4:], 16)
    for number, now_ms in enumerate(times * 20_000, 1):
        made = ids.next(now_ms)
        assert made.endswith(f"{(first + number) & 0xFFFF:04X}")
        if number < 20:
            assert re.fullmatch(r"0A0102032345[0-9A-F]{20}", made)
            since = int(made[20:28], 16)
            assert made[:28] == ids.next(now_ms)[:28] and since < 31 * 86_400_000
            first += 1
    assert int(ids.next(BORN_MS + 5)[20:28], 16) - int(ids.next(BORN_MS)[20:28], 16) == 5


# ---------------------------------------------------------------------------- a send there and back


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        pass


class Sender:
    """Waits for an answer, and keeps what it was told."""

    ends = float("inf")

    def __init__(self) -> None:
        self.told: list[object] = []

    def stored(self, told: Stored) -> None:
        self.told.append(told)

    def answered(self, frame: Frame) -> None:
        self.told.append(frame)

    def failed(self, error: Exception) -> None:
        self.told.append(error)


def _connection() -> tuple[Connection, Any]:
    connection = Connection("b:1", None, lambda one, frame: None, lambda one: None)
    transport: Any = Transport()
    connection.connection_made(transport)
    return connection, transport


def _send(connection: Connection, sender: Sender) -> None:
    header = SendTemplate("g", "t", 4).plain(2)
    connection.send(header, BORN_MS, b'"UNIQ_KEY\\u0001ID"', b"body", sender)


def test_a_quick_send_is_the_plain_frame() -> None:
    async def work() -> None:
        for group, topic in (("g", "t"), ("100%", '%RETRY%q"uote'), ("gruppe-ü", "t_1")):
            connection, transport = _connection()
            template = SendTemplate(group, topic, 7)
            text = b'"a%dsaid \\u0001"'
            connection.send(template.plain(3), BORN_MS, text, b"%d body", Sender())
            plain = template.frame(310, 1, 3, 0, BORN_MS, 0, text, b"%d body")
            await asyncio.sleep(0)
            (written,) = transport.written
            assert decode_frame(written) == decode_frame(plain)

    asyncio.run(work())


ANSWERS: list[dict[str, Any]] = [
    {"queueId": "2", "msgId": "M", "queueOffset": "5"},
    {"queueId": "2", "msgId": "M", "queueOffset": "5", "MSG_REGION": "R", "TRACE_ON": "false"},
    {"queueId": "1", "msgId": "M", "queueOffset": "9000000000", "transactionId": "T"},
    {"queueId": "2", "msgId": "ü", "queueOffset": "5", "recallHandle": "H", "new": "x"},
    {"queueId": "2", "msgId": "", "queueOffset": "-1", "MSG_REGION": ""},
    {"queueId": "2", "msgId": "M"},
    {"queueId": "two", "msgId": "M", "queueOffset": "5"},
    {"queueId": "2.5", "msgId": "M", "queueOffset": "5"},
    {"queueId": " 2", "msgId": "M", "queueOffset": "5"},
    {},
]


def _outcome(ext: dict[str, Any], code: int, *, is_quick: bool) -> object:
    """What a producer's send comes to that is answered so."""

    async def work() -> object:
        producer = Producer("g", namesrv="127.0.0.1:1")
        producer.loop = asyncio.get_running_loop()
        producer.session.is_started = True
        sending = producer.make(Message("t", b"x", unique_id="U"), None, None, None, is_async=True)
        sending.queue = MessageQueue("t", "b", 2)
        producer.under_way = 1
        answer = Frame(code=code, opaque=1, flag=1, ext=ext, remark="r")
        connection, _ = _connection()
        if is_quick:
            connection._sends[1] = sending
        else:
            connection._waiters[1] = sending
        connection.data_received(encode_frame(answer))
        assert producer.under_way == 0 and connection.waiting == 0
        try:
            return await sending.future  # type: ignore[misc]
        except SendFailed as error:
            return re.sub(r"in \d+ ms", "", str(error))

    return asyncio.run(work())


@pytest.mark.parametrize("code", [0, 10, 11, 12, 2, 13])
@pytest.mark.parametrize("ext", ANSWERS, ids=str)
def test_an_answer_means_the_same(ext: dict[str, Any], code: int) -> None:
    quick = _outcome(ext, code, is_quick=True)
    assert quick == _outcome(ext, code, is_quick=False)
    if ext in ANSWERS[:5] and code == 0:
        assert isinstance(quick, SendResult)


@pytest.mark.parametrize("seed", range(30))
def test_whoever_asked_is_told_once_in_whatever_pieces_it_comes(seed: int) -> None:
    """Answers of sends among others, in both serializations, cut anywhere."""
    rng = random.Random(seed)

    async def work() -> None:
        connection, _ = _connection()
        senders = [Sender() for _ in range(40)]
        stream = b""
        for opaque, one in enumerate(senders, 1):
            if rng.random() < 0.7:
                _send(connection, one)
            else:
                connection.ask_raw(connection.next_opaque(), b"", one)
            ext = {"queueId": "2", "msgId": str(opaque), "queueOffset": "5"}
            stream += encode_frame(
                Frame(
                    code=rng.choice([0, 0, 0, 2]),
                    opaque=opaque,
                    flag=1,
                    ext=ext,
                    body=rng.choice([b"", b"", b"", b"a body"]),
                    serialize=rng.choice([0, 0, 0, 1]),
                )
            )
            if rng.random() < 0.1:  # nobody waits for that
                stream += encode_frame(Frame(code=0, opaque=10_000, flag=1, ext=ext))
        assert len(FrameReader().feed(stream)) >= 40
        while stream:
            size = rng.choice([1, 7, 100, 1000, 10_000])
            connection.data_received(stream[:size])
            stream = stream[size:]
        for opaque, one in enumerate(senders, 1):
            (told,) = one.told
            found = told.msgId if isinstance(told, Stored) else told.ext["msgId"]  # type: ignore[attr-defined]
            assert found == str(opaque)
        assert connection.waiting == 0

    asyncio.run(work())


def test_the_end_of_a_connection_and_of_time_reach_quick_sends() -> None:
    async def work() -> None:
        connection, _ = _connection()
        late, lost = Sender(), Sender()
        late.ends = 0.0
        _send(connection, late)
        _send(connection, lost)
        await asyncio.sleep(0.12)
        assert "in time" in str(late.told) and not lost.told
        connection.connection_lost(None)
        assert "was closed by it" in str(lost.told)
        assert len(late.told) == len(lost.told) == 1

    asyncio.run(work())


def test_what_answers_ask_next_leaves_in_the_same_turn() -> None:
    async def work() -> None:
        connection, transport = _connection()

        class Again(Sender):
            def stored(self, told: Stored) -> None:
                super().stored(told)
                _send(connection, Sender())

        _send(connection, Again())
        await asyncio.sleep(0)
        ext = {"queueId": "2", "msgId": "M", "queueOffset": "5"}
        connection.data_received(encode_frame(Frame(code=0, opaque=1, flag=1, ext=ext)))
        assert len(transport.written) == 2

    asyncio.run(work())
