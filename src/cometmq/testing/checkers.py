"""Checkers: what must be true of a broker at any moment, and of a run at its end.

Owns: the invariants. One rule: each looks at the store through its own face or at what clients were
told, never at what the code meant to do; a problem is one sentence that names the place.

    1 acknowledged => durable if promised,      5 at least once; nobody stands beyond the end;
      and there, at that place                    one owner per queue
    2 queues gapless, unit and record agree     7 the index finds what was keyed
    3 every record was sent by somebody         8 after healing everybody gets done
1 is judged at every acknowledgement against the disk itself, 1 and 5 at every recovery, locks where
they are given (history.py); order within a queue where it is pulled (traffic.py); silence where it
is waited for (client.py); message kinds (6: transactions, delays, retries and others) in their own
files, kinds.py has the table. The numbers are those of the design; 4 waits for replication.
"""

from __future__ import annotations

from collections.abc import Callable

from cometmq.broker.broker import Broker
from cometmq.nameserver.nameserver import NameServer
from cometmq.store.consume_queue import BLANK_SIZE
from cometmq.store.layout import CONSUME_QUEUE, UNIT_BYTES
from cometmq.store.store import Store
from cometmq.testing import kinds
from cometmq.testing.admin import KV_NAMESPACE
from cometmq.testing.history import Ack, Found, History, Queue, Sent
from cometmq.testing.kinds_base import Ledger, record_of
from cometmq.testing.swarm import Swarm
from cometmq.testing.traffic import Consumer, ConsumerPlan
from cometmq.wire import fastjson, properties
from cometmq.wire.record import Blank, Scan, decode, scan

_ALL_TIME_MS = 2**62

Step = tuple[int, int, int, int]
"""Of a log: its begin, flushed, written and shown offsets."""


def check_broker(history: History, name: str, broker: Broker, *, is_new: bool = False) -> None:
    """Everything that must hold of a live broker, now; `is_new`: it has talked to nobody yet."""
    store = broker.store
    if broker.served.bugs:
        history.problem(f"{name} answered {broker.served.bugs} requests with a bug of its own")
    if store.stats.damaged_units:
        history.problem(f"{name}: {store.stats.damaged_units} units that point to no record")
    if broker.config.clean_forcibly:
        history.expired(name, store.min_log_offset)
    if is_new:
        for topic in history.topics.get(name, ()):
            if topic not in history.doomed and broker.topics.get(topic) is None:
                history.problem(f"{name} does not know {topic}, which it said it had made")
        check_tail(history, name, store)
    records = check_log(history, name, store)
    check_queues(history, name, store, records)
    check_acks(history, name, store, records)
    check_index(history, name, store, records)
    check_offsets(history, name, broker, is_new=is_new)
    kinds.check(history, name, broker, records)


def check_step(history: History, name: str, store: Store, before: Step) -> Step:
    """1 and 2, after every event: nothing is shown before it is durable where that is promised,
    and no bound of the log ever goes back. `before` is what the last call returned."""
    flushed, written = store.flushed_offset, store.max_log_offset
    shown = store.dispatched_offset
    step = (store.min_log_offset, flushed, written, shown)
    if step == before:
        return step
    most = flushed if history.sync_brokers[name] else written
    if shown > most or flushed > written:
        history.problem(
            f"{name} shows its log up to {shown}, has {flushed} flushed and {written} written"
        )
    if any(now < then for now, then in zip(step, before, strict=True)):
        history.problem(
            f"{name} went back: log begin, flushed, written, shown are {step} after {before}"
        )
    return step


