"""Which fields a header has, and how text becomes their values.

The table is the wire reference's sections 2.1 to 2.4 in its own notation: s text, i 32 bits,
l 64 bits, b boolean; `!` required, `?` optional. Fields that the reference requires but some real
client leaves out are `~`: they must parse when absent. A field that is not listed must not exist.
"""

from __future__ import annotations

import msgspec
import pytest

from cometmq.errors import HeaderError
from cometmq.wire import headers as h

TABLE: list[tuple[str, type[msgspec.Struct], str]] = [
    # client -> broker
    (
        "10 324",
        h.SendHeader,
        "producerGroup s! topic s! defaultTopic s! defaultTopicQueueNums i! queueId i! sysFlag i! "
        "bornTimestamp l! flag i! properties s? reconsumeTimes i? unitMode b? maxReconsumeTimes i? "
        "batch b? bname s?",
    ),
    (
        "10 response",
        h.SendResponse,
        "msgId s! queueId i! queueOffset l! transactionId s? batchUniqId s? recallHandle s?",
    ),
    (
        "11 361",
        h.PullHeader,
        "consumerGroup s! topic s! queueId i! queueOffset l! maxMsgNums i! sysFlag i! "
        "commitOffset l~ suspendTimeoutMillis l~ subscription s? subVersion l~ expressionType s? "
        "maxMsgBytes i? withExpired b?",
    ),
    (
        "11 response",
        h.PullResponse,
        "suggestWhichBrokerId l! nextBeginOffset l! minOffset l! maxOffset l! offsetDelta l? "
        "topicSysFlag i? groupSysFlag i? forbiddenType i?",
    ),
    (
        "12",
        h.QueryMessageHeader,
        "topic s! key s! maxNum i! beginTimestamp l! endTimestamp l!",
    ),
    (
        "12 response",
        h.QueryMessageResponse,
        "indexLastUpdateTimestamp l! indexLastUpdatePhyoffset l!",
    ),
    (
        "14",
        h.QueryConsumerOffsetHeader,
        "consumerGroup s! topic s! queueId i! setZeroIfNotFound b?",
    ),
    (
        "15",
        h.UpdateConsumerOffsetHeader,
        "consumerGroup s! topic s! queueId i! commitOffset l!",
    ),
    ("29", h.SearchOffsetHeader, "topic s! queueId i! timestamp l! boundaryType s?"),
    ("30 31 32", h.QueueHeader, "topic s! queueId i!"),
    ("14 29 30 31 response", h.OffsetResponse, "offset l!"),
    ("32 response", h.TimestampResponse, "timestamp l!"),
    ("33", h.ViewMessageHeader, "offset l! topic s?"),
    ("35", h.UnregisterClientHeader, "clientID s! producerGroup s? consumerGroup s?"),
    (
        "36",
        h.SendBackHeader,
        "offset l! group s! delayLevel i! originMsgId s? originTopic s? unitMode b? "
        "maxReconsumeTimes i?",
    ),
    (
        "37",
        h.EndTransactionHeader,
        "topic s? producerGroup s! tranStateTableOffset l! commitLogOffset l! commitOrRollback i! "
        "fromTransactionCheck b? msgId s~ transactionId s?",
    ),
    ("9001", h.EndProducersHeader, "topic s! writer s!"),
    ("370", h.RecallHeader, "producerGroup s? topic s! recallHandle s!"),
    (
        "200050",
        h.PopHeader,
        "consumerGroup s! topic s! queueId i! maxMsgNums i! invisibleTime l! pollTime l! "
        "initMode i! bornTime l? expType s? exp s? order b? attemptId s?",
    ),
    ("200051", h.AckHeader, "consumerGroup s! topic s! queueId i! extraInfo s! offset l!"),
    (
        "200053",
        h.ChangeInvisibleHeader,
        "consumerGroup s! topic s! queueId i! extraInfo s! offset l! invisibleTime l! suspend b?",
    ),
    ("200052", h.PeekHeader, "consumerGroup s! topic s! queueId i! maxMsgNums i!"),
    (
        "200054",
        h.NotificationHeader,
        "consumerGroup s! topic s! queueId i! pollTime l! bornTime l? order b? attemptId s?",
    ),
    ("200055", h.PollingInfoHeader, "consumerGroup s! topic s! queueId i!"),
    ("38 40 203", h.ConsumerGroupHeader, "consumerGroup s!"),
    (
        "17",
        h.CreateTopicHeader,
        "topic s! defaultTopic s~ readQueueNums i! writeQueueNums i! perm i! topicFilterType s~ "
        "topicSysFlag i? order b~ attributes s? force b?",
    ),
    ("323", h.ResumeChecksHeader, "topic s? msgId s!"),
    # broker -> client
    (
        "39",
        h.CheckTransactionHeader,
        "topic s? tranStateTableOffset l! commitLogOffset l! msgId s? transactionId s? "
        "offsetMsgId s? bname s?",
    ),
    (
        "220 222",
        h.ResetOffsetHeader,
        "topic s! group s! timestamp l~ isForce b~ queueId i? offset l?",
    ),
    ("221 223", h.ConsumerStatusHeader, "topic s! group s! clientAddr s?"),
    (
        "307 309",
        h.ClientOfGroupHeader,
        "consumerGroup s! clientId s~ jstackEnable b? msgId s? brokerName s? topic s? "
        "topicSysFlag i? groupSysFlag i?",
    ),
    (
        "326",
        h.PushReplyHeader,
        "producerGroup s! topic s! defaultTopic s! defaultTopicQueueNums i! queueId i! sysFlag i! "
        "bornTimestamp l! flag i! properties s? reconsumeTimes i? unitMode b? bornHost s! "
        "storeHost s! storeTimestamp l!",
    ),
    # anyone -> name server
    ("105", h.RouteHeader, "topic s! acceptStandardJsonOnly b?"),
    (
        "103",
        h.RegisterBrokerHeader,
        "brokerName s! brokerAddr s! clusterName s! haServerAddr s~ brokerId l! "
        "heartbeatTimeoutMillis l? enableActingMaster b? compressed b? bodyCrc32 i?",
    ),
    ("103 response", h.RegisterBrokerResponse, "haServerAddr s? masterAddr s?"),
    ("104 322", h.BrokerIdentityHeader, "brokerName s! brokerAddr s! clusterName s! brokerId l!"),
    ("322 response", h.DataVersionResponse, "changed b!"),
    (
        "904",
        h.BrokerHeartbeatHeader,
        "clusterName s! brokerAddr s! brokerName s! brokerId l? epoch i? maxOffset l? "
        "confirmOffset l? heartbeatTimeoutMills l? electionPriority i?",
    ),
    ("901", h.MemberGroupHeader, "clusterName s! brokerName s!"),
    ("205 327", h.BrokerNameHeader, "brokerName s!"),
    ("205 response", h.WipedResponse, "wipeTopicCount i!"),
    ("327 response", h.AddedResponse, "addTopicCount i!"),
    ("216 217", h.TopicInNameServerHeader, "topic s! clusterName s?"),
    ("100", h.PutKVHeader, "namespace s! key s! value s!"),
    ("101 102", h.KVHeader, "namespace s! key s!"),
    ("101 response", h.KVResponse, "value s?"),
    ("219", h.NamespaceHeader, "namespace s!"),
    ("224", h.ClusterHeader, "cluster s!"),
    # admin -> broker
    ("202 215 300 351", h.TopicHeader, "topic s!"),
    ("204", h.ProducerGroupHeader, "producerGroup s!"),
    ("207", h.GroupNameHeader, "groupName s! cleanOffset b?"),
    ("208", h.ConsumeStatsHeader, "consumerGroup s! topic s? topicList s?"),
    ("303", h.TimeSpanHeader, "topic s! group s!"),
    ("314", h.CloneOffsetHeader, "srcGroup s! destGroup s! topic s? offline b?"),
    ("315", h.StatsHeader, "statsName s! statsKey s!"),
    ("321", h.QueryConsumeQueueHeader, "topic s! queueId i! index l! count i! consumerGroup s?"),
    ("343 352", h.GroupHeader, "group s!"),
    ("345", h.SubscriptionHeader, "group s! topic s?"),
]
SAMPLES = {"s": "text", "i": "2147483647", "l": "9223372036854775807", "b": "true"}
VALUES = {"s": "text", "i": 2147483647, "l": 9223372036854775807, "b": True}


