# ruff: noqa: N815 - fields carry the wire's own names
"""One Struct per request and response header, with the wire's own field names.

Owns: which extFields a request carries and their types. On the wire every value is text; `parse`
reads it as Java does (an empty number or boolean counts as absent, an empty text is a text, only
"true" in any case is true) and says which field is missing or is not a number of its width;
`to_ext` writes text again and leaves None out. One rule: a field without a default is required.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

from cometmq.errors import HeaderError

T = TypeVar("T", bound=msgspec.Struct)

Int32: TypeAlias = int
"""A number that has 32 bits on the wire or in a record; `int` stands for 64 bits."""

_KINDS: dict[str, tuple[type, int]] = {
    "int": (int, 2**63),
    "Int32": (int, 2**31),
    "str": (str, 0),
    "bool": (bool, 0),
}
_Plan = tuple[tuple[str, str, type, int, bool, Any], ...]
"""Per field: its key on the wire, its name here, type, limit of a number, required?, default."""

_plans: dict[type, _Plan] = {}


def _plan(kind: type[msgspec.Struct]) -> _Plan:
    found = _plans.get(kind)
    if found is None:
        steps = []
        for field in msgspec.structs.fields(kind):
            want, limit = _KINDS[str(kind.__annotations__[field.name]).split(" ")[0]]
            steps.append((field.name, field.name, want, limit, field.required, field.default))
        found = _plans[kind] = tuple(steps)
    return found


def parse(kind: type[T], ext: dict[str, str]) -> T:
    """extFields to a header; HeaderError names the field that is missing or malformed."""
    return _parse(kind, _plan(kind), ext)


def _parse(kind: type[T], plan: _Plan, ext: dict[str, str]) -> T:
    values: list[Any] = []
    for name, _, want, limit, required, default in plan:
        raw = ext.get(name)
        if not raw:
            if raw is not None and want is str:
                values.append(raw)
            elif required:
                raise HeaderError(f"header field {_known_as(name)} is missing")
            else:
                values.append(default)
        elif want is str:
            values.append(raw)
        elif want is int:
            try:
                number = int(raw)
            except ValueError:
                raise _bad_number(name, "is not a number", raw) from None
            if not -limit <= number < limit:
                raise _bad_number(name, "is out of range", raw)
            values.append(number)
        else:
            values.append(raw.lower() == "true")
    return kind(*values)


def _bad_number(name: str, why: str, raw: str) -> HeaderError:
    return HeaderError(f"header field {_known_as(name)} {why}: {raw[:40]!r}")


def _known_as(name: str) -> str:
    long = SEND_LETTERS.get(name)
    return f"{name!r} ({long})" if long else repr(name)


def to_ext(header: msgspec.Struct) -> dict[str, str]:
    """A header to extFields: text only, None left out."""
    return _to_ext(header, _plan(type(header)))


def _to_ext(header: msgspec.Struct, plan: _Plan) -> dict[str, str]:
    ext: dict[str, str] = {}
    for name, field, want, _, _, _ in plan:
        value = getattr(header, field)
        if value is None:
            continue
        if want is bool:
            ext[name] = "true" if value else "false"
        else:
            ext[name] = value if want is str else str(value)
    return ext


class Header(msgspec.Struct, gc=False, frozen=True):
    """A request or response that carries no fields of its own."""


# ------------------------------------------------------------------------------- client -> broker


class SendHeader(msgspec.Struct, gc=False, frozen=True):
    """10 and 324 by these names; 310, 320 and 325 by the letters of SEND_LETTERS."""

    producerGroup: str
    topic: str
    defaultTopic: str
    defaultTopicQueueNums: Int32
    queueId: Int32
    sysFlag: Int32
    bornTimestamp: int
    flag: Int32
    properties: str | None = None
    reconsumeTimes: Int32 | None = None
    unitMode: bool = False
    maxReconsumeTimes: Int32 | None = None
    batch: bool = False
    bname: str | None = None


SEND_LETTERS = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
    "n": "bname",
}


def _plan_of_letters() -> _Plan:
    letters = {name: letter for letter, name in SEND_LETTERS.items()}
    return tuple((letters[step[0]], *step[1:]) for step in _plan(SendHeader))


_SEND_V2 = _plan_of_letters()


def parse_send_v2(ext: dict[str, str]) -> SendHeader:
    """The one-letter form of a send header."""
    return _parse(SendHeader, _SEND_V2, ext)


def send_v2_ext(header: SendHeader) -> dict[str, str]:
    """A send header to its one-letter form."""
    return _to_ext(header, _SEND_V2)


class SendResponse(msgspec.Struct, gc=False, frozen=True):
    msgId: str
    queueId: Int32
    queueOffset: int
    transactionId: str | None = None
    batchUniqId: str | None = None
    recallHandle: str | None = None


class PullHeader(msgspec.Struct, gc=False, frozen=True):
    """11 and 361."""

    consumerGroup: str
    topic: str
    queueId: Int32
    queueOffset: int
    maxMsgNums: Int32
    sysFlag: Int32
    commitOffset: int = 0
    suspendTimeoutMillis: int = 0
    subVersion: int = 0
    subscription: str | None = None
    expressionType: str | None = None
    maxMsgBytes: Int32 | None = None
    withExpired: bool | None = None
    """CometMQ's own: also what is past its TTL, so that a range of offsets always is the same."""


