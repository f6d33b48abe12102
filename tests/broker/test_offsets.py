"""Consumer offsets: against a plain dict, across restarts, and as clients ask for them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from skylark.broker.offset_rows import OffsetCopy
from skylark.broker.offsets import UNKNOWN, Offsets, handlers
from skylark.net.connection import Connection, RequestFailed
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

GROUPS = st.sampled_from(["g", "h"])
TOPICS = st.sampled_from(["T", "U", "%RETRY%g"])
QUEUES = st.integers(0, 3)
OFFSETS = st.integers(0, 2**63 - 1)
PEER = cast(Connection, "1.2.3.4:5")


class OffsetMachine(RuleBasedStateMachine):
    """The offsets beside dicts; a table is written at any moment after it was captured, and the broker is killed or
    stopped and starts again at any moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.offsets = Offsets(Path(self.directory.name))
        self.committed: dict[tuple[str, str, int], int] = {}
        self.resets: dict[tuple[str, str, int], int] = {}
        self.path = Path(self.directory.name) / "consumerOffset.json"
        self.on_disk: dict[tuple[str, str, int], int] = {}
        self.backup: dict[tuple[str, str, int], int] = {}
        self.captured: tuple[OffsetCopy, dict[tuple[str, str, int], int]] | None = None
        self.copies: list[tuple[OffsetCopy, dict[tuple[str, str, int], int]]] = []

    def teardown(self) -> None:
        self.directory.cleanup()

    @rule(group=GROUPS, topic=TOPICS, queue=QUEUES, offset=OFFSETS)
    def commit(self, group: str, topic: str, queue: int, offset: int) -> None:
        self.offsets.commit(group, topic, queue, offset, "peer")
        if (group, topic, queue) not in self.resets:
            self.committed[group, topic, queue] = offset

    @rule(group=GROUPS, topic=TOPICS, queue=QUEUES, offset=OFFSETS)
    def reset(self, group: str, topic: str, queue: int, offset: int) -> None:
        self.offsets.reset(group, topic, queue, offset)
        self.resets[group, topic, queue] = self.committed[group, topic, queue] = offset

    @rule(group=GROUPS, topic=TOPICS, queue=QUEUES)
    def take_reset(self, group: str, topic: str, queue: int) -> None:
        assert self.offsets.has_reset(group, topic, queue) == ((group, topic, queue) in self.resets)
        assert self.offsets.take_reset(group, topic, queue) == self.resets.pop((group, topic, queue), None)

    @rule(source=GROUPS, copy=GROUPS, topic=TOPICS)
    def clone(self, source: str, copy: str, topic: str) -> None:
        self.offsets.clone(source, copy, topic)
        copied = {key[2]: value for key, value in self.committed.items() if key[:2] == (source, topic)}
        if copied:
            self.committed = {key: value for key, value in self.committed.items() if key[:2] != (copy, topic)}
            self.committed |= {(copy, topic, queue): value for queue, value in copied.items()}
            self.resets = {
                key: value for key, value in self.resets.items() if key[:2] != (copy, topic) or key[2] in copied
            }

    @rule(group=GROUPS)
    def remove_group(self, group: str) -> None:
        self.offsets.group_deleted(group, with_offsets=True)
        self.committed = {key: value for key, value in self.committed.items() if key[0] != group}
        self.resets = {key: value for key, value in self.resets.items() if key[0] != group}

    @rule(topic=TOPICS)
    def remove_topic(self, topic: str) -> None:
        self.offsets.remove_topics([topic])
        self.committed = {key: value for key, value in self.committed.items() if key[1] != topic}
        self.resets = {key: value for key, value in self.resets.items() if key[1] != topic}
        self.on_disk = {key: value for key, value in self.on_disk.items() if key[1] != topic}
        self.backup = {key: value for key, value in self.backup.items() if key[1] != topic}
        if self.captured is not None:
            table, expected = self.captured
            self.captured = table, {key: value for key, value in expected.items() if key[1] != topic}

    @rule()
    def copy(self) -> None:
        self.copies = [*self.copies[-2:], (self.offsets.copy(), dict(self.committed))]

    @rule()
    def capture(self) -> None:
        if self.captured is None:
            table = self.offsets.capture()
            self.captured = None if table is None else (table, dict(self.committed))

    @rule(is_told=st.booleans())
    def write(self, is_told: bool) -> None:
        """A broker that is killed may not have learnt of a write that ended."""
        if self.captured is not None:
            table, expected = self.captured
            self._replaced_by(expected)
            self.offsets.write(table)
            if is_told:
                self.offsets.written(table)
                self.captured = None
            else:
                self.kill()

    def _replaced_by(self, expected: dict[tuple[str, str, int], int]) -> None:
        if self.path.exists():
            self.backup = self.on_disk
        self.on_disk = expected

    @rule()
    def kill(self) -> None:
        self.offsets = Offsets(Path(self.directory.name))
        self.committed = dict(self.on_disk)
        self.captured = None
        self.resets.clear()

    @rule()
    def restart(self) -> None:
        for _ in range(2):
            self.capture()
            self.write(is_told=True)
        assert self.on_disk == self.committed
        self.kill()

    @rule()
    def lose_the_table(self) -> None:
        """As one does whose table is damaged."""
        self.path.unlink(missing_ok=True)
        self.path.with_name("consumerOffset.json.bak").unlink(missing_ok=True)
        self.on_disk, self.backup = {}, {}
        self.kill()

    @rule()
    def damage_the_table(self) -> None:
        if self.path.exists() and self.path.with_name("consumerOffset.json.bak").exists():
            self.path.write_bytes(b"{")
            self.on_disk = dict(self.backup)
            self.kill()

    @invariant()
    def agrees(self) -> None:
        for group in ("g", "h"):
            for topic in ("T", "U", "%RETRY%g"):
                for queue in range(4):
                    key = group, topic, queue
                    assert self.offsets.query(*key) == self.resets.get(key, self.committed.get(key, -1))
            assert self.offsets.topics_of(group) == {key[1] for key in self.committed if key[0] == group}
        for copy, expected in self.copies:
            assert {(*key, queue): each for key, row in copy.offsets.items() for queue, each in row.items()} == expected
        assert self.offsets.groups_of("T") == {key[0] for key in self.committed if key[1] == "T"}


