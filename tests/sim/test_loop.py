"""SimLoop: ordinary asyncio code in virtual time, on a network that fails on request."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from cometmq.testing.loop import SimLoop, SimulationError, Trace, simulate

SERVER = ("10.0.0.1", 7000)
ADDRESS = "10.0.0.1:7000"

Main = Callable[[SimLoop], Coroutine[object, None, None]]


def run(main: Main, seed: int = 1) -> Trace:
    return simulate(seed, main)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


class Recorder(asyncio.Protocol):
    """A low-level protocol that writes down all that happens to it."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.chunks: list[bytes] = []
        self.lost: list[Exception | None] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.happened.append("made")

    def data_received(self, data: bytes) -> None:
        self.chunks.append(data)

    def eof_received(self) -> bool:
        self.happened.append("eof")
        return False

    def pause_writing(self) -> None:
        self.happened.append("pause")

    def resume_writing(self) -> None:
        self.happened.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.happened.append("lost")
        self.lost.append(exc)

    @property
    def received(self) -> bytes:
        return b"".join(self.chunks)


async def pair(loop: SimLoop) -> tuple[Recorder, Recorder]:
    """A client and the server's side of one connection."""
    made: list[Recorder] = []

    def accept() -> Recorder:
        made.append(Recorder())
        return made[-1]

    await loop.create_server(accept, *SERVER)
    _, client = await loop.create_connection(Recorder, *SERVER)
    await asyncio.sleep(0.1)
    assert isinstance(client, Recorder)
    return client, made[0]


# -------------------------------------------------------------------------------------------- time


def test_twelve_hours_pass_in_less_than_a_second() -> None:
    async def main(loop: SimLoop) -> None:
        async def beat() -> int:
            for _ in range(12 * 60):
                await asyncio.sleep(60)
            return 1

        assert sum(await asyncio.gather(beat(), beat(), beat())) == 3
        assert loop.time() == 12 * 3600

    began = time.perf_counter()
    assert run(main).time_s == 12 * 3600
    assert time.perf_counter() - began < 1


def test_timeouts_come_when_they_are_due() -> None:
    async def main(loop: SimLoop) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2.5)
        assert loop.time() == 2.5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.sleep(1)
        assert loop.time() == 2.6
        assert await asyncio.wait_for(asyncio.sleep(0.3, "done"), 1) == "done"
        assert loop.time() == 2.9

    run(main)


def test_no_timer_comes_early_and_timers_keep_their_order() -> None:
    async def main(loop: SimLoop) -> None:
        rng = random.Random(3)
        order: list[float] = []

        async def sleeper(delay: float) -> None:
            when = loop.time() + delay
            await asyncio.sleep(delay)
            assert loop.time() > when - 1e-8
            assert loop.time() < when + 2e-6
            order.append(when)

        await asyncio.gather(*(sleeper(rng.random() * 8e4) for _ in range(300)))
        assert order == sorted(order)
        deadline = loop.time() + 0.12345678901
        while loop.time() < deadline:
            await asyncio.sleep(deadline - loop.time())

    run(main)


def test_work_for_an_executor_runs_here_and_later() -> None:
    async def main(loop: SimLoop) -> None:
        thread = await asyncio.to_thread(threading.get_ident)
        assert thread == threading.get_ident()
        assert loop.time() > 0
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)
        told: list[int] = []
        loop.call_soon_threadsafe(told.append, 1)
        await asyncio.sleep(0)
        assert told == [1]

    run(main)


def test_another_thread_is_refused() -> None:
    async def main(loop: SimLoop) -> None:
        refused: list[SimulationError] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except SimulationError as error:
                refused.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert "one thread" in str(refused[0])

    run(main)


# ------------------------------------------------------------------------------ when it can't go on


def test_a_deadlock_names_who_waits() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main(loop: SimLoop) -> None:
        await asyncio.gather(waits_for_ever(), asyncio.sleep(5))

    with pytest.raises(SimulationError, match=r"deadlock: nothing is scheduled.*waits_for_ever"):
        run(main)


