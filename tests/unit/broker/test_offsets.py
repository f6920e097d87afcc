"""Consumer offsets: asked, told, kept on disk, reset by an operator; and the clock of queues."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cometmq.wire import fastjson, record
from cometmq.wire.codes import RequestCode as C

from .conftest import Benches
from .harness import HOLD, NOW_MS, PULL, Bench, bodies_of, offsets_of

FILE = "config/consumerOffset.json"


@pytest.fixture
def bench(benches: Benches) -> Bench:
    """T has ten messages in queue 0; the group G exists."""
    made = benches()
    ready(made)
    return made


def ready(bench: Bench) -> None:
    bench.create_topic()
    for number in range(10):
        bench.sent(body=b"%d" % number)
    bench.pull(offset=10)


def saved_offsets(bench: Bench) -> Any:
    return fastjson.loads(bench.files.read(FILE) or b"{}").get("offsetTable")


# ---------------------------------------------------------------------------------- ask and commit


def test_a_committed_offset_is_found_again(bench: Bench) -> None:
    assert bench.commit(7).code == 0
    answer = bench.offset_of()
    assert (answer.code, answer.ext) == (0, {"offset": "7"})


def test_no_offset_is_22(bench: Bench) -> None:
    answer = bench.offset_of()
    assert answer.code == 22
    assert "'G'" in str(answer.remark)


def asked(bench: Bench, queue: int = 0, group: str = "New") -> Any:
    """As 4.9 asks: without setZeroIfNotFound."""
    ext = {"consumerGroup": group, "topic": "T", "queueId": queue}
    return bench.ask(C.QUERY_CONSUMER_OFFSET, ext)


def test_a_new_group_on_a_young_queue_starts_at_its_beginning(bench: Bench) -> None:
    assert asked(bench).ext == {"offset": "0"}


def test_a_new_group_on_an_old_queue_has_no_offset(benches: Benches) -> None:
    bench = benches(in_memory_bytes=500)
    ready(bench)
    assert asked(bench).code == 22


def test_a_young_queue_in_an_old_log_is_young(benches: Benches) -> None:
    bench = benches(in_memory_bytes=500)
    ready(bench)
    bench.sent(queue=1)
    assert asked(bench, queue=1).ext == {"offset": "0"}


def test_a_oneway_commit_counts_and_is_not_answered(bench: Bench) -> None:
    ext = {"consumerGroup": "G", "topic": "T", "queueId": 0, "commitOffset": 4}
    assert bench.answer(bench.post(C.UPDATE_CONSUMER_OFFSET, ext, flag=2)) is None
    assert bench.offset_of().ext["offset"] == "4"


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        ({"consumerGroup": "Nobody"}, 26, "'Nobody'"),
        ({"topic": "Nope"}, 17, "'Nope'"),
        ({"queueId": 4}, 29, "4 queues"),
        ({"queueId": -1}, 29, "queue -1"),
        ({"commitOffset": -1}, 29, "offset -1"),
        ({"commitOffset": ""}, 29, "commitOffset"),
    ],
)
def test_a_commit_that_can_not_be_is_refused(
    bench: Bench, change: dict[str, Any], code: int, word: str
) -> None:
    ext = {"consumerGroup": "G", "topic": "T", "queueId": 0, "commitOffset": 4} | change
    before = bench.state()
    answer = bench.ask(C.UPDATE_CONSUMER_OFFSET, ext)
    assert answer.code == code
    assert word in str(answer.remark)
    assert bench.state() == before


def test_a_pull_may_carry_a_commit(bench: Bench) -> None:
    bench.pull(offset=5, flags=PULL | 1, commit=5)
    assert bench.offset_of().ext["offset"] == "5"


def test_a_pull_without_the_flag_commits_nothing(bench: Bench) -> None:
    bench.pull(offset=5, commit=5)
    assert bench.offset_of().code == 22


def test_a_pull_with_a_negative_commit_commits_nothing(bench: Bench) -> None:
    bench.commit(5)
    assert bench.pull(offset=5, flags=PULL | 1, commit=-1).code == 0
    assert bench.offset_of().ext["offset"] == "5"


def test_a_refused_pull_commits_nothing(bench: Bench) -> None:
    assert bench.pull(queue=99, flags=PULL | 1, commit=5).code == 29
    assert bench.broker.offsets.table == {}


def test_an_offset_that_moves_back_is_logged_and_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.commit(7)
    with caplog.at_level(logging.INFO, "cometmq.broker"):
        bench.commit(8)
        assert caplog.text == ""
        bench.commit(3)
    assert bench.offset_of().ext["offset"] == "3"
    for word in ("group=G", "topic=T", "queue=0", "before=8", "after=3", "10.1.1.1:50001"):
        assert word in caplog.text
    assert bench.runtime()["cometmqOffsetsMovedBack"] == "1"


# ------------------------------------------------------------------------------------------- disk


def test_offsets_are_saved_after_five_seconds(bench: Bench) -> None:
    bench.commit(7)
    bench.advance(4_999)
    assert saved_offsets(bench) is None
    bench.advance(1)
    assert saved_offsets(bench) == {"T@G": {"0": 7}}


def test_a_save_carries_all_changes_up_to_then(bench: Bench) -> None:
    bench.commit(1)
    bench.advance(3_000)
    bench.commit(2)
    bench.advance(2_000)
    assert saved_offsets(bench) == {"T@G": {"0": 2}}


def test_changes_during_a_save_are_saved_next(bench: Bench) -> None:
    bench.advance(1)
    bench.keeps_saves = True
    bench.commit(1)
    bench.advance(5_000)
    bench.commit(2)
    bench.advance(30_000)
    assert [one.name for one in bench.kept_saves] == [FILE], "one save at a time"
    bench.save()
    bench.keeps_saves = False
    bench.advance(5_000)
    assert saved_offsets(bench) == {"T@G": {"0": 2}}


def test_a_failed_save_is_tried_again_and_said_aloud(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.save_failure = "no space left"
    bench.commit(7)
    bench.advance(5_000)
    assert "no space left" in caplog.text and FILE in caplog.text
    bench.save_failure = None
    bench.advance(1_000)
    assert saved_offsets(bench) == {"T@G": {"0": 7}}


def test_offsets_are_saved_on_stop_and_read_again(benches: Benches) -> None:
    bench = benches()
    ready(bench)
    bench.commit(7)
    bench.stop()
    bench.close()
    again = benches(now_ms=NOW_MS + 60_000)
    assert again.offset_of().ext["offset"] == "7"


def test_javas_offset_file_with_bare_keys_is_read(benches: Benches) -> None:
    bench = benches()
    ready(bench)
    bench.close()
    bench.files.write(FILE, b'{"offsetTable":{"T@G":{0:4,1:0}}}')
    assert benches().offset_of().ext["offset"] == "4"


def test_a_damaged_offset_file_gives_way_to_its_backup(benches: Benches) -> None:
    bench = benches()
    ready(bench)
    for offset in (6, 7):
        bench.commit(offset)
        bench.advance(6_000)
    bench.close()
    bench.files.write(FILE, b'{"offsetTable":{"T@G":{"0"')
    assert benches().offset_of().ext["offset"] == "6"


def test_offsets_beyond_the_end_are_put_at_the_end_at_start(
    benches: Benches, caplog: pytest.LogCaptureFixture
) -> None:
    bench = benches()
    ready(bench)
    bench.close()
    bench.files.write(FILE, b'{"offsetTable":{"T@G":{"0":25,"1":3},"T@H":{"0":9}}}')
    again = benches()
    assert again.offset_of().ext["offset"] == "10"
    assert again.offset_of(queue=1).ext["offset"] == "0"
    assert again.offset_of(group="H").ext["offset"] == "9"
    assert "before=25 after=10" in caplog.text
    again.advance(6_000)
    assert saved_offsets(again)["T@G"] == {"0": 10, "1": 0}


def test_all_offsets_can_be_read(bench: Bench) -> None:
    bench.commit(7)
    found = bench.json(C.GET_ALL_CONSUMER_OFFSET)
    assert found["offsetTable"] == {"T@G": {"0": 7}}
    assert set(found["dataVersion"]) == {"counter", "stateVersion", "timestamp"}


# ------------------------------------------------------------------------------------------ resets


def reset(bench: Bench, **how: Any) -> Any:
    ext = {"topic": "T", "group": "G", "timestamp": -1, "isForce": True, "queueId": -1} | how
    return bench.ask(C.INVOKE_BROKER_TO_RESET_OFFSET, ext)


def test_a_reset_gives_the_next_pull_21_once(bench: Bench) -> None:
    bench.commit(10)
    answer = reset(bench, queueId=0, offset=3)
    assert answer.code == 0
    assert (
        answer.body == b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"T"}:3}}'
    ), "object keys are bare"
    moved = bench.pull(offset=10)
    assert (moved.code, moved.remark) == (21, "OFFSET_RESET")
    assert offsets_of(moved) == (3, 0, 10)
    assert bodies_of(bench.pull(offset=3))[0] == b"3"


def test_a_pending_reset_ignores_commits_and_answers_queries(bench: Bench) -> None:
    bench.commit(10)
    reset(bench, queueId=0, offset=3)
    assert bench.commit(10).code == 0
    bench.pull(queue=1, flags=PULL | 1, commit=0)
    assert bench.offset_of().ext["offset"] == "3"
    bench.pull(offset=10)
    bench.commit(4)
    assert bench.offset_of().ext["offset"] == "4"


def test_a_commit_that_rides_on_the_pull_that_learns_of_the_reset_is_ignored(bench: Bench) -> None:
    bench.commit(9)
    reset(bench, queueId=0, offset=3)
    assert bench.pull(offset=10, flags=PULL | 1, commit=10).code == 21
    assert bench.offset_of().ext["offset"] == "3"


def test_a_reset_wakes_the_holds_of_its_group_only(bench: Bench) -> None:
    mine, other = bench.hold(offset=10), bench.hold(offset=10, group="H")
    reset(bench, queueId=0, offset=3)
    answer = bench.answer(mine)
    assert answer is not None and answer.code == 21
    assert offsets_of(answer)[0] == 3
    assert bench.answer(other) is None


def test_a_reset_reaches_a_group_that_is_not_online(bench: Bench) -> None:
    reset(bench, queueId=0, offset=3)
    assert bench.offset_of().ext["offset"] == "3"


def test_a_reset_of_all_queues_to_the_end(bench: Bench) -> None:
    bench.commit(2)
    table = fastjson.loads(reset(bench, timestamp=-1).body)["offsetTable"]
    assert {key["queueId"]: offset for key, offset in table.items()} == {0: 10, 1: 0, 2: 0, 3: 0}
    assert bench.pull(offset=2).ext["nextBeginOffset"] == "10"


def test_a_reset_to_a_time(bench: Bench) -> None:
    bench.advance(5_000)
    bench.sent(body=b"late")
    table = fastjson.loads(reset(bench, timestamp=NOW_MS + 1).body)["offsetTable"]
    assert {key["queueId"]: offset for key, offset in table.items()}[0] == 10


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"topic": "Nope"}, 17),
        ({"group": "Nobody"}, 26),
        ({"queueId": 4, "offset": 0}, 29),
        ({"queueId": 0, "offset": 12}, 1),
    ],
)
def test_a_reset_that_can_not_be_is_refused(bench: Bench, how: dict[str, Any], code: int) -> None:
    bench.commit(5)
    before = bench.state()
    assert reset(bench, **how).code == code
    assert bench.state() == before
    assert bench.pull(offset=10).code == 19, "nothing is pending"


def test_one_past_the_end_is_a_valid_reset(bench: Bench) -> None:
    assert reset(bench, queueId=0, offset=11).code == 0


def test_a_reset_survives_a_restart_as_the_groups_offset(benches: Benches) -> None:
    bench = benches()
    ready(bench)
    bench.commit(10)
    reset(bench, queueId=0, offset=3)
    bench.stop()
    bench.close()
    assert benches().offset_of().ext["offset"] == "3"


def test_a_reset_that_moves_a_group_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.commit(10)
    with caplog.at_level(logging.INFO, "cometmq.broker"):
        reset(bench, queueId=0, offset=3)
    assert "offset reset group=G topic=T queue=0 before=10 after=3" in caplog.text


@pytest.mark.parametrize(("back", "level"), [(2_000, "INFO"), (2_001, "WARNING")])
def test_a_commit_that_moves_back_is_a_warning_beyond_what_was_in_flight(
    bench: Bench, caplog: pytest.LogCaptureFixture, back: int, level: str
) -> None:
    bench.commit(5_000)
    with caplog.at_level(logging.INFO, "cometmq.broker"):
        bench.commit(5_000 - back)
    (said,) = [one for one in caplog.records if "moved back" in one.message]
    assert said.levelname == level


# ------------------------------------------------------------------------------------------ clones


def clone(bench: Bench, **how: Any) -> Any:
    ext = {"srcGroup": "G", "destGroup": "H", "topic": "T", "offline": False} | how
    return bench.ask(C.CLONE_GROUP_OFFSET, ext)


def test_a_clone_has_the_offsets_of_the_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.pull(group="H")
    bench.commit(7)
    bench.commit(9, group="H")
    with caplog.at_level(logging.INFO, "cometmq.broker"):
        assert clone(bench).code == 0
    assert bench.offset_of(group="H").ext["offset"] == "7"
    assert "group=H" in caplog.text and "from=G" in caplog.text, "moved back silently"
    bench.commit(8, group="H")
    assert bench.offset_of().ext["offset"] == "7", "they do not share a table"


def test_a_clone_of_all_topics(bench: Bench) -> None:
    bench.pull(group="H")
    bench.commit(7)
    assert clone(bench, topic=None).code == 0
    assert bench.offset_of(group="H").ext["offset"] == "7"


def test_a_clone_into_an_unknown_group_is_refused(bench: Bench) -> None:
    bench.commit(7)
    before = bench.state()
    assert clone(bench, destGroup="Nobody").code == 26
    assert bench.state() == before


# ------------------------------------------------------------------------------- offsets and times


def queue_fact(bench: Bench, code: int, **more: Any) -> str:
    answer = bench.ask(code, {"topic": "T", "queueId": 0} | more)
    assert answer.code == 0
    (value,) = answer.ext.values()
    return value


def test_least_and_most_offsets(bench: Bench) -> None:
    assert queue_fact(bench, C.GET_MIN_OFFSET) == "0"
    assert queue_fact(bench, C.GET_MAX_OFFSET) == "10"
    assert queue_fact(bench, C.GET_MAX_OFFSET, queueId=3) == "0"


def test_earliest_store_time(bench: Bench) -> None:
    bench.advance(1_000)
    bench.sent()
    assert queue_fact(bench, C.GET_EARLIEST_MSG_STORETIME) == str(NOW_MS)
    assert queue_fact(bench, C.GET_EARLIEST_MSG_STORETIME, queueId=1) == "-1"


@pytest.mark.parametrize(
    ("at", "bound", "offset"),
    [
        (-1_000, None, 0),
        (0, None, 0),
        (1, None, 1),
        (10, None, 1),
        (11, None, 3),
        (20, "LOWER", 3),
        (21, "lower", 4),
        (10, "UPPER", 2),
        (19, "upper", 2),
        (99, "UPPER", 3),
        (-1, "UPPER", 0),
    ],
)
def test_offsets_by_time_in_milliseconds(
    benches: Benches, at: int, bound: str | None, offset: int
) -> None:
    """Messages at 0, 10, 10 and 20 ms."""
    bench = benches()
    for pause_ms in (0, 10, 0, 10):
        bench.advance(pause_ms)
        bench.sent()
    found = queue_fact(
        bench, C.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=NOW_MS + at, boundaryType=bound
    )
    assert found == str(offset)


# ----------------------------------------------------------------------------------------- queries


def by_key(bench: Bench, key: str, **how: Any) -> Any:
    ext = {
        "topic": "T",
        "key": key,
        "maxNum": 32,
        "beginTimestamp": 0,
        "endTimestamp": 2**62,
        "_UNIQUE_KEY_QUERY": False,
    } | how
    return bench.ask(C.QUERY_MESSAGE, ext)


def test_messages_are_found_by_any_of_their_keys(bench: Bench) -> None:
    bench.sent(body=b"x", props={"KEYS": "order-1 user-7"})
    bench.sent(body=b"y", props={"KEYS": "order-2 user-7"})
    assert bodies_of(by_key(bench, "order-1")) == [b"x"]
    answer = by_key(bench, "user-7")
    assert bodies_of(answer) == [b"x", b"y"]
    assert answer.ext["indexLastUpdateTimestamp"] == str(NOW_MS)
    last = record.decode_all(answer.body)[-1]
    assert answer.ext["indexLastUpdatePhyoffset"] == str(last.log_offset)


def test_a_message_is_found_by_its_unique_id(bench: Bench) -> None:
    bench.sent(body=b"x", props={"UNIQ_KEY": "AC1100"})
    assert bodies_of(by_key(bench, "AC1100", _UNIQUE_KEY_QUERY="true", maxNum=0)) == [b"x"]


def test_nothing_found_by_key_is_22_with_both_figures(bench: Bench) -> None:
    answer = by_key(bench, "nope")
    assert answer.code == 22
    assert set(answer.ext) == {"indexLastUpdateTimestamp", "indexLastUpdatePhyoffset"}
    assert "'nope'" in str(answer.remark)


def test_a_key_query_keeps_to_its_time_topic_and_count(bench: Bench) -> None:
    for number in range(3):
        bench.sent(body=b"%d" % number, props={"KEYS": "k"})
        bench.advance(1_000)
    bench.sent("Other", props={"KEYS": "k"})
    assert len(bodies_of(by_key(bench, "k"))) == 3
    assert len(bodies_of(by_key(bench, "k", maxNum=2))) == 2
    found = by_key(bench, "k", beginTimestamp=NOW_MS + 1, endTimestamp=NOW_MS + 1_999)
    assert bodies_of(found) == [b"1"]
    assert by_key(bench, "k", beginTimestamp=NOW_MS + 9_000).code == 22


def test_a_key_query_gives_at_most_64(bench: Bench) -> None:
    for _ in range(70):
        bench.sent(props={"KEYS": "k"})
    assert len(bodies_of(by_key(bench, "k", maxNum=1000))) == 64


@pytest.mark.parametrize("offset", [-1, 1, 1 << 50])
def test_a_log_offset_without_a_message_is_refused(bench: Bench, offset: int) -> None:
    answer = bench.ask(C.VIEW_MESSAGE_BY_ID, {"offset": offset})
    assert answer.code == 1
    assert str(offset) in str(answer.remark)


def test_held_pulls_of_a_reset_group_answer_for_their_own_queue(bench: Bench) -> None:
    opaques = [bench.post_pull("T", queue, 0, flags=HOLD) for queue in (1, 2)]
    reset(bench, queueId=1, offset=1)
    first, second = (bench.answer(opaque) for opaque in opaques)
    assert first is not None and (first.code, offsets_of(first)[0]) == (21, 1)
    assert second is not None and second.code == 19