class PullResponse(msgspec.Struct, gc=False, frozen=True):
    suggestWhichBrokerId: int
    nextBeginOffset: int
    minOffset: int
    maxOffset: int
    topicSysFlag: Int32 | None = None
    groupSysFlag: Int32 | None = None
    forbiddenType: Int32 | None = None
    offsetDelta: int | None = None


class QueryMessageHeader(msgspec.Struct, gc=False, frozen=True):
    """12; `_UNIQUE_KEY_QUERY` is read from extFields by the handler."""

    topic: str
    key: str
    maxNum: Int32
    beginTimestamp: int
    endTimestamp: int


class QueryMessageResponse(msgspec.Struct, gc=False, frozen=True):
    indexLastUpdateTimestamp: int
    indexLastUpdatePhyoffset: int


class QueryConsumerOffsetHeader(msgspec.Struct, gc=False, frozen=True):
    consumerGroup: str
    topic: str
    queueId: Int32
    setZeroIfNotFound: bool = True


class UpdateConsumerOffsetHeader(msgspec.Struct, gc=False, frozen=True):
    consumerGroup: str
    topic: str
    queueId: Int32
    commitOffset: int


class SearchOffsetHeader(msgspec.Struct, gc=False, frozen=True):
    topic: str
    queueId: Int32
    timestamp: int
    boundaryType: str | None = None


class QueueHeader(msgspec.Struct, gc=False, frozen=True):
    """30, 31 and 32."""

    topic: str
    queueId: Int32


class OffsetResponse(msgspec.Struct, gc=False, frozen=True):
    offset: int


class TimestampResponse(msgspec.Struct, gc=False, frozen=True):
    timestamp: int


class ViewMessageHeader(msgspec.Struct, gc=False, frozen=True):
    offset: int
    topic: str | None = None


class UnregisterClientHeader(msgspec.Struct, gc=False, frozen=True):
    clientID: str
    producerGroup: str | None = None
    consumerGroup: str | None = None


class SendBackHeader(msgspec.Struct, gc=False, frozen=True):
    """36."""

    offset: int
    group: str
    delayLevel: Int32
    originMsgId: str | None = None
    originTopic: str | None = None
    unitMode: bool = False
    maxReconsumeTimes: Int32 | None = None


class PopHeader(msgspec.Struct, gc=False, frozen=True):
    """200050."""

    consumerGroup: str
    topic: str
    queueId: Int32
    maxMsgNums: Int32
    invisibleTime: int
    pollTime: int
    initMode: Int32
    bornTime: int = 0
    expType: str | None = None
    exp: str | None = None
    order: bool = False
    attemptId: str | None = None


