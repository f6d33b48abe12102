"""The JSON tables: files of a real broker, round trips, and a crash at every step of a save."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from skylark.broker import assignment, filterdata, orders
from skylark.store import tables
from skylark.store.tables import (
    BadTable,
    ConsumerOffsetTable,
    DelayOffsetTable,
    SubscriptionGroupTable,
    TopicTable,
    load,
    save,
)
from skylark.wire import fastjson
from skylark.wire.mapping import MappingItem, MappingTable
from skylark.wire.tables import (
    CustomizedRetryPolicy,
    DataVersion,
    ExponentialRetryPolicy,
    GroupRetryPolicy,
    SimpleSubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from wire.poisoned import TOO_LARGE, sample, variants

GOLDEN = Path(__file__).parent / "golden"
ALL: list[tuple[Callable[[Path], Path], type[msgspec.Struct]]] = [
    (tables.topics_path, TopicTable),
    (tables.subscription_groups_path, SubscriptionGroupTable),
    (tables.consumer_offsets_path, ConsumerOffsetTable),
    (tables.delay_offsets_path, DelayOffsetTable),
]
STORED: list[type[msgspec.Struct]] = [
    *(kind for _, kind in ALL),
    MappingTable,
    tables.TimerMetrics,
    orders.WrittenOrders,
    filterdata._Table,
    assignment._Modes,
]


class Crash(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize(("path_in", "wanted"), ALL)
def test_reads_and_writes_the_files_of_apache(
    tmp_path: Path, path_in: Callable[[Path], Path], wanted: type[msgspec.Struct]
) -> None:
    table = load(path_in(GOLDEN), wanted)
    assert table is not None
    save(path_in(tmp_path), table)
    ours, theirs = path_in(tmp_path).read_bytes(), path_in(GOLDEN).read_bytes()
    if wanted is ConsumerOffsetTable:
        derived = b'\t"groupTopicMap":{\n\t\t"CG":[\n\t\t\t"TopicTest"\n\t\t]\n\t},\n'
        assert derived in theirs
        theirs = theirs.replace(derived, b"")
    assert ours == theirs


def test_what_the_files_of_apache_say() -> None:
    topics = load(tables.topics_path(GOLDEN), TopicTable)
    assert topics is not None
    assert topics.data_version == DataVersion(state_version=0, timestamp_ms=1_794_789_879_114, counter=2)
    assert topics.topic_config_table["TopicTest"] == TopicConfig("TopicTest", 4, 4)
    groups = load(tables.subscription_groups_path(GOLDEN), SubscriptionGroupTable)
    assert groups is not None
    assert groups.subscription_group_table["CG"] == SubscriptionGroupConfig("CG")
    offsets = load(tables.consumer_offsets_path(GOLDEN), ConsumerOffsetTable)
    assert offsets is not None
    assert offsets.offset_table == {"TopicTest@CG": {0: 50, 1: 50, 2: 50, 3: 50}}
    delays = load(tables.delay_offsets_path(GOLDEN), DelayOffsetTable)
    assert delays is not None
    assert delays.offset_table == {3: 2}


def test_numbers_are_keys_without_quotes(tmp_path: Path) -> None:
    save(tmp_path / "t.json", ConsumerOffsetTable(offset_table={"T@G": {0: 123}}))
    assert (tmp_path / "t.json").read_text() == (
        '{\n\t"dataVersion":{\n\t\t"counter":0,\n\t\t"stateVersion":0,\n\t\t"timestamp":0\n\t},\n'
        '\t"offsetTable":{\n\t\t"T@G":{\n\t\t\t0:123\n\t\t}\n\t},\n\t"pullOffsetTable":{}\n}'
    )


def test_unknown_fields_nulls_and_quoted_numbers_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"offsetTable":{"T@G":{"0":"7",1:8}},"pullOffsetTable":null,"from":{"the":["future"]}}')
    assert load(path, ConsumerOffsetTable) == ConsumerOffsetTable(offset_table={"T@G": {0: 7, 1: 8}})


names = st.text(min_size=1, max_size=12)
longs = st.integers(-(2**63), 2**63 - 1)
ints = st.integers(-(2**31), 2**31 - 1)
versions = st.builds(DataVersion, longs, longs, longs)
attributes = st.dictionaries(names, st.text(max_size=8), max_size=3)
topics = st.builds(TopicConfig, names, ints, ints, ints, names, ints, st.booleans(), attributes)
policies = st.builds(
    GroupRetryPolicy,
    st.sampled_from(["CUSTOMIZED", "EXPONENTIAL"]),
    st.none() | st.builds(ExponentialRetryPolicy, longs, longs, longs),
    st.none() | st.builds(CustomizedRetryPolicy, st.lists(longs, max_size=3)),
)
subscriptions = st.builds(SimpleSubscriptionData, names, st.none() | names, st.none() | names, longs)
groups = st.builds(
    SubscriptionGroupConfig,
    names,
    retry_max_times=ints,
    group_retry_policy=policies,
    subscription_data_set=st.none() | st.lists(subscriptions, max_size=2),
    attributes=attributes,
)
offsets = st.dictionaries(names, st.dictionaries(ints, longs, max_size=4), max_size=4)
any_table = st.one_of(
    st.builds(TopicTable, versions, st.dictionaries(names, topics, max_size=3)),
    st.builds(
        SubscriptionGroupTable,
        versions,
        st.dictionaries(names, st.dictionaries(names, ints, max_size=2), max_size=2),
        st.dictionaries(names, groups, max_size=3),
    ),
    st.builds(ConsumerOffsetTable, versions, offsets, offsets),
    st.builds(DelayOffsetTable, versions, st.dictionaries(ints, longs, max_size=18)),
)


@given(any_table, any_table)
def test_round_trip(first: msgspec.Struct, second: msgspec.Struct) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "config" / "t.json"
        save(path, first)
        assert load(path, type(first)) == first
        save(path, second)
        assert load(path, type(second)) == second
        assert load(path.with_name("t.json.bak"), type(first)) == first
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["t.json", "t.json.bak"]


def offset(value: int) -> DelayOffsetTable:
    return DelayOffsetTable(offset_table={1: value})


def test_nothing_there() -> None:
    assert load(Path("/nonexistent/t.json"), DelayOffsetTable) is None


@pytest.mark.parametrize("content", [None, b"", b'{"offsetTable":{1:', b"\0" * 300, b"[]", b'{"offsetTable":{1:"x"}}'])
def test_falls_back_to_the_backup(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | None) -> None:
    path = tmp_path / "t.json"
    save(path, offset(1))
    save(path, offset(2))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load(path, DelayOffsetTable) == offset(1)
    assert str(path) in caplog.text
    assert "t.json.bak" in caplog.text
    save(path, offset(3))
    assert load(path, DelayOffsetTable) == offset(3)
    if content:
        assert path.with_name("t.json.broken").read_bytes() == content
        assert load(path.with_name("t.json.bak"), DelayOffsetTable) == offset(1)


def test_no_good_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"{")
    with pytest.raises(BadTable, match=r"t\.json is damaged: .*, and it has no backup\. .* move t\.json out of"):
        load(path, DelayOffsetTable)
    path.with_name("t.json.bak").write_bytes(b"[")
    with pytest.raises(BadTable, match=r"t\.json is damaged.*t\.json\.bak is damaged.* t\.json and t\.json\.bak out"):
        load(path, DelayOffsetTable)
    path.unlink()
    with pytest.raises(BadTable, match=r"t\.json is missing or empty; .*t\.json\.bak is damaged.*move t\.json\.bak"):
        load(path, DelayOffsetTable)
    path.with_name("t.json.bak").unlink()
    path.mkdir()
    with pytest.raises(BadTable, match=r"t\.json can't be read: .*move it away"):
        load(path, DelayOffsetTable)


def test_a_table_that_the_broker_can_do_without_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"{")
    path.with_name("t.json.bak").write_bytes(b"[")
    assert load(path, DelayOffsetTable, expendable=True) is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["t.json.bak.broken", "t.json.broken"]
    assert "t.json is damaged" in caplog.text


@pytest.mark.parametrize(("wanted", "bad"), [(kind, bad) for kind in STORED for bad in TOO_LARGE])
def test_a_number_that_an_older_version_wrote_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: type[msgspec.Struct], bad: int
) -> None:
    path = tmp_path / "t.json"
    good = fastjson.loads(fastjson.dumps(sample(inspect.type_info(wanted))))
    for name, table in variants(inspect.type_info(wanted), bad):
        caplog.clear()
        path.write_bytes(fastjson.dumps(table, pretty=True))
        found = load(path, wanted)
        assert found is not None
        assert name in caplog.text
        assert str(path) in caplog.text
        save(path, found)
        assert load(path, wanted) == found
        assert str(bad) not in path.read_text()
        # What is not in the same part of the table as the number stays.
        for field in msgspec.structs.fields(wanted):
            if table[field.encode_name] == good[field.encode_name]:
                assert getattr(found, field.name) == fastjson.convert(good, wanted).__getattribute__(field.name)


def test_only_the_entry_with_the_number_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    huge = 10**30
    offsets = {"t@g": {0: 5, 1: huge, huge: 7, -huge: 8, 2: 6}, "u@g": {0: 1}}
    path.write_bytes(fastjson.dumps({"offsetTable": offsets}, pretty=True))
    table = load(path, ConsumerOffsetTable)
    assert table is not None
    assert table.offset_table == {"t@g": {0: 5, 2: 6}, "u@g": {0: 1}}

    group = {"groupName": "g", "retryQueueNums": huge, "retryMaxTimes": 3}
    path.write_bytes(fastjson.dumps({"subscriptionGroupTable": {"g": group}}, pretty=True))
    groups = load(path, SubscriptionGroupTable)
    assert groups is not None
    assert groups.subscription_group_table == {"g": SubscriptionGroupConfig("g", retry_max_times=3)}

    lost, kept = {"bname": "a", "startOffset": huge}, {"bname": "a", "gen": 1}
    detail = {"topic": "t", "bname": "a", "hostedQueues": {0: [kept], 1: [kept, lost]}}
    path.write_bytes(fastjson.dumps({"topicQueueMappingInfoMap": {"t": detail}}, pretty=True))
    mappings = load(path, MappingTable)
    assert mappings is not None
    assert mappings.topic_queue_mapping_info_map["t"].hosted_queues == {0: [MappingItem(bname="a", gen=1)]}


def crash_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Ends the process before the given of the calls that change the disk."""
    calls = 0

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                raise Crash
            return real(*args, **kwargs)

        return call

    for owner, name in [(os, "fdatasync"), (os, "fsync"), (os, "open")]:
        patch.setattr(owner, name, watched(getattr(owner, name)))
    for name in ("replace", "hardlink_to", "unlink"):
        patch.setattr(Path, name, watched(getattr(Path, name)))


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("former", [0, 1, 2])
def test_a_crash_between_any_two_steps_leaves_a_table(tmp_path: Path, former: int, links: bool) -> None:
    def no_links(*_args: Any) -> None:
        raise PermissionError("no hard links here")

    for step in range(1, 30):
        root = tmp_path / str(step)
        path = root / "t.json"
        for value in range(former):
            save(path, offset(value))
        with pytest.MonkeyPatch.context() as patch:
            if not links:
                patch.setattr(Path, "hardlink_to", no_links)
            crash_at(step, patch)
            try:
                save(path, offset(9))
                break
            except Crash:
                pass
        allowed = [offset(9), offset(former - 1) if former else None]
        assert load(path, DelayOffsetTable) in allowed
        save(path, offset(10))
        assert load(path, DelayOffsetTable) == offset(10)
    else:
        pytest.fail("the save never came to its end")
    assert step > 4


