"""A name server with a hand on every wire: frames in, effects out; the clock is a number."""

from __future__ import annotations

from typing import Any

import pytest

from cometmq.config import NameServerConfig
from cometmq.nameserver.nameserver import NameServer
from cometmq.ports import ConnId, Out, Save, Send
from cometmq.wire import fastjson
from cometmq.wire.bodies import DataVersion, Registration, TopicConfig, encode_registration
from cometmq.wire.codes import RequestCode
from cometmq.wire.frame import Frame, decode_frame


class Bench:
    """Drives one NameServer; `ask` is a request and its answer."""

    def __init__(self, kv: bytes | None = None, **settings: Any) -> None:
        self.server = NameServer(NameServerConfig(**settings), kv)
        self.now_ms = 1_000_000
        self._opaque = 0

    def send(
        self,
        code: int,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        conn: int = 1,
        version: int = 479,
        flag: int = 0,
    ) -> Out:
        """All effects of one request, the batch settled."""
        self._opaque += 1
        frame = Frame(code, self._opaque, flag, 0, version, None, dict(ext or {}), body)
        out: Out = []
        self.server.handle(ConnId(conn), frame, 0, self.now_ms, out)
        self.server.settle(self.now_ms, out)
        return out

    def ask(
        self, code: int, ext: dict[str, str] | None = None, body: bytes = b"", **how: Any
    ) -> Frame:
        """The one answer; it must come at once, to the asker."""
        out = self.send(code, ext, body, **how)
        (answer,) = self.replies(out)
        (conn,) = [effect.conn for effect in out if type(effect) is Send]
        assert conn == how.get("conn", 1)
        assert answer.is_response
        assert answer.opaque == self._opaque
        return answer

    def json(self, code: int, ext: dict[str, str] | None = None, **how: Any) -> Any:
        answer = self.ask(code, ext, **how)
        assert answer.code == 0, answer.remark
        return fastjson.loads(answer.body)

    def register(self, topics: Any = (), **how: Any) -> Frame:
        """REGISTER_BROKER; `topics` as for `registration`."""
        (answer,) = self.replies(self.register_effects(topics, **how))
        return answer

    def register_effects(
        self, topics: Any = (), *, conn: int = 1, ext: dict[str, str] | None = None, **who: Any
    ) -> Out:
        version = who.pop("version", DataVersion(1, 0, 1))
        request_version = who.pop("request_version", 479)
        body = self.registration(topics, version)
        fields = self.identity(**who) | {"haServerAddr": "10.0.0.1:10912"} | (ext or {})
        return self.send(
            RequestCode.REGISTER_BROKER, fields, body, conn=conn, version=request_version
        )

    def route(self, topic: str, **how: Any) -> Any:
        return self.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}, **how)

    def has_route(self, topic: str) -> bool:
        answer = self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
        assert answer.code in (0, 17)
        return answer.code == 0

    def brokers(self) -> dict[str, dict[str, str]]:
        """name -> id -> address."""
        table = self.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]
        return {name: broker["brokerAddrs"] for name, broker in table.items()}

    def close(self, conn: int) -> Out:
        out: Out = []
        self.server.closed(ConnId(conn), self.now_ms, out)
        return out

    def tick(self, after_ms: int = 0) -> Out:
        self.now_ms += after_ms
        out: Out = []
        self.server.tick(self.now_ms, out)
        return out

    def saved(self, reason: str | None = None) -> Out:
        out: Out = []
        self.server.saved("kvConfig.json", reason, self.now_ms, out)
        return out

    def put(self, namespace: str, key: str, value: str) -> None:
        """A setting, saved."""
        fields = {"namespace": namespace, "key": key, "value": value}
        out = self.send(RequestCode.PUT_KV_CONFIG, fields)
        assert self.saves(out)
        (answer,) = self.replies(self.saved())
        assert answer.code == 0

    @staticmethod
    def identity(
        name: str = "broker-a",
        address: str = "10.0.0.1:10911",
        cluster: str = "DefaultCluster",
        broker_id: int = 0,
    ) -> dict[str, str]:
        return {
            "brokerName": name,
            "brokerAddr": address,
            "clusterName": cluster,
            "brokerId": str(broker_id),
        }

    @staticmethod
    def registration(topics: Any, version: DataVersion) -> bytes:
        """A body; topics are names, or name -> TopicConfig."""
        if not isinstance(topics, dict):
            topics = {name: TopicConfig(name, 4, 4) for name in topics}
        return encode_registration(Registration(version, topics))

    @staticmethod
    def replies(out: Out) -> list[Frame]:
        return [decode_frame(effect.data) for effect in out if type(effect) is Send]

    @staticmethod
    def saves(out: Out) -> list[Save]:
        return [effect for effect in out if type(effect) is Save]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def make_bench() -> type[Bench]:
    """For tests that need their own settings: `make_bench(max_topics=3)`."""
    return Bench
