"""Moving a stopped stream by its checkpoint: against a model of what Spark does with one, and by command."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.commands import run_here
from patience import DEADLINE_S
from skylark.client.sync import Producer
from skylark.pipelines import moving
from skylark.pipelines.checkpoints import BACKUPS, SINK, Checkpoint, apply, expect_sink, held, local_path
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.keeping import CHECKPOINT
from skylark.spark.cluster import Cluster
from skylark.spark.queues import Queue, nested
from skylark.testing import LocalCluster

NOW = datetime(2026, 1, 31, tzinfo=UTC)
ZERO, ONE = Queue("orders", "broker-a", 0), Queue("orders", "broker-a", 1)


class Model:
    """A stream of Spark as far as its checkpoint goes. A batch fails by the messages that are bad."""

    def __init__(self, directory: Path, ends: Mapping[Queue, int], bad: set[tuple[Queue, int]] = frozenset()) -> None:  # type: ignore[assignment]
        self.directory = directory
        self.ends = ends
        self.bad = bad
        self.read: list[tuple[Queue, int]] = []
        for part in ("offsets", "commits"):
            (directory / part).mkdir(parents=True, exist_ok=True)

    def stored(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "offsets" / str(number)).read_text().split("\n")[2])
        return found

    def plan(self, number: int, end: Mapping[Queue, int]) -> None:
        marks = {queue: [offset - 1, 1, 1] for queue, offset in end.items() if offset}
        first = nested(dict.fromkeys(self.ends, 0))
        line = json.dumps({"f": first, "g": "g", "m": nested(marks), "n": "host:1", "o": nested(end), "v": 1, "z": 7})  # type: ignore[arg-type]
        (self.directory / "offsets" / str(number)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{line}')
        (self.directory / "offsets" / f".{number}.crc").write_bytes(b"crc")

    def newest(self) -> tuple[int, bool]:
        """The newest batch, and whether it is finished."""
        numbers = [int(path.name) for path in (self.directory / "offsets").iterdir() if path.name.isdecimal()]
        newest = max(numbers, default=-1)
        return newest, newest < 0 or (self.directory / "commits" / str(newest)).exists()

    def run(self, most: int) -> bool:
        """Batches of so many messages of each queue, until all was read; False if one failed."""
        while True:
            newest, is_finished = self.newest()
            if is_finished:
                begin = self._at(newest)
                if begin == self.ends:
                    return True
                newest += 1
                self.plan(newest, {queue: min(begin[queue] + most, end) for queue, end in self.ends.items()})
            if not self._batch(newest):
                return False

    def _at(self, number: int) -> dict[Queue, int]:
        if number < 0:
            return dict.fromkeys(self.ends, 0)
        tree = self.stored(number)["o"]
        return {queue: tree[queue.topic][queue.broker][str(queue.queue_id)] for queue in self.ends}

    def _batch(self, number: int) -> bool:
        first = self.stored(number)["f"]
        begin = (
            self._at(number - 1)
            if number
            else {queue: first[queue.topic][queue.broker][str(queue.queue_id)] for queue in self.ends}
        )
        end = self._at(number)
        assert all(begin[queue] <= end[queue] for queue in self.ends)
        rows = [(queue, offset) for queue in self.ends for offset in range(begin[queue], end[queue])]
        if self.bad.intersection(rows):
            return False
        self.read += rows
        (self.directory / "commits" / str(number)).write_text("v1\n{}")
        return True


def ends_of(model: Model) -> moving.Ends:
    return {queue: (0, end) for queue, end in model.ends.items()}


def stream_of(model: Model) -> moving.Stream:
    return moving.Stream(Checkpoint.read(model.directory), None)


def skip(model: Model, queue: Queue, offset: int) -> None:
    stream = stream_of(model)
    wanted = moving.Wanted(queue.topic, queue.broker, queue.queue_id)
    plan = moving.skip_message(stream, wanted, offset, ends_of(model))
    assert plan.change is not None
    apply(stream.checkpoint, plan.change, NOW)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path / "checkpoint", {ZERO: 10, ONE: 4})


PLACES = st.tuples(st.sampled_from([ZERO, ONE]), st.integers(0, 8))


@given(st.integers(0, 9), st.integers(0, 9), st.sets(PLACES, max_size=4), st.integers(1, 5))
def test_bad_messages_are_skipped_and_all_others_read_once(
    zero: int, one: int, bad: set[tuple[Queue, int]], most: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = Model(Path(directory), {ZERO: zero, ONE: one}, bad)
        for _ in range(3 * len(bad) + 1):
            if model.run(most):
                break
            begin = next(iter(stream_of(model).checkpoint.positions().values()))
            end = next(iter(stream_of(model).checkpoint.planned_ends().values()))
            queue, offset = min((queue, offset) for queue, offset in bad if begin[queue] <= offset < end[queue])
            skip(model, queue, offset)
        everything = {(queue, offset) for queue, end in model.ends.items() for offset in range(end)}
        assert sorted(model.read) == sorted(everything - bad)


@given(st.data())
def test_a_stream_goes_on_from_where_it_was_set_to(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = Model(Path(directory), {ZERO: 9, ONE: 5}, {(ZERO, data.draw(st.integers(0, 8)))})
        assert not model.run(data.draw(st.integers(1, 5)))
        model.bad, model.read = set(), []
        number, _ = model.newest()
        stream = stream_of(model)
        (before,) = stream.checkpoint.positions().values()
        target = data.draw(st.integers(0, 9))
        plan = moving.set_to(stream, moving.Wanted(queue_id=0), target, ends_of(model), dict, replan=True)
        if plan.change is not None:
            apply(stream.checkpoint, plan.change, NOW)
            end = model.stored(max(number - 1, 0))
            assert end["z"] == 7
            assert "0" not in end.get("m", {}).get("orders", {}).get("broker-a", {})
        assert model.run(3)
        expected = [(ZERO, offset) for offset in range(target, 9)] + [(ONE, offset) for offset in range(before[ONE], 5)]
        assert sorted(model.read) == sorted(expected)


def test_the_end_of_the_last_batch_is_changed_and_what_it_was_is_kept(model: Model) -> None:
    assert model.run(4)
    number, _ = model.newest()
    before = (model.directory / "offsets" / str(number)).read_bytes()
    stream = stream_of(model)
    plan = moving.set_to(stream, moving.Wanted(), "earliest", ends_of(model), dict)
    assert [(move.queue, move.before, move.after) for move in plan.moves] == [(ZERO, 10, 0), (ONE, 4, 0)]
    assert plan.change is not None
    backup = apply(stream.checkpoint, plan.change, NOW)
    assert model.newest() == (number, True)  # no batch was made: sinks and state count them
    assert "m" not in model.stored(number)
    assert not (model.directory / "offsets" / f".{number}.crc").exists()
    assert backup.parent == model.directory / BACKUPS
    assert {path.name for path in (backup / "offsets").iterdir()} == {str(number), f".{number}.crc"}
    assert (backup / "offsets" / str(number)).read_bytes() == before
    again = stream_of(model)
    assert moving.set_to(again, moving.Wanted(), "earliest", ends_of(model), dict).change is None


def test_targets() -> None:
    assert moving.target(" latest ") == "latest"
    assert moving.target("120") == 120
    assert moving.target("2026-01-31T12:00") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert moving.target('{"orders":{"broker-a":{"0":-2}}}') == {ZERO: -2}
    for text in ("soon", "-1", "{", str(2**63), ""):
        with pytest.raises(PipelineError, match="--to"):
            moving.target(text)


def test_where_a_stream_is_set_to(model: Model) -> None:
    assert model.run(4)
    stream, ends = stream_of(model), {ZERO: (3, 10), ONE: (0, 4)}

    def places(to: Any, **wanted: Any) -> list[int]:
        times = {ZERO: 5, ONE: 6}
        plan = moving.set_to(stream, moving.Wanted(**wanted), to, ends, lambda asked: {q: times[q] for q in asked})
        return [move.after for move in plan.moves]

    assert places("earliest") == [3, 0]
    assert places("latest") == [10, 4]
    assert places(NOW) == [5, 6]
    assert places(7, queue_id=0) == [7]
    assert places({ZERO: -2, ONE: 1}) == [3, 1]
    for to, wanted, message in (
        (7, {}, "--to 7 is for one queue, and every queue are 2"),
        (2, {"queue_id": 0}, "has the offsets 3 to 10: the stream can't go on from 2"),
        (11, {"queue_id": 0}, "has the offsets 3 to 10"),
        ("latest", {"topic": "others"}, "the stream has no queue of topic others"),
        ({Queue("others", "b", 0): 1}, {}, "the stream does not read queue 0 of topic others"),
    ):
        with pytest.raises(PipelineError, match=message):
            places(to, **wanted)
    with pytest.raises(PipelineError, match="queue 1 of topic orders at broker broker-a is not there now"):
        moving.set_to(stream, moving.Wanted(), "latest", {ZERO: (0, 10)}, dict)


def test_a_count_goes_to_the_end_at_most(model: Model) -> None:
    model.plan(0, {ZERO: 2, ONE: 1})
    (model.directory / "commits" / "0").write_text("v1\n{}")
    plan = moving.skip_count(stream_of(model), moving.Wanted(), 5, {ZERO: (4, 10), ONE: (0, 4)})
    assert [(move.before, move.after) for move in plan.moves] == [(2, 9), (1, 4)]


def test_a_batch_that_did_not_finish_is_not_planned_anew_unasked(model: Model) -> None:
    model.bad = {(ZERO, 5)}
    assert not model.run(4)
    for change in (
        lambda replan: moving.set_to(stream_of(model), moving.Wanted(), "latest", ends_of(model), dict, replan=replan),
        lambda replan: moving.skip_count(stream_of(model), moving.Wanted(), 1, ends_of(model), replan=replan),
    ):
        with pytest.raises(PipelineError, match="batch 1 was planned and did not finish, and its sink may know it"):
            change(False)
        assert "it is planned anew, under the same number" in change(True).remarks[0]


DECLARED = """\
name: paid
source: {{format: rocketmq, options: {{nameServer: "{namesrv}", subscribe: orders}}}}
sink: {{format: parquet, path: out}}
"""


def test_a_batch_that_the_files_have_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "paid.yaml").write_text(DECLARED.format(namesrv="host:2"))
    model = Model(tmp_path / "checkpoints" / "paid", {ZERO: 10, ONE: 4}, {(ZERO, 5)})
    assert not model.run(4)
    stream = moving.stream(tmp_path / "paid.yaml")
    assert stream.name_server == "host:2"
    wanted = moving.Wanted(queue_id=0)
    assert moving.skip_message(stream, wanted, 5, ends_of(model)).change is not None
    (tmp_path / "out" / "_spark_metadata").mkdir(parents=True)
    (tmp_path / "out" / "_spark_metadata" / "1").touch()
    with pytest.raises(PipelineError, match="the sink has batch 1 already"):
        moving.skip_message(stream, wanted, 5, ends_of(model))


def test_only_what_an_error_named_is_skipped(model: Model) -> None:
    model.bad = {(ZERO, 5)}
    assert not model.run(4)
    stream, ends = stream_of(model), ends_of(model)
    for offset, wanted, message in (
        (3, moving.Wanted(queue_id=0), "the stream is at 4 already"),
        (10, moving.Wanted(queue_id=0), "ends at 10: there is no message at offset 10"),
        (9, moving.Wanted(queue_id=0), "has no batch planned with the message at offset 9: run it"),
        (5, moving.Wanted(), "a message is in one queue"),
    ):
        with pytest.raises(PipelineError, match=message):
            moving.skip_message(stream, wanted, offset, ends)
    told = moving.skip_message(stream, moving.Wanted(queue_id=0), 5, ends).remarks
    assert told[0] == "batch 1, which did not finish, begins at 4; it ends at 5 instead of 8, before the message"


def test_a_stream_that_runs_is_not_moved(model: Model) -> None:
    assert model.run(4)
    stream = stream_of(model)
    plan = moving.set_to(stream, moving.Wanted(), "earliest", ends_of(model), dict)
    assert plan.change is not None
    with held(model.directory), pytest.raises(PipelineError, match=r"the stream of .* runs in process \d+: stop it"):
        apply(stream.checkpoint, plan.change, NOW)
    model.ends = {ZERO: 11, ONE: 4}
    assert model.run(4)
    with pytest.raises(PipelineError, match="was changed meanwhile: the stream runs"):
        apply(stream.checkpoint, plan.change, NOW)
    assert not (model.directory / BACKUPS).exists()


def test_what_is_no_checkpoint_to_change(model: Model, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is no checkpoint of a Spark stream"):
        Checkpoint.read(tmp_path)
    (model.directory / "metadata").touch()
    with pytest.raises(PipelineError, match="has no batch yet"):
        Checkpoint.read(model.directory)
    model.plan(3, model.ends)
    with pytest.raises(PipelineError, match="batch 3 planned and batch -1 finished"):
        Checkpoint.read(model.directory)
    (model.directory / "offsets" / "3").rename(model.directory / "offsets" / "0")
    assert Checkpoint.read(model.directory).finished is None
    text = (model.directory / "offsets" / "0").read_text()
    (model.directory / "offsets" / "0").write_text(text.replace("v1", "v2", 1))
    with pytest.raises(PipelineError, match="has the format 'v2'"):
        Checkpoint.read(model.directory)


def test_a_first_batch_of_an_older_version(model: Model) -> None:
    model.plan(0, model.ends)
    path = model.directory / "offsets" / "0"
    path.write_text(path.read_text().replace('"f"', '"y"'))
    assert moving.show(stream_of(model), {}).queues == []
    with pytest.raises(PipelineError, match="does not say where its first batch, which did not finish, begins"):
        moving.set_to(stream_of(model), moving.Wanted(), "latest", ends_of(model), dict, replan=True)


def test_other_sources_of_a_stream_stay(model: Model) -> None:
    """A join of a topic and files: each has its line."""
    model.plan(0, {ZERO: 2, ONE: 1})
    path = model.directory / "offsets" / "0"
    head = path.read_text().split("\n")
    lines = [*head[:2], '{"logOffset":3}', head[2], "-"]
    path.write_text("\n".join(lines))
    (model.directory / "commits" / "0").write_text("v1\n{}")
    stream = stream_of(model)
    plan = moving.set_to(stream, moving.Wanted(), "latest", ends_of(model), dict)
    assert plan.change is not None
    apply(stream.checkpoint, plan.change, NOW)
    changed = path.read_text().split("\n")
    assert [changed[0], changed[1], changed[2], changed[4]] == [lines[0], lines[1], lines[2], lines[4]]
    assert json.loads(changed[3])["o"] == {"orders": {"broker-a": {"0": 10, "1": 4}}}


def test_where_checkpoints_are() -> None:
    assert local_path("checkpoints/paid") == Path("checkpoints/paid")
    assert local_path("file:/data/paid") == local_path("file:///data/paid") == Path("/data/paid")
    assert local_path("s3a://bucket/paid") is local_path("hdfs:///paid") is local_path("file://host/paid") is None


@pytest.fixture(scope="module")
def orders() -> Iterator[LocalCluster]:
    with LocalCluster(topics={"orders": 1}) as cluster:
        with Producer(cluster.name_servers, group="tests") as producer:
            for number in range(10):
                producer.send("orders", str(number).encode())
        yield cluster


def test_by_command(
    orders: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with Cluster(orders.name_servers, timeout_s=DEADLINE_S) as cluster:
        (queue,) = cluster.queues("orders")
    file = tmp_path / "paid.yaml"
    file.write_text(DECLARED.format(namesrv=orders.name_servers))
    model = Model(tmp_path / "checkpoints" / "paid", {queue: 10}, {(queue, 5)})
    assert not model.run(4)

    def offsets(*arguments: object) -> tuple[int, str, str]:
        return run_here(monkeypatch, capsys, "pipeline", "offsets", *map(str, arguments))

    code, out, _ = offsets("show", file, "--json")
    place = {"topic": "orders", "broker": queue.broker, "queueId": 0}
    assert (code, json.loads(out)) == (
        0,
        {
            "checkpoint": str(model.directory),
            "finishedBatch": 0,
            "plannedBatch": 1,
            "queues": [{**place, "offset": 4, "planned": 8, "min": 0, "max": 10, "lag": 6}],
        },
    )
    code, out, _ = offsets("show", model.directory, "-n", orders.name_servers)
    assert out.splitlines()[0] == f"{model.directory}: batch 0 finished; batch 1 is planned and did not finish"
    assert out.splitlines()[-1].split() == ["orders", queue.broker, "0", "4", "8", "0", "10", "6"]

    code, out, err = offsets("skip", file, "--offset", 5)
    assert (code, err) == (1, "skylark: nothing was changed: without a terminal to ask at, say --yes, or --dry-run\n")
    assert "batch 1, which did not finish, begins at 4; it ends at 5 instead of 8" in out
    assert offsets("skip", file, "--offset", 5, "--dry-run")[1].endswith("nothing was changed\n")
    assert model.stored(1)["o"] == nested({queue: 8})

    code, out, _ = offsets("skip", file, "--offset", 5, "--yes")
    assert code == 0
    assert f"done; what was there before is in {model.directory}/backups/" in out
    assert not model.run(4)
    code, out, _ = offsets("skip", file, "--offset", 5, "--yes", "--json")
    told = json.loads(out)
    assert (told["moves"], told["changed"]) == ([{**place, "from": 5, "to": 6}], True)
    assert model.run(4)
    assert [offset for _, offset in model.read] == [*range(5), *range(6, 10)]

    code, out, _ = offsets("set", file, "--to", 7, "--yes")
    assert (
        out.splitlines()[0]
        == f"queue 0 of topic orders at broker {queue.broker}: from 10 to 7, 3 offsets are read again"
    )
    assert model.run(4)
    assert [offset for _, offset in model.read[-3:]] == [7, 8, 9]
    for arguments, message in (
        (("skip", file), "say what is passed over: --count COUNT or --offset OFFSET"),
        (("set", file, "--to", "soon"), "--to 'soon': expected earliest, latest, an offset, a time in UTC such as"),
        (("show", tmp_path), f"{tmp_path} is no checkpoint of a Spark stream"),
        (("show", tmp_path / "none.yaml"), "cannot read the pipeline"),
    ):
        code, out, err = offsets(*arguments)
        assert (code, out) == (1, "")
        assert err.startswith(f"skylark: {message}")


def test_an_archive_runs_once(
    orders: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two that took up the same batch would both have kept it; and while it runs, its position is not changed."""
    lake = tmp_path / "lake"
    archive = ("pipeline", "archive", "orders", "--to", str(lake), "-n", orders.name_servers)
    with held(lake / CHECKPOINT):
        ran = run_here(monkeypatch, capsys, *archive)
    assert ran[0] == 1
    assert "runs in process" in ran[2]