def fields(text: str) -> list[tuple[str, str, str]]:
    words = text.split()
    return [(name, kind[0], kind[1]) for name, kind in zip(words[::2], words[1::2], strict=True)]


CASES = [pytest.param(kind, fields(text), id=code) for code, kind, text in TABLE]
Fields = list[tuple[str, str, str]]


@pytest.mark.parametrize(("kind", "wanted"), CASES)
def test_header_has_exactly_the_fields_of_the_reference(
    kind: type[msgspec.Struct], wanted: Fields
) -> None:
    assert {field.name for field in msgspec.structs.fields(kind)} == {name for name, _, _ in wanted}


@pytest.mark.parametrize(("kind", "wanted"), CASES)
def test_header_reads_and_writes_every_field(kind: type[msgspec.Struct], wanted: Fields) -> None:
    ext = {name: SAMPLES[letter] for name, letter, _ in wanted}
    header = h.parse(kind, {**ext, "ns": "x", "lo": "true", "AccessKey": "k"})
    assert {name: getattr(header, name) for name, _, _ in wanted} == {
        name: VALUES[letter] for name, letter, _ in wanted
    }
    assert h.to_ext(header) == ext


@pytest.mark.parametrize(("kind", "wanted"), CASES)
def test_header_needs_the_required_fields_and_no_other(
    kind: type[msgspec.Struct], wanted: Fields
) -> None:
    required = {name: SAMPLES[letter] for name, letter, mark in wanted if mark == "!"}
    h.parse(kind, required)
    for name in required:
        with pytest.raises(HeaderError, match=f"'{name}' is missing"):
            h.parse(kind, {key: value for key, value in required.items() if key != name})