def test_a_spin_and_too_much_time_are_errors() -> None:
    async def spins(loop: SimLoop) -> None:
        while True:
            await asyncio.sleep(0)

    async def goes_on(loop: SimLoop) -> None:
        while True:
            await asyncio.sleep(10)

    with pytest.raises(SimulationError, match=r"spin: .*spins"):
        run(spins)
    with pytest.raises(SimulationError, match=r"more than 3600.0 s of virtual time.*goes_on"):
        simulate(1, goes_on, longest_s=3600)
    with pytest.raises(SimulationError, match="more than 1000 turns"):
        simulate(1, goes_on, most_turns=1000)


def test_what_nobody_looks_at_is_raised_at_the_end() -> None:
    async def breaks() -> None:
        raise ValueError("in a task")

    async def main(loop: SimLoop) -> None:
        task = asyncio.create_task(breaks())
        await asyncio.sleep(1)
        assert task.done()
        loop.call_soon(lambda: int("in a callback"))
        await asyncio.sleep(1)

    with pytest.raises(SimulationError, match=r"in a callback[\s\S]*in a task"):
        run(main)


def test_main_raises_and_what_it_left_is_cancelled() -> None:
    cancelled: list[int] = []

    async def left(number: int) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.append(number)

    async def main(loop: SimLoop) -> None:
        kept = [asyncio.create_task(left(number)) for number in range(5)]
        await asyncio.sleep(1)
        raise LookupError(len(kept))

    with pytest.raises(LookupError):
        run(main)
    assert cancelled == [0, 1, 2, 3, 4]


def test_what_is_not_there_says_so() -> None:
    async def main(loop: SimLoop) -> None:
        assert (await loop.getaddrinfo("localhost", 80))[0][4] == ("127.0.0.1", 80)
        assert (await loop.getaddrinfo("::1", 80))[0][0] == socket.AF_INET6
        with pytest.raises(socket.gaierror):
            await asyncio.open_connection("example.com", 80)
        with pytest.raises(NotImplementedError):
            loop.add_signal_handler(15, print)
        with pytest.raises(NotImplementedError):
            await loop.create_datagram_endpoint(asyncio.DatagramProtocol)
        with pytest.raises(NotImplementedError):
            await asyncio.open_connection("127.0.0.1", 80, ssl=True)

    run(main)


# ----------------------------------------------------------------------------------------- network


def test_streams_echo_in_pieces_and_in_order() -> None:
    sizes: list[int] = []

    async def main(loop: SimLoop) -> None:
        server = await asyncio.start_server(echo, *SERVER)
        assert server.sockets[0].getsockname() == SERVER
        reader, writer = await asyncio.open_connection(*SERVER)
        assert writer.get_extra_info("peername") == SERVER
        assert writer.get_extra_info("sockname")[0] == "127.0.0.1"
        assert writer.get_extra_info("socket") is None
        sent = loop.rng("test").randbytes(200_000)
        for begin in range(0, len(sent), 1000):
            writer.write(sent[begin : begin + 1000])
            if begin % 7 == 0:
                await asyncio.sleep(0.0005)
        writer.write_eof()
        got = b""
        while data := await reader.read(65536):
            sizes.append(len(data))
            got += data
        assert got == sent
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    run(main)
    assert any(size % 1000 for size in sizes), "no piece was cut"
    assert any(size > 1000 for size in sizes), "no pieces were joined"


def test_a_reader_that_pauses_makes_the_writer_wait() -> None:
    async def main(loop: SimLoop) -> None:
        client, server = await pair(loop)
        server.transport.pause_reading()
        assert not server.transport.is_reading()
        client.transport.set_write_buffer_limits(high=10_000, low=5_000)
        assert client.transport.get_write_buffer_limits() == (5_000, 10_000)
        client.transport.writelines([bytes(40_000)] * 2)
        assert client.happened == ["made", "pause"]
        assert client.transport.get_write_buffer_size() == 80_000 - 64 * 1024
        client.transport.close()
        await asyncio.sleep(60)
        assert server.chunks == [] and client.lost == [], "its last bytes are still here"
        server.transport.resume_reading()
        await asyncio.sleep(1)
        assert server.received == bytes(80_000)
        assert client.happened == ["made", "pause", "resume", "lost"]
        assert server.happened == ["made", "eof", "lost"]
        assert client.lost == server.lost == [None]

    for seed in range(10):
        run(main, seed)