def test_a_checkpoint_is_of_one_sink(tmp_path: Path) -> None:
    expect_sink(tmp_path, "the terminal")
    expect_sink(tmp_path, "lake/paid")  # nothing was read yet
    model = Model(tmp_path, {ZERO: 3})
    assert model.run(3)
    expect_sink(tmp_path, "lake/paid")
    with pytest.raises(PipelineError, match=r"wrote to lake/paid until now, .* missing in topic paid: give"):
        expect_sink(tmp_path, "topic paid")
    (tmp_path / SINK).unlink()
    expect_sink(tmp_path, "topic paid")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_it_is_asked(
    orders: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(orders.name_servers, timeout_s=DEADLINE_S) as cluster:
        (queue,) = cluster.queues("orders")
    model = Model(tmp_path, {queue: 10})
    assert model.run(10)
    command = ("pipeline", "offsets", "set", str(tmp_path), "-n", orders.name_servers, "--to", "8")
    for answer, code, told, offset in (("n", 130, "skylark: stopped", 10), ("y", 0, "It was written to last at 20", 8)):
        monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
        ended, out, err = run_here(monkeypatch, capsys, *command)
        assert (ended, told in err) == (code, True)
        assert "from 10 to 8, 2 offsets are read again" in out
        assert model.stored(0)["o"] == nested({queue: offset})


GUIDE = Path(__file__).parents[2] / "docs" / "pipelines.md"
EXAMPLES = GUIDE.read_text().partition("## Where a stream goes on\n")[2].split("```")[1].strip().splitlines()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_guide(
    orders: LocalCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    example: str,
) -> None:
    with Cluster(orders.name_servers, timeout_s=DEADLINE_S) as cluster:
        (queue,) = cluster.queues("orders")
    (tmp_path / "paid.yaml").write_text(DECLARED.format(namesrv=orders.name_servers))
    model = Model(tmp_path / "checkpoints" / "paid", {queue: 9}, {(queue, 5)} if "--offset" in example else set())
    assert model.run(4) is not bool(model.bad)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    here = {"120": "7", "4711": "5", "broker-a": queue.broker, "localhost:9876": orders.name_servers}
    for word, there in here.items():
        example = example.replace(word, there)
    name, *words = example.split()
    code, _, err = run_here(monkeypatch, capsys, *words)
    assert (name, code) == ("skylark", 0), err
    changes = " show " not in example and "--dry-run" not in example
    assert (model.directory / BACKUPS).exists() == changes
