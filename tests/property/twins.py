"""Two brokers side by side, one with the compiled path and one without, fed the same bytes.

Owns: the driver's part for both (cut, receive, handle, settle, carry out effects), the traffic, and
the comparison. One rule: after every step both have sent the same bytes to every connection, and at
the end their stores are the same, byte for byte.
"""

from __future__ import annotations

import json
import random
from typing import Any

from cometmq import _fast
from cometmq.broker.broker import Broker, Identity, store_config
from cometmq.config import BrokerConfig
from cometmq.ports import Close, ConnId, Flush, Out, Peer, Save, Send
from cometmq.store.store import Store
from cometmq.testing.disk import SimulatedFiles
from cometmq.wire import record
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import FrameReader
from cometmq.wire.headers import SEND_LETTERS
from cometmq.wire.message_id import pack_host
from cometmq.wire.record import Piece

HOST, PORT = "10.0.0.1", 10911
NOW_MS = 1_700_000_000_000
TIMER_SLOTS = 400  # a wheel of two weeks would be most of what is compared
TOPICS = ("orders", "bills", "TopicTest")
GROUPS = ("G1", "G2")
TAGS = ("A", "B", "prefix-1", "é", "")


class Side:
    """One broker, and what the driver would do for it."""

    def __init__(
        self,
        *,
        is_compiled: bool,
        settings: dict[str, Any],
        files: SimulatedFiles | None = None,
        now_ms: int = NOW_MS,
    ) -> None:
        self.files = SimulatedFiles(random.Random(1)) if files is None else files
        self.config = BrokerConfig(store_path="s", **settings)
        self.hot = None
        if is_compiled:
            module, why_not = _fast.load()
            assert module is not None, why_not
            self.hot = module.Hot()
        limits = store_config(self.config, settings.get("in_memory", 1 << 30))
        store = Store.open(self.files, limits, now_ms, hot=self.hot)
        self.broker = Broker(
            self.config, Identity(HOST, PORT, 77, 9), store, now_ms, timer_slots=TIMER_SLOTS
        )
        self.sent: dict[int, bytearray] = {}
        self.closed: list[int] = []
        self.flushes: list[Flush] = []
        self.seen = 0
        self._readers: dict[int, FrameReader] = {}

    def open(self, conn: int, host: str, now_ms: int) -> None:
        out: Out = []
        peer = Peer(host, 4000 + conn, pack_host(host, 4000 + conn), None)
        self.broker.opened(ConnId(conn), peer, now_ms, out)
        self._readers[conn] = FrameReader(self.config.max_frame_bytes)
        self.sent[conn] = bytearray()
        self._carry_out(out, now_ms)

    def play(self, conn: int, data: bytes, now_ms: int) -> bool:
        """Bytes arrive; False if they can't be understood."""
        out: Out = []
        reader = self._readers[conn]
        whole = reader.join(data)
        if whole is None:
            return True
        taken, frames = self.broker.receive(ConnId(conn), whole, now_ms, out)
        self.seen += frames
        for frame in reader.split(whole, taken):
            self.seen += 1
            self.broker.handle(ConnId(conn), frame, 0, now_ms, out)
        self.broker.settle(now_ms, out)
        self._carry_out(out, now_ms)
        return reader.error is None

    def close(self, conn: int, now_ms: int) -> None:
        out: Out = []
        self.broker.closed(ConnId(conn), now_ms, out)
        self.broker.settle(now_ms, out)
        self._carry_out(out, now_ms)

    def tick(self, now_ms: int) -> None:
        out: Out = []
        self.broker.tick(now_ms, out)
        self.broker.settle(now_ms, out)
        self._carry_out(out, now_ms)

    def flush(self, now_ms: int, *, fails: bool = False) -> None:
        """The oldest flush under way ends."""
        if not self.flushes:
            return
        flush = self.flushes.pop(0)
        out: Out = []
        if fails:
            self.broker.flush_failed(flush.kind, "EIO", now_ms, out)
        else:
            for target in flush.targets:
                target.sync()
            self.broker.flushed(flush.kind, now_ms, out)
        self.broker.settle(now_ms, out)
        self._carry_out(out, now_ms)

    def _carry_out(self, out: Out, now_ms: int) -> None:
        while out:
            effect = out.pop(0)
            if isinstance(effect, Send):
                if effect.conn in self.sent:
                    self.sent[effect.conn] += effect.data
            elif isinstance(effect, Flush):
                self.flushes.append(effect)
            elif isinstance(effect, Save):
                self.files.replace(effect.name, effect.content)
                self.broker.saved(effect.name, None, now_ms, out)
            elif isinstance(effect, Close):
                self.closed.append(effect.conn)

    @property
    def taken(self) -> int:
        """Frames that took the compiled path."""
        self.broker.fold()
        return self.broker.served.compiled

    def state(self) -> dict[str, Any]:
        """Everything that must be the same on both sides."""
        broker, store = self.broker, self.broker.store
        timers, half = broker.timers, broker.half
        broker.fold()
        return {
            "files": {name: bytes(inode.seen) for name, inode in self.files._names.items()},
            "ends": {
                (queue.topic, queue.queue_id): (
                    *(queue.ends.min_offset, queue.ends.max_offset, queue.ends.next_offset),
                    *(queue.ends.log_end, queue.ends.log_min),
                )
                for queue in store._queues
            },
            "log": (store._log.write_at, store._log.flushed_at, store.last_store_ms),
            "committed": store.committed_offset,
            "dispatched": (store.dispatched_offset, store.stats.dispatched_count),
            "stats": (
                *(store.stats.appended_count, store.stats.appended_bytes),
                *(store.stats.fetched_count, store.stats.fetched_bytes),
            ),
            "counters": broker.stats.counters,
            "topics": {k: (v.count, v.size) for k, v in broker.stats.topics.items()},
            "groups": {k: (v.count, v.size) for k, v in broker.stats.groups.items()},
            "offsets": (broker.offsets.table, broker.offsets.pulled, broker.offsets.resets),
            "holds": broker.holds.count,
            "served": (broker.served.requests, broker.served.refused, broker.served.bugs),
            "dirty": sorted(segment.name for segment in store._queues.dirty),
            "delay": (broker.delay.offsets, broker.delay.delivered, broker.delay.version),
            "timers": (
                *(timers.pending, timers.delivered, timers.recalled, timers.lost, timers.read_ms),
                *(timers.queue_offset, timers._safe_from, timers._last_slot_ms),
                *(timers._enter_upto, timers._log.end, timers.counts.table),
                timers.counts.version,
            ),
            "half": (
                *(half.commits, half.rollbacks, half.checks, half.repeated, half.offset),
                *(half._marks.count, bytes(half._marks._bits), half._ended_upto, half._pending),
            ),
        }


