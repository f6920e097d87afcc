# ruff: noqa: N815 - fields carry the wire's own names
"""JSON bodies that several requests share: topics, groups, heartbeats, registrations, routes.

Owns: shapes and the tolerant reading of them (enums by name or ordinal, numbers as text, missing
sets; C++, Go and Node send all of these). One rule: what is written here is compact JSON that every
known client reads; what is read here may come from any of them.
"""

from __future__ import annotations

import zlib
from typing import Annotated, Any, TypeVar

import msgspec

from cometmq.errors import BodyError
from cometmq.wire import fastjson
from cometmq.wire.codes import Version
from cometmq.wire.hashing import java_hash

T = TypeVar("T")

CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
CONSUME_FROM = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)
MAX_INFLATED_BYTES = 64 * 1024 * 1024
"""What a compressed registration may grow to: a million topics; a plain one has 16 MiB."""

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class DataVersion(msgspec.Struct, frozen=True):
    """The version of a table: equal only if all three are."""

    counter: Int64 = 0
    stateVersion: Int64 = 0
    timestamp: Int64 = 0

    def next(self, now_ms: int, steps: int = 1) -> DataVersion:
        return DataVersion(self.counter + steps, self.stateVersion, now_ms)


class TopicConfig(msgspec.Struct, frozen=True, gc=False):
    """One topic on one broker."""

    topicName: str
    readQueueNums: Int32 = 16
    writeQueueNums: Int32 = 16
    perm: Int32 = 6
    topicFilterType: str = "SINGLE_TAG"
    topicSysFlag: Int32 = 0
    order: bool = False
    attributes: dict[str, str] = {}


class GroupConfig(msgspec.Struct, frozen=True):
    """One subscription group on one broker (SubscriptionGroupConfig)."""

    groupName: str
    consumeEnable: bool = True
    consumeFromMinEnable: bool = True
    consumeBroadcastEnable: bool = True
    consumeMessageOrderly: bool = False
    retryQueueNums: Int32 = 1
    retryMaxTimes: Int32 = 16
    groupRetryPolicy: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "CUSTOMIZED"})
    brokerId: Int64 = 0
    whichBrokerWhenConsumeSlowly: Int64 = 1
    notifyConsumerIdsChangedEnable: bool = True
    groupSysFlag: Int32 = 0
    consumeTimeoutMinute: Int32 = 15
    attributes: dict[str, str] = {}
    subscriptionDataSet: list[Any] | None = None


class Subscription(msgspec.Struct, frozen=True):
    """What a group wants of one topic."""

    topic: str
    subString: str = "*"
    subVersion: int = 0
    expressionType: str = "TAG"
    tagsSet: tuple[str, ...] = ()
    codeSet: tuple[int, ...] = ()
    classFilterMode: bool = False


class ConsumerOfHeartbeat(msgspec.Struct, frozen=True):
    """One consumer group in a heartbeat."""

    groupName: str
    consumeType: str
    messageModel: str
    consumeFromWhere: str
    subscriptions: tuple[Subscription, ...]


class Heartbeat(msgspec.Struct, frozen=True):
    """34's body, normalised."""

    client_id: str
    producers: tuple[str, ...]
    consumers: tuple[ConsumerOfHeartbeat, ...]
    fingerprint: int
    is_without_sub: bool


def convert(raw: Any, kind: type[T], what: str) -> T:
    """Plain values to a Struct, numbers given as text allowed; BodyError says what is wrong."""
    try:
        return msgspec.convert(raw, kind, strict=False)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BodyError(f"{what}: {error}") from None


def drop_nulls(raw: Any) -> dict[str, Any]:
    """An object without its null fields, so that defaults apply; BodyError if it isn't one."""
    if not isinstance(raw, dict):
        raise BodyError(f"expected a JSON object, got {type(raw).__name__}")
    return {str(key): value for key, value in raw.items() if value is not None}


def load_object(body: bytes, what: str) -> dict[str, Any]:
    """A body that must be a JSON object."""
    value = fastjson.loads(body)
    if not isinstance(value, dict):
        raise BodyError(f"{what}: expected a JSON object")
    return value


def topic_config(raw: Any) -> TopicConfig:
    return convert(drop_nulls(raw), TopicConfig, "topic config")


def group_config(raw: Any) -> GroupConfig:
    config = convert(drop_nulls(raw), GroupConfig, "subscription group config")
    try:  # its two free-form fields must not hold what can't be saved again
        msgspec.json.encode((config.groupRetryPolicy, config.subscriptionDataSet))
    except TypeError:
        raise BodyError("subscription group config: an object as the key of a map") from None
    return config


