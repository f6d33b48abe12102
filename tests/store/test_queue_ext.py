"""Queues whose tag codes Apache's broker has kept in `consumequeue_ext`."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from skylark.store import ReadStatus, Store
from skylark.store.queue_ext import is_address
from skylark.wire.records import tag_code
from store.small_store import START_MS, a_message, small_store

ENTRY = struct.Struct(">qiq")
UNIT_FILE_BYTES = 100  # four units of 22 bytes, and where the file ends
COUNT = 20
TAGS = [["a", "b"][number % 2] for number in range(COUNT)]
DELAY_LEVEL = "3"


def fill_tagged(store: Store) -> None:
    for number, tag in enumerate(TAGS):
        store.append(a_message(b"%d" % number, TAGS=tag), START_MS + number)
    store.append(a_message(topic="SCHEDULE_TOPIC_XXXX", queue_id=2, DELAY=DELAY_LEVEL), START_MS)


def move_codes_out(root: Path, entry_range: range, topic: str = "topic", queue_id: int = 0) -> None:
    """What Apache's broker would have written with `enableConsumeQueueExt`, for a part of the entries."""
    directory = root / "consumequeue_ext" / topic / str(queue_id)
    directory.mkdir(parents=True)
    files: list[bytes] = [b""]
    for path in sorted((root / "consumequeue" / topic / str(queue_id)).iterdir()):
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), ENTRY.size):
            log_offset, size, code = ENTRY.unpack_from(data, at)
            if not size or (int(path.name) + at) // ENTRY.size not in entry_range:
                continue
            unit = struct.pack(">hqqh", 22, code, START_MS, 2) + b"\x01\x02"
            if len(files[-1]) + len(unit) > UNIT_FILE_BYTES - 4:
                files[-1] = (files[-1] + b"\xff\xff").ljust(UNIT_FILE_BYTES, b"\0")
                files.append(b"")
            address = -(2**63) + (len(files) - 1) * UNIT_FILE_BYTES + len(files[-1])
            assert is_address(address)
            files[-1] += unit
            ENTRY.pack_into(data, at, log_offset, size, address)
        path.write_bytes(data)
    for number, content in enumerate(files):
        (directory / f"{number * UNIT_FILE_BYTES:020d}").write_bytes(content.ljust(UNIT_FILE_BYTES, b"\0"))


def offsets_with(store: Store, tag: str) -> list[int]:
    found: list[int] = []
    offset = 0
    while (result := store.read("topic", 0, offset, 32, wants=frozenset([tag_code(tag)]))).status in (
        ReadStatus.FOUND,
        ReadStatus.NO_MATCHED_MESSAGE,
    ):
        found += [int.from_bytes(record[20:28], "big") for record in result.records]
        offset = result.next_offset
    return found


@pytest.mark.parametrize("units", ["there", "gone", "zeros"])
@pytest.mark.parametrize("moved", [range(COUNT), range(8), range(12, COUNT)])
def test_tags_are_found_where_apache_keeps_them(tmp_path: Path, moved: range, units: str) -> None:
    """In its units or, if those were lost, in the messages; also when only some entries lead there."""
    with small_store(tmp_path) as store:
        fill_tagged(store)
    move_codes_out(tmp_path, moved)
    if units == "gone":
        shutil.rmtree(tmp_path / "consumequeue_ext")
    elif units == "zeros":
        for path in (tmp_path / "consumequeue_ext").rglob("0*"):
            if path.is_file():
                path.write_bytes(bytes(UNIT_FILE_BYTES))
    for restart in range(2):
        with small_store(tmp_path) as store:
            for tag in "ab":
                assert offsets_with(store, tag)[: COUNT // 2] == [n for n in range(COUNT) if TAGS[n] == tag], tag
            codes = [entry.tag_code for n in range(COUNT) if (entry := store.entry("topic", 0, n)) is not None]
            assert codes == [tag_code(tag) for tag in TAGS]
            store.append(a_message(TAGS="a"), START_MS + COUNT)
            assert offsets_with(store, "a")[-1] == COUNT + restart


def test_the_time_that_a_delayed_message_is_due(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill_tagged(store)
        due = store.entry("SCHEDULE_TOPIC_XXXX", 2, 0)
    assert due is not None
    assert due.tag_code == START_MS + 10_000
    move_codes_out(tmp_path, range(1), "SCHEDULE_TOPIC_XXXX", 2)
    with small_store(tmp_path) as store:
        assert store.entry("SCHEDULE_TOPIC_XXXX", 2, 0) == due


def test_a_deleted_topic_leaves_no_units(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        fill_tagged(store)
    move_codes_out(tmp_path, range(COUNT))
    with small_store(tmp_path) as store:
        store.delete_topic("topic")
    assert not (tmp_path / "consumequeue_ext" / "topic").exists()
