"""LocalBroker: real sockets, inside this process, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cometmq import Message, SendStatus, _fast, aio
from cometmq.broker.broker import Broker
from cometmq.client.remote import Remote
from cometmq.errors import (
    ConfigError,
    ConnectionLost,
    RequestRefused,
    RequestTimeout,
    StoreCorrupt,
    UsageError,
)
from cometmq.nameserver.nameserver import NameServer
from cometmq.ports import Out
from cometmq.store.files import RealFiles
from cometmq.testing import LocalBroker
from cometmq.testing.memory import MemoryFiles
from cometmq.wire.codes import RequestCode, ResponseCode
from programs import SMALL, pull_ext, read_queue, send

SEND = RequestCode.SEND_MESSAGE_V2
KINDS = [None, "memory", "kept"]


def _open_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder that is being listed
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads, descriptors and temporary folders are as before."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    threads, files = threading.enumerate(), _open_files()
    yield
    assert threading.enumerate() == threads
    assert _open_files() == files
    assert list(temporary.iterdir()) == []
    gc.collect()  # an unclosed socket or transport would warn, and that is an error


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker(store="memory") as one:
        yield one


def _store(kind: str | None, tmp_path: Path) -> str | Path | None:
    return tmp_path / "kept" if kind == "kept" else kind


def _bodies(broker: LocalBroker, topic: str, queue_id: int = 0) -> list[bytes]:
    return [message.body for message in read_queue(broker.broker_address, topic, queue_id)]


def _has_route(broker: LocalBroker, topic: str) -> bool:
    with Remote(broker.namesrv) as remote:
        return remote.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code == 0


# ---------------------------------------------------------------------------------------- life


@pytest.mark.parametrize("kind", KINDS)
def test_it_serves_and_is_ready_at_once(kind: str | None, tmp_path: Path) -> None:
    began = time.perf_counter()
    with LocalBroker(store=_store(kind, tmp_path)) as broker:
        ready_s = time.perf_counter() - began
        broker.create_topic("orders", queues=2)
        assert _has_route(broker, "orders")
        with Remote(broker.broker_address) as remote:
            assert send(remote, "orders", b"hello", queue_id=1, tag="paid").code == 0
            assert send(remote, "made-by-sending", b"x").code == 0
        assert _bodies(broker, "orders", 1) == [b"hello"]
        assert (broker.broker_name, broker.store_path is None) == ("broker-a", kind == "memory")
    assert ready_s < 3  # 0.02 measured; the rest is for a busy machine
    assert (tmp_path / "kept").exists() == (kind == "kept")


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_keeps_messages_and_ports(kind: str | None, kill: bool, tmp_path: Path) -> None:
    small = SMALL | {"mappedFileSizeCommitLog": "65536"}
    with LocalBroker(store=_store(kind, tmp_path), settings=small) as broker:
        before = (broker.namesrv, broker.broker_address)
        sent = [b"%04d" % number + b"x" * 1000 for number in range(300)]
        with Remote(broker.namesrv) as namesrv, Remote(broker.broker_address) as remote:
            for body in sent:
                assert send(remote, "orders", body, unique="U1").code == 0
            broker.restart(kill=kill)
            with pytest.raises(ConnectionLost):
                remote.call(RequestCode.GET_BROKER_CONFIG)
            namesrv.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
        assert (broker.namesrv, broker.broker_address) == before
        assert _bodies(broker, "orders") == sent
        broker.restart(kill=kill)
        with Remote(broker.broker_address) as remote:
            assert send(remote, "orders", b"next").ext["queueOffset"] == "300"
        if broker.store_path is not None:
            assert (broker.store_path / "abort").exists()


@pytest.mark.parametrize("kill", [False, True])
def test_a_broker_that_was_stopped_does_nothing_any_more(
    kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are the next one's: a tick of it would clean them away."""
    ticked: list[Broker] = []
    tick = Broker.tick

    def noted(self: Broker, now_ms: int, out: Out) -> None:
        ticked.append(self)
        tick(self, now_ms, out)

    monkeypatch.setattr(Broker, "tick", noted)
    with LocalBroker(store="memory", settings=SMALL) as broker:
        with Remote(broker.broker_address) as remote:
            assert send(remote, "orders", b"x").code == 0
            broker.restart(kill=kill)
            stopped = ticked[0]
            ticked.clear()
            time.sleep(1.2)  # it ticks every 0.2 s or so
        assert ticked
        assert stopped not in ticked