@pytest.mark.parametrize(("kind", "wanted"), CASES)
def test_header_keeps_numbers_to_their_width(kind: type[msgspec.Struct], wanted: Fields) -> None:
    ext = {name: SAMPLES[letter] for name, letter, _ in wanted}
    for name, letter, _ in wanted:
        if letter in "il":
            bits = 31 if letter == "i" else 63
            assert getattr(h.parse(kind, {**ext, name: str(-(2**bits))}), name) == -(2**bits)
            for number in (2**bits, -(2**bits) - 1):
                with pytest.raises(HeaderError, match=f"'{name}' is out of range"):
                    h.parse(kind, {**ext, name: str(number)})


def test_every_header_is_in_the_table() -> None:
    listed = {kind for _, kind, _ in TABLE}
    defined = {
        one
        for one in vars(h).values()
        if isinstance(one, type)
        and issubclass(one, msgspec.Struct)
        and one.__module__ == h.__name__
    }
    assert defined - {h.Header} == listed


# -------------------------------------------------------------------------------- reading of text

ROUTE = {"topic": "T"}
QUEUE = {"topic": "T", "queueId": "3"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("True", True),
        ("TRUE", True),
        ("tRuE", True),
        ("false", False),
        ("1", False),
        ("yes", False),
        (" true", False),
        ("", False),
    ],
)
def test_only_true_in_any_case_is_true(text: str, value: bool) -> None:
    found = h.parse(h.RouteHeader, {**ROUTE, "acceptStandardJsonOnly": text})
    assert found.acceptStandardJsonOnly is value


def test_empty_boolean_takes_its_default() -> None:
    ext = {"consumerGroup": "g", "topic": "t", "queueId": "0", "setZeroIfNotFound": ""}
    assert h.parse(h.QueryConsumerOffsetHeader, ext).setZeroIfNotFound is True


