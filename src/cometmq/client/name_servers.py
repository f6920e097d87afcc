"""The name servers of a client: which there are, and asking one that answers.

Owns: the list, where it comes from, and which of them is asked. One rule: a question goes to the
one that answered last; only if that fails are the others tried, each once, and the error names all.

The list comes from the argument, from NAMESRV_ADDR, or from an HTTP address service
(`http://host[:port]/path` whose body is `ip:port;ip:port`), asked 10 s after the start and then
every 2 minutes; a changed list counts at once.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import random
import urllib.error
import urllib.request
from collections.abc import Sequence

from cometmq.client.connection import Connections
from cometmq.errors import CometError, ConnectionLost, RequestTimeout, Unreachable, UsageError
from cometmq.wire.frame import Frame

log = logging.getLogger("cometmq.client")

ENVIRONMENT = "NAMESRV_ADDR"
FIRST_LOOK_S = 10.0
LOOK_S = 120.0
HTTP_TIMEOUT_S = 3.0
MAX_LIST_BYTES = 64 * 1024


def parse_list(text: str) -> tuple[str, ...]:
    """`host:port;host:port` (or commas); UsageError names the piece that is no address."""
    found: list[str] = []
    for piece in text.replace(",", ";").split(";"):
        address = piece.strip()
        if not address:
            continue
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"name server address {address!r} is not host:port")
        if address not in found:
            found.append(address)
    return tuple(found)


class NameServers:
    """The name servers, as one that is asked."""

    def __init__(
        self,
        connections: Connections,
        namesrv: str | Sequence[str] | None,
        *,
        rng: random.Random,
        timeout_ms: int = 3_000,
    ) -> None:
        self._connections = connections
        self._timeout_ms = timeout_ms
        self._rng = rng
        self._url = ""
        text = namesrv if isinstance(namesrv, str) else ";".join(namesrv or ())
        text = text or os.environ.get(ENVIRONMENT, "")
        if text.startswith(("http://", "https://")):
            self._url, text = text, ""
        self.addresses = parse_list(text)
        if not self.addresses and not self._url:
            raise UsageError(
                'no name server: pass namesrv="host:9876" or set NAMESRV_ADDR '
                "(several: separate them with ;)"
            )
        self._first = self._rng.randrange(len(self.addresses)) if self.addresses else 0

    def __str__(self) -> str:
        return ";".join(self.addresses) or self._url

    async def start(self) -> None:
        """With an address service: ask it once, now; Unreachable if it gives no list."""
        if self._url:
            self._take(await asyncio.to_thread(self._read_service))
            if not self.addresses:
                raise Unreachable(f"the address service {self._url} knows no name server")

    async def follow(self) -> None:
        """Keep the list true for as long as the client runs."""
        if not self._url:
            return
        await asyncio.sleep(FIRST_LOOK_S)
        while True:
            try:
                self._take(await asyncio.to_thread(self._read_service))
            except CometError as error:
                log.warning("address_service_failed reason=%s action=keep the list", error)
            await asyncio.sleep(LOOK_S)

    def _read_service(self) -> str:
        try:
            with urllib.request.urlopen(self._url, timeout=HTTP_TIMEOUT_S) as answer:
                raw: bytes = answer.read(MAX_LIST_BYTES)
                return raw.decode("utf-8", "replace")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it is the answer too, and holds the socket
            said = f"{type(error).__name__}: {error}"
            raise Unreachable(f"the address service {self._url} did not answer: {said}") from None

    def _take(self, text: str) -> None:
        try:
            addresses = parse_list(text)
        except UsageError as error:
            log.warning("address_service_wrong reason=%s action=keep the list", error)
            return
        if addresses and addresses != self.addresses:
            log.info("name_servers before=%s after=%s", ";".join(self.addresses), text.strip())
            self.addresses = addresses
            self._first = self._rng.randrange(len(addresses))

    async def ask(self, code: int, ext: dict[str, str], body: bytes = b"") -> tuple[str, Frame]:
        """(who answered, the answer); Unreachable names every name server and what it said."""
        failed: list[str] = []
        addresses = self.addresses
        for turn in range(len(addresses)):
            number = (self._first + turn) % len(addresses)
            address = addresses[number]
            try:
                answer = await self._connections.request(
                    address, code, ext, body, timeout_ms=self._timeout_ms
                )
            except (ConnectionLost, RequestTimeout) as error:
                failed.append(str(error))
                continue
            if addresses is self.addresses:
                self._first = number
            return address, answer
        raise Unreachable(f"no name server answered: {'; '.join(failed)}")
