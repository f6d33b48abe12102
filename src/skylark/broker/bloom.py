"""Apache's Bloom filter, as far as Skylark needs it: the bits that belong to a name.

The hash is the one that Apache uses, so that the bits that one of them writes are the other's too.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from skylark.wire.numbers import Int

_MASK: Final = 2**64 - 1


class BloomBits(msgspec.Struct, rename="camel"):
    bit_num: Int = 0
    bit_pos: list[Int] = []


class Bloom:
    """Which bits belong to a name: as many as keep errors below a rate when so many names are in use."""

    def __init__(self, error_percent: int, names: int) -> None:
        rate = error_percent / 100
        self.hashes = math.ceil(math.log(rate) / math.log(0.5))
        bits = math.ceil(names * (math.log(1 / rate) / math.log(2)) * (math.log(math.e) / math.log(2)))
        self.bits = -(-bits // 8) * 8

    def of(self, name: str) -> BloomBits:
        hashed = murmur3_64(name.encode())
        low, high = hashed & 0xFFFFFFFF, hashed >> 32
        positions = []
        for number in range(1, self.hashes + 1):
            combined = (low + number * high) & 0xFFFFFFFF
            if combined & 0x80000000:
                combined ^= 0xFFFFFFFF
            positions.append(combined % self.bits)
        return BloomBits(self.bits, positions)

    def made(self, bits: BloomBits | None) -> bool:
        return bits is not None and bits.bit_num == self.bits and len(bits.bit_pos) == self.hashes


def murmur3_64(data: bytes) -> int:
    """The first half of MurmurHash3 x64 128 with seed 0.

    >>> hex(murmur3_64(b"group#topic"))
    '0xa546c40b70da5124'
    """
    first = second = 0
    whole = len(data) & ~15
    for at in range(0, whole, 16):
        first ^= _mix_first(int.from_bytes(data[at : at + 8], "little"))
        first = (_rotate(first, 27) + second) * 5 + 0x52DCE729 & _MASK
        second ^= _mix_second(int.from_bytes(data[at + 8 : at + 16], "little"))
        second = (_rotate(second, 31) + first) * 5 + 0x38495AB5 & _MASK
    second ^= _mix_second(int.from_bytes(data[whole + 8 :], "little"))
    first ^= _mix_first(int.from_bytes(data[whole : whole + 8], "little"))
    first ^= len(data)
    second ^= len(data)
    first = first + second & _MASK
    second = first + second & _MASK
    return _finish(first) + _finish(second) & _MASK


def _rotate(number: int, count: int) -> int:
    return (number << count | number >> 64 - count) & _MASK


def _mix_first(number: int) -> int:
    return _rotate(number * 0x87C37B91114253D5 & _MASK, 31) * 0x4CF5AD432745937F & _MASK


def _mix_second(number: int) -> int:
    return _rotate(number * 0x4CF5AD432745937F & _MASK, 33) * 0x87C37B91114253D5 & _MASK


def _finish(number: int) -> int:
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return number ^ number >> 33
