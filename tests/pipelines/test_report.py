"""The report, from messages that are known: counted by real Spark, with both servers, and shown in all its forms."""

from __future__ import annotations

import asyncio
import io
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from servers import Server

from client.inbox import DEADLINE_S, Inbox
from client.plain import create_topic
from skylark.client.listening import RetryLater
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.query import QueryClient
from skylark.client.session import Session
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.report import charts, page, tables, terminal
from skylark.pipelines.report.figures import SECTIONS, Bucket, HotKey, Latency, Report, Throughput, duration, size
from skylark.pipelines.report.gathering import Asked, check, gather
from skylark.pipelines.report.times import bucket_s, over_time
from skylark.pipelines.span import Span

AGAIN = ["again 1", "again 2"]
BODIES = [*AGAIN, *(f"m{number}" for number in range(17)), "dead"]
LATE = 5
DAWN = datetime.fromtimestamp(1, UTC)
NOW_MS = 1_700_000_000_000


class Scene(msgspec.Struct):
    """20 traced messages, 12 with the key hot; 2 were consumed twice, 1 is dead; 5 more came when nobody listened."""

    namesrv: str
    topic: str
    group: str
    ids: dict[str, str]

    def asked(self, **more: object) -> Asked:
        return Asked(name_server=self.namesrv, topics=[self.topic], **more)  # type: ignore[arg-type]


class Listener:
    """Those that come again were sent before all others and fail after them: so they are the slowest on any machine."""

    def __init__(self) -> None:
        self._inbox = Inbox()
        self.wait = self._inbox.wait

    async def __call__(self, message: Message) -> object:
        text, is_new = message.body.decode(), message.reconsume_times == 0
        await self._inbox(message)
        if text == "dead":
            return RetryLater(-1)
        if text in AGAIN and is_new:
            await self.wait(len(BODIES))
            return RetryLater(1)
        return None


async def act(namesrv: str, topic: str, group: str) -> Scene:
    listener = Listener()
    async with Session(namesrv) as session:
        await create_topic(session, topic, 2)
        async with Producer(session=session, group="reported", trace=True) as producer:
            receipts = [
                await producer.send(topic, body.encode(), key="hot" if number < 12 else ["cold", f"k{number}"])
                for number, body in enumerate(BODIES)
            ]
            consumer = PushConsumer(session=session, group=group, listener=listener, from_where="first", trace=True)
            consumer.subscribe(topic)
            async with consumer:
                await listener.wait(len(BODIES) + 2)
        async with Producer(session=session, group="reported") as producer:
            for _ in range(LATE):
                await producer.send(topic, b"late")
        scene = Scene(namesrv, topic, group, {body: r.msg_id for body, r in zip(BODIES, receipts, strict=True)})
        await all_is_there(session, scene)
    return scene


async def all_is_there(session: Session, scene: Scene) -> None:
    """Apache's server shows what it has stored a moment later."""
    async with QueryClient(session=session) as query:
        for body, msg_id in scene.ids.items():
            count = 5 if body in AGAIN else 3
            await until(lambda msg_id=msg_id: query.trace(msg_id), count)
        await until(lambda: query.by_time(f"%DLQ%{scene.group}", 0), 1)
        await until(lambda: query.by_time(scene.topic, 0), len(BODIES) + LATE)