def test_an_end_in_one_direction_leaves_the_other() -> None:
    async def main(loop: SimLoop) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = await reader.read(-1)
            writer.write(asked.upper())
            writer.close()

        await asyncio.start_server(serve, *SERVER)
        reader, writer = await asyncio.open_connection(*SERVER)
        assert writer.can_write_eof()
        writer.write(b"question")
        writer.write_eof()
        with pytest.raises(RuntimeError):
            writer.write(b"too late")
        assert await reader.read(-1) == b"QUESTION"
        writer.close()
        assert writer.is_closing()

    run(main)


def test_a_reset_ends_both_sides_and_loses_what_was_under_way() -> None:
    async def main(loop: SimLoop) -> None:
        client, server = await pair(loop)
        await asyncio.start_server(echo, "10.0.0.2", 7000)
        reader, writer = await asyncio.open_connection("10.0.0.2", 7000)
        client.transport.write(b"lost")
        loop.network.reset(ADDRESS)
        client.transport.write(b"also lost: what arrives has no holes")
        await asyncio.sleep(1)
        for side in (client, server):
            assert [type(error) for error in side.lost] == [ConnectionResetError]
            assert side.chunks == []
            assert side.transport.is_closing()
        writer.write(b"others don't notice")
        assert await reader.readexactly(19) == b"others don't notice"
        loop.network.reset("10.0.0.2:7000")
        with pytest.raises(ConnectionResetError):
            await reader.read(1)

    run(main)


def test_a_cut_is_half_open_until_it_heals() -> None:
    async def main(loop: SimLoop) -> None:
        await asyncio.start_server(echo, *SERVER)
        reader, writer = await asyncio.open_connection(*SERVER)
        loop.network.cut(ADDRESS)
        writer.write(b"ping")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(4), 3600)
        assert not writer.is_closing()
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.open_connection(*SERVER)
        assert loop.time() == began + 3
        with pytest.raises(TimeoutError):
            await asyncio.open_connection(*SERVER)
        assert 127 < loop.time() - began - 3 < 128, "as Linux gives up"
        loop.network.heal(ADDRESS)
        assert await reader.readexactly(4) == b"ping", "TCP would have sent it again"
        writer.close()

    run(main)


def test_whoever_writes_to_a_side_that_went_during_a_cut_gets_a_reset() -> None:
    async def main(loop: SimLoop) -> None:
        served = loop.network.process("10.0.0.1")
        await served.spawn(asyncio.start_server(echo, *SERVER))
        reader, writer = await asyncio.open_connection(*SERVER)
        await asyncio.sleep(1)
        loop.network.cut("10.0.0.1")
        served.kill()
        await asyncio.sleep(100)
        loop.network.heal("10.0.0.1")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 100)
        writer.write(b"still there?")
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*SERVER)

    for seed in range(5):
        run(main, seed)


def test_a_killed_process_says_nothing_and_hears_nothing() -> None:
    async def main(loop: SimLoop) -> None:
        made: list[Recorder] = []

        def accept() -> Recorder:
            made.append(Recorder())
            return made[-1]

        async def serve() -> None:
            await loop.create_server(accept, *SERVER)

        process = loop.network.process("10.0.0.1")
        await process.spawn(serve())
        _, client = await loop.create_connection(Recorder, *SERVER)
        await asyncio.sleep(0.1)
        process.kill()
        await asyncio.sleep(1)
        assert isinstance(client, Recorder)
        assert [type(error) for error in client.lost] == [ConnectionResetError]
        assert made[0].happened == ["made"], "the dead are not told"
        await asyncio.start_server(echo, *SERVER)

    for seed in range(5):
        run(main, seed)


