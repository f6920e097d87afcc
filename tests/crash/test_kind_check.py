"""The checks of message kinds see what is wrong: each lie about a good store must be named.

Owns: the proof that kind_check.py, and what store_check.py knows of timers and delays, are worth
asking. One rule: a new promise comes with the lie that breaks it.
"""

from __future__ import annotations

import copy
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from journey import ENTRIES, SLOTS
from kind_check import KindCheck
from kind_journey import KindJourney
from kinds import DEAD_TOPIC, SETTINGS, Ledger, Sent
from store_check import SCHEDULE_TOPIC, Found, check

LOAD_S = 3.5


@dataclass
class Good:
    """A store that was stopped with all kinds in it, and what was promised of it."""

    store: Path
    ledger: Ledger
    found: Found
    boots: list[int]


def look(store: Path) -> Found:
    return check(store, slots=SLOTS, entries=ENTRIES, levels=SETTINGS["messageDelayLevel"])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    with KindJourney(tmp_path_factory.mktemp("kinds"), "ASYNC_FLUSH", seed=3) as journey:
        load = journey.load(journey.start_and_check())
        time.sleep(LOAD_S)
        while not any(DEAD_TOPIC in key for key in look(journey.store).queues):
            time.sleep(0.2)
        load.stop()
        journey.end()
    return Good(journey.store, journey.ledger, look(journey.store), journey.boots)


def test_a_good_store_keeps_all_promises(good: Good) -> None:
    assert good.found.faults == []
    assert good.found.timer_count > 10
    looked = KindCheck(good.ledger, good.found, good.boots)
    looked.check()
    assert looked.open_ends() == []


def some(ledger: Ledger, found: Found, is_it: Callable[[Sent], bool], topic: str) -> Sent:
    """A message of this kind that a record of this topic shows."""
    for record in found.records.values():
        sent = ledger.find(record.body)
        if record.topic == topic and sent is not None and is_it(sent):
            return sent
    raise AssertionError(f"the load left nothing in {topic}")


def lost(ledger: Ledger, found: Found) -> None:
    one = some(ledger, found, lambda sent: sent.log_offset is not None, "events")
    del found.records[one.log_offset or 0]


def never_sent(ledger: Ledger, found: Found) -> None:
    del ledger.sent[some(ledger, found, lambda sent: True, "steps").number]


def early_delay(ledger: Ledger, found: Found) -> None:
    some(ledger, found, lambda sent: sent.level == 1, "delayed").level = 5


def early_timer(ledger: Ledger, found: Found) -> None:
    some(ledger, found, lambda sent: True, "timed").due_ms += 2_000


def recalled_came(ledger: Ledger, found: Found) -> None:
    some(ledger, found, lambda sent: True, "timed").is_recalled = True


def rolled_back_came(ledger: Ledger, found: Found) -> None:
    some(ledger, found, lambda sent: True, "orders").fate = "rollback"


def open_came(ledger: Ledger, found: Found) -> None:
    some(ledger, found, lambda sent: True, "orders").end_tried = False


def committed_lost(ledger: Ledger, found: Found) -> None:
    one = some(ledger, found, lambda sent: sent.ended_in is not None, "orders")
    drop(ledger, found, one, "orders")


def delivered_twice(ledger: Ledger, found: Found) -> None:
    double(ledger, found, "delayed")


def committed_twice(ledger: Ledger, found: Found) -> None:
    double(ledger, found, "orders")


def dead_twice(ledger: Ledger, found: Found) -> None:
    double(ledger, found, DEAD_TOPIC)


def dead_lost(ledger: Ledger, found: Found) -> None:
    drop(ledger, found, some(ledger, found, lambda sent: True, DEAD_TOPIC), DEAD_TOPIC)


def never_failed(ledger: Ledger, found: Found) -> None:
    one = some(ledger, found, lambda sent: sent.fails, DEAD_TOPIC)
    ledger.backs_tried.pop((one.number, 0))


def origin_wrong(ledger: Ledger, found: Found) -> None:
    for record in found.records.values():
        if record.topic == DEAD_TOPIC:
            record.properties["ORIGIN_MESSAGE_ID"] = "00"
            return


def drop(ledger: Ledger, found: Found, one: Sent, topic: str) -> None:
    for at, record in list(found.records.items()):
        if record.topic == topic and ledger.find(record.body) is one:
            del found.records[at]


def double(ledger: Ledger, found: Found, topic: str) -> None:
    one = next(record for record in found.records.values() if record.topic == topic)
    found.records[found.log_end] = one


LIES = {
    lost: "is lost",
    never_sent: "nobody sent",
    early_delay: "early",
    early_timer: "early",
    recalled_came: "taken back, and came",
    rolled_back_came: "rolled back, and came",
    open_came: "before anybody committed",
    committed_lost: "is not there",
    delivered_twice: "copies, at most 1",
    committed_twice: "delivered 2 times",
    dead_twice: "sent back 1 times, stored 2",
    dead_lost: "is lost",
    never_failed: "sent back 0 times",
    origin_wrong: "says that it was 00 first",
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_broken_promise_is_named(good: Good, lie: Callable[[Ledger, Found], None]) -> None:
    ledger = copy.copy(good.ledger)
    ledger.sent = {number: copy.copy(one) for number, one in good.ledger.sent.items()}
    ledger.backs_tried = copy.copy(good.ledger.backs_tried)
    found = look(good.store)
    lie(ledger, found)
    with pytest.raises(AssertionError, match=LIES[lie]):
        KindCheck(ledger, found, good.boots).check()


# --------------------------------------------------------------------------------- damaged files


def unit_elsewhere(store: Path, found: Found) -> None:
    _patch(min((store / "timerlog").iterdir()), 28, struct.pack(">q", 1))


def chain_broken(store: Path, found: Found) -> None:
    _patch(min((store / "timerlog").iterdir()), 52 + 4, struct.pack(">q", 52 * 3))


def slot_forgotten(store: Path, found: Found) -> None:
    (store / "timerwheel").write_bytes(bytes((store / "timerwheel").stat().st_size))
    check_file = store / "config" / "timercheck"
    _patch(check_file, 0, struct.pack(">q", 0))


def check_ahead(store: Path, found: Found) -> None:
    _patch(store / "config" / "timercheck", 16, struct.pack(">q", 10**6))


def due_time_wrong(store: Path, found: Found) -> None:
    record = next(one for one in found.records.values() if one.topic == SCHEDULE_TOPIC)
    folder = store / "consumequeue" / SCHEDULE_TOPIC / str(record.queue_id)
    _patch(min(folder.iterdir()), 12, struct.pack(">q", record.store_ms))


def _patch(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as sink:
        sink.seek(at)
        sink.write(content)


DAMAGES = {
    unit_elsewhere: "leads to 1",
    chain_broken: "follows 156",
    slot_forgotten: "the slot of",
    check_ahead: "was read to 1000000",
    due_time_wrong: "says",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_named(good: Good, tmp_path: Path, damage: Callable[[Path, Found], None]) -> None:
    store = tmp_path / "store"
    shutil.copytree(good.store, store)
    damage(store, good.found)
    faults = look(store).faults
    assert any(DAMAGES[damage] in fault for fault in faults), faults
