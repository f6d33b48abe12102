"""Commit logs read without a broker and without Spark: every message once however they are cut, never a torn one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skylark.spark.bodies import Shape
from skylark.spark.columns import NAMES
from skylark.spark.commitlog import Segment, SegmentFile
from skylark.spark.offline import broker_name, log_directories, plan, scan_options
from skylark.spark.options import BadOption
from skylark.spark.own_topics import is_own
from skylark.spark.positions import DataLost
from skylark.spark.scanning import Part, read_parts
from skylark.wire.message import MAGIC_BLANK, SYS_TRANSACTION_PREPARED, Message
from skylark.wire.records import encode_host, encode_record

HOST = encode_host("127.0.0.1", 10911)
SEGMENT_BYTES = 2048
ALL = Shape(NAMES)
HOUR_MS = 3_600_000


class Log:
    """Writes segments as a broker does."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory / "commitlog"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._end = 0
        self._data = bytearray()
        self._offset = 0

    def append(self, body: bytes, topic: str = "orders", *, time_ms: int = 0, **fields: Any) -> tuple[Path, int, int]:
        """Where the record is: the file, its position and its size."""
        message = Message(topic, fields.pop("queue_id", 0), body, {"n": str(self._offset)}, born_host=HOST, **fields)
        size = len(self._record(message, time_ms))
        if self._end % self._segment_bytes + size + 8 > self._segment_bytes:
            rest = self._segment_bytes - self._end % self._segment_bytes
            self._write(struct.pack(">iI", rest, MAGIC_BLANK).ljust(rest, b"\0"))
        at = self._end
        path = self._write(self._record(message, time_ms))
        self._offset += 1
        return path, at % self._segment_bytes, size

    def _record(self, message: Message, time_ms: int) -> bytes:
        return encode_record(
            message, queue_offset=self._offset, log_offset=self._end, store_timestamp_ms=time_ms, store_host=HOST
        )

    def _write(self, data: bytes) -> Path:
        base = self._end - self._end % self._segment_bytes
        path = self.directory / f"{base:020}"
        if not path.exists():
            path.write_bytes(bytes(self._segment_bytes))
        with path.open("r+b") as file:
            file.seek(self._end - base)
            file.write(data)
        self._end += len(data)
        return path


def rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    return [row for batch in batches(path, **options) for row in batch.to_pylist()]


def batches(path: Path, **options: Any) -> list[pa.RecordBatch]:
    parsed = scan_options({"path": str(path), **{name: str(value) for name, value in options.items()}})
    return [batch for parts in plan(parsed) for batch in read_parts(parsed, ALL, parts)]


def bodies(path: Path, **options: Any) -> list[bytes]:
    return [row["body"] for row in rows(path, **options)]