def check_dropped(
    history: History, name: str, store: Store, is_durable: Callable[[str, int, int], bool]
) -> None:
    """2, when log files were dropped: how far their queues had come must be on disk by now, since
    nothing else tells it after a power loss."""
    file_bytes = store.config.queue_file_bytes
    for topic, queue_id in store.queues():
        queue = store._queues.get(topic, queue_id)
        assert queue is not None
        index, first = queue.max_offset - 1, queue.segments.start // UNIT_BYTES
        while index >= first and queue.unit(index)[0] >= store.min_log_offset:
            index -= 1
        at = index * UNIT_BYTES % file_bytes
        file = f"{CONSUME_QUEUE}/{topic}/{queue_id}/{index * UNIT_BYTES - at:020}"
        if index >= first and topic not in history.doomed:
            if not is_durable(file, at, UNIT_BYTES):
                history.problem(
                    f"{name} dropped the record of {topic} queue {queue_id} offset {index}, whose "
                    f"unit is not on disk"
                )


def check_log(history: History, name: str, store: Store) -> dict[int, Found]:
    """3: walk the log; every record by its offset."""
    records: dict[int, Found] = {}
    numbers: dict[tuple[str, int, int], int] = {}
    position, end = store.min_log_offset, store.max_log_offset
    while position < end:
        found = _look(history, name, store, position)
        if found is None:
            history.problem(f"{name}: no valid record at log offset {position}")
            break
        if type(found) is Blank:
            position += found.size
            continue
        assert isinstance(found, Found)
        place = (found.topic, found.queue_id, found.queue_offset)
        if place in numbers and found.topic not in history.doomed:
            history.problem(f"{name}: {place} stands at {numbers[place]} and at {position}")
        numbers[place] = position
        records[position] = found
        position += found.size
    return records


def check_tail(history: History, name: str, store: Store) -> None:
    """3, after recovery: only zeros stand behind the end, or a later one takes them for records."""
    end = store.max_log_offset
    for segment in store._log.segments.items:
        left = bytes(segment.buffer[max(end - segment.start, 0) :])
        if left.strip(b"\0"):
            history.problem(f"{name}: bytes are left behind the end of the log at {end}")
            return


def _look(history: History, name: str, store: Store, position: int) -> Found | Blank | None:
    """What stands at a place of the log; None if nothing valid does."""
    commit_log = store._log
    segment = commit_log.segments.find(position)
    if segment is not None:
        at = position - segment.start
        size = int.from_bytes(segment.buffer[at : at + 4], "big")
        known = history.proven.get(bytes(segment.buffer[at : at + size]))
        if known is not None and known.log_offset == position:
            return known
    found = commit_log.scan(position, verify_crc=True)
    if type(found) is not Scan:
        return found if type(found) is Blank else None
    raw = commit_log.view(position, found.size)
    assert raw is not None
    message = decode(raw)
    token = message.body.partition(b"|")[0].decode("utf-8", "replace")
    ledger = history.ledger
    result = Found(
        token,
        found.topic,
        found.queue_id,
        found.queue_offset,
        found.log_offset,
        found.size,
        None if ledger is None else record_of(message),
    )
    sent = history.sent.get(token)
    is_right = sent is not None and _is_as_sent(
        sent, message.topic, message.body, message.properties
    )
    if not is_right and isinstance(ledger, Ledger):
        is_right = ledger.is_explained(sent, message) or kinds.explains(ledger, sent, message)
    if not is_right:
        history.problem(f"{name}: record at {position} is nothing that was sent: {token!r}")
    else:
        history.proven[bytes(raw)] = result
    return result


def _is_as_sent(sent: Sent, topic: str, body: bytes, text: str) -> bool:
    table = properties.parse(text)
    return (
        sent.topic == topic
        and sent.body == body
        and table.get(properties.TAGS, "") == sent.tags
        and table.get(properties.KEYS, "") == sent.key
        and (not sent.unique_key or table.get(properties.UNIQUE_KEY) == sent.unique_key)
    )