def test_a_process_dials_from_its_own_host() -> None:
    async def main(loop: SimLoop) -> None:
        await asyncio.start_server(echo, *SERVER)

        async def dial() -> tuple[str, int]:
            _, writer = await asyncio.open_connection(*SERVER)
            name: tuple[str, int] = writer.get_extra_info("sockname")
            writer.close()
            return name

        assert (await loop.network.process("10.7.0.1").spawn(dial()))[0] == "10.7.0.1"
        loop.network.cut("10.7.0.1")
        with pytest.raises(TimeoutError):
            await loop.network.process("10.7.0.1").spawn(dial())
        assert (await dial())[0] == "127.0.0.1"

    run(main)


def test_a_stall_holds_bytes_but_not_connections() -> None:
    async def main(loop: SimLoop) -> None:
        await asyncio.start_server(echo, *SERVER)
        loop.network.stall(ADDRESS)
        reader, writer = await asyncio.open_connection(*SERVER)
        writer.write(b"one")
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 60)
        loop.network.go_on(ADDRESS)
        assert await reader.readexactly(6) == b"onetwo"
        writer.close()

    run(main)


def test_refused_connections() -> None:
    async def main(loop: SimLoop) -> None:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*SERVER)
        server = await asyncio.start_server(echo, *SERVER)
        with pytest.raises(OSError, match="in use"):
            await asyncio.start_server(echo, *SERVER)
        loop.network.refuse(ADDRESS)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*SERVER)
        loop.network.heal(ADDRESS)
        _, writer = await asyncio.open_connection(*SERVER)
        writer.close()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*SERVER)
        anywhere = await asyncio.start_server(echo, None, 0)
        port = anywhere.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("10.9.9.9", port)
        writer.close()
        await asyncio.start_server(echo, "::", 7001)
        loop.network.refuse("[::1]:7001")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("::1", 7001)
        _, writer = await asyncio.open_connection("::2", 7001)
        writer.close()

    run(main)


def test_the_delay_is_what_was_asked_for() -> None:
    async def main(loop: SimLoop) -> None:
        client, server = await pair(loop)
        loop.network.split_percent = 0
        loop.network.delay(2, 3)
        client.transport.write(b"slow")
        await asyncio.sleep(1.999)
        assert server.chunks == []
        await asyncio.sleep(1.002)
        assert server.chunks == [b"slow"]

    for seed in range(5):
        run(main, seed)


def test_an_abort_is_seen_as_a_reset_or_as_an_end() -> None:
    seen: set[str] = set()

    async def main(loop: SimLoop) -> None:
        client, server = await pair(loop)
        client.transport.write(b"last words")
        client.transport.abort()
        client.transport.write(b"ignored")
        await asyncio.sleep(1)
        assert client.lost == [None]
        assert b"last words".startswith(server.received)
        seen.add(type(server.lost[0]).__name__)

    for seed in range(20):
        run(main, seed)
    assert seen == {"NoneType", "ConnectionResetError"}


def test_a_protocol_that_raises_loses_its_connection() -> None:
    class Broken(Recorder):
        def data_received(self, data: bytes) -> None:
            raise ValueError("no")

    async def main(loop: SimLoop) -> None:
        made: list[Broken] = []

        def accept() -> Broken:
            made.append(Broken())
            return made[-1]

        await loop.create_server(accept, *SERVER)
        _, writer = await asyncio.open_connection(*SERVER)
        writer.write(b"?")
        await asyncio.sleep(1)
        assert isinstance(made[0].lost[0], ValueError)
        assert len(loop.unhandled) == 1
        loop.unhandled.clear()

    run(main)