def change(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def test_all_columns(tmp_path: Path) -> None:
    Log(tmp_path).append(b"hello", queue_id=3, time_ms=5, born_timestamp_ms=4, reconsume_times=2)
    (row,) = rows(tmp_path, broker="broker-a")
    assert row["bornTimestamp"].timestamp() == 0.004
    assert row["storeTimestamp"].timestamp() == 0.005
    del row["bornTimestamp"], row["storeTimestamp"]
    assert row == {
        "topic": "orders",
        "broker": "broker-a",
        "queueId": 3,
        "offset": 0,
        "body": b"hello",
        "tags": None,
        "keys": None,
        "properties": [("n", "0")],
        "reconsumeTimes": 2,
        "msgId": "7F00000100002A9F0000000000000000",
    }


SIZES = st.lists(st.integers(0, 700), max_size=30)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.data())
def test_every_message_once_however_the_log_is_cut(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("log")
    log = Log(root)
    sent = [bytes([number]) * size for number, size in enumerate(sizes)]
    for body in sent:
        log.append(body)
    options = scan_options({"path": str(root), "minPartitions": str(data.draw(st.integers(1, 200)))})
    tasks = plan(options)
    order = data.draw(st.permutations(range(len(tasks))))
    found = {
        n: [row["body"] for batch in read_parts(options, ALL, tasks[n]) for row in batch.to_pylist()] for n in order
    }
    assert [body for number in sorted(found) for body in found[number]] == sent


@settings(deadline=None, max_examples=60)
@given(SIZES.filter(bool), st.data())
def test_a_record_is_found_from_anywhere(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    log = Log(tmp_path_factory.mktemp("log"), 1 << 20)
    places = [log.append(bytes(size)) for size in sizes]
    path, last, size = places[-1]
    position = data.draw(st.integers(0, last + size))
    with SegmentFile(Segment(str(path), 0, 1 << 20)) as file:
        expected = next((at for _, at, _ in places if at >= position), None)
        assert file.find_record(position, 1 << 20) == expected
        assert file.written_end() == last + size


def test_a_copy_of_the_log_in_a_message_is_not_taken_for_records(tmp_path: Path) -> None:
    log = Log(tmp_path, 1 << 16)
    path, _, _ = log.append(b"a" * 100)
    log.append(path.read_bytes()[:1000] * 5)
    log.append(b"c")
    assert [len(body) for body in bodies(tmp_path, minPartitions=50)] == [100, 5000, 1]


def test_a_forged_record_at_the_place_that_it_names_is_an_error_and_no_message(tmp_path: Path) -> None:
    log = Log(tmp_path, 1 << 16)
    _, _, size = log.append(b"a" * 100)
    message = Message("orders", 0, b"forged", {}, born_host=HOST)
    # The body of the next record begins 88 bytes behind the record.
    forged = encode_record(message, queue_offset=0, log_offset=size + 88, store_timestamp_ms=0, store_host=HOST)
    path, at, _ = log.append(forged + b"." * 1000)
    log.append(b"b" * 200)
    segment = Segment(str(path), 0, 1 << 16)
    with SegmentFile(segment) as file:
        place = file.find_record(at + 1, 1 << 16)
        assert place == at + 88
        end = file.written_end()
    options = scan_options({"path": str(tmp_path)})
    with pytest.raises(DataLost, match=f"{path.name}, position {at} .*runs past"):
        list(read_parts(options, ALL, [Part("b", segment, 0, place), Part("b", segment, place, end)]))


def test_segments_that_are_small_share_a_task(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(40):
        log.append(bytes([number]) * 300)
    (task,) = plan(scan_options({"path": str(tmp_path)}))
    assert len(task) == len(list(log.directory.iterdir())) == 8


def test_a_large_message(tmp_path: Path) -> None:
    log = Log(tmp_path, 16 << 20)
    log.append(b"a")
    log.append(b"b" * (5 << 20))
    log.append(b"c")
    assert [len(body) for body in bodies(tmp_path)] == [1, 5 << 20, 1]
    assert [len(body) for body in bodies(tmp_path, maxBytesPerPartition=1 << 16)] == [1, 5 << 20, 1]


# What a crash or a broker at work leaves.


def test_a_torn_record_at_the_end_is_left_out_wherever_it_was_torn(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(b"first")
    path, at, size = log.append(b"second \x01\x02")
    whole = path.read_bytes()
    for written in range(size):  # by a crash, or by a broker that is just writing it
        path.write_bytes(whole[: at + written] + bytes(len(whole) - at - written))
        assert bodies(tmp_path) == [b"first"], written
        path.write_bytes(whole[: at + written])  # the file itself is short
        assert bodies(tmp_path) == [b"first"], written
    path.write_bytes(whole)
    assert bodies(tmp_path) == [b"first", b"second \x01\x02"]


def test_a_torn_first_record_is_an_empty_log(tmp_path: Path) -> None:
    path, _, size = Log(tmp_path).append(b"hello")
    whole = path.read_bytes()
    for written in range(size):
        path.write_bytes(whole[:written].ljust(SEGMENT_BYTES, b"\0"))
        assert bodies(tmp_path) == []


def test_segments_made_ahead_are_empty(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(b"a")
    for number in (1, 2):
        with (log.directory / f"{number * SEGMENT_BYTES:020}").open("wb") as file:
            file.truncate(SEGMENT_BYTES)
    assert bodies(tmp_path) == [b"a"]
    (log.directory / "lock").touch()  # other files are not looked at
    assert bodies(tmp_path) == [b"a"]


def test_a_closed_segment_before_the_next_is_written(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(b"a" * 1500)
    last, _, _ = log.append(b"b" * 1500)
    last.unlink()
    assert bodies(tmp_path) == [b"a" * 1500]


def test_what_is_written_after_the_plan_is_not_read(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(b"a")
    options = scan_options({"path": str(tmp_path)})
    tasks = plan(options)
    log.append(b"b")
    for _ in range(2):
        assert [
            row["body"] for parts in tasks for batch in read_parts(options, ALL, parts) for row in batch.to_pylist()
        ] == [b"a"]


# Damage.


@pytest.mark.parametrize("at", [0, 4, 28, 36, 84, 100])
def test_damage_names_file_and_position_or_is_left_out(tmp_path: Path, at: int) -> None:
    log = Log(tmp_path)
    log.append(b"first" * 20)
    path, position, _ = log.append(b"second" * 20)
    log.append(b"third" * 20)
    change(path, position + at, b"\x55\x55\x55\x55")
    with pytest.raises(
        DataLost, match=rf"{path.name}, position {position} \(log offset {position}\).*failOnDataLoss=false"
    ):
        bodies(tmp_path)
    assert bodies(tmp_path, failOnDataLoss="false") == [b"first" * 20, b"third" * 20]


def test_zeros_in_the_middle_are_damage(tmp_path: Path) -> None:
    log = Log(tmp_path)
    places = [log.append(bytes([number]) * 400) for number in range(9)]
    assert len({path for path, _, _ in places}) == 3
    path, position, _ = places[1]
    change(path, position, bytes(SEGMENT_BYTES - position))  # to the end of a segment that is not the last
    with pytest.raises(DataLost, match=f"{path.name}, position {position} "):
        bodies(tmp_path)
    assert [body[0] for body in bodies(tmp_path, failOnDataLoss="false")] == [0, 4, 5, 6, 7, 8]


def test_checksums_are_compared_unless_told_otherwise(tmp_path: Path) -> None:
    log = Log(tmp_path)
    path, _, _ = log.append(b"first")
    log.append(b"second")
    change(path, 88, b"F")
    with pytest.raises(DataLost, match=r"position 0 .*checksum"):
        bodies(tmp_path)
    assert bodies(tmp_path, checkCrc="false") == [b"First", b"second"]
    assert bodies(tmp_path, topics="another") == []  # nobody asked for that message


def test_a_missing_segment(tmp_path: Path) -> None:
    log = Log(tmp_path)
    places = [log.append(bytes([number]) * 1500) for number in range(4)]
    places[2][0].unlink()
    with pytest.raises(DataLost, match="the log from offset 4096 to 6144 is missing"):
        bodies(tmp_path)
    assert len(bodies(tmp_path, failOnDataLoss="false")) == 3
    places[0][0].unlink()  # the oldest may go: that is retention
    places[1][0].unlink()
    assert len(bodies(tmp_path)) == 1


def test_a_segment_that_retention_deletes_while_it_is_read(tmp_path: Path) -> None:
    path, _, _ = Log(tmp_path).append(b"a")
    for strict in ("true", "false"):
        options = scan_options({"path": str(tmp_path), "failOnDataLoss": strict})
        (parts,) = plan(options)
        if strict == "false":
            path.unlink()
            assert list(read_parts(options, ALL, parts)) == []
    with pytest.raises(DataLost, match="deleted since"):
        list(read_parts(scan_options({"path": str(tmp_path)}), ALL, parts))


# Which messages.


def test_topics_and_queues(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for topic in ("orders", "payments", "orders-eu"):
        for queue_id in range(3):
            log.append(f"{topic} {queue_id}".encode(), topic, queue_id=queue_id)
    assert len(bodies(tmp_path)) == 9
    assert bodies(tmp_path, topics="payments, orders", queues="2,1") == [
        *(b"orders 1", b"orders 2", b"payments 1", b"payments 2")
    ]
    assert bodies(tmp_path, topicPattern="orders.+", queues="0") == [b"orders-eu 0"]


def test_topics_of_rocketmq_itself_are_left_out(tmp_path: Path) -> None:
    own = ["SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC", "%RETRY%group", "%DLQ%group"]
    assert all(map(is_own, own))
    log = Log(tmp_path)
    for topic in [*own, "orders"]:
        log.append(topic.encode(), topic)
    log.append(b"prepared in its own topic", sys_flag=SYS_TRANSACTION_PREPARED)
    assert bodies(tmp_path) == [b"orders"]
    assert bodies(tmp_path, topicPattern=".*(group|orders)") == [b"orders"]
    assert bodies(tmp_path, topics="%DLQ%group") == [b"%DLQ%group"]
    assert len(bodies(tmp_path, includeSystemTopics="true")) == 6


def test_times(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for hour in range(20):
        log.append(bytes([hour]) * 400, time_ms=hour * HOUR_MS)
    found = {"startingTimestamp": 5 * HOUR_MS, "endingTimestamp": 8 * HOUR_MS}
    assert [body[0] for body in bodies(tmp_path, **found)] == [5, 6, 7]
    assert [body[0] for body in bodies(tmp_path, startingTimestamp=18 * HOUR_MS + 1)] == [19]
    assert [body[0] for body in bodies(tmp_path, endingTimestamp=1)] == [0]
    (task,) = plan(scan_options({"path": str(tmp_path), **{name: str(time) for name, time in found.items()}}))
    assert [part.segment.base // SEGMENT_BYTES for part in task] == [1, 2]


def test_a_clock_that_was_set_back_loses_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for minute in (60, 61, 62, 55, 56, 57):
        log.append(bytes([minute]) * 1500, time_ms=minute * 60_000)
    assert [body[0] for body in bodies(tmp_path, startingTimestamp=61 * 60_000)] == [61, 62]
    assert [body[0] for body in bodies(tmp_path, endingTimestamp=57 * 60_000)] == [55, 56]


def test_few_messages_of_many_are_gathered(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for number in range(30):
        log.append(b"." * 400, "orders" if number % 10 == 0 else "payments")
    assert [batch.num_rows for batch in batches(tmp_path, topics="orders")] == [3]


# Paths.


def test_one_log_or_several(tmp_path: Path) -> None:
    for name in ("broker-a", "broker-b"):
        Log(tmp_path / name / "store").append(name.encode())
    first, second = tmp_path / "broker-a" / "store", tmp_path / "broker-b" / "store"
    assert [(row["broker"], row["body"]) for row in rows(tmp_path / "*" / "store")] == [
        ("broker-a", b"broker-a"),
        ("broker-b", b"broker-b"),
    ]
    assert len(log_directories(f"{first},{second / 'commitlog'},file://{first}")) == 2
    assert scan_options({"paths": f'["{first}","{second}"]'}).path == f"{first},{second}"


def test_names_of_brokers() -> None:
    assert broker_name(Path("/data/broker-a/commitlog")) == "broker-a"
    assert broker_name(Path("/data/broker-a/store/commitlog")) == "broker-a"
    assert broker_name(Path("/data/copy-of-the-log")) == "copy-of-the-log"


def test_a_store_without_messages(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert bodies(tmp_path) == []


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "consumequeue").mkdir()
    for path, reason in [
        (tmp_path / "nowhere", "there is no .*nowhere"),
        (tmp_path / "x*", r"there is no .*x\*"),
        (tmp_path / "file", "file is not a directory"),
        (tmp_path / "empty", "empty holds neither a commitlog directory nor segments"),
        (tmp_path, "neither a commitlog directory"),
    ]:
        with pytest.raises(BadOption, match=f"option path=.*{reason}"):
            bodies(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "option path is missing"),
        ({"path": "x", "topics": "a", "topicPattern": "b"}, "topics and topicPattern exclude each other"),
        ({"path": "x", "topicPattern": "("}, r"option topicPattern='\('"),
        ({"path": "x", "queues": "0,a"}, "option queues='0,a': expected numbers"),
        ({"path": "x", "startingTimestamp": "yesterday"}, "option startingTimestamp='yesterday'"),
        ({"path": "x", "maxBytesPerPartition": "1"}, "option maxBytesPerPartition='1'"),
        ({"path": "x", "topic": "a"}, "unknown option 'topic'; did you mean topics"),
    ],
)
def test_wrong_options(options: dict[str, str], reason: str) -> None:
    with pytest.raises(BadOption, match=reason):
        scan_options(options)
