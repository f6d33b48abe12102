"""The kinds of measurement. Each prepares a server once and then gives a sample as often as it is asked.

A measure is a declared value and holds nothing between calls: what it needs to know, it asks the server.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from servers import Server

from bench.suite import load
from bench.suite.contenders import cpu_seconds, create_topics, max_offset, memory, settled, stored
from bench.suite.figures import Sample
from bench.suite.java import run_programs
from bench.suite.load import Job, Queue

TOPIC, FILLED, OTHER = "Bench", "Filled", "Other"
FILL_BATCH, FILL_IN_FLIGHT = 32, 8
FILL_DEADLINE_S = 900.0
RARE_EVERY = 1000
RATE_ROUND = 2
"""At a fixed rate rounds are so many times as long: the highest of the latencies are few."""
RARE = "rare"


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    def prepare(self, server: Server) -> None:
        """Make the topics and the messages that the samples need."""

    def warm(self, server: Server, seconds: float) -> None:
        """Let the server compile and cache what it will."""
        self.sample(server, seconds)

    def sample(self, server: Server, seconds: float) -> Sample:
        """Measure for about so long."""
        raise NotImplementedError


def loaded(server: Server, job: Job, count: Callable[[load.Result], int] = lambda result: result.messages) -> Sample:
    """Run a job and say what it came to: rate, latency, and what the server spent on it.

    `count` gives the messages that count; those that the generator takes for done beyond that are lost.
    """
    before: list[float] = []
    result = load.run(job, when_ready=lambda: before.append(cpu_seconds(server.pids)))
    spent_s = cpu_seconds(server.pids) - before[0]
    messages = count(result)
    if not messages:
        raise load.LoadFailed(f"all requests were refused: {result.errors} {result.remark}")
    lost = max(0, result.messages - messages)
    refused = sum(result.errors.values()) + lost
    sample = memory(server.pids) | {
        "rate": messages / result.seconds,
        "cpu": spent_s / messages * 100_000,
        "generator_cpu": result.cpu_seconds / messages * 100_000,
        "refused_percent": refused / (refused + messages) * 100,
    }
    if result.latency_ms is not None:
        sample |= {
            "p50_ms": result.latency_ms.p50,
            "p99_ms": result.latency_ms.p99,
            "p999_ms": result.latency_ms.p999,
        }
    return sample


def fill(server: Server, topic: str, queues: int, messages: int, body_bytes: int, tag: str = "common") -> None:
    """So many messages more in a topic, all in their queues when this returns."""
    many = messages >= 10_000  # few are sent one by one: exactly so many, over all the queues
    expected = stored(server, topic, queues) + messages
    load.run(
        Job(
            kind="send",
            address=server.broker_addr,
            encoding="binary",
            topic=topic,
            queues=[Queue(number) for number in range(queues)],
            body_bytes=body_bytes,
            properties=[("TAGS", tag), ("price", "150" if tag == RARE else "50")],
            batch=FILL_BATCH if many else 1,
            in_flight=FILL_IN_FLIGHT if many else 1,
            messages=messages,
            seconds=FILL_DEADLINE_S,
        )
    )
    there = settled(server, topic, queues, expected)
    if there < expected:
        raise load.LoadFailed(f"only {there} of {expected} messages came to {topic}")


class Send(Measure, frozen=True, kw_only=True):
    """Messages as fast as their acknowledgements come, or at a rate."""

    body_bytes: int = 128
    in_flight: int
    connections: int = 1
    encoding: str = "json"
    batch: int = 1
    one_way: int = 0
    rate: int = 0
    topics: int = 1
    queues: int = 8
    transactions: bool = False
    topic: str = TOPIC
    more_gb: float = 0.0
    """How much goes into the store before, besides what is there."""

    def prepare(self, server: Server) -> None:
        names = [self.topic] if self.topics < 2 else [f"{self.topic}-{number}" for number in range(self.topics)]
        create_topics(server, names, self.queues)
        if self.more_gb:
            create_topics(server, [FILLED], 8)
            fill(server, FILLED, 8, int(self.more_gb * 1e9 / 4300), 4096)
        # A queue's first message makes its files; that is no part of what is measured.
        load.run(msgspec.structs.replace(self.job(server, FILL_DEADLINE_S), messages=self.topics * self.queues))

    def job(self, server: Server, seconds: float) -> Job:
        return Job(
            kind="send",
            address=server.broker_addr,
            encoding=self.encoding,
            topic=self.topic,
            topics=self.topics,
            queues=[Queue(number) for number in range(self.queues)],
            body_bytes=self.body_bytes,
            connections=self.connections,
            in_flight=self.in_flight,
            batch=self.batch,
            one_way=self.one_way,
            seconds=seconds,
        )

    def sample(self, server: Server, seconds: float) -> Sample:
        job = self.job(server, seconds)
        if self.transactions:
            job.kind = "transactions"
        if self.rate:
            job.rate, job.warm_seconds, job.seconds = self.rate, 0.5, seconds * RATE_ROUND
        if not self.one_way:
            return loaded(server, job)
        # What a server drops of these it doesn't tell: only what is stored counts.
        before = stored(server, self.topic, self.queues)
        return loaded(
            server,
            job,
            lambda result: settled(server, self.topic, self.queues, before + result.messages) - before,
        )


class Pull(Measure, frozen=True, kw_only=True):
    """Everything in a topic, again and again; the count is of messages that the server looked at."""

    messages: int = 200_000
    body_bytes: int = 128
    queues: int = 8
    connections: int = 2  # on one, server and load would wait for each other in turn
    encoding: str = "json"
    subscription: str = "*"

    def prepare(self, server: Server) -> None:
        create_topics(server, [FILLED], self.queues)
        if self.subscription == "*":
            fill(server, FILLED, self.queues, self.messages, self.body_bytes)
            return
        part = self.messages // 4
        for _ in range(4):
            fill(server, FILLED, self.queues, part - part // RARE_EVERY, self.body_bytes)
            fill(server, FILLED, self.queues, part // RARE_EVERY, self.body_bytes, RARE)

    def job(self, server: Server, seconds: float) -> Job:
        ends = [max_offset(server, FILLED, number) for number in range(self.queues)]
        return Job(
            kind="pull",
            address=server.broker_addr,
            encoding=self.encoding,
            topic=FILLED,
            queues=[Queue(number, 0, end) for number, end in enumerate(ends)],
            connections=self.connections,
            subscription=self.subscription,
            seconds=seconds,
        )

    def sample(self, server: Server, seconds: float) -> Sample:
        return loaded(server, self.job(server, seconds), lambda result: result.looked_at)


class ColdPull(Pull, frozen=True, kw_only=True):
    """The same once, of a server that has just been started and a log that is not in memory."""

    def prepare(self, server: Server) -> None:
        super().prepare(server)
        create_topics(server, [OTHER], 1)
        fill(server, OTHER, 1, 50_000, self.body_bytes)

    def warm(self, server: Server, seconds: float) -> None:
        """Each sample is a new process, and warms it up."""

    def sample(self, server: Server, seconds: float) -> Sample:
        server.stop()
        forget(server.store)
        server.start()
        warm = Job(
            kind="pull",
            address=server.broker_addr,
            encoding=self.encoding,
            topic=OTHER,
            queues=[Queue(0, 0, max_offset(server, OTHER, 0))],
            seconds=seconds,
        )
        load.run(warm)  # the server's code is warm, the log of the topic to read is not
        job = self.job(server, FILL_DEADLINE_S)
        job.once = True
        return loaded(server, job, lambda result: result.looked_at)


def forget(store: Path) -> None:
    """Take the files out of the page cache; no process may have them mapped."""
    for path in store.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


class Push(Measure, frozen=True, kw_only=True):
    """From the time that a message is due to be sent to its arrival at consumers that wait for it."""

    rate: int
    groups: int = 1
    body_bytes: int = 128
    queues: int = 8
    delay_level: int = 0
    delay_ms: int = 0

    def prepare(self, server: Server) -> None:
        create_topics(server, [TOPIC], self.queues)

    def sample(self, server: Server, seconds: float) -> Sample:
        ends = [max_offset(server, TOPIC, number) for number in range(self.queues)]
        return loaded(
            server,
            Job(
                kind="push",
                address=server.broker_addr,
                topic=TOPIC,
                queues=[Queue(number, end) for number, end in enumerate(ends)],
                groups=self.groups,
                body_bytes=self.body_bytes,
                properties=[("DELAY", str(self.delay_level))] if self.delay_level else [],
                rate=self.rate,
                delay_ms=self.delay_ms,
                warm_seconds=0.5,
                seconds=seconds * RATE_ROUND,
            ),
        )


class Idle(Measure, frozen=True, kw_only=True):
    """Consumers that wait for messages which do not come; the part of a core that the server takes."""

    consumers: int
    seconds: float = 10.0
    """Of a sample at least: Apache's broker looks every 5 seconds for pulls that have waited long enough."""
    queues: int = 8

    def prepare(self, server: Server) -> None:
        create_topics(server, [TOPIC], self.queues)

    def sample(self, server: Server, seconds: float) -> Sample:
        ends = [max_offset(server, TOPIC, number) for number in range(self.queues)]
        before: list[float] = []
        result = load.run(
            Job(
                kind="idle",
                address=server.broker_addr,
                topic=TOPIC,
                queues=[Queue(number, end) for number, end in enumerate(ends)],
                connections=self.consumers,
                seconds=max(seconds, self.seconds),
            ),
            when_ready=lambda: before.append(cpu_seconds(server.pids)),
        )
        spent_s = cpu_seconds(server.pids) - before[0]
        return memory(server.pids) | {"cpu_percent": spent_s / result.seconds * 100}


