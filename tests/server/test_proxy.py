"""Proxy: bytes pass unchanged, or late, or not at all."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from cometmq.client.remote import Remote
from cometmq.errors import ConnectionLost, RequestTimeout, UsageError
from cometmq.testing import LocalBroker, Proxy
from cometmq.wire.codes import RequestCode
from programs import read_queue, send


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads, files = threading.enumerate(), len(os.listdir("/proc/self/fd"))
    yield
    assert threading.enumerate() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    gc.collect()


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    """A server that sends back what it gets, and ends when its peer does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(taken: socket.socket) -> None:
        with taken:
            try:
                while data := taken.recv(65536):
                    taken.sendall(data)
            except ConnectionResetError:
                pass

    def accept() -> None:
        while True:
            try:
                taken, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(taken,)))
            threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(5)
    listener.close()


def _settle(threads: int) -> None:
    """The echo server's threads end a moment after their connections."""
    give_up = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < give_up:
        time.sleep(0.001)


@pytest.fixture
def proxy(echo: str) -> Iterator[Proxy]:
    threads = threading.active_count()
    with Proxy(echo, listen="127.0.0.1:0") as one:
        yield one
    _settle(threads)


def _connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 5)
    connection.settimeout(5)
    return connection


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        data = connection.recv(65536)
        assert data, f"ended after {len(found)} of {size} bytes"
        found += data
    return found


def test_bytes_pass_unchanged_and_so_does_the_end(proxy: Proxy) -> None:
    sent = os.urandom(3_000_000)
    with _connect(proxy) as connection:
        feeder = threading.Thread(target=connection.sendall, args=(sent,))
        feeder.start()
        assert _read(connection, len(sent)) == sent
        feeder.join()
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert _read(connection, 10) == b"last words"
        assert connection.recv(1) == b""


def test_delay(proxy: Proxy) -> None:
    with _connect(proxy) as connection:
        proxy.delay(0.1)
        began = time.monotonic()
        connection.sendall(b"a")
        connection.sendall(b"b")
        assert _read(connection, 2) == b"ab"
        assert 0.19 < time.monotonic() - began < 5
        proxy.delay(0)
        connection.sendall(b"c")
        assert _read(connection, 1) == b"c"
        assert time.monotonic() - began < 5
        with pytest.raises(UsageError):
            proxy.delay(-1)


def test_stall_and_go_on(proxy: Proxy) -> None:
    with _connect(proxy) as connection:
        connection.sendall(b"a")
        assert _read(connection, 1) == b"a"
        proxy.stall()
        connection.sendall(b"b")
        with _connect(proxy) as other:
            other.sendall(b"c")
            for one in (connection, other):
                one.settimeout(0.1)
                with pytest.raises(TimeoutError):
                    one.recv(1)
                one.settimeout(5)
            proxy.go_on()
            assert (_read(connection, 1), _read(other, 1)) == (b"b", b"c")


def test_cut_resets_all(proxy: Proxy) -> None:
    with _connect(proxy) as one, _connect(proxy) as other:
        for connection in (one, other):
            connection.sendall(b"a")
            assert _read(connection, 1) == b"a"
        proxy.cut()
        for connection in (one, other):
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
    with _connect(proxy) as connection:
        connection.sendall(b"b")
        assert _read(connection, 1) == b"b"


def test_refuse_and_go_on(proxy: Proxy) -> None:
    with _connect(proxy) as connection:
        proxy.refuse()
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            _connect(proxy)
        connection.sendall(b"a")
        assert _read(connection, 1) == b"a"
        proxy.go_on()
        with _connect(proxy) as other:
            other.sendall(b"b")
            assert _read(other, 1) == b"b"


def test_a_target_that_is_not_there_is_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
    with Proxy(target) as proxy:
        assert proxy.address == target.replace("127.0.0.1", "127.0.0.2")
        with _connect(proxy) as connection, pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_closing_with_bytes_on_their_way_leaves_nothing(echo: str) -> None:
    threads = threading.active_count()
    with Proxy(echo, listen="127.0.0.1:0") as proxy:
        connection = _connect(proxy)
        connection.setblocking(False)
        for _ in range(100):
            try:
                connection.send(bytes(65536))
            except BlockingIOError:
                break
        proxy.stall()
    connection.close()
    _settle(threads)
    proxy.close()  # once more does no harm
    with pytest.raises(UsageError, match="does not run"):
        proxy.cut()
    with pytest.raises(UsageError, match="not host:port"):
        Proxy("localhost")


def test_between_a_client_and_a_broker() -> None:
    with LocalBroker(store="memory", settings={"brokerIP1": "127.0.0.2"}) as broker:
        with Proxy(broker.broker_address) as proxy:
            with Remote(broker.namesrv) as remote:
                route = remote.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})
            assert proxy.address.encode() in route.body, "clients go to the proxy by themselves"
            with Remote(proxy.address, timeout_ms=200) as remote:
                assert send(remote, "orders", b"1").code == 0
                proxy.stall()
                with pytest.raises(RequestTimeout):
                    send(remote, "orders", b"2")
                proxy.go_on()
                assert send(remote, "orders", b"3").code == 0
                proxy.cut()
                with pytest.raises(ConnectionLost):
                    send(remote, "orders", b"4")
            broker.restart()
            with Remote(proxy.address) as remote:
                assert send(remote, "orders", b"5").code == 0
        bodies = [message.body for message in read_queue(broker.broker_address, "orders", 0)]
        assert bodies == [b"1", b"2", b"3", b"5"]
