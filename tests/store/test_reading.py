"""Reads with filters against a plain model of what they promise: any entries, limits, tags and records wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.store import ReadResult, ReadStatus, Store
from skylark.wire.message import Message
from skylark.wire.records import decode_record, tag_code
from store.small_store import START_MS, a_message, small_store

LOOKED_AT_MOST = 40
PER_FILE = 100
# "AaAa" and "BBBB" share their code; "a" and "A" only its last five bits, by which most entries are sorted out.
TAGS = ["AaAa", "BBBB", "a", "A", "b", ""]

stored = st.lists(st.tuples(st.sampled_from(TAGS), st.integers(0, 300)), min_size=1, max_size=130)


@contextmanager
def filled(messages: list[tuple[str, int]], memory_bytes: int) -> Iterator[Store]:
    with (
        TemporaryDirectory() as root,
        small_store(
            Path(root), segment_bytes=1 << 20, queue_entries_per_file=PER_FILE, max_filter_bytes=LOOKED_AT_MOST * 20,
            physical_memory_bytes=memory_bytes, memory_ratio=100, max_transfer_count_in_memory=12,
            max_transfer_count_on_disk=3, max_transfer_bytes_in_memory=2500, max_transfer_bytes_on_disk=700,
        ) as store,
    ):  # fmt: skip
        for tag, size in messages:
            store.append(Message("topic", 0, b"x" * size, {"TAGS": tag} if tag else {}), START_MS)
        yield store


def expected(
    store: Store, offset: int, max_count: int, max_bytes: int, memory_bytes: int, tags: set[str] | None, least: int
) -> ReadResult:
    """What a read must find: the tags (by their codes), and bodies of at least a size."""
    cached_from = store.log_max_offset - memory_bytes
    codes = {tag_code(tag) for tag in tags} if tags is not None else None
    high = store.max_offset("topic", 0)
    stop = min(high, offset + max(LOOKED_AT_MOST, max_count), offset - offset % PER_FILE + PER_FILE)
    records: list[bytes] = []
    log_offset = 0
    while offset < stop:
        entry = store.entry("topic", 0, offset)
        assert entry is not None
        most_count, most_bytes = (12, 2500) if entry.log_offset >= cached_from else (3, 700)
        is_full = len(records) >= min(most_count, max_count)
        if records and (is_full or len(b"".join(records)) + entry.size_bytes > min(most_bytes, max(max_bytes, 100))):
            break
        offset, log_offset = offset + 1, entry.log_offset
        record = bytes(store.record_at(entry.log_offset) or b"")
        if (codes is None or entry.tag_code in codes) and len(decode_record(record).body) >= least:
            records.append(record)
    status = ReadStatus.FOUND if records else ReadStatus.NO_MATCHED_MESSAGE
    return ReadResult(status, offset, 0, high, records, len(b"".join(records)), log_offset < cached_from)


@given(
    messages=stored,
    tags=st.none() | st.sets(st.sampled_from([*TAGS[:-1], "nobody's"])),
    least=st.integers(0, 300),
    max_count=st.integers(1, 60),
    max_bytes=st.integers(1, 4000),
    memory_bytes=st.integers(1, 30_000),
    place=st.floats(0, 1, exclude_max=True),
)
def test_a_filtered_read_finds_what_it_must(
    messages: list[tuple[str, int]], tags: set[str] | None, least: int, max_count: int, max_bytes: int,
    memory_bytes: int, place: float,
) -> None:  # fmt: skip
    with filled(messages, memory_bytes) as store:
        offset = int(place * len(messages))
        wants = frozenset(map(tag_code, tags)) if tags is not None else None
        found = store.read("topic", 0, offset, max_count, max_bytes, wants)
        assert found == expected(store, offset, max_count, max_bytes, memory_bytes, tags, 0)
        found = store.read(
            "topic", 0, offset, max_count, max_bytes, wants, lambda record: len(decode_record(record).body) >= least
        )
        assert found == expected(store, offset, max_count, max_bytes, memory_bytes, tags, least)


def test_codes_beyond_64_bits_are_nobodys(tmp_path: Path) -> None:
    """A client's heartbeat brings them, and may bring anything."""
    with small_store(tmp_path) as store:
        store.append(Message("topic", 0, b"", {"TAGS": "a"}), START_MS)
        far = tag_code("a") + 2**70
        assert store.read("topic", 0, 0, 1, wants=frozenset([far, -far])).status is ReadStatus.NO_MATCHED_MESSAGE
        assert store.read("topic", 0, 0, 1, wants=frozenset([far, tag_code("a")])).count == 1


