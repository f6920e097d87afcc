"""The bit positions of RocketMQ's bloom filter, as consumerFilter.json holds them.

    positions("G#T") == [24, 26, 83]      of 112 bits, for group G on topic T

Owns: the 128-bit murmur3 hash (Guava's murmur3_128, seed 0) of which RocketMQ takes the first word,
and its way from there to positions. One rule: the numbers are for an expected error of 20 percent
and 32 groups (maxErrorRateOfBloomFilter, expectConsumerNumUseFilter), RocketMQ's defaults.
"""

from __future__ import annotations

BIT_COUNT = 112
HASH_COUNT = 3

_MASK = 2**64 - 1
_C1 = 0x87C37B91114253D5
_C2 = 0x4CF5AD432745937F


def positions(text: str) -> list[int]:
    """Where a group's bits stand; `text` is `group#topic`."""
    word = murmur3(text.encode())
    low, high = word & 0xFFFFFFFF, word >> 32
    found = []
    for turn in range(1, HASH_COUNT + 1):
        mixed = (low + turn * high) & 0xFFFFFFFF
        if mixed & 0x8000_0000:
            mixed ^= 0xFFFFFFFF
        found.append(mixed % BIT_COUNT)
    return found


def murmur3(data: bytes) -> int:
    """The first of the two 64-bit words of murmur3 x64-128 with seed 0."""
    h1 = h2 = 0
    whole = len(data) & ~15
    for at in range(0, whole, 16):
        h1 ^= _mix(int.from_bytes(data[at : at + 8], "little"), _C1, 31, _C2)
        h1 = ((_turn(h1, 27) + h2) * 5 + 0x52DCE729) & _MASK
        h2 ^= _mix(int.from_bytes(data[at + 8 : at + 16], "little"), _C2, 33, _C1)
        h2 = ((_turn(h2, 31) + h1) * 5 + 0x38495AB5) & _MASK
    h1 ^= _mix(int.from_bytes(data[whole : whole + 8], "little"), _C1, 31, _C2)
    h2 ^= _mix(int.from_bytes(data[whole + 8 :], "little"), _C2, 33, _C1)
    h1 ^= len(data)
    h2 ^= len(data)
    h1 = (h1 + h2) & _MASK
    h2 = (h2 + h1) & _MASK
    return (_final(h1) + _final(h2)) & _MASK


def _mix(word: int, first: int, turn: int, second: int) -> int:
    return _turn(word * first & _MASK, turn) * second & _MASK


def _turn(word: int, by: int) -> int:
    return (word << by | word >> 64 - by) & _MASK


def _final(word: int) -> int:
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD & _MASK
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return word ^ word >> 33