class Java(Measure, frozen=True, kw_only=True):
    """Apache's benchmark programs: a producer, with or without a consumer beside it."""

    threads: int
    body_bytes: int = 128
    queues: int = 8
    consume: bool = False

    def prepare(self, server: Server) -> None:
        create_topics(server, [TOPIC], self.queues)

    def warm(self, server: Server, seconds: float) -> None:
        """The same requests; the programs would take ten seconds for a first report."""
        Send(in_flight=self.threads, body_bytes=self.body_bytes).sample(server, seconds)

    def sample(self, server: Server, seconds: float) -> Sample:
        report = run_programs(server, TOPIC, self.queues, self.threads, self.body_bytes, consume=self.consume)
        sample = memory(server.pids) | {
            "rate": report.sent_rate,
            "cpu": report.cpu_s,
            "mean_ms": report.response_ms,
            "refused_percent": report.failed_percent,
        }
        return sample if report.consumed_rate is None else sample | {"consumed": report.consumed_rate}


class Start(Measure, frozen=True, kw_only=True):
    """From the start of the processes to the first acknowledged message; with a store, from a kill to there."""

    store_gb: float = 0.0
    body_bytes: int = 4096

    def prepare(self, server: Server) -> None:
        create_topics(server, [TOPIC], 8)
        if self.store_gb:
            fill(server, TOPIC, 8, int(self.store_gb * 1e9 / (self.body_bytes + 200)), self.body_bytes)

    def warm(self, server: Server, seconds: float) -> None:
        """Each sample is a new process; its files have been read at the first start."""

    def sample(self, server: Server, seconds: float) -> Sample:
        server.kill()
        if not self.store_gb:
            shutil.rmtree(server.store)
            server.store.mkdir()
        began_s = time.monotonic()
        server.start()
        # A topic that is not there yet is made by the first message, as a user's first message does.
        topic = TOPIC if self.store_gb else f"First-{time.monotonic_ns()}"
        load.run(
            Job(
                kind="send",
                address=server.broker_addr,
                topic=topic,
                queues=[Queue(0)],
                body_bytes=128,
                messages=1,
                seconds=60,
            )
        )
        return memory(server.pids) | {"seconds": time.monotonic() - began_s}