class AckHeader(msgspec.Struct, gc=False, frozen=True):
    """200051."""

    consumerGroup: str
    topic: str
    queueId: Int32
    extraInfo: str
    offset: int


class ChangeInvisibleHeader(msgspec.Struct, gc=False, frozen=True):
    """200053."""

    consumerGroup: str
    topic: str
    queueId: Int32
    extraInfo: str
    offset: int
    invisibleTime: int
    suspend: bool = False


class PeekHeader(msgspec.Struct, gc=False, frozen=True):
    """200052."""

    consumerGroup: str
    topic: str
    queueId: Int32
    maxMsgNums: Int32


class NotificationHeader(msgspec.Struct, gc=False, frozen=True):
    """200054."""

    consumerGroup: str
    topic: str
    queueId: Int32
    pollTime: int
    bornTime: int = 0
    order: bool = False
    attemptId: str | None = None


class PollingInfoHeader(msgspec.Struct, gc=False, frozen=True):
    """200055."""

    consumerGroup: str
    topic: str
    queueId: Int32


class EndProducersHeader(msgspec.Struct, gc=False, frozen=True):
    """9001, CometMQ's own: `writer` is what the names of its producers begin with."""

    topic: str
    writer: str


class RecallHeader(msgspec.Struct, gc=False, frozen=True):
    """370."""

    topic: str
    recallHandle: str
    producerGroup: str | None = None


class EndTransactionHeader(msgspec.Struct, gc=False, frozen=True):
    producerGroup: str
    tranStateTableOffset: int
    commitLogOffset: int
    commitOrRollback: Int32
    msgId: str | None = None
    transactionId: str | None = None
    fromTransactionCheck: bool = False
    topic: str | None = None


class ConsumerGroupHeader(msgspec.Struct, gc=False, frozen=True):
    """38, 40 and 203."""

    consumerGroup: str


class ProducerGroupHeader(msgspec.Struct, gc=False, frozen=True):
    """204."""

    producerGroup: str


class CreateTopicHeader(msgspec.Struct, gc=False, frozen=True):
    """17."""

    topic: str
    readQueueNums: Int32
    writeQueueNums: Int32
    perm: Int32
    defaultTopic: str | None = None
    topicFilterType: str | None = "SINGLE_TAG"
    topicSysFlag: Int32 = 0
    order: bool = False
    attributes: str | None = None
    force: bool = False


# ------------------------------------------------------------------------------- broker -> client


class CheckTransactionHeader(msgspec.Struct, gc=False, frozen=True):
    """39."""

    tranStateTableOffset: int
    commitLogOffset: int
    topic: str | None = None
    msgId: str | None = None
    transactionId: str | None = None
    offsetMsgId: str | None = None
    bname: str | None = None


class ResetOffsetHeader(msgspec.Struct, gc=False, frozen=True):
    """220 and 222."""

    topic: str
    group: str
    timestamp: int = -1
    isForce: bool = False
    queueId: Int32 = -1
    offset: int | None = None


class ConsumerStatusHeader(msgspec.Struct, gc=False, frozen=True):
    """221 and 223."""

    topic: str
    group: str
    clientAddr: str | None = None


class ResumeChecksHeader(msgspec.Struct, gc=False, frozen=True):
    """323."""

    msgId: str
    topic: str | None = None


class ClientOfGroupHeader(msgspec.Struct, gc=False, frozen=True):
    """307 and 309, forwarded by the broker to one client."""

    consumerGroup: str
    clientId: str | None = None
    jstackEnable: bool = False
    msgId: str | None = None
    brokerName: str | None = None
    topic: str | None = None
    topicSysFlag: Int32 | None = None
    groupSysFlag: Int32 | None = None


class PushReplyHeader(msgspec.Struct, gc=False, frozen=True):
    """326."""

    producerGroup: str
    topic: str
    defaultTopic: str
    defaultTopicQueueNums: Int32
    queueId: Int32
    sysFlag: Int32
    bornTimestamp: int
    flag: Int32
    bornHost: str
    storeHost: str
    storeTimestamp: int
    properties: str | None = None
    reconsumeTimes: Int32 | None = None
    unitMode: bool = False


