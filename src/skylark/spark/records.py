"""From records to Arrow columns in one pass over the bytes, without a Python object a message.

A pull reply and the commit log are runs of records (see `skylark.wire.message`). A loop over their sizes finds where
each begins; after that every step is one call for all records: the numbers are gathered with numpy, texts and bodies
are cut out with one Arrow array whose offsets point into the bytes, and so are the names and values of properties.

Bytes that are not records are BadRecord. What whole records may hold besides, whatever it is, is told by row in
`faults`, for one message must not stand in the way of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from struct import Struct, error
from typing import Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa

from skylark.client.compression import inflate
from skylark.client.errors import MissingCodec
from skylark.spark.inner_batches import inner_records
from skylark.wire.message import (
    MAGIC_V1,
    MAGIC_V2,
    PROPERTY_UNIQUE_KEY,
    SYS_BORN_HOST_V6,
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    SYS_STORE_HOST_V6,
    BadRecord,
    message_id,
)

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")
_SPARK_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

_SIZE = Struct(">i")
SMALLEST: Final = 91
"""The bytes of a record with nothing in it."""
_NAME_END, _ENTRY_END = 1, 2  # what ends the name and the value of a property
_ALL_64_BITS: Final = (1 << 64) - 1
_V6_EXTRA: Final = 12  # bytes by which a host is longer
WRAPPED: Final = SYS_INNER_BATCH | SYS_NEED_UNWRAP
"""The flags of a batch that its broker stored as one record."""

PORTION_BYTES: Final = 16 << 20
"""What is made of records comes in portions of about that size, however large they become by it."""
FIRST_TIME_MS: Final = -62_135_596_800_000
LAST_TIME_MS: Final = 253_402_300_799_999
"""The times that Spark has: the years 1 to 9999."""

# A record's numbers lie in three places, since a host may be 8 or 20 bytes long.
_HEAD: Final = np.dtype(
    [
        ("size", ">i4"), ("magic", ">u4"), ("crc", ">i4"), ("queue_id", ">i4"), ("flag", ">i4"),
        ("queue_offset", ">i8"), ("log_offset", ">i8"), ("sys_flag", ">i4"), ("born_time", ">i8"),
    ]
)  # fmt: skip
_STORE_TIME: Final = np.dtype(">i8")
_AFTER_HOSTS: Final = np.dtype([("reconsume_times", ">i4"), ("prepared_offset", ">i8"), ("body_size", ">i4")])

Array = np.ndarray[Any, Any]


class Records:
    """A run of whole records, looked at column by column. Raises BadRecord for bytes that are not records."""

    def __init__(self, data: bytes, *, starts: Sequence[int] | None = None, check_crc: bool = True) -> None:
        """`starts` says where the records begin, if the caller knows; else they fill the data."""
        self._data = data
        self._starts = np.array(_starts(data) if starts is None else starts, np.int64)
        self._entries: tuple[pa.Array, pa.Array, pa.Array] | None = None
        self._find_parts()
        self._is_damaged = np.zeros(len(self), bool)
        if check_crc:
            self._is_damaged[self.damaged_bodies()] = True

    def _find_parts(self) -> None:
        starts = self._starts
        head = self._head = self._gather(starts, _HEAD)
        is_long_topic = head["magic"] == MAGIC_V2
        if not np.all(is_long_topic | (head["magic"] == MAGIC_V1)):
            raise BadRecord("bytes without the mark of a record")
        sys_flags = self._sys_flags = head["sys_flag"].astype(np.int64)
        self._store_time_at = starts + 56 + (sys_flags & SYS_BORN_HOST_V6 != 0) * _V6_EXTRA
        self._after_hosts_at = self._store_time_at + 16 + (sys_flags & SYS_STORE_HOST_V6 != 0) * _V6_EXTRA
        self._after_hosts = self._gather(self._after_hosts_at, _AFTER_HOSTS)
        ends = self._ends = starts + head["size"]
        self._body_at = self._after_hosts_at + _AFTER_HOSTS.itemsize
        self._body_end = self._body_at + self._after_hosts["body_size"]
        if not np.all((self._body_end >= self._body_at) & (self._body_end <= ends - 3)):
            raise BadRecord("a record whose body is longer than the record")
        topic_size = self._gather(self._body_end, np.dtype(">u2")).astype(np.int64)
        self._topic_at = self._body_end + 1 + is_long_topic
        self._topic_end = self._topic_at + np.where(is_long_topic, topic_size, topic_size >> 8)
        self._properties_at = self._topic_end + 2
        if not np.all(self._properties_at + self._gather(self._topic_end, np.dtype(">i2")) == ends):
            raise BadRecord("a record whose parts don't add up to its size")

    def __len__(self) -> int:
        return len(self._starts)

    def queue_ids(self) -> pa.Array:
        return pa.array(self._head["queue_id"].astype(np.int32))

    def queue_offsets(self) -> pa.Array:
        return pa.array(self._head["queue_offset"].astype(np.int64))

    def log_offsets(self) -> Array:
        return self._head["log_offset"].astype(np.int64)

    def sys_flags(self) -> Array:
        return self._sys_flags

    def born_times(self) -> pa.Array:
        return _timestamps(self._born_times_ms())

    def store_times(self) -> pa.Array:
        return _timestamps(self.store_times_ms())

    def _born_times_ms(self) -> Array:
        return self._head["born_time"].astype(np.int64)

    def store_times_ms(self) -> Array:
        return self._gather(self._store_time_at, _STORE_TIME).astype(np.int64)

    def reconsume_times(self) -> pa.Array:
        return pa.array(self._after_hosts["reconsume_times"].astype(np.int32))

    def topics(self) -> pa.Array:
        return _text(self._cut(self._topic_at, self._topic_end))

    def stored_bodies(self) -> pa.Array:
        """As they are in the records: those that are compressed are not inflated."""
        return self._cut(self._body_at, self._body_end)

    def compressed_rows(self) -> list[int]:
        rows: list[int] = np.flatnonzero(self._sys_flags & SYS_COMPRESSED).tolist()
        return rows

    def inflated(self, row: int, body: bytes) -> bytes:
        """The stored body of a row as it was before. Raises UnreadableMessage, or MissingCodec with its offset."""
        try:
            return inflate(body, int(self._sys_flags[row]))
        except MissingCodec as e:
            raise MissingCodec(f"the message at offset {self._head['queue_offset'][row]}: {e}") from None

    def faults(self, columns: Iterable[str] = ()) -> dict[int, str]:
        """Row -> why it can't be given, for those whose columns of these names can't be, or that were damaged."""
        found: dict[int, str] = {}
        for name, times_ms in (("bornTimestamp", self._born_times_ms), ("storeTimestamp", self.store_times_ms)):
            if name in columns:
                found |= _times_out_of_range(name, times_ms())
        for row in np.flatnonzero(self._sys_flags & WRAPPED == WRAPPED).tolist():
            found[row] = self._why_wrapped(row)
        found |= dict.fromkeys(np.flatnonzero(self._is_damaged).tolist(), "its body fails its checksum")
        return found

    def properties(self) -> pa.Array:
        offsets, names, values = self._property_entries()
        return pa.MapArray.from_arrays(offsets, names, values)

    def message_ids(self) -> pa.Array:
        """The id that the producer gave, or the one that the place in the log gives."""
        ids = self.property_values(PROPERTY_UNIQUE_KEY)
        if not ids.null_count:
            return ids
        values = ids.to_pylist()
        log_offsets = self.log_offsets()
        for row in np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False)).tolist():
            host_at = int(self._store_time_at[row]) + 8
            host = self._data[host_at : int(self._after_hosts_at[row])]
            values[row] = message_id(host, int(log_offsets[row]) & _ALL_64_BITS)  # a negative one as Java writes it
        return pa.array(values, pa.string())

    def property_values(self, name: str) -> pa.Array:
        """The property's value in each message, null where it is missing."""
        import pyarrow.compute as pc  # only here: processes that plan need none of it, and it takes long to import

        offsets, names, values = self._property_entries()
        found = pc.indices_nonzero(pc.equal(names, name)).to_numpy()
        rows = np.searchsorted(offsets.to_numpy(), found, side="right") - 1
        picks = np.zeros(len(self), np.int64)
        missing = np.ones(len(self), bool)
        picks[rows] = found
        missing[rows] = False
        return values.take(pa.array(picks, mask=missing))

    def damaged_bodies(self) -> Array:
        """The numbers of the records whose bodies fail their checksums."""
        data = self._data
        bounds = zip(self._body_at.tolist(), self._body_end.tolist(), strict=True)
        found = np.array([crc32(data[begin:end]) for begin, end in bounds], np.int64) & 0x7FFFFFFF
        return np.flatnonzero((self._head["crc"] != found) & (self._body_end > self._body_at))

    def end_in_zeros(self) -> Array:
        """Whether the last byte of each record's last text is zero, so that the record was not written to its end.

        The checksum is of the body alone; behind it are the texts of the topic and of the properties.
        """
        last = np.where(self._properties_at < self._ends, self._ends, self._topic_end) - 1
        is_zero: Array = np.frombuffer(self._data, np.uint8)[last] == 0
        return is_zero

    def unwrapped(self) -> Iterator[Records]:
        """With the messages of a batch that was stored as one record (an inner batch) each as a record of its own.

        They come in portions: a batch may be compressed. One that can't be unpacked stays as it is, and is a fault.
        """
        wrapped = self._sys_flags & WRAPPED == WRAPPED
        if not np.any(wrapped):
            yield self
            return
        pieces: list[bytes] = []
        damaged: list[bool] = []
        room = PORTION_BYTES
        for row, is_wrapped in enumerate((wrapped & ~self._is_damaged).tolist()):
            for piece in self._inner_records(row) if is_wrapped else [self._record(row)]:
                pieces.append(piece)
                damaged.append(bool(self._is_damaged[row]))
                room -= len(piece)
                if room <= 0:
                    yield _checked(pieces, damaged)
                    pieces, damaged, room = [], [], PORTION_BYTES
        if pieces:
            yield _checked(pieces, damaged)

    def _record(self, row: int) -> bytes:
        return self._data[self._starts[row] : self._ends[row]]

    def _inner_records(self, row: int) -> list[bytes]:
        """Of the batch in a row; the row itself if it can't be unpacked."""
        try:
            return inner_records(self._record(row))
        except MissingCodec as e:
            raise MissingCodec(f"the message at offset {self._head['queue_offset'][row]}: {e}") from None
        except BadRecord:
            return [self._record(row)]

    def _why_wrapped(self, row: int) -> str:
        try:
            inner_records(self._record(row))
        except (BadRecord, MissingCodec) as e:
            return f"it is a batch that can't be unpacked: {e}"
        return "it is a batch that was not unpacked"

    def slice(self, first: int, end: int) -> Records:
        """The records from `first` to before `end`."""
        return self._picked(np.arange(first, end))

    def filter(self, wanted: Array) -> Records:
        """The records for which the array has a true value."""
        return self._picked(np.flatnonzero(wanted))

    def _picked(self, rows: Array) -> Records:
        """Some of the records, in their order, over the same bytes."""
        picked = copy(self)
        picked._entries = None
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                setattr(picked, name, value[rows])
        return picked

    def _property_entries(self) -> tuple[pa.Array, pa.Array, pa.Array]:
        """Where each message's entries begin, all names, all values."""
        if self._entries is None:
            text = _text(self._cut(self._properties_at, self._ends))
            self._entries = _entries(text) or _odd_entries(text)
        return self._entries

    def _gather(self, positions: Array, kind: np.dtype[Any]) -> Array:
        """What lies at these positions, as `kind`."""
        width = kind.itemsize
        if not len(positions):
            return np.zeros(0, kind)
        # An array that begins anew at every byte; numpy copies from it without a look at what it copies.
        anywhere = np.ndarray((max(0, len(self._data) - width + 1),), f"V{width}", self._data, 0, (1,))
        try:
            gathered: Array = anywhere[positions].view(kind)
        except IndexError:
            raise BadRecord("a record whose parts are longer than the bytes that are there") from None
        return gathered

    def _cut(self, begins: Array, ends: Array) -> pa.Array:
        if len(self._data) >= 1 << 31:
            raise BadRecord("more than 2 GiB of records at once")
        return _cut(pa.py_buffer(self._data), pa.binary(), begins, ends)