def check_queues(history: History, name: str, store: Store, records: dict[int, Found]) -> None:
    """2: every unit points to its own record, without gaps."""
    for topic, queue_id in list(store.queues()):
        if topic in history.doomed:
            continue
        queue = store._queues.get(topic, queue_id)
        assert queue is not None
        if store.min_offset(topic, queue_id) != 0 and store.min_log_offset == 0:
            history.problem(f"{name}: {topic} queue {queue_id} begins at {queue.min_offset}")
        for offset in range(queue.min_offset, queue.max_offset):
            log_offset, size, _ = queue.unit(offset)
            found = records.get(log_offset) if size != BLANK_SIZE else None
            if found is None or (
                (found.topic, found.queue_id, found.queue_offset, found.size)
                != (topic, queue_id, offset, size)
            ):
                history.problem(
                    f"{name}: unit {offset} of {topic} queue {queue_id} points to "
                    f"{log_offset}, where its record is not"
                )
                break
        if queue.ends.next_offset < queue.max_offset:
            history.problem(
                f"{name}: {topic} queue {queue_id} would give {queue.ends.next_offset} again"
            )


def check_acks(history: History, name: str, store: Store, records: dict[int, Found]) -> None:
    """1: what was acknowledged stands where its sender was told."""
    for place, table in history.acks.items():
        if place[0] == name:
            for offset, ack in table.items():
                _check_ack(history, place, offset, ack, store, records)


def _check_ack(
    history: History, place: Queue, offset: int, ack: Ack, store: Store, records: dict[int, Found]
) -> None:
    _, topic, queue_id = place
    found = records.get(ack.log_offset)
    if found is None or found.token != ack.token:
        holds = "nothing" if found is None else found.token
        history.problem(
            f"acknowledged but gone: {ack.token} at {place} offset {offset}, log offset "
            f"{ack.log_offset} holds {holds}"
        )
        return
    queue = store._queues.get(topic, queue_id)
    if ack.log_offset >= store.dispatched_offset:
        return  # not visible yet
    if queue is None or offset >= queue.max_offset or queue.unit(offset)[0] != ack.log_offset:
        history.problem(f"{place}: offset {offset} does not lead to {ack.token}")


def check_index(history: History, name: str, store: Store, records: dict[int, Found]) -> None:
    """7: visible records with a key are found by it; of many, the newest and every fifth."""
    # Expired records whose removal a power loss has undone need not be found.
    begin = history.log_begins.get(name, 0)
    places = [found for log_offset, found in records.items() if log_offset >= begin]
    for one in places[:-10:5] + places[-10:]:
        token, log_offset = one.token, one.log_offset
        sent = history.sent.get(token)
        if sent is None or not sent.key or log_offset >= store.dispatched_offset:
            continue
        found = store.find_by_key(sent.topic, sent.key, 64, 0, _ALL_TIME_MS)
        if not any(_log_offset(history, raw) == log_offset for raw in found.records):
            history.problem(f"{name}: {token} at {log_offset} is not found by its key")
            return


def _log_offset(history: History, raw: bytes) -> int:
    known = history.proven.get(raw)
    if known is not None:
        return known.log_offset
    found = scan(raw, 0, len(raw), verify_crc=False)
    return found.log_offset if type(found) is Scan else -1


def check_offsets(history: History, name: str, broker: Broker, *, is_new: bool) -> None:
    """5: no group stands beyond the end of a queue, unless its own member puts it there because
    it does not know yet that the broker lost what it had shown."""
    for (topic, group), queues in broker.offsets.table.items():
        if topic in history.doomed or topic.startswith("%RETRY%"):
            continue
        for queue_id, offset in queues.items():
            place = (name, topic, queue_id)
            most = broker.store.max_offset(topic, queue_id)
            if not is_new:
                most = max(most, history.excused.get((group, place), 0))
            if offset > most:
                history.problem(f"{group} stands at {offset} of {place}, which ends at {most}")


def check_settings(history: History, name: str, server: NameServer) -> None:
    """1, for name servers: what they said is saved is there."""
    found = fastjson.loads(server.settings.listing(KV_NAMESPACE) or b"{}")
    table = found.get("table", {}) if isinstance(found, dict) else {}
    for key, value in history.settings.get(name, {}).items():
        if table.get(key) != value:
            history.problem(f"{name} acknowledged {key}={value} and has {table.get(key)!r}")