def data_version(raw: Any) -> DataVersion:
    return convert(drop_nulls(raw), DataVersion, "data version") if raw else DataVersion()


def _enum(value: Any, names: tuple[str, ...], default: str) -> str:
    """By name, by ordinal, or by ordinal as text; what Java doesn't know becomes the default."""
    if isinstance(value, str):
        if value.upper() in names:
            return value.upper()
        value = int(value) if value.isdecimal() and len(value) <= 2 else -1
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return default


def _text(value: Any, what: str) -> str:
    """A scalar as text; BodyError for an object or array (its text could be of any size)."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    raise BodyError(f"{what} is not a text")


def _number(value: Any, what: str) -> int:
    """A 64-bit integer, also one that came as text; BodyError if it is anything else."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise BodyError(f"{what} is not a number") from None
    if not -(2**63) <= number < 2**63:
        raise BodyError(f"{what} is out of range")
    return number


def _truth(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() == "true")


def _list(raw: Any) -> list[Any]:
    return raw if isinstance(raw, list) else []


def subscription(raw: Any) -> Subscription:
    """One subscription; tag codes are computed where the sender left them out."""
    fields = drop_nulls(raw)
    if "topic" not in fields:
        raise BodyError("subscription without a topic")
    text = _text(fields.get("subString", "*"), "subString") or "*"
    kind = _text(fields.get("expressionType", ""), "expressionType") or "TAG"
    tags = tuple(sorted({_text(tag, "a tag") for tag in _list(fields.get("tagsSet"))}))
    if kind == "TAG" and not tags and text != "*":
        tags = tuple(sorted({tag.strip() for tag in text.split("||") if tag.strip()}))
    codes = tuple(sorted({_number(code, "a tag code") for code in _list(fields.get("codeSet"))}))
    if tags and len(codes) != len(tags):
        codes = tuple(sorted({java_hash(tag) for tag in tags}))
    return Subscription(
        _text(fields["topic"], "topic"),
        text,
        _number(fields.get("subVersion", 0), "subVersion"),
        kind,
        tags,
        codes,
        _truth(fields.get("classFilterMode")),
    )


def heartbeat(body: bytes) -> Heartbeat:
    """34's body from any client."""
    raw = drop_nulls(load_object(body, "heartbeat"))
    consumers = []
    for item in _list(raw.get("consumerDataSet")):
        fields = drop_nulls(item)
        consumers.append(
            ConsumerOfHeartbeat(
                groupName=_text(fields.get("groupName", ""), "groupName"),
                consumeType=_enum(fields.get("consumeType"), CONSUME_TYPES, CONSUME_TYPES[1]),
                messageModel=_enum(fields.get("messageModel"), MESSAGE_MODELS, MESSAGE_MODELS[1]),
                consumeFromWhere=_enum(
                    fields.get("consumeFromWhere"), CONSUME_FROM, CONSUME_FROM[0]
                ),
                subscriptions=tuple(
                    subscription(one) for one in _list(fields.get("subscriptionDataSet"))
                ),
            )
        )
    producers = tuple(
        _text(drop_nulls(item).get("groupName", ""), "groupName")
        for item in _list(raw.get("producerDataSet"))
    )
    return Heartbeat(
        client_id=_text(raw.get("clientID", ""), "clientID"),
        producers=producers,
        consumers=tuple(consumers),
        fingerprint=_number(raw.get("heartbeatFingerprint", 0), "heartbeatFingerprint"),
        is_without_sub=_truth(raw.get("withoutSub")),
    )


# ----------------------------------------------------------------------------------- registration


class Registration(msgspec.Struct, frozen=True):
    """103's body: the topics a broker tells of, and their version."""

    version: DataVersion
    topics: dict[str, TopicConfig]
    filter_servers: tuple[str, ...] = ()


class _TopicTable(msgspec.Struct):
    dataVersion: DataVersion | None = None
    topicConfigTable: dict[str, TopicConfig] | None = None


class _RegisterBody(msgspec.Struct):
    topicConfigSerializeWrapper: _TopicTable | None = None
    filterServerList: list[str] | None = None


_register_decode = msgspec.json.Decoder(_RegisterBody, strict=False).decode
_table_decode = msgspec.json.Decoder(_TopicTable, strict=False).decode


