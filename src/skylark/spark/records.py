"""From pulled bytes to Arrow columns in one pass over the bytes, without a Python object a message.

A pull reply is a run of records (see `skylark.wire.message`). A loop over their sizes finds where each begins; after
that every step is one call for all records: numbers are gathered with numpy, bodies and properties are cut out with one
Arrow array whose offsets point into the pulled bytes, and the properties are split by Arrow's own string kernels.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from skylark.client.compression import inflate
from skylark.client.errors import UnreadableMessage
from skylark.wire.message import (
    MAGIC_V1,
    MAGIC_V2,
    PROPERTY_UNIQUE_KEY,
    SYS_BORN_HOST_V6,
    SYS_COMPRESSED,
    SYS_FLAG_POSITION,
    SYS_STORE_HOST_V6,
    BadRecord,
    message_id,
)

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")
_SPARK_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

_SIZE = Struct(">i")
_SMALLEST: Final = 91  # a record with nothing in it
_ENTRY_END: Final = "\x02"
_NAME_END: Final = "\x01"
_V6_EXTRA: Final = 12  # bytes by which a host is longer


class Records:
    """A run of whole records, looked at column by column. Raises BadRecord for bytes that are not records."""

    def __init__(self, data: bytes, *, check_crc: bool = True) -> None:
        self._data = data
        self._raw = np.frombuffer(data, np.uint8)
        self._starts = np.array(_starts(data), np.int64)
        self._count = len(self._starts)
        self._entries: tuple[pa.Array, pa.Array, pa.Array] | None = None
        try:
            self._find_parts()
        except IndexError:
            raise BadRecord("a record whose parts are longer than the bytes that are there") from None
        if check_crc:
            self._check_bodies()

    def _find_parts(self) -> None:
        starts = self._starts
        magic = self._gather(starts + 4, ">u4")
        is_long_topic = magic == MAGIC_V2
        if not np.all(is_long_topic | (magic == MAGIC_V1)):
            raise BadRecord("bytes without the mark of a record")
        self._sys_flags = self._gather(starts + SYS_FLAG_POSITION, ">i4")
        born_extra = (self._sys_flags & SYS_BORN_HOST_V6 != 0) * _V6_EXTRA
        store_extra = (self._sys_flags & SYS_STORE_HOST_V6 != 0) * _V6_EXTRA
        self._store_time_at = starts + 56 + born_extra
        after_hosts = self._after_hosts = self._store_time_at + 16 + store_extra
        sizes = self._gather(starts, ">i4")
        ends = starts + sizes
        self._body_at = after_hosts + 16
        self._body_end = self._body_at + self._gather(after_hosts + 12, ">i4")
        if not np.all((self._body_end >= self._body_at) & (self._body_end < ends - 3)):
            raise BadRecord("a record whose body is longer than the record")
        topic_at = self._body_end + 1 + is_long_topic
        topic_sizes = np.where(is_long_topic, self._gather(self._body_end, ">u2"), self._raw[self._body_end])
        self._properties_at = topic_at + topic_sizes + 2
        properties_sizes = self._gather(self._properties_at - 2, ">i2")
        if not np.all(self._properties_at + properties_sizes == ends):
            raise BadRecord("a record whose parts don't add up to its size")
        self._ends = ends
        self._topic_at, self._topic_end = topic_at, topic_at + topic_sizes

    def __len__(self) -> int:
        return self._count

    def queue_ids(self) -> pa.Array:
        return pa.array(self._gather(self._starts + 12, ">i4"))

    def queue_offsets(self) -> pa.Array:
        return pa.array(self._gather(self._starts + 20, ">i8"))

    def born_times(self) -> pa.Array:
        return _timestamps(self._gather(self._starts + 40, ">i8"))

    def store_times(self) -> pa.Array:
        return _timestamps(self.store_times_ms())

    def store_times_ms(self) -> np.ndarray[Any, Any]:
        return self._gather(self._store_time_at, ">i8")

    def reconsume_times(self) -> pa.Array:
        return pa.array(self._gather(self._after_hosts, ">i4"))

    def topics(self) -> pa.Array:
        return _text(self._cut(self._topic_at, self._topic_end))

    def bodies(self) -> pa.Array:
        """Inflated where they were compressed. Raises UnreadableMessage with the offset of one that can't be."""
        bodies = self._cut(self._body_at, self._body_end)
        compressed = np.flatnonzero(self._sys_flags & SYS_COMPRESSED)
        if not len(compressed):
            return bodies
        values = bodies.to_pylist()
        for index in compressed.tolist():
            try:
                values[index] = inflate(values[index], int(self._sys_flags[index]))
            except UnreadableMessage as e:
                offset = self.queue_offsets()[index].as_py()
                raise UnreadableMessage(f"the message at offset {offset}: {e}") from None
        return pa.array(values, pa.binary())

    def properties(self) -> pa.Array:
        offsets, names, values = self._property_entries()
        return pa.MapArray.from_arrays(offsets, names, values)

    def message_ids(self) -> pa.Array:
        """The id that the producer gave, or the one that the place in the log gives."""
        ids = self.property_values(PROPERTY_UNIQUE_KEY)
        if not ids.null_count:
            return ids
        values = ids.to_pylist()
        log_offsets = self._gather(self._starts + 28, ">i8")
        for row in np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False)).tolist():
            host_at = int(self._store_time_at[row]) + 8
            host = self._data[host_at : int(self._after_hosts[row])]
            if log_offsets[row] < 0:
                raise BadRecord(f"a record at log offset {log_offsets[row]}")
            values[row] = message_id(host, int(log_offsets[row]))
        return pa.array(values, pa.string())

    def property_values(self, name: str) -> pa.Array:
        """The property's value in each message, null where it is missing."""
        offsets, names, values = self._property_entries()
        found = pc.indices_nonzero(pc.equal(names, name)).to_numpy()
        rows = np.searchsorted(offsets.to_numpy(), found, side="right") - 1
        picks = np.zeros(self._count, np.int64)
        missing = np.ones(self._count, bool)
        picks[rows] = found
        missing[rows] = False
        return values.take(pa.array(picks, mask=missing))

    def slice(self, first: int, end: int) -> Records:
        """The records from `first` to before `end`."""
        return Records(self._data[self._starts[first] : self._ends[end - 1]] if end > first else b"", check_crc=False)

    def filter(self, wanted: np.ndarray[Any, Any]) -> Records:
        """The records for which the array has a true value."""
        pieces = [self._data[self._starts[row] : self._ends[row]] for row in np.flatnonzero(wanted).tolist()]
        return Records(b"".join(pieces), check_crc=False)

    def _property_entries(self) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Where each message's entries begin, all names, all values."""
        if self._entries is None:
            text = _text(self._cut(self._properties_at, self._ends))
            entries = pc.split_pattern(pc.ascii_rtrim(text, _ENTRY_END), _ENTRY_END)
            # A message without properties is one empty text after the split, and has no entry.
            is_entry = pc.match_substring(entries.values, _NAME_END)
            pairs = pc.split_pattern(entries.values.filter(is_entry), _NAME_END, max_splits=1)
            before = np.concatenate(([0], np.cumsum(is_entry.to_numpy(zero_copy_only=False))))
            offsets = pa.array(before[entries.offsets.to_numpy()], pa.int32())
            parts = pairs.flatten()
            self._entries = offsets, _every_second(parts, 0), _every_second(parts, 1)
        return self._entries

    def _check_bodies(self) -> None:
        view = memoryview(self._data)
        stored = self._gather(self._starts + 8, ">i4")
        found = [
            crc32(view[begin:end]) & 0x7FFFFFFF
            for begin, end in zip(self._body_at.tolist(), self._body_end.tolist(), strict=True)
        ]
        wrong = np.flatnonzero((stored != found) & (self._body_end > self._body_at))
        if len(wrong):
            offset = self.queue_offsets()[int(wrong[0])].as_py()
            raise BadRecord(f"the body of the message at offset {offset} fails its checksum")

    def _gather(self, positions: np.ndarray[Any, Any], kind: str) -> np.ndarray[Any, Any]:
        """The big-endian numbers at these positions, in the machine's order."""
        width = np.dtype(kind).itemsize
        if not self._count:
            return np.zeros(0, kind[1:])
        windows = np.lib.stride_tricks.sliding_window_view(self._raw, width)
        gathered: np.ndarray[Any, Any] = windows[positions].view(kind).ravel().astype(kind[1:])
        return gathered

    def _cut(self, begins: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> pa.Array:
        """The byte ranges as a binary array: every second element of one that covers the bytes without copying them."""
        if len(self._data) >= 1 << 31:
            raise BadRecord("more than 2 GiB of records at once")
        offsets = np.empty(2 * self._count + 1, np.int32)
        offsets[0:-1:2] = begins
        offsets[1::2] = ends
        offsets[-1] = len(self._data)
        pieces = pa.Array.from_buffers(
            pa.binary(), 2 * self._count, [None, pa.py_buffer(offsets), pa.py_buffer(self._data)]
        )
        return _every_second(pieces, 0)


def _starts(data: bytes) -> list[int]:
    starts = []
    position, end = 0, len(data)
    size_at = _SIZE.unpack_from
    try:
        while position < end:
            (size,) = size_at(data, position)
            if size < _SMALLEST:
                raise BadRecord(f"a record of {size} bytes")
            starts.append(position)
            position += size
    except error:
        raise BadRecord("cut short") from None
    if position != end:
        raise BadRecord("cut short")
    return starts


def _timestamps(times_ms: np.ndarray[Any, Any]) -> pa.Array:
    try:
        return pa.array(times_ms).cast(_MILLISECONDS).cast(_SPARK_TIMESTAMP)
    except pa.ArrowInvalid as e:
        raise BadRecord(f"a time that is out of range: {e}") from None


def _text(data: pa.Array) -> pa.Array:
    try:
        return data.cast(pa.string())
    except pa.ArrowInvalid:  # what is not UTF-8 is shown as such, and does not make the rest unreadable
        return pa.array([piece.decode("utf-8", "replace") for piece in data.to_pylist()], pa.string())


def _every_second(array: pa.Array, first: int) -> pa.Array:
    return array.take(pa.array(np.arange(first, len(array), 2)))
