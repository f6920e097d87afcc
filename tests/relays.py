"""A relay in front of a server, which may end TLS, and certificates for it.

Owns: both, for any test. One rule: it carries bytes as they are; what it reads of them is a copy.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from cometmq.testing.background import Background
from cometmq.wire.frame import Frame, FrameReader


class Relay:
    """Carries connections from 127.0.0.2 to a server; may end TLS, and reads the requests."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._tls = tls
        self.address = f"127.0.0.2:{port}"
        self.frames: list[Frame] = []

    def __enter__(self) -> Relay:
        self._background = Background("relay")
        self._background.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._background.run(self._end())
        self._background.close()

    async def _begin(self) -> None:
        self._links: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(
            self._link, "127.0.0.2", self._port, ssl=self._tls
        )

    async def _end(self) -> None:
        self._server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        try:
            ways = [
                asyncio.create_task(self._carry(reader, far_writer, FrameReader())),
                asyncio.create_task(self._carry(far_reader, writer, None)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except asyncio.CancelledError:
            pass
        finally:
            for one in (writer, far_writer):
                one.transport.abort()
            self._links.discard(task)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, frames: FrameReader | None
    ) -> None:
        while data := await source.read(65536):
            if frames is not None:
                self.frames += frames.feed(data)
            sink.write(data)
            await sink.drain()


def make_certificate(folder: Path, name: str, *, password: str | None = None) -> Path:
    """For 127.0.0.2 and for clients, signed by itself; key and certificate in one file."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl binary to make a certificate with")
    path = folder / f"{name}.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-days", "2"]
    command += ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.2"]
    command += ["-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path
