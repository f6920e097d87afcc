"""A broker with a hand on every wire: frames in, effects out; the clock is a number.

`Bench` does by hand what the driver does with sockets and threads: it carries out each effect at
once, or keeps it back when a test asks for that (`flushes`, `saves`, a silent name server). The
store is real, on files of a few kilobytes; only the syncs are left out, since no test cuts power.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cometmq.broker.broker import Broker, Identity, store_config
from cometmq.config import BrokerConfig
from cometmq.ports import Close, ConnId, Dial, Flush, Out, Peer, Save, Send
from cometmq.store.files import RealFiles
from cometmq.store.store import Store
from cometmq.wire import fastjson, message_id, properties, record
from cometmq.wire.bodies import Registration, registration
from cometmq.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, PullFlag, RequestCode
from cometmq.wire.frame import Frame, decode_frame, encode_frame, reply_to
from cometmq.wire.headers import SEND_LETTERS

NOW_MS = 1_700_000_000_000
HOST, PORT = "10.0.0.1", 10911
NAMESRV = "10.9.9.9:9876"
MOST_TICKS = 5_000  # in one `advance`; more means that the deadline stands still

PULL = PullFlag.SUBSCRIPTION
HOLD = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND

SMALL = {
    "log_file_bytes": 1024 * 1024,
    "queue_file_bytes": 20 * 1000,
    "index_slots": 64,
    "index_entries": 512,
}


class TestFiles(RealFiles):
    """Real files without syncs, on a disk as full as the test says."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ratio = 0.10

    def used_ratio(self) -> float:
        return self.ratio

    def replace(self, name: str, content: bytes) -> None:
        path = Path(self._path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(str(path) + ".bak")
        path.write_bytes(content)

    def write(self, name: str, content: bytes) -> None:
        path = Path(self._path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def _sync_fd(self, name: str, fd: int, *, is_whole: bool = False) -> None:
        pass

    def _sync_name(self, name: str) -> None:
        pass


class StubNameServer:
    """What a test needs of a name server: it listens, and answers as it is told to."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_reachable = True
        self.is_silent = False
        self.code = 0
        self.order_topics: dict[str, str] = {}
        self.requests: list[Frame] = []
        self.unanswered: list[tuple[ConnId, Frame]] = []
        self.conn: ConnId | None = None

    @property
    def registrations(self) -> list[Registration]:
        return [
            registration(one.body, one.version)
            for one in self.requests
            if one.code == RequestCode.REGISTER_BROKER
        ]

    @property
    def topics(self) -> set[str]:
        return {name for one in self.registrations for name in one.topics}

    def answer(self, frame: Frame) -> Frame:
        body = b""
        if frame.code == RequestCode.REGISTER_BROKER and self.order_topics:
            body = fastjson.dumps({"table": self.order_topics})
        return reply_to(frame, self.code, "refused" if self.code else None, body=body)


class Bench:
    """Drives one Broker. `ask` is a request and its answer; `advance` lets time pass."""

    def __init__(
        self,
        folder: Path,
        *,
        namesrv: list[StubNameServer] | str = "",
        in_memory_bytes: int = 1 << 30,
        now_ms: int = NOW_MS,
        opens_after_ms: int = 0,
        is_quiet: bool = True,
        **settings: Any,
    ) -> None:
        """`opens_after_ms`: how long the store's recovery takes; `is_quiet`: settle at once."""
        self.servers: dict[str, StubNameServer] = {}
        if not isinstance(namesrv, str):
            self.servers = {one.address: one for one in namesrv}
            namesrv = ";".join(self.servers)
        self.config = BrokerConfig(
            **{**SMALL, "namesrv": namesrv, "store_path": str(folder), **settings}
        )
        self.now_ms = now_ms
        self.files = TestFiles(folder)
        self.store = Store.open(self.files, store_config(self.config, in_memory_bytes), now_ms)
        self.now_ms += opens_after_ms
        self.broker = Broker(self.config, Identity(HOST, PORT, 77, 9), self.store, self.now_ms)
        self.inbox: dict[int, list[Frame]] = {}
        self.raw: dict[int, list[bytes]] = {}
        self.closed: list[Close] = []
        self.saved: list[Save] = []
        self.dialled: list[str] = []
        self.keeps_flushes = False
        self.kept_flushes: list[Flush] = []
        self.keeps_saves = False
        self.kept_saves: list[Save] = []
        self.save_failure: str | None = None
        self.ticks = 0
        self._opaque = 0
        self._next_conn = 1
        self._is_open = True
        self.conn = self.connect()
        if is_quiet:
            self.tick()

    # -------------------------------------------------------------------------- the driver's part

    def connect(self, host: str = "10.1.1.1", port: int | None = None) -> ConnId:
        """A client's connection."""
        conn = ConnId(self._next_conn)
        self._next_conn += 1
        port = 50_000 + conn if port is None else port
        out: Out = []
        peer = Peer(host, port, message_id.pack_host(host, port))
        self.broker.opened(conn, peer, self.now_ms, out)
        self._carry_out(out)
        return conn

    def disconnect(self, conn: int) -> None:
        out: Out = []
        self.broker.closed(ConnId(conn), self.now_ms, out)
        self.broker.settle(self.now_ms, out)
        self._carry_out(out)

    def tick(self) -> None:
        self.ticks += 1
        out: Out = []
        self.broker.tick(self.now_ms, out)
        self.broker.settle(self.now_ms, out)
        self._carry_out(out)

    def advance(self, duration_ms: int) -> None:
        """Let time pass; the core is ticked exactly when it asks to be."""
        end_ms = self.now_ms + duration_ms
        for _ in range(MOST_TICKS):
            if self.broker.deadline_ms > end_ms:
                break
            self.now_ms = max(self.now_ms, self.broker.deadline_ms)
            self.tick()
        else:
            raise AssertionError(f"more than {MOST_TICKS} ticks in {duration_ms} ms: it spins")
        self.now_ms = end_ms

    def stop(self) -> None:
        out: Out = []
        self.broker.stop(self.now_ms, out)
        self._carry_out(out)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.broker.close(self.now_ms)

    def crash(self) -> None:
        """Let go of the files without a word; `abort` stays."""
        self._is_open = False
        self.store._release()

    def turn(self, *requests: tuple[int, Frame], waited_ms: int = 0, stall_ms: int = 0) -> None:
        """One batch: all frames, then settle. `stall_ms`: how long the first one took."""
        out: Out = []
        for number, (conn, frame) in enumerate(requests):
            self.broker.handle(ConnId(conn), frame, waited_ms, self.now_ms, out)
            if number == 0 and stall_ms:
                self.broker.stalled(stall_ms, self.now_ms, out)
        self.broker.settle(self.now_ms, out)
        self._carry_out(out)

    def _carry_out(self, out: Out) -> None:
        for effect in out:
            if isinstance(effect, Send):
                self._deliver(effect)
            elif isinstance(effect, Flush):
                if self.keeps_flushes and effect.kind == "log":
                    self.kept_flushes.append(effect)
                else:
                    self._flush(effect)
            elif isinstance(effect, Save):
                if self.keeps_saves:
                    self.kept_saves.append(effect)
                else:
                    self._save(effect)
            elif isinstance(effect, Dial):
                self._dial(effect.address)
            elif isinstance(effect, Close):
                self.closed.append(effect)
                self.disconnect(effect.conn)

    def _flush(self, effect: Flush, reason: str | None = None) -> None:
        out: Out = []
        if reason is None:
            for target in effect.targets:
                target.sync()
            self.broker.flushed(effect.kind, self.now_ms, out)
        else:
            self.broker.flush_failed(effect.kind, reason, self.now_ms, out)
        self.broker.settle(self.now_ms, out)
        self._carry_out(out)

    def flush(self, reason: str | None = None) -> None:
        """Let the flush go that was kept back; `reason` makes it fail."""
        self._flush(self.kept_flushes.pop(0), reason)

    def _save(self, effect: Save) -> None:
        self.saved.append(effect)
        if self.save_failure is None:
            self.files.replace(effect.name, effect.content)
        out: Out = []
        self.broker.saved(effect.name, self.save_failure, self.now_ms, out)
        self.broker.settle(self.now_ms, out)
        self._carry_out(out)

    def save(self) -> None:
        """Let the saves go that were kept back."""
        kept, self.kept_saves = self.kept_saves, []
        for effect in kept:
            self._save(effect)

    def _dial(self, address: str) -> None:
        self.dialled.append(address)
        out: Out = []
        server = self.servers.get(address)
        if server is None or not server.is_reachable:
            self.broker.dial_failed(address, "refused", self.now_ms, out)
        else:
            server.conn = ConnId(self._next_conn)
            self._next_conn += 1
            host, _, port = address.rpartition(":")
            peer = Peer(host, int(port), message_id.pack_host(host, int(port)), address)
            self.broker.opened(server.conn, peer, self.now_ms, out)
        self._carry_out(out)

    def _deliver(self, effect: Send) -> None:
        frame = decode_frame(effect.data)
        for server in self.servers.values():
            if server.conn == effect.conn:
                server.requests.append(frame)
                if server.is_silent:
                    server.unanswered.append((effect.conn, frame))
                else:
                    self.turn((effect.conn, server.answer(frame)))
                return
        self.inbox.setdefault(effect.conn, []).append(frame)
        self.raw.setdefault(effect.conn, []).append(effect.data)

    def release(self, server: StubNameServer) -> None:
        """A silent name server answers all that it was asked."""
        kept, server.unanswered = server.unanswered, []
        for conn, frame in kept:
            self.turn((conn, server.answer(frame)))

    # ------------------------------------------------------------------------- the client's part

    def frame(
        self,
        code: int,
        ext: dict[str, Any] | None = None,
        body: bytes = b"",
        *,
        flag: int = 0,
        language: int = 0,
        version: int = 401,
        serialize: int = 0,
    ) -> Frame:
        self._opaque += 1
        texts = {key: _text(value) for key, value in (ext or {}).items() if value is not None}
        return Frame(code, self._opaque, flag, language, version, None, texts, body, serialize)

    def post(
        self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"", **how: Any
    ) -> int:
        """A request as a turn of its own; its opaque. The answer, if any, waits in the inbox."""
        conn = how.pop("conn", self.conn)
        waited_ms = how.pop("waited_ms", 0)
        frame = self.frame(code, ext, body, **how)
        self.turn((conn, decode_frame(encode_frame(frame))), waited_ms=waited_ms)
        return frame.opaque

    def answer(self, opaque: int, conn: int | None = None) -> Frame | None:
        """Take the answer to a request out of the inbox; None if there is none yet."""
        box = self.inbox.get(self.conn if conn is None else conn, [])
        found = [one for one in box if one.is_response and one.opaque == opaque]
        assert len(found) <= 1, f"answered {len(found)} times"
        if not found:
            return None
        box.remove(found[0])
        return found[0]

    def requests_to(self, conn: int) -> list[Frame]:
        """Take what the broker asked or told this client on its own."""
        box = self.inbox.get(conn, [])
        found = [one for one in box if not one.is_response]
        self.inbox[conn] = [one for one in box if one.is_response]
        return found

    def ask(
        self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"", **how: Any
    ) -> Frame:
        """A request and its answer, which must come at once."""
        conn = how.get("conn", self.conn)
        answer = self.answer(self.post(code, ext, body, **how), conn)
        assert answer is not None, "not answered"
        return answer

    def json(
        self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"", **how: Any
    ) -> Any:
        answer = self.ask(code, ext, body, **how)
        assert answer.code == 0, answer.remark
        return fastjson.loads(answer.body)

    # ------------------------------------------------------------------------------ the requests

    def send_ext(
        self,
        topic: str = "T",
        *,
        queue: int = 0,
        props: dict[str, str] | str | None = None,
        template: str = "TBW102",
        queues: int = 4,
        sys_flag: int = 0,
        flag: int = 0,
        batch: bool | None = None,
        reconsume: int | None = None,
        code: int = RequestCode.SEND_MESSAGE_V2,
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "producerGroup": "pg",
            "topic": topic,
            "defaultTopic": template,
            "defaultTopicQueueNums": queues,
            "queueId": queue,
            "sysFlag": sys_flag,
            "bornTimestamp": self.now_ms - 5,
            "flag": flag,
            "properties": properties.build(props) if isinstance(props, dict) else props,
            "reconsumeTimes": reconsume,
            "batch": batch,
        }
        if code == RequestCode.SEND_MESSAGE:
            return fields
        return {letter: fields[name] for letter, name in SEND_LETTERS.items() if name in fields}

    def post_send(self, topic: str = "T", body: bytes = b"hello", **how: Any) -> int:
        code = how.get("code", RequestCode.SEND_MESSAGE_V2)
        transport = {
            key: how.pop(key)
            for key in ("conn", "waited_ms", "serialize", "language", "version")
            if key in how
        }
        flag = FLAG_ONEWAY if how.pop("oneway", False) else 0
        return self.post(code, self.send_ext(topic, **how), body, flag=flag, **transport)

    def send(self, topic: str = "T", body: bytes = b"hello", **how: Any) -> Frame:
        conn = how.get("conn", self.conn)
        answer = self.answer(self.post_send(topic, body, **how), conn)
        assert answer is not None, "the send was not answered"
        return answer

    def sent(self, topic: str = "T", body: bytes = b"hello", **how: Any) -> Frame:
        """A send that must succeed."""
        answer = self.send(topic, body, **how)
        assert answer.code == 0, answer.remark
        return answer

    def pull_ext(
        self,
        topic: str = "T",
        queue: int = 0,
        offset: int = 0,
        *,
        group: str = "G",
        count: int = 32,
        flags: int = PULL,
        tags: str | None = "*",
        suspend_ms: int = 15_000,
        commit: int = 0,
        sub_version: int = 0,
        kind: str | None = None,
    ) -> dict[str, Any]:
        return {
            "consumerGroup": group,
            "topic": topic,
            "queueId": queue,
            "queueOffset": offset,
            "maxMsgNums": count,
            "sysFlag": flags,
            "commitOffset": commit,
            "suspendTimeoutMillis": suspend_ms,
            "subscription": tags,
            "subVersion": sub_version,
            "expressionType": kind,
        }

    def post_pull(self, topic: str = "T", queue: int = 0, offset: int = 0, **how: Any) -> int:
        code = how.pop("code", RequestCode.PULL_MESSAGE)
        transport = {key: how.pop(key) for key in ("conn", "serialize") if key in how}
        return self.post(code, self.pull_ext(topic, queue, offset, **how), **transport)

    def pull(self, topic: str = "T", queue: int = 0, offset: int = 0, **how: Any) -> Frame:
        conn = how.get("conn", self.conn)
        answer = self.answer(self.post_pull(topic, queue, offset, **how), conn)
        assert answer is not None, "the pull is held"
        return answer

    def hold(self, topic: str = "T", queue: int = 0, offset: int = 0, **how: Any) -> int:
        """A pull that must be held; its opaque."""
        conn = how.get("conn", self.conn)
        opaque = self.post_pull(topic, queue, offset, flags=HOLD, **how)
        early = self.answer(opaque, conn)
        assert early is None, f"answered at once with {early}"
        return opaque

    def create_topic(self, topic: str = "T", queues: int = 4, **more: Any) -> Frame:
        ext = {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": queues,
            "writeQueueNums": queues,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": False,
            **more,
        }
        return self.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext)

    def beat(
        self,
        group: str = "G",
        topics: dict[str, str] | None = None,
        *,
        client: str = "c1",
        conn: int | None = None,
        version: int = 1,
        model: Any = "CLUSTERING",
        producers: tuple[str, ...] = (),
        fingerprint: int = 0,
        without_sub: bool = False,
        kind: str = "TAG",
        **how: Any,
    ) -> Frame:
        """A Java client's heartbeat; `topics` maps a topic to its expression."""
        body = heartbeat_body(
            client,
            [consumer_body(group, topics or {"T": "*"}, version=version, model=model, kind=kind)]
            if group
            else [],
            producers,
            fingerprint=fingerprint,
            without_sub=without_sub,
        )
        return self.ask(
            RequestCode.HEART_BEAT, None, body, conn=self.conn if conn is None else conn, **how
        )

    def commit(self, offset: int, topic: str = "T", queue: int = 0, group: str = "G") -> Frame:
        return self.ask(
            RequestCode.UPDATE_CONSUMER_OFFSET,
            {"consumerGroup": group, "topic": topic, "queueId": queue, "commitOffset": offset},
        )

    def offset_of(self, topic: str = "T", queue: int = 0, group: str = "G") -> Frame:
        return self.ask(
            RequestCode.QUERY_CONSUMER_OFFSET,
            {
                "consumerGroup": group,
                "topic": topic,
                "queueId": queue,
                "setZeroIfNotFound": False,
            },
        )

    def runtime(self) -> dict[str, str]:
        table = self.json(RequestCode.GET_BROKER_RUNTIME_INFO)["table"]
        assert isinstance(table, dict)
        return table

    def state(self) -> tuple[bytes, bytes, bytes]:
        """All that an operator's request may change, for `nothing has changed`."""
        broker = self.broker
        return broker.topics.encode(), broker.groups.encode(), broker.offsets.encode()


def offsets_of(answer: Frame) -> tuple[int, int, int]:
    """next, min and max of a pull's answer; all four must be there."""
    ext = answer.ext
    assert ext["suggestWhichBrokerId"] == "0"
    return int(ext["nextBeginOffset"]), int(ext["minOffset"]), int(ext["maxOffset"])


def bodies_of(answer: Frame) -> list[bytes]:
    return [message.body for message in record.decode_all(answer.body)]


def consumer_body(
    group: str,
    topics: dict[str, str],
    *,
    version: Any = 1,
    model: Any = "CLUSTERING",
    kind: str = "TAG",
) -> dict[str, Any]:
    subscriptions = []
    for topic, expression in topics.items():
        tags = [] if expression == "*" else [one.strip() for one in expression.split("||")]
        subscriptions.append(
            {
                "classFilterMode": False,
                "codeSet": [],
                "expressionType": kind,
                "subString": expression,
                "subVersion": version,
                "tagsSet": tags if kind == "TAG" else [],
                "topic": topic,
            }
        )
    return {
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "consumeType": "CONSUME_PASSIVELY",
        "groupName": group,
        "messageModel": model,
        "subscriptionDataSet": subscriptions,
        "unitMode": False,
    }


def heartbeat_body(
    client: str,
    consumers: list[dict[str, Any]],
    producers: tuple[str, ...] = (),
    *,
    fingerprint: int = 0,
    without_sub: bool = False,
) -> bytes:
    return msgspec.json.encode(
        {
            "clientID": client,
            "consumerDataSet": consumers,
            "heartbeatFingerprint": fingerprint,
            "producerDataSet": [{"groupName": name} for name in producers],
            "withoutSub": without_sub,
        }
    )


def response(request: Frame, code: int = 0, body: bytes = b"", remark: str | None = None) -> Frame:
    """A client's answer to what the broker asked it."""
    return Frame(code, request.opaque, FLAG_RESPONSE, remark=remark, body=body)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
