"""Proxy: a TCP proxy between a client and a server, for tests of what goes wrong in between.

Owns: its listening port, the pairs of connections, and the thread they are carried in. One rule:
bytes pass unchanged and in order, or not at all; it knows nothing of what they mean.

Clients learn a broker's address from the name server, so the broker must name the proxy's. It can,
by its host: the proxy listens on the broker's port of 127.0.0.2.

    with LocalBroker(settings={"brokerIP1": "127.0.0.2"}) as broker:
        with Proxy(broker.broker_address) as proxy:  # 127.0.0.2:<the broker's port>
            ...                                      # a client of broker.namesrv
            proxy.cut()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from functools import partial

from cometmq.errors import UsageError
from cometmq.testing.background import Background, bind

HOST = "127.0.0.2"  # loopback as well, and nobody else is there
CHUNK_BYTES = 64 * 1024
MOST_CHUNKS = 256  # on their way in one direction; then the sender has to wait
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset, and drops what was not sent


class Proxy:
    """Carries connections from `address` to `target`, from `start` (or `with`) to `close`.

    `target` and `listen` are `host:port`; without `listen` it is 127.0.0.2 and the target's port.
    """

    def __init__(self, target: str, *, listen: str = "") -> None:
        self._target = _split(target)
        self._listen = _split(listen) if listen else (HOST, self._target[1])
        self.address = ""
        """Where it listens, `host:port`."""
        self._background: Background | None = None
        self._held: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._links: set[asyncio.Task[None]] = set()
        self._delay_s = 0.0

    # -------------------------------------------------------------------------------------- life

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Proxy:
        return self.start()  # no more than a bound socket to wait for

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Proxy:
        if self._background is not None:
            raise UsageError("this Proxy runs already")
        held = bind(*self._listen)
        self._port = int(held.getsockname()[1])
        self.address = f"{self._listen[0]}:{self._port}"
        self._held, self._background = held, Background("cometmq-proxy")
        try:
            self._background.run(self._begin())
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Reset what is open and let go of the port."""
        background, self._background = self._background, None
        if background is None:
            return
        try:
            background.run(self._end())
        finally:
            background.close()
            assert self._held is not None
            self._held.close()
        for error in background.errors:
            raise error

    # ------------------------------------------------------------------------------------ faults

    def delay(self, seconds: float) -> None:
        """Bytes take so long from now on, each way; 0 ends it."""
        if seconds < 0:
            raise UsageError(f"delay({seconds}): bytes can't come before they were sent")
        self._running()
        self._delay_s = seconds

    def stall(self) -> None:
        """Nothing moves any more; connections stay open, and new ones are accepted."""
        self._running().run(self._set_flowing(False))

    def refuse(self) -> None:
        """New connections are refused; those that are open stay."""
        self._running().run(self._stop_listening())

    def go_on(self) -> None:
        """End `stall` and `refuse`. What was held back moves on; nothing is lost."""
        self._running().run(self._set_flowing(True))

    def cut(self) -> None:
        """Reset all connections, both ends; what was on its way is lost."""
        self._running().run(self._cut())

    def _running(self) -> Background:
        if self._background is None:
            raise UsageError("this Proxy does not run; use it in a `with` block")
        return self._background

    # --------------------------------------------------------------------------------- in the loop

    async def _begin(self) -> None:
        self._flowing = asyncio.Event()
        await self._set_flowing(True)

    async def _end(self) -> None:
        await self._stop_listening()
        await self._cut()

    async def _set_flowing(self, is_flowing: bool) -> None:
        if not is_flowing:
            self._flowing.clear()
            return
        self._flowing.set()
        if self._listener is None:
            self._listener = bind(self._listen[0], self._port)
            self._listener.setblocking(False)
            self._listener.listen()
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._accept()  # who got through believes to be connected
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        """Take whoever waits. An asyncio.Server would lose those that come while it closes."""
        assert self._listener is not None
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # nobody waits, or nobody any more
                return
            link = asyncio.get_running_loop().create_task(self._link(near))
            self._links.add(link)
            link.add_done_callback(partial(self._ended, near))

    def _ended(self, near: socket.socket, link: asyncio.Task[None]) -> None:
        near.close()  # nobody else does if it was cancelled before its first step
        self._links.discard(link)

    async def _cut(self) -> None:
        links = list(self._links)
        for link in links:
            link.cancel()
        if links:
            await asyncio.wait(links)
            await asyncio.sleep(0)  # their sockets are closed now

    async def _link(self, near: socket.socket) -> None:
        """One connection and its other half, until both have ended."""
        writers: list[asyncio.StreamWriter] = []
        try:
            try:
                near_reader, near_writer = await asyncio.open_connection(sock=near)
                writers.append(near_writer)
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                writers.append(far_writer)
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._carry(near_reader, far_writer))
                    both.create_task(self._carry(far_reader, near_writer))
                for one in writers:
                    one.close()
                    await one.wait_closed()
            except* OSError:  # one side was reset: so is the other
                _reset(writers)
        except asyncio.CancelledError:
            _reset(writers)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """One direction, until its end of file has been passed on."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_CHUNKS)

        async def take() -> None:
            data = b"?"
            while data:
                await self._flowing.wait()
                data = await source.read(CHUNK_BYTES)
                await chunks.put((loop.time() + self._delay_s, data))

        async def give() -> None:
            while True:
                due_s, data = await chunks.get()
                await asyncio.sleep(max(due_s - loop.time(), 0))
                await self._flowing.wait()
                if not data:
                    sink.write_eof()
                    return
                sink.write(data)
                await sink.drain()

        async with asyncio.TaskGroup() as both:
            both.create_task(take())
            both.create_task(give())


def _reset(writers: list[asyncio.StreamWriter]) -> None:
    for one in writers:
        with contextlib.suppress(OSError):  # it may be gone already
            one.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        one.transport.abort()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)