def offsets_read(store: Store, wants: frozenset[int] | None = None) -> list[int]:
    found, offset = [], 0
    while offset < store.max_offset("topic", 0):
        result = store.read("topic", 0, offset, 32, wants=wants)
        assert result.next_offset > offset
        assert result.status is not ReadStatus.MESSAGE_WAS_REMOVING
        found += [decode_record(record).queue_offset for record in result.records]
        offset = result.next_offset
    return found


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("bit", [0, 7, 8, 11, 13, 40, 62, 63, 64 + 0, 64 + 5, 64 + 12, 64 + 30, 64 + 31])
def test_a_flipped_bit_in_an_entry_costs_that_message_only(
    tmp_path: Path, bit: int, filtered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its log offset, or of the size that follows it; bits are counted from the last."""
    with small_store(tmp_path, queue_entries_per_file=100, segment_bytes=1 << 14) as store:
        for number in range(90):
            store.append(a_message(b"x" * 4, TAGS="a"), START_MS + number)
            store.append(a_message(b"x" * 4, "other", TAGS="a"), START_MS + number)
        path = tmp_path / "consumequeue" / "topic" / "0" / f"{0:020d}"
        byte = 20 * 40 + (7 - bit // 8 if bit < 64 else 8 + 3 - (bit - 64) // 8)
        with path.open("r+b") as file:
            file.seek(byte)
            was = file.read(1)[0]
            file.seek(byte)
            file.write(bytes([was ^ 1 << bit % 8]))
        wants = frozenset([tag_code("a")]) if filtered else None
        for _ in range(3):
            assert offsets_read(store, wants) == [*range(40), *range(41, 90)]
        (told,) = caplog.messages
        assert "topic-0: 1 entries lead to no record of this queue and are stepped over: that at 40, to log" in told


def test_an_entry_that_leads_to_a_record_of_another_queue_is_stepped_over(tmp_path: Path) -> None:
    with small_store(tmp_path, queue_entries_per_file=100) as store:
        for number in range(10):
            for queue_id in (0, 1):
                store.append(a_message(b"x" * 4, queue_id=queue_id), START_MS + number)
        zero, one = (tmp_path / "consumequeue" / "topic" / name / f"{0:020d}" for name in "01")
        with zero.open("r+b") as file:
            file.seek(60)
            file.write(one.read_bytes()[60:80])  # of the same offset
            file.seek(100)
            file.write(zero.read_bytes()[120:140])  # of the same queue
        assert offsets_read(store) == [0, 1, 2, 4, 6, 7, 8, 9]


def test_what_is_told_of_damaged_entries_has_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_store(tmp_path, queue_entries_per_file=2000, segment_bytes=1 << 20) as store:
        for number in range(1500):
            store.append(a_message(b""), START_MS + number)
        path = tmp_path / "consumequeue" / "topic" / "0" / f"{0:020d}"
        with path.open("r+b") as file:
            file.write((b"\xff" * 8 + b"\0\0\0\x64" + bytes(8)) * 1500)
        assert offsets_read(store) == offsets_read(store) == []
        assert len(caplog.messages) < 60
        assert caplog.messages[-1].endswith("; no more of them are told")
