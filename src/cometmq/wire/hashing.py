"""Java's two hashes that are part of the formats: the string hash and the masked CRC.

java_hash("TagA") == 2598919            h = 31*h + unit over UTF-16 units, signed 32 bits
body_crc(b"hello") == 907060870         CRC-32 with the top bit cleared
"""

from __future__ import annotations

import zlib
from functools import lru_cache


@lru_cache(maxsize=4096)
def java_hash(text: str) -> int:
    """Java's String.hashCode: over UTF-16 code units, wrapped to a signed 32-bit integer."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (value * 31 + unit) & 0xFFFFFFFF
    else:
        raw = text.encode("utf-16-be", "surrogatepass")
        for at in range(0, len(raw), 2):
            value = (value * 31 + (raw[at] << 8 | raw[at + 1])) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


def index_hash(key: str) -> int:
    """The key index's hash: absolute value, and 0 where Java's abs stays negative."""
    value = abs(java_hash(key))
    return 0 if value == 0x8000_0000 else value


def body_crc(body: bytes | memoryview) -> int:
    """CRC-32 of a body as RocketMQ stores it: the sign bit is cleared."""
    return zlib.crc32(body) & 0x7FFF_FFFF