def registration(body: bytes, request_version: int) -> Registration:
    """103's body, plain or compressed: told by its first byte, because 5.x mislabels it."""
    if not body:
        return Registration(DataVersion(), {})
    if body[:1] == b"\x78":
        return _inflated_registration(body, request_version)
    is_old = 0 < request_version < Version.V3_0_11  # then the body is the topic table alone
    try:
        if is_old:
            return _from_table(_table_decode(body), ())
        decoded = _register_decode(body)
        table = decoded.topicConfigSerializeWrapper or _TopicTable()
        return _from_table(table, tuple(decoded.filterServerList or ()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    raw = drop_nulls(load_object(body, "registration"))
    wrapper = raw if is_old else drop_nulls(raw.get("topicConfigSerializeWrapper", {}))
    topics = {
        name: topic_config(one)
        for name, one in drop_nulls(wrapper.get("topicConfigTable", {})).items()
    }
    servers = () if is_old else _texts(raw.get("filterServerList"))
    return Registration(data_version(wrapper.get("dataVersion")), topics, servers)


def _texts(raw: Any) -> tuple[str, ...]:
    return tuple(_text(one, "a filter server") for one in _list(raw))


def _from_table(table: _TopicTable, servers: tuple[str, ...]) -> Registration:
    return Registration(table.dataVersion or DataVersion(), table.topicConfigTable or {}, servers)


def _inflated_registration(body: bytes, request_version: int) -> Registration:
    """zlib of: i32+DataVersion; i32 count, count x i32+`topic readQ writeQ perm FILTER [attrs]`;
    i32+filter servers; and from 5.0 on a mapping section, which is not needed here."""
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(body, MAX_INFLATED_BYTES)
    except zlib.error as error:
        raise BodyError(f"compressed registration: {error}") from None
    if len(raw) == MAX_INFLATED_BYTES:
        raise BodyError(f"compressed registration grows to {MAX_INFLATED_BYTES} bytes or more")
    if not inflate.eof:
        raise BodyError("compressed registration is cut short")
    at = 0

    def number() -> int:
        nonlocal at
        if at + 4 > len(raw):
            raise BodyError("compressed registration ends inside a length")
        value = int.from_bytes(raw[at : at + 4], "big", signed=True)
        at += 4
        return value

    def text() -> bytes:
        nonlocal at
        size = number()
        if size < 0 or at + size > len(raw):
            raise BodyError("compressed registration has a text beyond its end")
        at += size
        return raw[at - size : at]

    version = data_version(fastjson.loads(text()))
    topics: dict[str, TopicConfig] = {}
    for _ in range(max(number(), 0)):
        config = _topic_of_line(text().decode("utf-8", "replace"))
        topics[config.topicName] = config
    servers = fastjson.loads(text()) if at < len(raw) else []
    return Registration(version, topics, _texts(servers))


def _topic_of_line(line: str) -> TopicConfig:
    """`topic readQ writeQ perm FILTER [attributes as JSON]`"""
    words = line.split(" ", 5)
    if len(words) < 5:
        raise BodyError(f"compressed registration has a bad topic {line[:80]!r}")
    name, read, write, perm, kind = words[:5]
    fields: dict[str, Any] = {
        "topicName": name,
        "readQueueNums": read,
        "writeQueueNums": write,
        "perm": perm,
        "topicFilterType": kind,
    }
    if len(words) > 5 and words[5]:
        fields["attributes"] = fastjson.loads(words[5].encode()) or {}
    return convert(fields, TopicConfig, f"compressed registration, topic {name[:80]!r}")


def encode_registration(registered: Registration) -> bytes:
    """103's body as 4.9 and 5.x send it, not compressed."""
    return msgspec.json.encode(
        {
            "filterServerList": list(registered.filter_servers),
            "topicConfigSerializeWrapper": {
                "dataVersion": registered.version,
                "topicConfigTable": registered.topics,
            },
        }
    )


# ------------------------------------------------------------------------------------------- misc


def queue_key(topic: str, broker: str, queue_id: int) -> fastjson.ObjectKey:
    """A queue as the key of a JSON map, in fastjson's field order."""
    return fastjson.ObjectKey(brokerName=broker, queueId=queue_id, topic=topic)


def parse_properties_text(body: bytes) -> dict[str, str]:
    """Java-properties text (`k=v` lines, # comments) as 25 and 318 carry it."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise BodyError("configuration text is not UTF-8") from None
    found: dict[str, str] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        key, mark, value = line.partition("=")
        if not mark:
            key, _, value = line.partition(":")
        found[key.strip()] = value.strip()
    return found