TestOffsetMachine = OffsetMachine.TestCase
TestOffsetMachine.settings = settings(max_examples=40)


def test_the_file_is_apaches(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    offsets.commit("g", "T", 0, 5, "peer")
    offsets.commit("g", "T", 1, 6, "peer")
    offsets.pulled("g", "T", 0, 5)
    offsets.data_version.counter, offsets.data_version.timestamp_ms = 6, 5
    offsets.save()
    assert fastjson.dumps(offsets.copy().written()) == (
        b'{"dataVersion":{"counter":7,"stateVersion":0,"timestamp":5},"groupTopicMap":{"g":["T"]},'
        b'"offsetTable":{"T@g":{0:5,1:6}},"pullOffsetTable":{"T@g":{0:5}}}'
    )
    assert (tmp_path / "consumerOffset.json").read_text() == (
        '{\n\t"dataVersion":{\n\t\t"counter":7,\n\t\t"stateVersion":0,\n\t\t"timestamp":5\n\t},\n\t"groupTopicMap":{\n'
        '\t\t"g":[\n\t\t\t"T"\n\t\t]\n\t},\n\t"offsetTable":{\n\t\t"T@g":{\n\t\t\t0:5,\n\t\t\t1:6\n\t\t}\n\t},\n'
        '\t"pullOffsetTable":{\n\t\t"T@g":{\n\t\t\t0:5\n\t\t}\n\t}\n}'
    )


def test_nothing_is_written_while_nothing_changes(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    assert offsets.is_new
    offsets.save()
    assert not Offsets(tmp_path).is_new, "an empty table is there, so that a lost one is missed"
    offsets.commit("g", "T", 0, 5, "peer")
    offsets.save()
    (tmp_path / "consumerOffset.json").unlink()
    offsets.commit("g", "T", 0, 5, "peer")
    offsets.save()
    assert not (tmp_path / "consumerOffset.json").exists()


def ask(offsets: Offsets, code: RequestCode, beginning: int = UNKNOWN, **fields: str) -> Frame:
    request = Frame(code, {"consumerGroup": "g", "topic": "T", "queueId": "0"} | fields)
    answer = handlers(offsets, lambda *_: beginning, {"T"}, lambda _, queue_id: queue_id in range(4), {"g"})[code](
        request, PEER
    )
    if isinstance(answer, Coroutine):
        answer = asyncio.run(answer)
    assert isinstance(answer, Frame)
    return answer


def refused(offsets: Offsets, code: RequestCode, beginning: int = UNKNOWN, **fields: str) -> tuple[int, str]:
    with pytest.raises(RequestFailed) as failure:
        ask(offsets, code, beginning, **fields)
    return failure.value.code, failure.value.remark


def test_query_of_a_committed_offset(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    assert ask(offsets, RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset="42").code == 0
    assert ask(offsets, RequestCode.QUERY_CONSUMER_OFFSET).fields == {"offset": "42"}


def test_a_new_group_is_told_where_it_begins(tmp_path: Path) -> None:
    assert ask(Offsets(tmp_path), RequestCode.QUERY_CONSUMER_OFFSET, 7).fields == {"offset": "7"}


def test_a_new_group_that_is_told_nothing_decides_itself(tmp_path: Path) -> None:
    assert refused(Offsets(tmp_path), RequestCode.QUERY_CONSUMER_OFFSET) == (
        ResponseCode.QUERY_NOT_FOUND,
        "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first",
    )


def test_a_client_can_ask_not_to_be_given_zero(tmp_path: Path) -> None:
    answer = refused(Offsets(tmp_path), RequestCode.QUERY_CONSUMER_OFFSET, 0, setZeroIfNotFound="false")
    assert answer == (ResponseCode.QUERY_NOT_FOUND, "Not found, do not set to zero, maybe this group boot first")


def test_commits_of_strangers_are_refused(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    update = RequestCode.UPDATE_CONSUMER_OFFSET
    assert refused(offsets, update, commitOffset="1", consumerGroup="x") == (
        ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
        "Group x not exist!",
    )
    assert refused(offsets, update, commitOffset="1", topic="x") == (
        ResponseCode.TOPIC_NOT_EXIST,
        "Topic x not exist!",
    )
    assert refused(offsets, update, commitOffset="1", consumerGroup="CID_RMQ_SYS_TRANS") == (
        ResponseCode.NO_PERMISSION,
        "the offsets of group CID_RMQ_SYS_TRANS are the broker's own",
    )


def test_commits_to_queues_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    offsets.put("g", "T", 7, 1)
    update = RequestCode.UPDATE_CONSUMER_OFFSET
    for queue_id in ("-1", "4", "2147483647"):
        assert refused(offsets, update, commitOffset="1", queueId=queue_id) == (
            ResponseCode.INVALID_PARAMETER,
            f"the offset of g is not kept: topic T has no queue {queue_id} on this broker",
        )
    assert ask(offsets, update, commitOffset="5", queueId="7").code == 0, "what is kept can be changed"
    assert dict(offsets.of("g", "T")) == {7: 5}


def test_a_reset_outweighs_what_a_consumer_commits(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    offsets.reset("g", "T", 0, 3)
    answer = ask(offsets, RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset="42")
    assert (answer.code, answer.remark) == (0, "Offset has been previously reset")
    assert offsets.take_reset("g", "T", 0) == 3
    ask(offsets, RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset="42")
    assert ask(offsets, RequestCode.QUERY_CONSUMER_OFFSET).fields == {"offset": "42"}


def test_pulled_offsets_run_ahead(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    offsets.commit("g", "T", 0, 5, "peer")
    assert offsets.query_pulled("g", "T", 0) == 5
    offsets.pulled("g", "T", 0, 9)
    assert offsets.query_pulled("g", "T", 0) == 9
    assert offsets.query("g", "T", 0) == 5


def test_get_all(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    offsets.commit("g", "T", 0, 5, "peer")
    assert b'"offsetTable":{"T@g":{0:5}}' in ask(offsets, RequestCode.GET_ALL_CONSUMER_OFFSET).body


def test_a_table_that_is_just_written_has_no_deleted_topic(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    for topic in ("T", "U"):
        offsets.commit("g", topic, 0, 5, "peer")
    table = offsets.capture()
    assert table is not None
    offsets.remove_topics(["T"])
    offsets.write(table)
    assert Offsets(tmp_path).topics_of("g") == {"U"}
    offsets.written(table)
    offsets.commit("g", "T", 0, 1, "peer")
    offsets.save()
    assert Offsets(tmp_path).query("g", "T", 0) == 1, "that is one of the same name"


def test_what_is_noted_of_deleted_topics_does_not_grow(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    noted = tmp_path / "deletedOffsets"
    for number in range(5):
        offsets.commit("g", "T", 0, number, "peer")
        offsets.save()
        offsets.remove_topics(["T", "U"])
        offsets.remove_topics([f"T{number}"])
    assert noted.stat().st_size > 0
    for number in range(3):
        offsets.commit("g", "V", 0, number, "peer")
        offsets.save()
    assert noted.stat().st_size == 0


def test_a_deleted_topic_does_not_come_back_from_the_backup(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    offsets.commit("g", "T", 0, 5, "peer")
    offsets.save()
    offsets.group_deleted("g", with_offsets=True)
    offsets.save()  # the former table is the backup now, and still has the topic
    offsets.remove_topics(["T"])
    (tmp_path / "consumerOffset.json").write_text("damaged")
    assert Offsets(tmp_path).of("g", "T") == {}


def test_deleting_costs_a_line_and_not_a_table(tmp_path: Path) -> None:
    offsets = Offsets(tmp_path)
    for number in range(100):
        offsets.commit("g", f"T{number}", 0, 5, "peer")
    offsets.save()
    before = (tmp_path / "consumerOffset.json").stat()
    for number in range(50):
        offsets.remove_topics([f"T{number}"])
    after = (tmp_path / "consumerOffset.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert Offsets(tmp_path).topics_of("g") == {f"T{number}" for number in range(50, 100)}