def _cut(data: pa.Buffer, kind: pa.DataType, begins: Array, ends: Array) -> pa.Array:
    """Byte ranges that follow each other: every second element of an array that covers the bytes without a copy."""
    offsets = np.empty(2 * len(begins) + 1, np.int32)
    offsets[0:-1:2] = begins
    offsets[1::2] = ends
    offsets[-1] = data.size
    pieces = pa.Array.from_buffers(kind, 2 * len(begins), [None, pa.py_buffer(offsets), data])
    return _every_second(pieces, 0)


def _entries(text: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array] | None:
    """Names and values of properties that are all well formed, as nearly all are; else None."""
    _, row_bounds, data = text.buffers()
    bounds = np.frombuffer(row_bounds, np.int32)[: len(text) + 1]
    if data is None or not bounds[-1]:
        return None
    raw = np.frombuffer(data, np.uint8)[: bounds[-1]]
    separators = np.flatnonzero(raw - 1 < _ENTRY_END)  # both kinds: zero minus one is 255
    name_ends, value_ends = separators[0::2], separators[1::2]
    if (
        len(name_ends) != len(value_ends)
        or np.any(raw[name_ends] == _ENTRY_END)
        or np.any(raw[value_ends] == _NAME_END)
        or np.any(name_ends + 1 == value_ends)
    ):
        return None
    entry_bounds = np.concatenate(([0], value_ends + 1))
    if np.any(name_ends == entry_bounds[:-1]):
        return None
    offsets = np.searchsorted(entry_bounds, bounds)
    if offsets[-1] == len(entry_bounds) or np.any(entry_bounds[offsets] != bounds):
        return None
    names = _cut(data, pa.string(), entry_bounds[:-1], name_ends)
    values = _cut(data, pa.string(), name_ends + 1, value_ends)
    return pa.array(offsets, pa.int32()), names, values