class Twins:
    """Both sides, in step."""

    def __init__(self, **settings: Any) -> None:
        self.plain = Side(is_compiled=False, settings=settings)
        self.compiled = Side(is_compiled=True, settings=settings)
        self.now_ms = NOW_MS
        self.conns: list[int] = []
        self._next_conn = 1

    def open(self, host: str = "10.0.0.2") -> int:
        conn = self._next_conn
        self._next_conn += 1
        for side in (self.plain, self.compiled):
            side.open(conn, host, self.now_ms)
        self.conns.append(conn)
        return conn

    def play(self, conn: int, data: bytes) -> None:
        plain = self.plain.play(conn, data, self.now_ms)
        compiled = self.compiled.play(conn, data, self.now_ms)
        assert plain == compiled
        self.compare_sent()
        if not plain:
            for side in (self.plain, self.compiled):
                side.close(conn, self.now_ms)
            self.conns.remove(conn)

    def both(self, name: str, *args: Any, **options: Any) -> None:
        for side in (self.plain, self.compiled):
            getattr(side, name)(*args, **options)
        self.compare_sent()

    def compare_sent(self) -> None:
        for conn, expected in self.plain.sent.items():
            assert bytes(self.compiled.sent[conn]) == bytes(expected)
        assert len(self.plain.flushes) == len(self.compiled.flushes)

    def compare(self) -> None:
        plain, compiled = self.plain.state(), self.compiled.state()
        assert plain.keys() == compiled.keys()
        for name, expected in plain.items():
            assert compiled[name] == expected, name


