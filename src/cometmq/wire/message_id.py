"""The two ids of a message.

offset id   upper-case hex of store ip (4 or 16 bytes) + port i32 + log offset i64
            10.0.0.1:10911 at 4096 <-> 0A00000100002A9F0000000000001000
unique id   upper-case hex of ip, pid u16, node hash i32, ms since the month began i32, counter u16;
            made by the sender; opaque to everybody else
"""

from __future__ import annotations

import struct
from ipaddress import ip_address

from cometmq.errors import UsageError
from cometmq.message import LogOffset

_TAIL = struct.Struct(">iq")


def pack_host(host: str, port: int) -> bytes:
    """`ip` and port as records store them: 4 or 16 address bytes, then the port as i32."""
    return ip_address(host.split("%", 1)[0]).packed + port.to_bytes(4, "big")


def unpack_host(packed: bytes) -> tuple[str, int]:
    """The reverse of pack_host."""
    return str(ip_address(packed[:-4])), int.from_bytes(packed[-4:], "big", signed=True)


def offset_id(store_host: bytes, log_offset: int) -> str:
    """The id a broker gives: `store_host` as pack_host makes it, then the log offset."""
    return (store_host + log_offset.to_bytes(8, "big", signed=True)).hex().upper()


def parse_offset_id(text: str) -> tuple[str, int, LogOffset]:
    """Offset id to (ip, port, log offset); UsageError if it isn't one."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    if len(raw) not in (16, 28) or len(text) != 2 * len(raw):
        raise UsageError(f"{text!r} is not an offset message id: expected 32 or 56 hex digits")
    port, log_offset = _TAIL.unpack(raw[-12:])
    return str(ip_address(raw[:-12])), port, LogOffset(log_offset)


def unique_id(host: bytes, pid: int, node: int, month_ms: int, counter: int) -> str:
    """A unique id from its parts; the caller keeps counter and clock."""
    tail = struct.pack(
        ">HIIH", pid & 0xFFFF, node & 0xFFFFFFFF, month_ms & 0xFFFFFFFF, counter & 0xFFFF
    )
    return (host + tail).hex().upper()
