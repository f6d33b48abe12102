"""Index files: against files of a real broker, against a plain model, and through crashes and full disks."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from skylark.store import index as index_module
from skylark.store.api import StoreError
from skylark.store.index import ENTRY, HEADER, SLOT, BadIndexFile, IndexService, key_hash
from skylark.wire.records import BatchPart, decode_properties

GOLDEN = Path(__file__).parent / "golden"
GOLDEN_SLOTS, GOLDEN_ENTRIES = 50, 200
ALWAYS = (0, 1 << 62)
START_MS = 1_700_000_000_000


def golden_messages() -> list[tuple[str, list[str], int, int]]:
    """What a broker of Apache RocketMQ 5.5.0 had in its log when it wrote the golden files: keys as they are filed."""
    return [tuple(message) for message in json.loads((GOLDEN / "index_messages.json").read_text())]


def java_hash(text: str) -> int:
    code = 0
    raw = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(raw[::2], raw[1::2], strict=True):
        code = (code * 31 + high * 256 + low) & 0xFFFF_FFFF
    return code - (1 << 32) if code >= 1 << 31 else code


def put_numbered(index: IndexService, numbers: range) -> None:
    """Message n has two keys and lies at n * 100 in the log."""
    for n in numbers:
        index.put("T", [f"key-{n}", "all"], n * 100, START_MS + n * 1000)


def assert_each_found_once(index: IndexService, numbers: range) -> None:
    for n in numbers:
        assert index.query("T", f"key-{n}", 10, *ALWAYS) == [n * 100]
    assert index.query("T", "all", 10_000, *ALWAYS) == [n * 100 for n in reversed(numbers)]


@pytest.fixture
def index(tmp_path: Path) -> Iterator[IndexService]:
    service = IndexService(tmp_path / "index", 10, 50)
    yield service
    service.close()


def test_writes_the_same_bytes_as_apache(tmp_path: Path) -> None:
    service = IndexService(tmp_path, GOLDEN_SLOTS, GOLDEN_ENTRIES)
    for message in golden_messages():
        service.put(*message)
    service.close()
    ours = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    theirs = [path.read_bytes() for path in sorted((GOLDEN / "index").iterdir())]
    assert len(theirs) == 5
    assert ours == theirs


def test_finds_everything_in_files_of_apache(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "index", tmp_path / "index")
    service = IndexService(tmp_path / "index", GOLDEN_SLOTS, GOLDEN_ENTRIES)
    messages = golden_messages()
    for topic, keys, log_offset, stored_ms in messages:
        for key in keys:
            assert log_offset in service.query(topic, key, 1000, *ALWAYS)
        assert service.query(topic, keys[0], 1000, stored_ms - 1000, stored_ms)
    assert (service.last_log_offset, service.last_timestamp_ms) == (messages[-1][2], messages[-1][3])
    service.close()


def test_goes_on_in_a_file_of_apache(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "index", tmp_path / "index")
    messages = golden_messages()
    service = IndexService(tmp_path / "index", GOLDEN_SLOTS, GOLDEN_ENTRIES)
    service.put("TopicTest", ["later"], messages[-1][2] + 300, messages[-1][3] + 5)
    assert service.query("TopicTest", "later", 10, *ALWAYS) == [messages[-1][2] + 300]
    service.close()


@given(st.text(), st.text())
def test_hash_is_that_of_java(topic: str, key: str) -> None:
    assert key_hash(topic, key) == abs(java_hash(f"{topic}#{key}"))


@given(st.text("0123456789ABCDEF", min_size=1, max_size=80))
def test_hash_of_unique_keys(key: str) -> None:
    assert key_hash("TopicTest", key) == abs(java_hash(f"TopicTest#{key}"))


def property_keys(properties: dict[str, str]) -> list[str]:
    """What a message can be found by: its unique key, each of its keys, and "T#" with its tags."""
    keys = [word for word in properties.get("KEYS", "").split(" ") if word]
    if "UNIQ_KEY" in properties:
        keys.insert(0, properties["UNIQ_KEY"])
    if "TAGS" in properties:
        keys.append("T#" + properties["TAGS"])
    return keys


@given(st.lists(st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "a", "é", " ", "\x01", "\x02"]), max_size=24))
def test_stored_properties_are_filed_as_the_map_says(words: list[str]) -> None:
    stored = "".join(words).encode()
    with TemporaryDirectory() as root:
        directory = Path(root)
        scanned = IndexService(directory / "scanned", 10, 50)
        scanned.put_all("T", [BatchPart(0, b"", stored)], [700], START_MS)
        mapped = IndexService(directory / "mapped", 10, 50)
        mapped.put("T", property_keys(decode_properties(stored)), 700, START_MS)
        scanned.close()
        mapped.close()
        contents = [[path.read_bytes() for path in (directory / name).iterdir()] for name in ("scanned", "mapped")]
        assert contents[0] == contents[1]


def test_the_smallest_int_hashes_to_zero() -> None:
    wanted = (1 << 31) - java_hash("T#" + "@" * 7)
    digits: list[int] = []
    for _ in range(7):
        wanted, digit = divmod(wanted % (1 << 32) if not digits else wanted, 31)
        digits.append(digit)
    key = "".join(chr(ord("@") + digit) for digit in reversed(digits))
    assert java_hash(f"T#{key}") == -(1 << 31)
    assert key_hash("T", key) == 0


def test_the_first_entry_of_a_further_file_counts_from_the_end_of_the_file_before(
    index: IndexService, tmp_path: Path
) -> None:
    for number in range(50):  # a file holds 49
        index.put("T", ["a"], number, START_MS + number // 49 * 7_000)
    index.flush()
    first, second = sorted((tmp_path / "index").iterdir())
    assert HEADER.unpack_from(first.read_bytes())[:2] == (START_MS, START_MS)
    data = second.read_bytes()
    assert HEADER.unpack_from(data)[:2] == (START_MS + 7_000, START_MS + 7_000)
    assert ENTRY.unpack_from(data, 100) == (key_hash("T", "a"), 49, 7, 0)


def test_layout_of_a_small_file(index: IndexService, tmp_path: Path) -> None:
    index.put("T", ["a"], 700, START_MS)
    index.put("T", ["a"], 900, START_MS + 2500)
    index.flush()
    (path,) = (tmp_path / "index").iterdir()
    data = path.read_bytes()
    code = key_hash("T", "a")
    assert len(data) == 40 + 10 * 4 + 50 * 20
    assert HEADER.unpack_from(data) == (START_MS, START_MS + 2500, 700, 900, 1, 3)
    assert SLOT.unpack_from(data, 40 + code % 10 * 4) == (2,)
    assert data[80:100] == bytes(20)
    assert ENTRY.unpack_from(data, 100) == (code, 700, 0, 0)
    assert ENTRY.unpack_from(data, 120) == (code, 900, 2, 1)


def test_newest_first_within_count_and_time(index: IndexService) -> None:
    put_numbered(index, range(200))
    assert index.query("T", "all", 3, *ALWAYS) == [19900, 19800, 19700]
    assert index.query("T", "all", 100, START_MS + 50_000, START_MS + 52_999) == [5200, 5100, 5000]
    assert index.query("T", "all", 100, START_MS + 500_000, START_MS + 600_000) == []
    assert index.query("T", "all", 0, *ALWAYS) == []
    assert index.query("Other", "all", 100, *ALWAYS) == []
    assert index.query("T", "nobody", 100, *ALWAYS) == []


def test_a_message_is_put_once(index: IndexService) -> None:
    put_numbered(index, range(40))
    put_numbered(index, range(50))
    assert_each_found_once(index, range(50))
    assert index.next_log_offset == 4901


def test_messages_without_keys_count_as_put(index: IndexService, tmp_path: Path) -> None:
    index.put("T", (), 500, START_MS)
    assert index.next_log_offset == 501
    assert index.last_log_offset == 0
    assert list((tmp_path / "index").iterdir()) == []


def test_file_names_sort_even_if_the_clock_goes_back(index: IndexService, tmp_path: Path) -> None:
    for n in range(200):
        index.put("T", [f"key-{n}"], n, START_MS - n * 3_600_000)
    index.flush()
    names = [path.name for path in (tmp_path / "index").iterdir()]
    assert len(names) == 5
    assert all(len(name) == 17 for name in names)
    begins = [HEADER.unpack_from((tmp_path / "index" / name).read_bytes())[2] for name in sorted(names)]
    assert begins == sorted(begins)


def test_a_long_chain_is_given_up(index: IndexService, monkeypatch: pytest.MonkeyPatch) -> None:
    put_numbered(index, range(20))
    monkeypatch.setattr(index_module, "_MAX_CHAIN_STEPS", 5)
    assert len(index.query("T", "all", 100, *ALWAYS)) <= 5


def test_a_search_gives_way_and_goes_on_or_ends_with_the_files(
    index: IndexService, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_numbered(index, range(20))
    expected = index.query("T", "all", 100, *ALWAYS)
    monkeypatch.setattr(index_module, "_CHAIN_STEPS_PER_TURN", 4)
    found: list[int] = []
    assert len(list(index.search("T", "all", 100, *ALWAYS, found))) >= 5
    assert found == expected
    found.clear()
    search = index.search("T", "all", 100, *ALWAYS, found)
    next(search)
    some = list(found)
    index.close()
    assert list(search) == []
    assert found == some


def test_a_damaged_chain_ends(tmp_path: Path) -> None:
    service = IndexService(tmp_path, 1, 50)
    put_numbered(service, range(20))
    service.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    for number in range(1, 41):
        code, offset, seconds, _ = ENTRY.unpack_from(data, 44 + number * 20)
        ENTRY.pack_into(data, 44 + number * 20, code, offset, seconds, 41 - number)
    path.write_bytes(data)
    service = IndexService(tmp_path, 1, 50)
    service.query("T", "all", 1000, *ALWAYS)
    service.close()


def test_wrong_size_names_the_file(tmp_path: Path) -> None:
    service = IndexService(tmp_path, 10, 50)
    put_numbered(service, range(5))
    service.close()
    (path,) = tmp_path.iterdir()
    with pytest.raises(BadIndexFile, match=path.name) as caught:
        IndexService(tmp_path, 10, 51)
    assert isinstance(caught.value, StoreError), "a broker tells of it in one line"


def test_what_is_no_index_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "20240101000000000").touch()
    IndexService(tmp_path, 10, 50).close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_full_disk_raises_and_later_goes_on(index: IndexService, tmp_path: Path) -> None:
    def no_space(*_args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(OSError, match="No space"):
            put_numbered(index, range(1))
        assert list((tmp_path / "index").iterdir()) == []
    put_numbered(index, range(24))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(OSError, match="No space"):
            put_numbered(index, range(24, 26))
        assert index.query("T", "key-3", 10, *ALWAYS) == [300]
        assert index.next_log_offset <= 2401
    put_numbered(index, range(index.next_log_offset // 100, 60))
    for n in range(60):
        assert n * 100 in index.query("T", f"key-{n}", 10, *ALWAYS)


def test_flush_syncs_a_full_file_once(index: IndexService, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_ino))
    put_numbered(index, range(30))
    index.flush()
    index.flush()
    assert sorted(synced.count(inode) for inode in set(synced)) == [1, 2]
    assert index.durable_log_offset == index.next_log_offset == 2901
    assert index.sealed_timestamp_ms == START_MS + 24_000


def test_after_a_failed_sync_nothing_counts_as_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = IndexService(tmp_path, 10, 50)
    put_numbered(service, range(5))
    service.flush()
    put_numbered(service, range(10))
    with monkeypatch.context() as patch:

        def fail(_fd: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="Input/output"):
            service.flush()
    service.flush()
    assert service.durable_log_offset == 401
    with pytest.raises(OSError, match="not to be trusted"):
        service.close()


def test_a_file_may_go_while_it_is_flushed(index: IndexService, monkeypatch: pytest.MonkeyPatch) -> None:
    put_numbered(index, range(100))
    sync = os.fdatasync

    def sync_while_deleting(fd: int) -> None:
        index.delete_before(10_000)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", sync_while_deleting)
    index.flush()
    assert index.query("T", "key-99", 10, *ALWAYS) == [9900]


def test_delete_before_keeps_what_is_needed_and_the_last(index: IndexService, tmp_path: Path) -> None:
    put_numbered(index, range(100))
    assert len(list((tmp_path / "index").iterdir())) == 5
    assert index.delete_before(2400) == 0
    assert index.delete_before(2500) == 1
    assert index.query("T", "key-20", 10, *ALWAYS) == []
    assert index.query("T", "key-30", 10, *ALWAYS) == [3000]
    assert index.delete_before(1 << 60) == 3
    assert index.query("T", "key-99", 10, *ALWAYS) == [9900]


@pytest.mark.parametrize("cut", [0, 1, 100, 1950, 2400, 2401, 4999, 5000, 9900, 9901, 1 << 40])
def test_truncate_drops_exactly_the_tail(index: IndexService, cut: int) -> None:
    put_numbered(index, range(100))
    kept = min((cut + 99) // 100, 100)
    assert index.truncate_from(cut) == (kept * 100 - 99 if kept else 0)
    assert_each_found_once(index, range(kept))
    put_numbered(index, range(120))
    assert_each_found_once(index, range(120))


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(0, 60), st.randoms(use_true_random=False))
def test_power_loss_costs_nothing_that_was_flushed(flushed: int, unflushed: int, random: Any) -> None:
    """Of the blocks written after the last flush some reach the disk and others do not."""
    block = 64
    with TemporaryDirectory() as name:
        directory = Path(name)
        service = IndexService(directory, 10, 50)
        put_numbered(service, range(flushed))
        service.flush()
        durable = service.durable_log_offset
        before = {path.name: path.read_bytes() for path in directory.iterdir()}
        put_numbered(service, range(flushed, flushed + unflushed))
        service.close()
        for path in directory.iterdir():
            new = path.read_bytes()
            old = before.get(path.name, bytes(len(new)))
            parts = [random.choice((old, new))[i : i + block] for i in range(0, len(new), block)]
            path.write_bytes(b"".join(parts))
        service = IndexService(directory, 10, 50)
        again_from = service.recover(0, durable, (flushed + unflushed) * 100)
        assert again_from == durable
        put_numbered(service, range(flushed, flushed + unflushed + 10))
        assert_each_found_once(service, range(flushed + unflushed + 10))
        service.close()


def test_a_put_cut_off_before_the_header_hides_nothing(tmp_path: Path) -> None:
    service = IndexService(tmp_path, 1, 50)
    put_numbered(service, range(10))
    service.close()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    SLOT.pack_into(data, 40, 21)
    path.write_bytes(data)
    service = IndexService(tmp_path, 1, 50)
    assert service.recover(0, 901, 1000) == 901
    put_numbered(service, range(15))
    assert_each_found_once(service, range(15))
    service.close()


def test_recover_trusts_files_that_apache_sealed(index: IndexService, tmp_path: Path) -> None:
    put_numbered(index, range(60))
    index.flush()
    assert index.sealed_timestamp_ms > 0
    last_in_full_file = (index.sealed_timestamp_ms - START_MS) // 1000
    assert index.recover(index.sealed_timestamp_ms, 0, 6000) == last_in_full_file * 100 + 1
    assert_each_found_once(index, range(last_in_full_file + 1))


def test_recover_keeps_nothing_beyond_the_log(index: IndexService) -> None:
    put_numbered(index, range(60))
    index.flush()
    assert index.recover(1 << 60, 6000, 1000) == 901
    assert index.durable_log_offset == 901
    assert_each_found_once(index, range(10))


def test_a_file_that_cannot_be_repaired_for_lack_of_space_is_dropped(index: IndexService) -> None:
    put_numbered(index, range(10))
    with pytest.MonkeyPatch.context() as patch:

        def no_space(*_args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "posix_fallocate", no_space)
        assert index.recover(0, 500, 1000) == 0
    put_numbered(index, range(10))
    assert_each_found_once(index, range(10))


class IndexAgainstModel(RuleBasedStateMachine):
    """Whatever the order of puts, restarts, cuts and deletions, queries answer like a list."""

    @initialize(slots=st.integers(1, 8), entries=st.integers(2, 12))
    def start(self, slots: int, entries: int) -> None:
        self.scratch = TemporaryDirectory()
        self.directory = Path(self.scratch.name)
        self.shape = (slots, entries)
        self.index = IndexService(self.directory, *self.shape)
        self.filed: list[tuple[str, int]] = []
        self.end = 0

    @rule(keys=st.lists(st.sampled_from("abcd"), max_size=6), gap=st.integers(1, 500))
    def put(self, keys: list[str], gap: int) -> None:
        self.index.put("T", keys, self.end, START_MS + self.end)
        self.filed += [(key, self.end) for key in keys]
        self.end += gap

    @rule()
    def restart(self) -> None:
        self.index.close()
        self.index = IndexService(self.directory, *self.shape)

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        self.end = int(self.end * share)
        self.index.truncate_from(self.end)
        self.filed = [(key, offset) for key, offset in self.filed if offset < self.end]

    @rule(share=st.floats(0, 1))
    def expire(self, share: float) -> None:
        gone = int(self.end * share)
        self.index.delete_before(gone)
        survivors: list[tuple[str, int]] = []
        for key in "abcd":
            expected = [offset for filed, offset in reversed(self.filed) if filed == key]
            found = self.index.query("T", key, 10_000, *ALWAYS)
            assert found == expected[: len(found)]
            assert all(offset < gone for offset in expected[len(found) :])
            survivors += [(key, offset) for offset in reversed(found)]
        self.filed = survivors

    @invariant()
    def queries_agree(self) -> None:
        if hasattr(self, "index"):
            for key in "abcd":
                expected = [offset for filed, offset in reversed(self.filed) if filed == key]
                assert self.index.query("T", key, 10_000, *ALWAYS) == expected

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.index.close()
            self.scratch.cleanup()


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=40, stateful_step_count=25)