def test_kill_leaves_what_a_killed_process_leaves(tmp_path: Path) -> None:
    """State that was not yet saved is lost, a clean stop saves it; messages survive both."""
    where = {"topic": "orders", "queueId": "0", "consumerGroup": "billing"}
    offsets = []
    with LocalBroker(store=tmp_path / "store") as broker:
        with Remote(broker.broker_address) as remote:
            group = b'{"groupName":"billing"}'
            remote.call(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group)
        for kill in (False, True):
            with Remote(broker.broker_address) as remote:
                send(remote, "orders", b"a")
                end = int(remote.call(RequestCode.GET_MAX_OFFSET, where).ext["offset"])
                remote.call(RequestCode.UPDATE_CONSUMER_OFFSET, where | {"commitOffset": str(end)})
            broker.restart(kill=kill)
            with Remote(broker.broker_address) as remote:
                answer = remote.call(RequestCode.QUERY_CONSUMER_OFFSET, where)
                offsets.append(int(answer.ext["offset"]))
        assert len(_bodies(broker, "orders")) == 2
    assert offsets == [1, 1]
    assert not (tmp_path / "store" / "abort").exists()


def test_staged_messages_in_memory(tmp_path: Path) -> None:
    settings = {"transientStorePoolEnable": "true", "transientStorePoolBytes": "5000000"}
    with LocalBroker(store="memory", settings=settings) as broker:
        with Remote(broker.broker_address) as remote:
            for number in range(20):
                assert send(remote, "orders", b"%d" % number).code == 0
        broker.restart()
        assert len(_bodies(broker, "orders")) == 20


def test_a_kept_store_is_found_again(tmp_path: Path) -> None:
    for expected in ("0", "1"):
        broker = LocalBroker(store=tmp_path / "store")
        with broker, Remote(broker.broker_address) as remote:
            assert send(remote, "orders", b"x").ext["queueOffset"] == expected


def test_memory_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with LocalBroker(store="memory") as broker:
        with Remote(broker.broker_address) as remote:
            send(remote, "orders", b"x")
        with Remote(broker.namesrv) as remote:
            pair = {"namespace": "n", "key": "k", "value": "v"}
            remote.call(RequestCode.PUT_KV_CONFIG, pair)
        assert not any(str(tmp_path) in name for name in _open_files())
        assert sorted(tmp_path.rglob("*")) == before


def test_two_at_once(tmp_path: Path) -> None:
    with LocalBroker() as one, LocalBroker(settings={"brokerName": "broker-b"}) as other:
        for broker, body in ((one, b"1"), (other, b"2")):
            with Remote(broker.broker_address) as remote:
                send(remote, "orders", body)
        one.fail(SEND)
        with Remote(other.broker_address) as remote:
            assert send(remote, "orders", b"2").code == 0
        assert (_bodies(one, "orders"), _bodies(other, "orders")) == ([b"1"], [b"2", b"2"])