def test_a_crash_while_replacing_a_broken_file_keeps_the_backup(tmp_path: Path) -> None:
    for step in range(1, 30):
        path = tmp_path / str(step) / "t.json"
        save(path, offset(1))
        save(path, offset(2))
        path.write_bytes(b"{broken")
        assert load(path, DelayOffsetTable) == offset(1)
        with pytest.MonkeyPatch.context() as patch:
            crash_at(step, patch)
            try:
                save(path, offset(9))
                break
            except Crash:
                pass
        assert load(path, DelayOffsetTable) in [offset(1), offset(9)]


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    save(path, offset(1))

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(OSError, match="No space"):
        save(path, offset(2))
    assert load(path, DelayOffsetTable) == offset(1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_is_told_with_the_name_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "delayOffset.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/delayOffset\.json") as failure:
        save(tmp_path / "delayOffset.json", DelayOffsetTable(offset_table={1: 2}))
    assert failure.value.errno == errno.ENOSPC


def test_data_version() -> None:
    version = DataVersion()
    version.next_version(1000)
    assert version == DataVersion(0, 1000, 1)
    version.next_version(500, state_version=3)
    assert version == DataVersion(3, 500, 2)
    assert version.compare(DataVersion(3, 500, 2)) == 0
    assert version.compare(DataVersion(2, 900, 9)) == 1
    assert version.compare(DataVersion(3, 900, 1)) == 1
    assert version.compare(DataVersion(3, 501, 2)) == -1