def test_what_arrives_is_a_prefix_whatever_happens() -> None:
    async def main(loop: SimLoop) -> None:
        rng = loop.rng("faults")
        network = loop.network
        client, server = await pair(loop)
        sent = bytearray()
        for step in range(300):
            await asyncio.sleep(rng.random() / 100)
            piece = f"{step:05}".encode() * rng.randrange(1, 2000)
            if not client.transport.is_closing():
                client.transport.write(piece)
                sent += piece
            fault = rng.randrange(12)
            if fault == 0:
                network.stall(ADDRESS)
            elif fault == 1:
                network.go_on(ADDRESS)
            elif fault == 2:
                network.cut(ADDRESS)
            elif fault == 3:
                network.heal(ADDRESS)
            elif fault == 4:
                network.delay(0, rng.random() / 10)
            elif fault == 5 and not server.transport.is_closing():
                server.transport.pause_reading()
            elif fault == 6:
                server.transport.resume_reading()
            assert bytes(sent).startswith(server.received)
        network.heal(ADDRESS)
        network.go_on(ADDRESS)
        server.transport.resume_reading()
        if rng.randrange(2):
            await asyncio.sleep(5)
            assert server.received == sent
        else:
            network.reset(ADDRESS)
            await asyncio.sleep(5)
            assert bytes(sent).startswith(server.received)
            assert client.happened[-1] == server.happened[-1] == "lost"

    for seed in range(6):
        run(main, seed)


# ------------------------------------------------------------------------------------- determinism


async def crowd(loop: SimLoop) -> None:
    """Many clients, task groups that fail, sets of tasks, an executor, faults."""
    rng = loop.rng("crowd")
    server = await asyncio.start_server(echo, *SERVER)

    async def ask(number: int) -> int:
        reader, writer = await asyncio.open_connection(*SERVER)
        try:
            for step in range(5):
                text = f"{number}.{step}".encode() * 50
                writer.write(text)
                await asyncio.wait_for(reader.readexactly(len(text)), 2)
                await asyncio.to_thread(lambda: None)
        finally:
            writer.write(b"bye")
            writer.close()
        return number

    async def fail() -> None:
        await asyncio.sleep(0.004)
        raise LookupError

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(ask(number))
            group.create_task(fail())
    tasks = {asyncio.create_task(ask(number)) for number in range(20)}
    await asyncio.sleep(rng.random() / 100)
    loop.network.reset(ADDRESS)
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            loop.note(f"{type(task.exception()).__name__}")
    server.close()


def test_the_same_seed_gives_the_same_trace() -> None:
    first = run(crowd, 11)
    assert first.events > 200
    assert run(crowd, 11) == first
    assert run(crowd, 12).hash != first.hash


def test_another_process_with_another_hash_seed_gives_the_same_trace() -> None:
    program = (
        "import runpy, sys; from cometmq.testing.loop import simulate;"
        f"print(simulate(11, runpy.run_path({__file__!r})['crowd']).hash)"
    )
    hashes = set()
    for hash_seed in ("1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        hashes.add(done.stdout.strip())
    assert hashes == {run(crowd, 11).hash}


def test_a_draw_in_one_concern_does_not_shift_another() -> None:
    async def quiet(loop: SimLoop) -> None:
        await asyncio.sleep(1)
        loop.note(str(loop.rng("a").random()))

    async def drawing(loop: SimLoop) -> None:
        loop.rng("b").random()
        await asyncio.sleep(1)
        loop.note(str(loop.rng("a").random()))

    assert run(quiet) == run(drawing)


def test_every_line_of_the_trace_is_told() -> None:
    lines: list[str] = []
    trace = simulate(11, crowd, tell=lines.append)
    assert len(lines) == trace.events
    assert any("10.0.0.1:7000 accepts 127.0.0.1:4" in line for line in lines)


# --------------------------------------------------------------------------------- what it leans on


def test_the_private_hooks_of_base_event_loop_are_there() -> None:
    """SimLoop leans on these four names that asyncio does not promise, and on nothing else that is
    private: whoever raises the Python version looks here first."""
    base = asyncio.BaseEventLoop
    once = inspect.getsource(base._run_once)  # type: ignore[attr-defined]
    assert "self._selector.select(timeout)" in once, "asked to wait: None, 0 or seconds"
    assert "self._process_events(" in once
    assert "self.time() + self._clock_resolution" in once
    assert "self._write_to_self()" in inspect.getsource(base.call_soon_threadsafe)
    used = inspect.getsource(SimLoop)
    for hook in ("_selector", "_process_events", "_clock_resolution", "_write_to_self"):
        assert hook in used, f"{hook} is not used any more"
    ours = {name for name in vars(SimLoop) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in ours if hasattr(base, name)} == {"_process_events", "_write_to_self"}