def test_async_with() -> None:
    async def ask(broker: LocalBroker) -> bytes:
        reader, writer = await asyncio.open_connection(*broker.namesrv.rsplit(":", 1))
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def sleep_inside() -> None:
        async with LocalBroker():
            await asyncio.sleep(60)

    async def main() -> None:
        async with LocalBroker(store="memory") as broker:
            broker.create_topic("orders")
            await asyncio.to_thread(broker.restart)
            assert (await ask(broker)).startswith(b"HTTP/1.")
        with pytest.raises(UsageError, match="does not run"):
            broker.create_topic("orders")
        taken = LocalBroker(settings={"listenPort": broker.namesrv.rpartition(":")[2]})
        async with taken:
            with pytest.raises(ConfigError, match="can't listen"):
                async with LocalBroker(
                    settings={"listenPort": taken.broker_address.rpartition(":")[2]}
                ):
                    pass
        for wait_s in (0, 0.001, 0.002, 0.005, 0.01, 0.03):
            task = asyncio.create_task(sleep_inside())
            await asyncio.sleep(wait_s)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_mistakes_are_said_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'flushDiskType'"):
        LocalBroker(settings={"flushDiskTipe": "SYNC_FLUSH"})
    with pytest.raises(ConfigError, match="its own name server"):
        LocalBroker(settings={"namesrvAddr": "127.0.0.1:9876"})
    log_file = tmp_path / "store" / "commitlog" / ("0" * 20)
    log_file.parent.mkdir(parents=True)
    log_file.write_bytes(b"short")
    with pytest.raises(StoreCorrupt):
        LocalBroker(store=tmp_path / "store").start()
    broker = LocalBroker(store="memory")
    with broker, pytest.raises(UsageError, match="runs already"):
        broker.start()
    broker.stop()  # once more does no harm
    with broker:  # and it may be used again
        assert _has_route(broker, "TBW102")


def test_a_bug_in_the_background_is_raised_by_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = LocalBroker(store="memory").start()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(NameServer, "settle", broken)
        _has_route(broker, "orders")
    with pytest.raises(ZeroDivisionError):
        broker.stop()


# -------------------------------------------------------------------------------------- faults


def test_fail_refuses_without_doing(broker: LocalBroker) -> None:
    with Remote(broker.broker_address) as remote:
        fault = broker.fail(SEND, times=2, after=1, response_code=ResponseCode.SYSTEM_BUSY)
        codes = [send(remote, "orders", b"%d" % number).code for number in range(5)]
        assert codes == [0, ResponseCode.SYSTEM_BUSY, ResponseCode.SYSTEM_BUSY, 0, 0]
        assert fault.hits == 2
        broker.fail(SEND, remark="not today")
        answer = send(remote, "orders", b"x")
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "not today")
        broker.fail(SEND, times=100)
        broker.clear_faults()
        assert send(remote, "orders", b"5").code == 0
    assert _bodies(broker, "orders") == [b"0", b"3", b"4", b"5"]