def test_defaults_are_those_of_apache() -> None:
    assert fastjson.dumps(TopicConfig("t")) == (
        b'{"attributes":{},"order":false,"perm":6,"readQueueNums":16,"topicFilterType":"SINGLE_TAG","topicName":"t",'
        b'"topicSysFlag":0,"writeQueueNums":16}'
    )
    assert fastjson.dumps(SubscriptionGroupConfig("g")) == (
        b'{"attributes":{},"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,'
        b'"consumeFromMinEnable":true,"consumeMessageOrderly":false,"consumeTimeoutMinute":15,"groupName":"g",'
        b'"groupRetryPolicy":{"type":"CUSTOMIZED"},"groupSysFlag":0,"notifyConsumerIdsChangedEnable":true,'
        b'"retryMaxTimes":16,"retryQueueNums":1,"whichBrokerWhenConsumeSlowly":1}'
    )


def test_golden_files_stay_as_they_are(tmp_path: Path) -> None:
    """Loading must not touch what it loads."""
    shutil.copytree(GOLDEN / "config", tmp_path / "config")
    before = {path: path.read_bytes() for path in (tmp_path / "config").iterdir()}
    for path_in, wanted in ALL:
        load(path_in(tmp_path), wanted)
    assert {path: path.read_bytes() for path in (tmp_path / "config").iterdir()} == before
