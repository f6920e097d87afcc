"""Checkers: what must be true of a broker at any moment, and of a run at its end.

Owns: the invariants. One rule: each looks at the store through its own face or at what clients were
told, never at what the code meant to do; a problem is one sentence that names the place.

    1 acknowledged => there, at that place      5 at least once; nobody stands beyond the end
    2 queues gapless, unit and record agree     7 the index finds what was keyed
    3 every record was sent by somebody         8 after healing everybody gets done
1 and 5 are judged at every recovery too (history.py); order within a queue where it is pulled
(traffic.py); silence where it is waited for (traffic.py).
"""

from __future__ import annotations

from cometmq.broker.broker import Broker
from cometmq.nameserver.nameserver import NameServer
from cometmq.store.consume_queue import BLANK_SIZE
from cometmq.store.store import Store
from cometmq.testing.admin import KV_NAMESPACE
from cometmq.testing.history import Ack, History, Queue, Sent
from cometmq.testing.swarm import Swarm
from cometmq.wire import fastjson, properties
from cometmq.wire.record import Blank, Scan, decode, scan

_ALL_TIME_MS = 2**62


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
    tokens = check_log(history, name, store)
    check_queues(history, name, store, tokens)
    check_acks(history, name, store, tokens)
    check_index(history, name, store, tokens)
    check_offsets(history, name, broker, is_new=is_new)


def check_log(history: History, name: str, store: Store) -> dict[int, str]:
    """3: walk the log; the token of every record by its offset."""
    commit_log = store._log
    tokens: dict[int, str] = {}
    numbers: dict[tuple[str, int, int], int] = {}
    position = store.min_log_offset
    while position < store.max_log_offset:
        found = commit_log.scan(position, verify_crc=True)
        if type(found) is Blank:
            position += found.size
            continue
        if type(found) is not Scan:
            history.problem(f"{name}: no valid record at log offset {position}")
            break
        raw = commit_log.view(position, found.size)
        assert raw is not None
        message = decode(raw)
        token = message.body.partition(b"|")[0].decode("utf-8", "replace")
        sent = history.sent.get(token)
        if sent is None or not _is_as_sent(sent, message.topic, message.body, message.properties):
            history.problem(f"{name}: record at {position} is nothing that was sent: {token!r}")
        place = (found.topic, found.queue_id, found.queue_offset)
        if place in numbers and found.topic not in history.doomed:
            history.problem(f"{name}: {place} stands at {numbers[place]} and at {position}")
        numbers[place] = position
        tokens[position] = token
        position += found.size
    return tokens


def _is_as_sent(sent: Sent, topic: str, body: bytes, text: str) -> bool:
    table = properties.parse(text)
    return (
        sent.topic == topic
        and sent.body == body
        and table.get(properties.TAGS, "") == sent.tags
        and table.get(properties.KEYS, "") == sent.key
        and (not sent.unique_key or table.get(properties.UNIQUE_KEY) == sent.unique_key)
    )


def check_queues(history: History, name: str, store: Store, tokens: dict[int, str]) -> None:
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
            found = store._log.scan(log_offset, verify_crc=False) if size != BLANK_SIZE else None
            if (
                type(found) is not Scan
                or (found.topic, found.queue_id, found.queue_offset, found.size)
                != (topic, queue_id, offset, size)
                or log_offset not in tokens
            ):
                history.problem(
                    f"{name}: unit {offset} of {topic} queue {queue_id} points to "
                    f"{log_offset}, where its record is not"
                )
                break
        if queue.next_offset < queue.max_offset:
            history.problem(
                f"{name}: {topic} queue {queue_id} would give {queue.next_offset} again"
            )


def check_acks(history: History, name: str, store: Store, tokens: dict[int, str]) -> None:
    """1: what was acknowledged stands where its sender was told."""
    for place, table in history.acks.items():
        if place[0] == name:
            for offset, ack in table.items():
                _check_ack(history, place, offset, ack, store, tokens)


def _check_ack(
    history: History, place: Queue, offset: int, ack: Ack, store: Store, tokens: dict[int, str]
) -> None:
    _, topic, queue_id = place
    found = tokens.get(ack.log_offset)
    if found != ack.token:
        history.problem(
            f"acknowledged but gone: {ack.token} at {place} offset {offset}, log offset "
            f"{ack.log_offset} holds {found!r}"
        )
        return
    queue = store._queues.get(topic, queue_id)
    if ack.log_offset >= store.dispatched_offset:
        return  # not visible yet
    if queue is None or offset >= queue.max_offset or queue.unit(offset)[0] != ack.log_offset:
        history.problem(f"{place}: offset {offset} does not lead to {ack.token}")


def check_index(history: History, name: str, store: Store, tokens: dict[int, str]) -> None:
    """7: visible records with a key are found by it; of many, the newest and every fifth."""
    # Expired records whose removal a power loss has undone need not be found.
    begin = history.log_begins.get(name, 0)
    places = [place for place in tokens.items() if place[0] >= begin]
    for log_offset, token in places[:-10:5] + places[-10:]:
        sent = history.sent.get(token)
        if sent is None or not sent.key or log_offset >= store.dispatched_offset:
            continue
        found = store.find_by_key(sent.topic, sent.key, 64, 0, _ALL_TIME_MS)
        if not any(_log_offset(raw) == log_offset for raw in found.records):
            history.problem(f"{name}: {token} at {log_offset} is not found by its key")
            return


def _log_offset(raw: bytes) -> int:
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
    if kept - conns:
        history.problem(f"{name} still keeps connections {sorted(kept - conns)}, which are gone")


def known_brokers(server: NameServer) -> set[str]:
    """8: whom a name server would send clients to."""
    return {member.name for member in server.routes.members.values()}


def missing(history: History, brokers: dict[str, Broker], swarm: Swarm) -> list[str]:
    """5 and 8: what groups have not been given yet; each text names one queue."""
    texts: list[str] = []
    groups = {plan.group: plan for plan in swarm.consumers}
    for name, broker in brokers.items():
        store = broker.store
        if store.is_dispatch_behind:
            texts.append(f"{name} has not dispatched all of its log")
            continue
        for topic, queue_id in store.queues():
            for group, plan in groups.items():
                if topic in plan.topics:
                    place = (name, topic, queue_id)
                    text = _missing_of(history, place, group, plan.tags, store)
                    if text:
                        texts.append(text)
    return texts


def _missing_of(history: History, place: Queue, group: str, tags: str, store: Store) -> str:
    name, topic, queue_id = place
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
        token = decode(raw).body.partition(b"|")[0].decode("utf-8", "replace")
        if tags != "*" and history.sent[token].tags != tags:
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