@pytest.mark.parametrize(
    "code, status",
    [
        (ResponseCode.FLUSH_DISK_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT),
        (ResponseCode.SLAVE_NOT_AVAILABLE, SendStatus.SLAVE_NOT_AVAILABLE),
        (ResponseCode.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
def test_fail_with_a_weak_status_stores_and_says_so(
    broker: LocalBroker, code: ResponseCode, status: SendStatus
) -> None:
    broker.create_topic("orders", queues=1)

    async def work() -> None:
        async with aio.Producer("shop", namesrv=broker.namesrv) as producer:
            await producer.send(Message("orders", b"0"))
            fault = broker.fail(SEND, response_code=code)
            sent = await producer.send(Message("orders", b"1"))
            assert (sent.status, fault.hits) == (status, 1)
            assert sent.offset_id
            assert (await producer.send(Message("orders", b"2"))).status is SendStatus.SEND_OK
            broker.fail(RequestCode.SEND_BATCH_MESSAGE, response_code=code)
            assert (await producer.send_batch([Message("orders", b"3")])).status is status

    asyncio.run(work())
    with Remote(broker.broker_address) as remote:
        broker.fail(SEND, response_code=code, remark="slowly")
        answer = send(remote, "orders", b"4")
        assert (answer.code, answer.remark) == (code, "slowly") and answer.ext["msgId"]
        broker.fail(RequestCode.GET_BROKER_CONFIG, response_code=code)  # no send: refused
        with pytest.raises(RequestRefused):
            remote.call(RequestCode.GET_BROKER_CONFIG)
    assert sorted(_bodies(broker, "orders")) == [b"%d" % number for number in range(5)]


def test_fail_reaches_what_the_compiled_path_would_take(broker: LocalBroker) -> None:
    with Remote(broker.broker_address) as remote:
        for _ in range(2):
            for _ in range(20):
                assert send(remote, "orders", b"x", unique="U1").code == 0
            broker.fail(SEND)
            assert send(remote, "orders", b"x", unique="U1").code == ResponseCode.SYSTEM_ERROR
        figures = json.loads(remote.call(RequestCode.GET_BROKER_RUNTIME_INFO, {}).body)["table"]
    if _fast.load()[0] is not None:
        assert int(figures["cometmqRequestsCompiled"]) > 10


def test_fail_at_the_name_server(broker: LocalBroker) -> None:
    broker.fail(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    assert not _has_route(broker, "TBW102")
    assert _has_route(broker, "TBW102")


def test_delay_holds_one_answer_back(broker: LocalBroker) -> None:
    broker.create_topic("orders")
    with Remote(broker.broker_address) as remote, Remote(broker.broker_address) as other:
        broker.delay(RequestCode.PULL_MESSAGE, 1.5)
        send(other, "orders", b"x")
        began = time.monotonic()
        held = remote.send(RequestCode.PULL_MESSAGE, pull_ext("orders", 0, 0))
        remote.call(RequestCode.GET_BROKER_CONFIG)
        assert time.monotonic() - began < 1.4
        assert remote.wait(held).code == 0
        assert 1.45 < time.monotonic() - began < 5


def test_delay_of_an_answer_that_waits_itself(broker: LocalBroker) -> None:
    broker.create_topic("orders")
    with Remote(broker.broker_address) as remote, Remote(broker.broker_address) as other:
        broker.delay(RequestCode.PULL_MESSAGE, 0.2)
        held = remote.send(RequestCode.PULL_MESSAGE, pull_ext("orders", 0, 0, suspend_ms=10_000))
        time.sleep(0.1)
        send(other, "orders", b"x")
        began = time.monotonic()
        assert remote.wait(held).code == 0
        assert 0.15 < time.monotonic() - began < 5


def test_drop_does_it_and_never_answers(broker: LocalBroker) -> None:
    with Remote(broker.broker_address, timeout_ms=200) as remote:
        assert send(remote, "orders", b"1").code == 0
        broker.drop(SEND)
        with pytest.raises(RequestTimeout):
            send(remote, "orders", b"2")
        assert send(remote, "orders", b"3").code == 0
    assert _bodies(broker, "orders") == [b"1", b"2", b"3"]


def test_cut_connections(broker: LocalBroker) -> None:
    with Remote(broker.broker_address) as remote, Remote(broker.namesrv) as namesrv:
        send(remote, "orders", b"x")
        held = remote.send(RequestCode.PULL_MESSAGE, pull_ext("orders", 0, 1, suspend_ms=10_000))
        broker.cut_connections()
        with pytest.raises(ConnectionLost):
            remote.wait(held)
        with pytest.raises(ConnectionLost):
            namesrv.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
    assert _has_route(broker, "orders"), "the broker's own connection stays"


@pytest.mark.parametrize("kind", KINDS)
def test_move_clock(kind: str | None, tmp_path: Path) -> None:
    hour_ms = 3_600_000
    settings = SMALL | {"mappedFileSizeCommitLog": "65536"}
    with LocalBroker(store=_store(kind, tmp_path), settings=settings) as broker:
        with Remote(broker.broker_address) as remote:
            for _ in range(100):
                send(remote, "orders", b"x" * 2000)
            held = remote.send(
                RequestCode.PULL_MESSAGE, pull_ext("orders", 0, 100, suspend_ms=9000)
            )
            before_ms = time.time() * 1000
            broker.move_clock(100 * 3600)
            assert remote.wait(held, 1000).code == ResponseCode.PULL_NOT_FOUND
            broker.restart()
        with Remote(broker.broker_address) as remote:
            where = {"topic": "orders", "queueId": "0"}
            remote.call(RequestCode.TRIGGER_DELETE_FILES)
            least = int(remote.call(RequestCode.GET_MIN_OFFSET, where).ext["offset"])
            send(remote, "orders", b"later")
        assert least > 0, "what is older than fileReservedTime has gone"
        newest = read_queue(broker.broker_address, "orders", 0)[-1]
        assert newest.body == b"later"
        assert 99 * hour_ms < newest.store_ms - before_ms < 101 * hour_ms
        with pytest.raises(UsageError, match="backwards"):
            broker.move_clock(-1)


def test_a_nearly_full_disk_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(f_blocks=10_000_000, f_bfree=300_000, f_bavail=300_000, f_frsize=4096)
    monkeypatch.setattr("cometmq.store.files.os.statvfs", lambda _: room)
    quick = {"cleanResourceInterval": "100"}
    for settings, code in (
        (quick, 0),
        (quick | {"diskSpaceWarningLevelRatio": "90"}, ResponseCode.SERVICE_NOT_AVAILABLE),
    ):
        with LocalBroker(settings=settings) as broker, Remote(broker.broker_address) as remote:
            broker.move_clock(1)
            assert send(remote, "orders", b"x").code == code
    assert RealFiles(tmp_path / "a", spare_bytes=2**40).used_ratio() == 1.0


# ---------------------------------------------------------------------------------- the plugin


def test_the_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from cometmq.client.remote import Remote\n"
        "from cometmq.wire.codes import RequestCode\n"
        "seen = []\n"
        "def test_one(rocketmq, rocketmq_topic):\n"
        "    with Remote(rocketmq.namesrv) as remote:\n"
        "        remote.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {'topic': rocketmq_topic})\n"
        "    rocketmq.fail(RequestCode.GET_ROUTEINFO_BY_TOPIC, times=9)\n"
        "    seen.append((rocketmq, rocketmq_topic))\n"
        "def test_two(rocketmq, rocketmq_topic):\n"
        "    assert seen[0][0] is rocketmq and seen[0][1] != rocketmq_topic\n"
        "    with Remote(rocketmq.namesrv) as remote:\n"
        "        remote.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {'topic': rocketmq_topic})\n"
    )
    done = subprocess.run(  # the installed package brings them, by its entry point
        [sys.executable, "-W", "error", "-m", "pytest", "-q", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_plugin_is_cheap_to_import() -> None:
    script = (
        "import sys, pytest, cometmq.testing.pytest_plugin\n"
        "print([name for name in sys.modules if name.startswith('cometmq')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(json.loads(done.stdout.replace("'", '"'))) == {
        *("cometmq", "cometmq.errors", "cometmq.testing", "cometmq.testing.pytest_plugin"),
    }


def test_memory_files_keep_the_contract() -> None:
    now_ms = [5]
    files = MemoryFiles(lambda: now_ms[0])
    mapped = files.map("a/b/0", 8)
    mapped.buffer[:2] = b"hi"
    rest = mapped.buffer[1:]
    assert mapped.close() and bytes(rest[:1]) == b"i"
    assert bytes(files.map("a/b/0", 8).buffer[:2]) == b"hi"
    assert (files.folders("a"), files.files("a/b"), files.files("a")) == (["b"], [("0", 8)], [])
    with pytest.raises(StoreCorrupt):
        files.map("a/b/0", 9)
    now_ms[0] = 6
    files.writing("a/b/0", 2, memoryview(b"!!!")).sync()
    assert (files.read("a/b/0"), files.modified_ms("a/b/0")) == (b"hi!!!\0\0\0", 6)
    files.zero_from("a/b/0", 1, 8)
    assert files.read("a/b/0") == b"h" + bytes(7)
    files.making("a/b/1", 4).sync()
    files.making("a/b/0", 8).sync()
    assert files.files("a/b") == [("0", 8), ("1", 4)]
    files.replace("s", b"1")
    files.replace("s", b"2")
    assert (files.read("s"), files.read("s.bak"), files.read("none")) == (b"2", b"1", None)
    files.rename("s", "t")
    files.remove_folder("a")
    files.remove("a")
    assert (files.read("t"), files.folders("a"), files.files("a/b")) == (b"2", [], [])
    with pytest.raises(FileNotFoundError):
        files.writing("gone", 0, memoryview(b"x")).sync()
    files.target("gone").sync()