def check_ghosts(history: History, name: str, core: Broker | NameServer, conns: set[int]) -> None:
    """Nothing is kept for connections that are gone."""
    if isinstance(core, NameServer):
        kept = {int(member.conn) for member in core.routes.members.values()}
    else:
        kept = {int(conn) for conn in core.peers}
        for group in core.members.consumers.values():
            kept |= {int(conn) for conn in group.members}
        kept |= {int(hold.call.conn) for hold in core.holds._holds.values() if not hold.is_over}
        kept |= {int(conn) for conn in core.pop.polls._by_conn}
    if kept - conns:
        history.problem(f"{name} still keeps connections {sorted(kept - conns)}, which are gone")


def unshared(
    history: History, brokers: dict[str, Broker], swarm: Swarm, members: list[Consumer]
) -> list[str]:
    """5 and 8: after healing each queue belongs to exactly one member of a group."""
    texts: list[str] = []
    shared = [plan for plan in swarm.consumers if kinds.has_owners(plan)]
    for group, topics in {plan.group: plan.topics for plan in shared}.items():
        owners: dict[Queue, int] = {}
        for place in [p for one in members if one.group == group for p in one.places]:
            owners[place] = owners.get(place, 0) + 1
        for name, broker in brokers.items():
            for topic in topics:
                config = broker.topics.get(topic)
                for queue_id in range(config.readQueueNums if config is not None else 0):
                    count = owners.get((name, topic, queue_id), 0)
                    if count != 1:
                        text = f"{topic} queue {queue_id} of {name}"
                        texts.append(f"{text} belongs to {count} members of {group}")
    return texts


def known_brokers(server: NameServer) -> set[str]:
    """8: whom a name server would send clients to."""
    return {member.name for member in server.routes.members.values()}


def missing(history: History, brokers: dict[str, Broker], swarm: Swarm) -> list[str]:
    """5 and 8: what groups have not been given yet; each text names one queue."""
    texts: list[str] = []
    groups = {plan.group: plan for plan in swarm.consumers if kinds.is_owed_all(plan)}
    for name, broker in brokers.items():
        store = broker.store
        if store.is_dispatch_behind:
            texts.append(f"{name} has not dispatched all of its log")
            continue
        for topic, queue_id in store.queues():
            for plan in groups.values():
                if topic in plan.topics:
                    place = (name, topic, queue_id)
                    text = _missing_of(history, place, plan, store)
                    if text:
                        texts.append(text)
        if history.ledger is not None:
            texts += kinds.unmet(history, name, broker, check_log(history, name, store))
    return texts


def _missing_of(history: History, place: Queue, plan: ConsumerPlan, store: Store) -> str:
    name, topic, queue_id = place
    group = plan.group
    consumed = history.consumed.get(group, set())
    queue = store._queues.get(topic, queue_id)
    assert queue is not None
    begin = max(queue.min_offset, history.excused.get((group, place), 0))
    for offset in range(begin, queue.max_offset):
        if queue.unit(offset)[0] < history.log_begins.get(name, 0):
            continue  # expired, and back after a power loss: the group may have passed it over
        raw = store.record_at(queue.unit(offset)[0])
        if raw is None:
            return f"{place} offset {offset} can't be read"
        known = history.proven.get(raw)
        if known is not None:
            token = known.token
        else:
            token = decode(raw).body.partition(b"|")[0].decode("utf-8", "replace")
        if not kinds.wants(plan, history.sent[token]):
            continue
        if (*place, offset, token) not in consumed:
            return f"{group} was never given {token} at {place} offset {offset}"
    return ""


def may_flip(name: str, seen: bytearray, at: int) -> bool:
    """Where a flipped bit must be noticed: in bodies, which have a CRC, and in what is derived from
    the log. RocketMQ's record protects nothing else."""
    if name.startswith(("consumequeue/", "index/")):
        return True
    if not name.startswith("commitlog/"):
        return False
    position = 0
    while True:
        found = scan(seen, position, len(seen), verify_crc=False)
        if type(found) is not Scan:
            return False
        if position <= at < position + found.size:
            begin = position + 88
            size = int.from_bytes(seen[begin - 4 : begin], "big")
            return begin <= at < begin + size
        position += found.size