# -------------------------------------------------------------------------------------- traffic


class Traffic:
    """Requests as clients write them, right and wrong, from one seed."""

    def __init__(self, rng: random.Random, oddness: int = 100, kinds: int = 0) -> None:
        self.rng = rng
        self.count = 0
        self.kinds = kinds  # percent of sends that are of a kind that waits
        self.oddness = oddness  # percent of all that is odd below that really comes

    def chance(self, percent: int) -> bool:
        return self.rng.randrange(100) < percent

    def rarely(self, percent: int) -> bool:
        """Something that is not ordinary."""
        return self.rng.randrange(10_000) < percent * self.oddness

    def mostly(self, ordinary: str, *odd: str) -> str:
        return self.rng.choice(odd) if self.rarely(40) else ordinary

    def stream(self, frames: int) -> bytes:
        return b"".join(self.frame() for _ in range(frames))

    def frame(self) -> bytes:
        kind = self.rng.choices(
            ("send", "batch", "pull", "other", "hostile"),
            (60, 10, 20, 0.06 * self.oddness, 0.04 * self.oddness),
        )[0]
        raw: bytes = getattr(self, kind)()
        return raw

    # ------------------------------------------------------------------------------------- kinds

    def send(self) -> bytes:
        fields = self.send_fields(self.properties())
        if self.chance(self.kinds):
            self.add_kind(fields)
        body = self.rng.randbytes(self.rng.choice((0, 1, 15, 16, 17, 128, 900)))
        if self.chance(70):
            return self.request(310, fields, body)
        return self.request(
            10, {SEND_LETTERS.get(key, key): value for key, value in fields.items()}, body
        )

    def add_kind(self, fields: dict[str, str]) -> None:
        """Make a send one of a delayed, timed or half message, mostly as clients do."""
        rng = self.rng
        later = self.rng.choice((1, 999, 1000, 1001, 3000, 30_000, 250_000))
        pairs = rng.choice(
            (
                [("DELAY", self.mostly(rng.choice(("1", "2", "3")), "18", "19", "0", "x", "03"))],
                [("TIMER_DELAY_MS", self.mostly(str(later), "0", "-1", "9" * 14, "x"))],
                [("TIMER_DELAY_SEC", self.mostly(str(later // 1000), "0", "99999999"))],
                [("TIMER_DELIVER_MS", self.mostly(str(NOW_MS + later), "1", "9" * 17))],
                [("TRAN_MSG", self.mostly("true", "TRUE", "false")), ("PGROUP", "P1")],
            )
        )
        if self.rarely(15):
            pairs = pairs + rng.choice(
                (
                    *([("REAL_TOPIC", "bills")], [("REAL_QID", "2")], [("TIMER_OUT_MS", "7")]),
                    *([("note", "TIMER_")], [("x", "REAL_TOPIC")], [("DELAY", "2")]),
                    *([("TIMER_DELAY_MS", "5000")], [("TRAN_MSG", "true")], [("TTL_MS", "900")]),
                    *([("__transactionId__", "t")], [("TRANSACTION_CHECK_TIMES", "3")]),
                    *([("CHECK_IMMUNITY_TIME_IN_SECONDS", "1")], [("TIMER_DEL_UNIQKEY", "k")]),
                    *([("QUEUE_MS", "1")], [("PGROUP", "P2")], [("TIMER_ROLL_TIMES", "2")]),
                )
            )
        text = fields.get("i", "")
        more = "".join(f"{name}\x01{value}\x02" for name, value in pairs)
        whole = not text or text.endswith("\x02")
        fields["i"] = more + text if self.chance(50) or not whole else text + more
        if pairs[0][0] == "TRAN_MSG" and self.chance(80):
            fields["f"] = "4"

    def batch(self) -> bytes:
        fields = self.send_fields(self.properties() if self.chance(50) else "")
        fields["m"] = self.mostly("true", "TRUE", "false")
        pieces = [
            Piece(self.rng.randrange(5), self.rng.randbytes(self.rng.randrange(40)), text)
            for text in (self.properties() for _ in range(self.rng.randrange(1, 6)))
        ]
        if self.chance(25):
            batch = self.count - self.rng.choice((0, 0, 0, 40))
            for n, piece in enumerate(pieces):
                piece.properties = f"PRODUCER_SEQ\x01w {batch} {n}\x02" + piece.properties
        body = record.join_batch(pieces)
        if self.rarely(15):
            body = self.damage(body)
        return self.request(self.rng.choice((320, 310)), fields, body)

    def pull(self) -> bytes:
        rng = self.rng
        flag = int(self.mostly(rng.choice(("4", "4", "5", "0")), "2", "6", "7", "20"))
        fields = {
            "consumerGroup": rng.choice(GROUPS),
            "topic": rng.choice(TOPICS),
            "queueId": self.mostly(str(rng.randrange(4)), "9", "-1"),
            "queueOffset": self.mostly(str(rng.randrange(30)), "80", "-1", str(10**15)),
            "maxMsgNums": self.mostly("32", "1", "3", "0", "-5", "1000"),
            "sysFlag": str(flag),
            "commitOffset": str(rng.choice((0, 0, 3, 7, -1))),
            "suspendTimeoutMillis": "1000",
            "subVersion": str(rng.choice((0, 5, 10, 11))),
        }
        if flag & 4 or self.chance(20):
            wish = rng.choice(("*", "*", "A || B"))
            fields["subscription"] = self.mostly(wish, "A", "pre*", "", " * ", "é", "TAGS = 'A'")
            fields["expressionType"] = self.mostly("TAG", "", "SQL92")
        return self.request(rng.choice((11, 11, 361)), self.odd(fields))

    def other(self) -> bytes:
        rng = self.rng
        topic, group = rng.choice(TOPICS), rng.choice(GROUPS)
        kind = rng.randrange(7)
        if kind <= 1:
            is_sql = self.chance(15)
            subscription = {
                "topic": topic,
                "subString": "TAGS = 'A'" if is_sql else rng.choice(("*", "A || B")),
                "subVersion": rng.choice((5, 10, 12)),
                "expressionType": "SQL92" if is_sql else "TAG",
            }
            consumer = {
                "groupName": group,
                "consumeType": "CONSUME_PASSIVELY",
                "messageModel": rng.choice(("CLUSTERING", "CLUSTERING", "BROADCASTING")),
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "subscriptionDataSet": [subscription],
            }
            body = {"clientID": "c1", "producerDataSet": [], "consumerDataSet": [consumer]}
            return self.request(RequestCode.HEART_BEAT, {}, json.dumps(body).encode())
        place = {"topic": topic, "queueId": str(rng.randrange(3))}
        if kind == 2:
            return self.request(RequestCode.GET_MAX_OFFSET, place)
        if kind == 3:
            fields = {**place, "consumerGroup": group, "commitOffset": str(rng.randrange(9))}
            return self.request(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
        if kind == 4:
            fields = {
                "topic": topic,
                "defaultTopic": "TBW102",
                "readQueueNums": "4",
                "writeQueueNums": rng.choice(("4", "3")),
                "perm": rng.choice(("6", "6", "6", "4", "2")),
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": "0",
                "order": "false",
            }
            if self.chance(20):
                fields["attributes"] = rng.choice(("+dedup.minutes=1", "-dedup.minutes"))
            return self.request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
        if kind == 5 and self.chance(30):
            return self.request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic})
        if not self.chance(10):
            return self.request(RequestCode.GET_MIN_OFFSET, place)
        fields = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true"}
        return self.request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)

    def hostile(self) -> bytes:
        raw = self.send() if self.chance(50) else self.pull()
        return self.damage(raw)

    # ------------------------------------------------------------------------------------- parts

    def send_fields(self, text: str) -> dict[str, str]:
        rng = self.rng
        fields = {
            "a": "P1",
            "b": rng.choice(("", "x/y", "%RETRY%G1")) if self.rarely(5) else rng.choice(TOPICS),
            "c": "TBW102",
            "d": "4",
            "e": self.mostly(str(rng.randrange(4)), "-1", "4", "70"),
            "f": self.mostly(
                rng.choice(("0", "1", "2", "16", "48", "256")),
                "4",
                "8",
                "12",
                "64",
                "128",
                "-1",
                str(2**30),
                str(2**31),
            ),
            "g": self.mostly(str(NOW_MS), "0", "-5", str(2**63 - 1)),
            "h": rng.choice(("0", "7", "-1")),
            "i": text,
            "j": "0",
            "k": "false",
            "m": "false",
        }
        if self.chance(20):
            fields["l"] = self.mostly("16", "", "x")
        if self.chance(10):
            fields["n"] = "broker-a"
        return self.odd(fields)

    def odd(self, fields: dict[str, str]) -> dict[str, str]:
        """Sometimes a field is missing, or no number, or written in a way that few would."""
        rng = self.rng
        if self.rarely(6):
            del fields[rng.choice(list(fields))]
        if self.rarely(6):
            name = rng.choice(list(fields))
            fields[name] = rng.choice(("", " 1", "+1", "01", "1_0", "x", "1.0", "٣", "9" * 30))
        if self.rarely(6):
            fields[rng.choice(("z", "extra", "aa", "é"))] = rng.choice(("1", "\n\t", 'q"q'))
        return fields

    def properties(self) -> str:
        rng = self.rng
        self.count += 1
        pairs: list[tuple[str, str]] = []
        if not self.rarely(5):
            pairs.append(("UNIQ_KEY", f"0A00000200004D2{self.count:017d}"))
        if self.chance(60):
            pairs.append(("TAGS", self.mostly(rng.choice(("A", "B", "long-tag-7")), *TAGS)))
        if self.chance(50):
            words = rng.choice(("k1", "k1 k2", " k3  k4 ", f"k{self.count}"))
            pairs.append(("KEYS", self.mostly(words, "ключ")))
        if self.chance(60):
            pairs.append(("WAIT", self.mostly("true", "false")))
        if self.chance(30):
            value = rng.choice(("v", "値", 'a"b\\c/d', "\t\n", "\x7f", "😀"))
            pairs.append((f"p{rng.randrange(9)}", value))
        if self.rarely(8):
            pairs.append(
                rng.choice(
                    (
                        *(("DELAY", "0"), ("DELAY", "3"), ("TRAN_MSG", "true"), ("TRAN_MSG", "x")),
                        *(("TIMER_DELAY_MS", "0"), ("CLUSTER", "c"), ("MSG_REGION", "r")),
                        *(("xTRACE_ON", "y"), ("MY_LONG_POP_CK", "y"), ("NOTDELAYED", "DELAY")),
                        *(("a_very_long_name_DELAY", "9"), ("", "v"), ("n", "")),
                        *(("UNIQ_KEY", "again"), ("TAGS", "A"), ("KEYS", "z"), ("UNIQ_KEY", 'q"q')),
                        *(("TTL_MS", "1"), ("TTL_MS", "900"), ("TTL_MS", "-1"), ("xTTL_MS", "1")),
                        *(("TTL_UNTIL", "5"), ("PRODUCER_SEQ", f"p 1 {rng.randrange(2)}")),
                        *(("PRODUCER_SEQ", "p 2 0"), ("PRODUCER_SEQ", "?"), ("UNIQ_KEY", "twice")),
                        *(("UNIQ_KEY", ""), ("KEYS", " ".join(f"w{n}" for n in range(70)))),
                    )
                )
            )
        rng.shuffle(pairs)
        text = "".join(f"{name}\x01{value}\x02" for name, value in pairs)
        if self.chance(30) and text:
            text = text[:-1]
        if self.rarely(3):
            text += rng.choice(("\x02", "\x01", "stray", "a\x01b\x01c\x02", "\x02\x02"))
        return text

    def request(self, code: int, fields: dict[str, str], body: bytes = b"") -> bytes:
        self.count += 1
        flag = 2 if self.chance(4) else 0
        if self.chance(30):
            header, mark = self.binary(code, flag, fields), 1
        else:
            header, mark = self.json(code, flag, fields), 0
        size = 4 + len(header) + len(body)
        return (
            size.to_bytes(4, "big") + bytes([mark]) + len(header).to_bytes(3, "big") + header + body
        )

    def json(self, code: int, flag: int, fields: dict[str, str]) -> bytes:
        rng = self.rng
        head: dict[str, Any] = {
            "code": code,
            "extFields": fields,
            "flag": flag,
            "language": "JAVA",
            "opaque": self.count,
            "serializeTypeCurrentRPC": "JSON",
            "version": 401,
        }
        if self.rarely(10):
            head["remark"] = rng.choice((None, "", "hello"))
        if self.chance(10):
            items = list(head.items())
            rng.shuffle(items)
            head = dict(items)
        if self.rarely(5):
            name = rng.choice(list(head))
            head[name] = rng.choice((None, 1.5, "7", True, [], {}, -1, 2**31, 2**40))
        if self.rarely(4):
            fields["e" if "e" in fields else "queueId"] = 0  # type: ignore[assignment]
        # fastjson writes other scripts as they are and escapes what is below a blank
        separators = (", ", ": ") if self.chance(10) else (",", ":")
        text = json.dumps(head, ensure_ascii=self.chance(10), separators=separators)
        if self.rarely(3):
            text = text.replace('"opaque"', '"opaque":3,"opaque"', 1)
        if self.rarely(3):
            text = " " + text + rng.choice((" ", "\n", "x", "{}"))
        return text.encode("utf-8", "surrogatepass")

    def binary(self, code: int, flag: int, fields: dict[str, str]) -> bytes:
        rng = self.rng
        remark = b"r" if self.rarely(20) else b""
        table = b""
        for name, value in fields.items():
            key, raw = name.encode(), str(value).encode()
            table += len(key).to_bytes(2, "big") + key + len(raw).to_bytes(4, "big") + raw
        if self.rarely(3):
            table += b"\0\1b\0\0\0\1x"
        size = len(table) + (rng.choice((-1, 1, 5)) if self.rarely(2) else 0)
        return b"".join(
            (
                code.to_bytes(2, "big"),
                bytes([rng.choice((0, 0, 9, 200))]),
                (401).to_bytes(2, "big"),
                self.count.to_bytes(4, "big"),
                flag.to_bytes(4, "big"),
                len(remark).to_bytes(4, "big"),
                remark,
                max(size, 0).to_bytes(4, "big"),
                table,
            )
        )

    def damage(self, raw: bytes) -> bytes:
        """Some bytes changed, the frame's own length mostly left alone."""
        rng = self.rng
        content = bytearray(raw)
        first = 0 if self.chance(5) else 4
        for _ in range(rng.choice((1, 1, 2, 5))):
            if len(content) > first:
                content[rng.randrange(first, len(content))] = rng.choice(
                    (0, 1, 2, 34, 44, 92, 123, 125, 127, 128, 0xC3, 0xED, 0xFF, rng.randrange(256))
                )
        return bytes(content)
