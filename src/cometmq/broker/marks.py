"""A moving set of numbers: one bit for each, from a base that only goes up.

Owns: the bits. One rule: its size follows the span between the base and the highest number marked,
not how many are marked; a million numbers take 125 kB.
"""

from __future__ import annotations

_CHUNK = 4096  # bytes looked at in one step


class Marks:
    """Which numbers from `base` on are marked."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.count = 0
        self._begin = base - base % 8  # the number of the first bit
        self._bits = bytearray()

    def mark(self, number: int) -> None:
        assert number >= self.base, (number, self.base)
        at, bit = divmod(number - self._begin, 8)
        missing = at + 1 - len(self._bits)
        if missing > 0:
            self._bits.extend(bytes(missing))
        if not self._bits[at] >> bit & 1:
            self._bits[at] |= 1 << bit
            self.count += 1

    def has(self, number: int) -> bool:
        """Whether a number is marked; not known of those below the base."""
        assert number >= self.base, (number, self.base)
        at, bit = divmod(number - self._begin, 8)
        return at < len(self._bits) and bool(self._bits[at] >> bit & 1)

    def shared(self) -> tuple[int, bytearray]:
        """The number of the first bit, and the bits. Who adds to them adds to `count` as well; true
        until the base moves."""
        return self._begin, self._bits

    def next_clear(self, number: int, end: int) -> int:
        """The first from `number` on that is not marked, at most `end`."""
        while number < end and self.has(number):
            number += 1
            if number % 8 == 0:  # whole bytes at a time
                at = (number - self._begin) // 8
                chunk = self._bits[at : at + _CHUNK]
                number += 8 * (len(chunk) - len(chunk.lstrip(b"\xff")))
        return min(number, end)

    def forget_below(self, number: int) -> None:
        """Move the base up."""
        if number <= self.base:
            return
        whole, rest = divmod(number - self._begin, 8)
        self.count -= int.from_bytes(self._bits[:whole], "big").bit_count()
        del self._bits[:whole]
        self._begin += 8 * whole
        if rest and self._bits:
            below = self._bits[0] & ((1 << rest) - 1)
            self.count -= below.bit_count()
            self._bits[0] ^= below
        self.base = number
