"""What is measured: each workload and each growth is a value, with the aim that it was given."""

from __future__ import annotations

import msgspec

from bench.suite.figures import Aim, at_least, at_most
from bench.suite.measures import ColdPull, Idle, Java, Measure, Pull, Push, Send, Start

Settings = tuple[tuple[str, str], ...]
"""Of both brokers, by their names in broker.conf."""
ASYNC: Settings = (("flushDiskType", "ASYNC_FLUSH"),)
SYNC: Settings = (("flushDiskType", "SYNC_FLUSH"),)
PIPELINE = 256


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    measure: Measure
    shows: str = "rate"
    """The metric of its first row in the table."""
    aims: tuple[Aim, ...] = ()
    settings: Settings = ASYNC
    quick: bool = False
    """Also measured by --quick."""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """The same measurement at several sizes of one thing, on one pair of servers."""

    name: str
    title: str
    axis: str
    points: tuple[tuple[float, Measure], ...]
    settings: Settings = ASYNC


CPU_AIM = at_most("cpu", 0.4)
SIZES = ((128, "128 B"), (1024, "1 KiB"), (4096, "4 KiB"))


def _synchronous(threads: int, body_bytes: int, size: str) -> Workload:
    """A thread that waits for each acknowledgement is one request in flight: that is how it looks from the server."""
    aimed = threads == 32 and body_bytes == 128
    return Workload(
        name=f"send-{threads}x{body_bytes}",
        title=f"send, {threads} in flight, {size}",
        measure=Send(in_flight=threads, body_bytes=body_bytes),
        aims=(at_least("rate", 2), CPU_AIM) if aimed else (),
        quick=aimed,
    )


WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(
            name=f"java-{threads}x128",
            title=f"Apache's producer, {threads} threads, 128 B",
            measure=Java(threads=threads),
            aims=(at_least("rate", 2), CPU_AIM) if threads == 32 else (),
        )
        for threads in (16, 32, 64)
    ),
    Workload(
        name="java-consumer",
        title="Apache's producer (32 threads) and consumer together",
        measure=Java(threads=32, consume=True),
    ),
    *(_synchronous(threads, body_bytes, size) for body_bytes, size in SIZES for threads in (16, 32, 64)),
    Workload(
        name="pipelined-json",
        title=f"pipelined send, {PIPELINE} in flight, JSON headers",
        measure=Send(in_flight=PIPELINE),
        aims=(at_least("rate", 2.5), at_most("rss_mb", 0.1), at_most("own_mb", 0.1)),
        quick=True,
    ),
    Workload(
        name="pipelined-binary",
        title=f"pipelined send, {PIPELINE} in flight, binary headers",
        measure=Send(in_flight=PIPELINE, encoding="binary"),
        aims=(at_least("rate", 2.5), CPU_AIM),
    ),
    Workload(
        name="rate-5000",
        title="send at 5,000/s, to the acknowledgement",
        measure=Send(in_flight=1, rate=5000),
        shows="p99_ms",
    ),
    Workload(
        name="batch-32",
        title="batch send of 32",
        measure=Send(in_flight=16, batch=32),
        aims=(at_least("rate", 1.5),),
        quick=True,
    ),
    Workload(
        name="one-way",
        title="one-way send (one in 32 is answered, so that none is lost)",
        measure=Send(in_flight=8, one_way=31),
    ),
    Workload(name="flush-1", title="synchronous flush, 1 in flight", measure=Send(in_flight=1), settings=SYNC),
    Workload(
        name="flush-64",
        title="synchronous flush, 64 in flight",
        measure=Send(in_flight=64),
        aims=(at_least("rate", 1.5),),
        settings=SYNC,
        quick=True,
    ),
    Workload(
        name="pull-warm", title="pull of 32, warm", measure=Pull(), aims=(at_least("rate", 2), CPU_AIM), quick=True
    ),
    Workload(
        name="pull-cold",
        title="pull of 32, 1 KiB, cold",
        measure=ColdPull(body_bytes=1024),
    ),
    Workload(
        name="pull-tag",
        title="pull by tag, one in 1,000 wanted (looked at/s)",
        measure=Pull(subscription="rare"),
    ),
    Workload(
        name="pull-sql",
        title="pull by SQL, one in 1,000 wanted (looked at/s)",
        measure=Pull(subscription="price > 100"),
        settings=(*ASYNC, ("enablePropertyFilter", "true")),
    ),
    Workload(
        name="push-1",
        title="end to end at 5,000/s, one group",
        measure=Push(rate=5000),
        shows="p99_ms",
        aims=(at_most("p99_ms", 0.5),),
        quick=True,
    ),
    Workload(
        name="push-10",
        title="end to end at 5,000/s, ten groups",
        measure=Push(rate=5000, groups=10),
        shows="p99_ms",
        aims=(at_most("p99_ms", 0.5),),
    ),
    Workload(
        name="topics-1000",
        title="pipelined send to 1,000 topics",
        measure=Send(in_flight=PIPELINE, topics=1000, queues=2),
    ),
    Workload(
        name="idle-1000",
        title="1,000 idle consumers",
        measure=Idle(consumers=1000),
        shows="cpu_percent",
        aims=(at_most("cpu_percent", 0.5),),
    ),
    Workload(
        name="delayed",
        title="delayed by 1 s, sent at 2,000/s, how late",
        measure=Push(rate=2000, delay_level=1, delay_ms=1000),
        shows="p99_ms",
    ),
    Workload(
        name="transactions",
        title="transactions, 64 in flight",
        measure=Send(in_flight=64, transactions=True),
        # From the first end on, a thread of Apache's broker turns without a pause whenever nothing has ended for this
        # long: while it idles beside Skylark it would take a core of it.
        settings=(*ASYNC, ("transactionOpBatchInterval", "3600000")),
    ),
    Workload(
        name="start",
        title="start to the first acknowledged message",
        measure=Start(),
        shows="seconds",
        aims=(at_most("seconds", 0.2),),
        quick=True,
    ),
    Workload(
        name="open-10gb",
        title="opening a store of 10 GB after kill -9, to the first acknowledged message",
        measure=Start(store_gb=10),
        shows="seconds",
    ),
)


MORE_BROKERS = ("pipelined send on two connections", Send(in_flight=PIPELINE // 2, connections=2))
"""Measured on Skylark alone, with one broker and with two."""


def _send(**options: int | float | str) -> Send:
    return Send(**({"in_flight": PIPELINE} | options))  # type: ignore[arg-type]


GROWTHS: tuple[Growth, ...] = (
    Growth(
        name="queues",
        title="pipelined send to one topic",
        axis="queues",
        points=tuple((count, _send(queues=count, topic=f"Queues-{count}")) for count in (1, 8, 64, 512)),
    ),
    Growth(
        name="topics",
        title="pipelined send to topics of 2 queues",
        axis="topics",
        points=tuple((count, _send(topics=count, queues=2, topic=f"Topics-{count}")) for count in (1, 10, 100, 1000)),
    ),
    Growth(
        name="connections",
        title="send, 4 in flight on each connection",
        axis="connections",
        points=tuple((count, _send(connections=count, in_flight=4)) for count in (1, 10, 100, 1000)),
    ),
    Growth(
        name="store",
        title="pipelined send to a store of this size",
        axis="GB in the store",
        points=tuple(
            (total, _send(more_gb=more)) for total, more in ((0.0, 0.0), (1.0, 1.0), (2.0, 1.0), (4.0, 2.0), (8.0, 4.0))
        ),
    ),
)