def _odd_entries(text: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """The same for any text: the last separator may be missing, a value may hold the one that ends names.

    As in Apache's reader, a pair whose name or value is empty is none.
    """
    import pyarrow.compute as pc

    end, name_end = chr(_ENTRY_END), chr(_NAME_END)
    entries = pc.split_pattern(pc.ascii_rtrim(text, end), end)
    texts = entries.values
    name_size = pc.find_substring(texts, name_end)
    is_entry = pc.and_(pc.greater(name_size, 0), pc.greater(pc.binary_length(texts), pc.add(name_size, 1)))
    pairs = pc.split_pattern(texts.filter(is_entry), name_end, max_splits=1)
    before = np.concatenate(([0], np.cumsum(is_entry.to_numpy(zero_copy_only=False))))
    offsets = pa.array(before[entries.offsets.to_numpy()], pa.int32())
    parts = pairs.flatten()
    return offsets, _every_second(parts, 0), _every_second(parts, 1)


def _starts(data: bytes) -> list[int]:
    starts = []
    position, end = 0, len(data)
    size_at = _SIZE.unpack_from
    try:
        while position < end:
            (size,) = size_at(data, position)
            if size < SMALLEST:
                raise BadRecord(f"a record of {size} bytes")
            starts.append(position)
            position += size
    except error:
        raise BadRecord("cut short") from None
    if position != end:
        raise BadRecord("cut short")
    return starts


def _checked(pieces: list[bytes], damaged: list[bool]) -> Records:
    """Records whose checksums were compared before, when they were parts of others."""
    records = Records(b"".join(pieces), check_crc=False)
    records._is_damaged = np.array(damaged)
    return records


def _times_out_of_range(name: str, times_ms: Array) -> dict[int, str]:
    if not len(times_ms) or (times_ms.min() >= FIRST_TIME_MS and times_ms.max() <= LAST_TIME_MS):
        return {}
    rows = np.flatnonzero((times_ms < FIRST_TIME_MS) | (times_ms > LAST_TIME_MS)).tolist()
    return {
        row: f"its {name} is {times_ms[row]} ms since 1970, and Spark's times end with the years 1 and 9999"
        for row in rows
    }


def _timestamps(times_ms: Array) -> pa.Array:
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
