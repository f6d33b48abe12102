"""Records with their bodies as they were before they were compressed, in portions that have room in memory.

A few kilobytes may become gigabytes: bodies are inflated one after the other, and a portion ends when those in it have
about PORTION_BYTES. A single body may have MAX_INFLATED_BYTES (64 MiB), as everywhere in Skylark; a larger one is a
fault, and so is one that is not what its flag says. A codec that is not installed here is no fault of the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import pyarrow as pa

from skylark.client.errors import MissingCodec, UnreadableMessage
from skylark.spark.records import PORTION_BYTES, Records

_NOTHING: Final = b""  # in place of a body that can't be given


class Portion(msgspec.Struct):
    """`faults` is row -> why it can't be given; what it has for a body is not looked at."""

    records: Records
    bodies: pa.Array
    faults: dict[int, str]


def portions(records: Records, faults: Mapping[int, str]) -> Iterator[Portion]:
    """All of the records, those too that are at fault already. Raises MissingCodec."""
    compressed = records.compressed_rows()
    if not compressed:
        yield Portion(records, records.stored_bodies(), dict(faults))
        return
    stored = records.stored_bodies()
    first, room = 0, PORTION_BYTES
    inflated: dict[int, bytes] = {}
    found = dict(faults)
    for row in compressed:
        if row not in faults:
            try:
                inflated[row] = records.inflated(row, stored[row].as_py())
            except MissingCodec:
                raise
            except UnreadableMessage as e:
                found[row] = str(e)
        room -= len(inflated.get(row, _NOTHING))
        if room <= 0:
            yield _portion(records, stored, inflated, found, first, row + 1)
            first, room = row + 1, PORTION_BYTES
            inflated = {}
    if first < len(records):
        yield _portion(records, stored, inflated, found, first, len(records))


def _portion(
    records: Records, stored: pa.Array, inflated: dict[int, bytes], faults: dict[int, str], first: int, end: int
) -> Portion:
    bodies = stored.slice(first, end - first).to_pylist()
    for row, body in inflated.items():
        bodies[row - first] = body
    own = {row - first: reason for row, reason in faults.items() if first <= row < end}
    part = records if end - first == len(records) else records.slice(first, end)
    return Portion(part, pa.array(bodies, pa.binary()), own)
