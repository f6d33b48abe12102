"""What the rows of a batch are, in a few bytes: by it a batch that comes again is told from another of its number.

A row's digest is that of its topic, body and properties, without the unique key, which each attempt makes anew. The
digests are added up, so neither the order of the rows counts nor how they are spread over tasks: Spark may change both
when it runs a batch again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import msgspec

from skylark.spark.rows import Outgoing
from skylark.wire.message import PROPERTY_UNIQUE_KEY

_DIGEST_BYTES: Final = 16
_MASK: Final = (1 << 8 * _DIGEST_BYTES) - 1


class Content(msgspec.Struct, frozen=True):
    """The rows of a batch, or of a part of it."""

    target: str | None
    """the topic that all go to; None if each row names its own"""
    count: int
    digest: bytes

    def __str__(self) -> str:
        rows = "1 row" if self.count == 1 else f"{self.count:,} rows"
        where = "topics that they name" if self.target is None else f"topic {self.target}"
        return f"{rows} for {where} (digest {self.digest.hex()[:12]})"


class Tally:
    """Counts rows as they pass."""

    def __init__(self, target: str | None) -> None:
        self._target = target
        self._count = 0
        self._sum = 0

    def add(self, message: Outgoing) -> None:
        own = sorted(item for item in message.properties.items() if item[0] != PROPERTY_UNIQUE_KEY)
        # Neither a name nor a value holds character 1 or 2, so nothing but these properties gives this text.
        text = message.topic + "\2" + "".join([f"{name}\1{value}\2" for name, value in own]) + "\2"
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
        digest.update(message.body)
        self._sum += int.from_bytes(digest.digest(), "big")
        self._count += 1

    @property
    def content(self) -> Content:
        return Content(self._target, self._count, (self._sum & _MASK).to_bytes(_DIGEST_BYTES, "big"))


def total(target: str | None, parts: Iterable[Content]) -> Content:
    """The content of a batch, from those of its tasks."""
    count = 0
    digest = 0
    for part in parts:
        count += part.count
        digest += int.from_bytes(part.digest, "big")
    return Content(target, count, (digest & _MASK).to_bytes(_DIGEST_BYTES, "big"))