# --------------------------------------------------------------------------- anyone -> name server


class RouteHeader(msgspec.Struct, gc=False, frozen=True):
    """105."""

    topic: str
    acceptStandardJsonOnly: bool = False


class RegisterBrokerHeader(msgspec.Struct, gc=False, frozen=True):
    """103."""

    brokerName: str
    brokerAddr: str
    clusterName: str
    brokerId: int
    haServerAddr: str | None = None
    heartbeatTimeoutMillis: int | None = None
    enableActingMaster: bool | None = None
    compressed: bool = False
    bodyCrc32: Int32 = 0


class RegisterBrokerResponse(msgspec.Struct, gc=False, frozen=True):
    haServerAddr: str | None = None
    masterAddr: str | None = None


class BrokerIdentityHeader(msgspec.Struct, gc=False, frozen=True):
    """104 and 322."""

    brokerName: str
    brokerAddr: str
    clusterName: str
    brokerId: int


class BrokerHeartbeatHeader(msgspec.Struct, gc=False, frozen=True):
    """904."""

    clusterName: str
    brokerAddr: str
    brokerName: str
    brokerId: int | None = None
    heartbeatTimeoutMills: int | None = None
    epoch: Int32 | None = None
    maxOffset: int | None = None
    confirmOffset: int | None = None
    electionPriority: Int32 | None = None


class DataVersionResponse(msgspec.Struct, gc=False, frozen=True):
    changed: bool


class BrokerNameHeader(msgspec.Struct, gc=False, frozen=True):
    """205 and 327."""

    brokerName: str


class MemberGroupHeader(msgspec.Struct, gc=False, frozen=True):
    """901."""

    clusterName: str
    brokerName: str


class WipedResponse(msgspec.Struct, gc=False, frozen=True):
    wipeTopicCount: Int32


class AddedResponse(msgspec.Struct, gc=False, frozen=True):
    addTopicCount: Int32


class TopicInNameServerHeader(msgspec.Struct, gc=False, frozen=True):
    """216 and 217."""

    topic: str
    clusterName: str | None = None


class KVHeader(msgspec.Struct, gc=False, frozen=True):
    """101 and 102."""

    namespace: str
    key: str


class PutKVHeader(msgspec.Struct, gc=False, frozen=True):
    """100."""

    namespace: str
    key: str
    value: str


class KVResponse(msgspec.Struct, gc=False, frozen=True):
    value: str | None = None


class NamespaceHeader(msgspec.Struct, gc=False, frozen=True):
    """219."""

    namespace: str


class ClusterHeader(msgspec.Struct, gc=False, frozen=True):
    """224."""

    cluster: str


# -------------------------------------------------------------------------------- admin -> broker


class TopicHeader(msgspec.Struct, gc=False, frozen=True):
    """202, 215, 300 and 351."""

    topic: str


class GroupNameHeader(msgspec.Struct, gc=False, frozen=True):
    """207."""

    groupName: str
    cleanOffset: bool = False


class GroupHeader(msgspec.Struct, gc=False, frozen=True):
    """343 and 352."""

    group: str


class ConsumeStatsHeader(msgspec.Struct, gc=False, frozen=True):
    """208."""

    consumerGroup: str
    topic: str | None = None
    topicList: str | None = None


class SubscriptionHeader(msgspec.Struct, gc=False, frozen=True):
    """345."""

    group: str
    topic: str | None = None


class TimeSpanHeader(msgspec.Struct, gc=False, frozen=True):
    """303."""

    topic: str
    group: str


class CloneOffsetHeader(msgspec.Struct, gc=False, frozen=True):
    """314."""

    srcGroup: str
    destGroup: str
    topic: str | None = None
    offline: bool = False


class StatsHeader(msgspec.Struct, gc=False, frozen=True):
    """315."""

    statsName: str
    statsKey: str


class QueryConsumeQueueHeader(msgspec.Struct, gc=False, frozen=True):
    """321."""

    topic: str
    queueId: Int32
    index: int
    count: Int32
    consumerGroup: str | None = None