def test_empty_text_is_a_text() -> None:
    assert h.parse(h.RouteHeader, {"topic": ""}).topic == ""
    found = h.parse(h.UnregisterClientHeader, {"clientID": "c", "producerGroup": ""})
    assert (found.producerGroup, found.consumerGroup) == ("", None)


@pytest.mark.parametrize("text", ["x", "1.5", "0x10", "--1", "1e3", "9" * 5000, "\x00", "3 4"])
def test_what_is_not_a_number_names_the_field(text: str) -> None:
    with pytest.raises(HeaderError, match="'queueId' is not a number") as caught:
        h.parse(h.QueueHeader, {**QUEUE, "queueId": text})
    assert len(str(caught.value)) < 200, "a hostile value must not fill the log"


def test_missing_and_empty_numbers_name_the_field() -> None:
    with pytest.raises(HeaderError, match="'queueId' is missing"):
        h.parse(h.QueueHeader, ROUTE)
    with pytest.raises(HeaderError, match="'queueId' is missing"):
        h.parse(h.QueueHeader, {**QUEUE, "queueId": ""})


def test_empty_optional_number_takes_its_default() -> None:
    ext = {"offset": "1", "group": "g", "delayLevel": "0", "maxReconsumeTimes": ""}
    assert h.parse(h.SendBackHeader, ext).maxReconsumeTimes is None
    ext = {"topic": "t", "group": "g", "queueId": ""}
    assert h.parse(h.ResetOffsetHeader, ext).queueId == -1


def test_none_is_left_out_and_booleans_are_java_words() -> None:
    sent = h.to_ext(h.SendBackHeader(offset=5, group="g", delayLevel=-1, unitMode=False))
    assert sent == {"offset": "5", "group": "g", "delayLevel": "-1", "unitMode": "false"}
    assert h.to_ext(h.DataVersionResponse(changed=True)) == {"changed": "true"}
    assert h.to_ext(h.Header()) == {}


# ------------------------------------------------------------------------------------ one letters

LETTERS = {
    "a": "group",
    "b": "topic",
    "c": "TBW102",
    "d": "4",
    "e": "-1",
    "f": "769",
    "g": "1700000000000",
    "h": "0",
    "i": "TAGS\x01a\x02",
    "j": "0",
    "k": "false",
    "l": "16",
    "m": "true",
    "n": "broker-a",
}
LONG = {
    "producerGroup": "group",
    "topic": "topic",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "4",
    "queueId": "-1",
    "sysFlag": "769",
    "bornTimestamp": "1700000000000",
    "flag": "0",
    "properties": "TAGS\x01a\x02",
    "reconsumeTimes": "0",
    "unitMode": "false",
    "maxReconsumeTimes": "16",
    "batch": "true",
    "bname": "broker-a",
}


def test_both_forms_of_a_send_header_mean_the_same() -> None:
    header = h.parse_send_v2({**LETTERS, "ReqT": "0", "z": "?"})
    assert header == h.parse(h.SendHeader, LONG)
    assert (header.queueId, header.batch, header.properties) == (-1, True, "TAGS\x01a\x02")
    assert h.send_v2_ext(header) == LETTERS
    assert h.to_ext(header) == LONG


def test_long_names_do_not_count_in_the_letter_form() -> None:
    with pytest.raises(HeaderError):
        h.parse_send_v2(LONG)
    with pytest.raises(HeaderError):
        h.parse(h.SendHeader, LETTERS)


@pytest.mark.parametrize("letter", "abcdefgh")
def test_missing_letter_is_named_with_its_meaning(letter: str) -> None:
    ext = {key: value for key, value in LETTERS.items() if key != letter}
    with pytest.raises(HeaderError, match=rf"'{letter}' \({h.SEND_LETTERS[letter]}\) is missing"):
        h.parse_send_v2(ext)


def test_smallest_send_header() -> None:
    header = h.parse_send_v2({key: LETTERS[key] for key in "abcdefgh"})
    assert (header.properties, header.reconsumeTimes, header.maxReconsumeTimes) == (None,) * 3
    assert (header.unitMode, header.batch, header.bname) == (False, False, None)