async def until(look: Callable[[], Awaitable[Sequence[object]]], count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(await look()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def scene(server: Server) -> Scene:
    name = f"{type(server).__name__}_{time.time_ns()}"
    return asyncio.run(act(server.namesrv_addr, f"reported_{name}", f"group_{name}"))


@pytest.fixture(scope="module")
def report(spark: SparkSession, scene: Scene) -> Report:
    asked = scene.asked(message=scene.ids["again 1"])
    return gather(spark, asked, check(asked), time.time_ns() // 1_000_000)


def test_throughput(scene: Scene, report: Report) -> None:
    (found,) = report.throughput
    sizes = sum(len(body) for body in BODIES) + LATE * len("late")
    assert (found.topic, found.messages, found.body_bytes) == (scene.topic, 25, sizes)
    assert sum(bucket.messages for bucket in report.buckets) == 25
    assert sum(bucket.body_bytes for bucket in report.buckets) == sizes
    assert found.peak_per_s == max(bucket.messages for bucket in report.buckets) / report.bucket_s
    assert found.first is not None
    assert found.last is not None
    assert found.first <= found.last <= report.made
    assert found.mean_per_s == pytest.approx(25 / max(1.0, (found.last - found.first).total_seconds()))
    assert [row.queue for row in report.queues] == [0, 1]
    assert sum(row.messages for row in report.queues) == 25
    assert sum(row.share for row in report.queues) == pytest.approx(1)


def test_hot_keys(scene: Scene, report: Report) -> None:
    hot, cold, *others = report.keys
    assert hot == HotKey(topic=scene.topic, key="hot", messages=12, share=12 / 25)
    assert cold == HotKey(topic=scene.topic, key="cold", messages=8, share=8 / 25)
    assert [row.key for row in others] == [f"k{number}" for number in range(12, 20)]  # ten in all


def test_latency(scene: Scene, report: Report) -> None:
    found = {(row.way, row.measured_by, row.group): row for row in report.latency}
    assert list(found) == [
        ("sent to stored", "messages", None),
        ("stored to handed out", "traces", scene.group),
        ("sent to consumed", "traces", scene.group),
    ]
    for row in report.latency:
        assert row.p50_ms <= row.p90_ms <= row.p99_ms <= row.p999_ms <= row.max_ms < 3_600_000
    assert [row.messages for row in report.latency] == [25, 20, 19]  # the dead one was never consumed
    assert found["sent to consumed", "traces", scene.group].max_ms >= 1000, "a retry waits for a second"
    assert "latency" not in report.notes


def test_lag(scene: Scene, report: Report) -> None:
    assert report.groups == [scene.group]
    lag = {row.topic: row for row in report.lag}
    assert lag[scene.topic].behind == LATE
    assert lag[scene.topic].queues == 2
    assert lag[f"%RETRY%{scene.group}"].behind == 0
    queues = [row for row in report.queue_lag if row.topic == scene.topic]
    for row in queues:
        assert row.committed is not None
        assert row.behind == row.end - row.committed
    waiting = [row for row in queues if row.behind]
    assert waiting
    for row in waiting:
        assert row.next_stored is not None
        assert row.behind_s == pytest.approx((report.made - row.next_stored).total_seconds())
    assert lag[scene.topic].behind_s == max(row.behind_s or 0 for row in waiting)


def test_retries_and_dead_letters(scene: Scene, report: Report) -> None:
    assert [(row.group, row.topic, row.times, row.messages) for row in report.retries] == [
        (scene.group, scene.topic, 1, 2)
    ]
    (dead,) = report.dead_letters
    assert (dead.group, dead.topic, dead.messages) == (scene.group, scene.topic, 1)
    (last,) = report.last_dead_letters
    assert (last.keys, last.time, last.topic) == ("cold k19", dead.last, scene.topic)
    assert last.msg_id == scene.ids["dead"]


def test_traces(scene: Scene, report: Report) -> None:
    assert [(row.what, row.group, row.calls, row.failed) for row in report.traces] == [
        ("sent", "reported", 20, 0),
        ("consumed", scene.group, 22, 3),
    ]
    assert len(report.slowest) == 10
    assert {row.msg_id for row in report.slowest[:2]} == {scene.ids["again 1"], scene.ids["again 2"]}
    slowest = report.slowest[0]
    assert (slowest.calls, slowest.took_ms) == (2, round((slowest.consumed - slowest.sent).total_seconds() * 1000))
    assert [(step.what, step.result) for step in report.steps] == [
        ("sent", "success"),
        ("consuming", ""),
        ("consumed", "failed"),
        ("consuming", "retry 1"),
        ("consumed", "success"),
    ]
    assert {step.msg_id for step in report.steps} == {scene.ids["again 1"]}


def test_a_lake_gives_the_same_figures_and_needs_no_group(
    spark: SparkSession, scene: Scene, report: Report, tmp_path: Path
) -> None:
    lake = str(tmp_path / "lake")
    rows = spark.read.format("rocketmq").options(nameServer=scene.namesrv, subscribe=scene.topic).load()
    rows.withColumn("date", F.to_date("storeTimestamp")).write.partitionBy("topic", "date").parquet(lake)
    asked = scene.asked(lake=lake, span=Span(DAWN, datetime(2200, 1, 1, tzinfo=UTC)), top=1)
    found = gather(spark, asked, check(asked), NOW_MS)
    assert (found.throughput, found.buckets, found.queues) == (report.throughput, report.buckets, report.queues)
    assert found.keys == report.keys[:1]
    assert [row.way for row in found.latency] == ["sent to stored"]
    assert found.notes.keys() == {"latency", "traces", "lag"}
    nowhere = msgspec.structs.replace(asked, topics=["nowhere"])
    with pytest.raises(PipelineError, match=f"has no topic nowhere, only {scene.topic}"):
        gather(spark, nowhere, check(nowhere), NOW_MS)


def test_nothing_there_is_said_and_no_failure(spark: SparkSession, scene: Scene) -> None:
    asked = scene.asked(groups=[scene.group], span=Span(None, DAWN), message="no such id")
    report = gather(spark, asked, check(asked), NOW_MS)
    assert report.throughput[0].messages == 0
    assert [row.messages for row in report.queues] == [0, 0]
    assert report.notes.keys() == {"throughput", "traces", "retries", "dead_letters", "steps"}
    assert report.lag, "where the group is now has no period"
    shown = io.StringIO()
    terminal.show(report, shown)
    assert "no message was stored in this time" in shown.getvalue()
    assert "No message was stored in this time." in page.page(report)


def test_what_is_not_there(scene: Scene) -> None:
    with pytest.raises(
        PipelineError, match=r"there is no group 'nobody' that consumed .*: they are consumed by group_"
    ):
        check(scene.asked(groups=["nobody"]))
    with pytest.raises(PipelineError, match="topic 'nowhere' does not exist"):
        check(Asked(name_server=scene.namesrv, topics=["nowhere"]))


class Outline(HTMLParser):
    """What a page has: its elements, its texts, and the headings under which there is a chart."""

    EMPTY = frozenset(("meta", "path", "use", "rect"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.texts: list[str] = []
        self.charts: list[str] = []
        self.outside: list[str] = []
        self._open: list[str] = []
        self._section = ""
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1
        values = dict(attributes)
        if tag == "section":
            self._section = values["id"] or ""
        if tag == "svg":
            self.charts.append(self._section)
        self.outside += [
            value or "" for name, value in attributes if name in ("src", "href") or (name == "xlink:href" and value)
        ]
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.count[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.texts.append(text)


def test_the_page_has_charts_and_figures(scene: Scene, report: Report) -> None:
    text = page.page(report)
    outline = Outline(text)
    assert outline.charts == ["buckets", "queues", "keys", "latency", "lag", "retries"]
    shown = [section for section in SECTIONS if report.rows(section)]
    assert outline.count["table"] == len(shown) == len(SECTIONS)
    assert outline.count["h2"] == len(SECTIONS)
    for section in shown:
        for row in report.rows(section):
            assert set(section.cells(row)) - {""} <= set(outline.texts)
    assert "12 (48.0%)" in outline.texts, "the bar of the key hot"
    assert scene.topic in outline.texts
    assert not [name for name in outline.outside if not name.startswith("#")], "it needs nothing else"
    assert "currentColor" in text


def test_the_terminal_has_the_same_figures(report: Report) -> None:
    shown = io.StringIO()
    terminal.show(report, shown)
    lines = [re.split(r"\s{2,}", line.strip()) for line in shown.getvalue().splitlines()]
    for section in SECTIONS:
        if section.name != "buckets":
            assert [section.title] in lines
            for row in report.rows(section):
                assert [cell for cell in section.cells(row) if cell] in lines


HOSTILE = "<b>&'\"$x_1$ \N{SNOWMAN}"


@pytest.fixture
def small() -> Report:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    return Report(
        made=at,
        read_from="here",
        topics=["t"],
        groups=[],
        since=None,
        until=None,
        throughput=[
            Throughput(
                topic="t", messages=1, body_bytes=2048, mean_per_s=1.0, peak_per_s=1.0, peak_at=at, first=at, last=None
            )
        ],
        buckets=[Bucket(topic="t", time=at, messages=1, body_bytes=2048)],
        keys=[HotKey(topic="t", key=HOSTILE, messages=1, share=1.0)],
        latency=[
            Latency(
                topic="t",
                way="sent to stored",
                group=None,
                measured_by="messages",
                messages=1,
                p50_ms=-3,
                p90_ms=0,
                p99_ms=0,
                p999_ms=0,
                max_ms=0,
            )
        ],
    )


def test_text_is_text_on_the_page_and_in_its_charts(small: Report) -> None:
    outline = Outline(page.page(small))
    assert outline.texts.count(HOSTILE) == 2, "in the chart and in the table"
    assert outline.count["b"] == 4, "those of the tiles alone"
    assert page.page(small) == page.page(small)


def test_parquet_is_a_history(spark: SparkSession, small: Report, tmp_path: Path) -> None:
    tables.write(spark, small, str(tmp_path))
    small.made = datetime(2026, 2, 1, 12, tzinfo=UTC)
    tables.write(spark, small, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"throughput", "buckets", "keys", "latency"}
    found = spark.read.parquet(str(tmp_path / "latency")).orderBy("report_made")
    assert [(row.topic, row.group, row.p50_ms) for row in found.collect()] == [("t", None, -3)] * 2
    times = found.select(F.unix_millis("report_made")).collect()
    assert [row[0] for row in times] == [1_769_860_800_000, 1_769_947_200_000]


def test_without_matplotlib_it_says_what_to_install(small: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PipelineError, match=r"pip install '\.\[report\]'"):
        page.page(small)


def test_buckets_fit_the_time() -> None:
    assert [bucket_s(seconds * 1000) for seconds in (0, 60, 120, 121, 3600, 86_400, 10**7)] == [
        1, 1, 1, 5, 30, 1800, 3600
    ]  # fmt: skip
    at = [Bucket(topic="t", time=datetime.fromtimestamp(s, UTC), messages=s, body_bytes=0) for s in (10, 25)]
    assert [b.messages for b in over_time(at, "t", 5)] == [10, 0, 0, 25]
    assert over_time(at, "other", 5) == []


def test_figures_are_readable() -> None:
    assert [size(count) for count in (0, 1023, 1536, 5 << 30)] == ["0 B", "1,023 B", "1.5 KiB", "5.0 GiB"]
    assert [duration(ms) for ms in (-5, 999, 1500, 90_000, 7_200_000, 172_800_000)] == [
        "-5 ms", "999 ms", "1.5 s", "1.5 min", "2.0 h", "2.0 d"
    ]  # fmt: skip
