"""Our Python client beside the official one, and its memory over many messages.

    python bench/python_client.py throughput     # against one Apache 5.5.0 server, both clients in turn
    python bench/python_client.py twins          # the blocking twin beside asyncio, against Skylark
    python bench/python_client.py memory --minutes 10

The official client (PyPI `rocketmq-python-client`) speaks gRPC, so the server is Apache's proxy with its broker inside.
Ours speaks the remoting protocol to that same broker. Each client sends to a topic of its own and consumes from it; the
figure is the median of some rounds. What it needs is fetched once, into `.cache/grpc-client`: a virtual environment and
Apache's jars (Maven). Where that fails, ours is measured alone, against Skylark.

Memory: a consumer reads what a process beside it sends, as fast as both can, and prints what it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "interop"))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from servers import CACHE, JAVA_OPENS, Process, SkylarkServer, free_port  # noqa: E402

from skylark.client import sync  # noqa: E402
from skylark.client.errors import RouteNotFound  # noqa: E402
from skylark.client.lite_pull_consumer import LitePullConsumer  # noqa: E402
from skylark.client.message import Message  # noqa: E402
from skylark.client.producer import Producer  # noqa: E402
from skylark.client.push_consumer import PushConsumer  # noqa: E402
from skylark.client.routes import TopicRoute  # noqa: E402
from skylark.client.session import Session  # noqa: E402
from skylark.wire.bodies import encode_body  # noqa: E402
from skylark.wire.codes import RequestCode  # noqa: E402
from skylark.wire.frame import Frame  # noqa: E402
from skylark.wire.headers import CreateTopic  # noqa: E402
from skylark.wire.tables import SubscriptionGroupConfig  # noqa: E402
from skylark.wire.typed import encode_header  # noqa: E402

OTHER = ROOT / ".cache" / "grpc-client"
OTHER_PYTHON = OTHER / "venv" / "bin" / "python"
CLIENT_VERSION = "5.1.2"
SERVER_VERSION = "5.5.0"
POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>skylark</groupId><artifactId>proxy</artifactId><version>1</version><dependencies><dependency>
<groupId>org.apache.rocketmq</groupId><artifactId>rocketmq-proxy</artifactId><version>{SERVER_VERSION}</version>
</dependency></dependencies></project>
"""
CONSUME_DEADLINE_S = 300.0
START_DEADLINE_S = 60.0
console = Console()


# The official client's surroundings.


def fetch() -> None:
    """The official client and Apache's proxy; nothing happens when they are there."""
    if not OTHER_PYTHON.exists():
        venv.create(OTHER / "venv", with_pip=True)
        install = [str(OTHER_PYTHON), "-m", "pip", "install", "-q", f"rocketmq-python-client=={CLIENT_VERSION}"]
        subprocess.run(install, check=True)
    if not list((OTHER / "lib").glob(f"rocketmq-proxy-{SERVER_VERSION}.jar")):
        (OTHER / "pom.xml").write_text(POM)
        copy = ["mvn", "-q", "-B", "-f", str(OTHER / "pom.xml"), "dependency:copy-dependencies"]
        subprocess.run([*copy, f"-DoutputDirectory={OTHER / 'lib'}"], check=True)


@contextmanager
def apache_with_proxy(directory: Path) -> Iterator[tuple[str, str]]:
    """(name server, gRPC endpoint) of an Apache name server and a proxy with a broker inside."""
    namesrv_port, broker_port, ha_port, grpc_port, remoting_port = (free_port() for _ in range(5))
    namesrv = f"127.0.0.1:{namesrv_port}"
    conf = directory / "conf"
    conf.mkdir()
    (conf / "rmq-proxy.json").write_text(
        json.dumps(
            {
                "rocketMQClusterName": "DefaultCluster",
                "namesrvAddr": namesrv,
                "grpcServerPort": grpc_port,
                "remotingListenPort": remoting_port,
            }
        )
    )
    (directory / "broker.conf").write_text(
        f"brokerClusterName=DefaultCluster\nbrokerName=broker-a\nbrokerId=0\nbrokerIP1=127.0.0.1\n"
        f"listenPort={broker_port}\nhaListenPort={ha_port}\nnamesrvAddr={namesrv}\n"
        f"storePathRootDir={directory / 'store'}\nautoCreateTopicEnable=true\ndiskMaxUsedSpaceRatio=95\n"
    )
    (directory / "namesrv.conf").write_text(
        f"listenPort={namesrv_port}\nkvConfigPath={directory / 'kv.json'}\n"
        f"configStorePath={directory / 'namesrv.properties'}\n"
    )
    java = ["java", *JAVA_OPENS, f"-Drocketmq.home.dir={directory}", f"-Duser.home={directory}"]
    name_server = Process(
        [
            *(*java, "-Xmx128m", "-cp", f"{CACHE / SERVER_VERSION}/*"),
            *("org.apache.rocketmq.namesrv.NamesrvStartup", "-c", str(directory / "namesrv.conf")),
        ],
        log=directory / "namesrv.log",
        ready="boot success",
        cwd=directory,
    )
    try:
        name_server.wait_ready()
        proxy = Process(
            [
                *(*java, "-Xmx1g", "-cp", f"{OTHER / 'lib'}/*", "org.apache.rocketmq.proxy.ProxyStartup"),
                *("-pm", "local", "-n", namesrv, "-pc", str(conf / "rmq-proxy.json")),
                *("-bc", str(directory / "broker.conf")),
            ],
            log=directory / "proxy.log",
            ready="startup successfully",
            cwd=directory,
        )
        try:
            proxy.wait_ready()
            yield namesrv, f"127.0.0.1:{grpc_port}"
        finally:
            proxy.kill()
    finally:
        name_server.kill()


def official(work: str, endpoint: str, topic: str, count: int, args: argparse.Namespace, home: Path) -> float:
    """Messages a second. The client writes its log below the home directory, so it gets one of its own."""
    script = ROOT / "bench" / "grpc_client.py"
    numbers = [str(count), str(args.in_flight), str(args.body_bytes)]
    done = subprocess.run(
        [str(OTHER_PYTHON), str(script), work, endpoint, topic, *numbers, topic],
        env=os.environ | {"HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    if result["failures"] or result["messages"] < count:
        console.print(f"[yellow]the official client: {result}")
    return float(result["messages"] / result["seconds"])


# Our client.


async def registered(session: Session) -> TopicRoute:
    """Apache's broker says that it is up a moment before the name server knows it."""
    async with asyncio.timeout(START_DEADLINE_S):
        while True:
            try:
                return await session.routes.get("TBW102")
            except RouteNotFound:
                await asyncio.sleep(0.1)


async def create(namesrv: str, topic: str, queues: int = 8) -> None:
    """A topic, and a group of its name: the proxy makes neither by itself."""
    async with Session(namesrv) as session:
        route = await registered(session)
        header = CreateTopic(topic, "TBW102", queues, queues, 6, "SINGLE_TAG", 0, attributes="+message.type=NORMAL")
        group = encode_body(SubscriptionGroupConfig(group_name=topic))
        for broker in route.brokers:
            for request in (
                Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header)),
                Frame(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, group),
            ):
                answer = await session.ask_broker(broker, request, 10)
                assert answer.code == 0, answer.remark


async def send(namesrv: str, topic: str, count: int, in_flight: int, body_bytes: int) -> float:
    """Many at once."""
    body = b"x" * body_bytes
    async with Producer(namesrv, group="senders", max_in_flight=in_flight, timeout_s=30) as producer:
        await producer.send(topic, body)
        begin = time.perf_counter()
        for _ in range(count):
            await producer.send_soon(topic, body)
        await producer.flush()
        return count / (time.perf_counter() - begin)


async def send_one(namesrv: str, topic: str, count: int, body_bytes: int) -> float:
    """One after the other."""
    body = b"x" * body_bytes
    async with Producer(namesrv, group="senders", timeout_s=30) as producer:
        await producer.send(topic, body)
        begin = time.perf_counter()
        for _ in range(count):
            await producer.send(topic, body)
        return count / (time.perf_counter() - begin)


async def consume(namesrv: str, topic: str, count: int) -> float:
    seen = 0
    first_s = last_s = 0.0
    done = asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal seen, first_s, last_s
        last_s = time.perf_counter()
        if seen == 0:
            first_s = last_s
        seen += 1
        if seen == count:
            done.set()

    consumer = PushConsumer(namesrv, group=topic, listener=handle, from_where="first")
    consumer.subscribe(topic)
    async with consumer, asyncio.timeout(CONSUME_DEADLINE_S):
        await done.wait()
    return seen / (last_s - first_s)


def on_uvloop(work: Any) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def ours(work: str, namesrv: str, topic: str, count: int, args: argparse.Namespace) -> float:
    rate: float
    if work == "send":
        rate = on_uvloop(send(namesrv, topic, count, args.in_flight, args.body_bytes))
    elif work == "send_one":
        rate = on_uvloop(send_one(namesrv, topic, count, args.body_bytes))
    else:
        rate = on_uvloop(consume(namesrv, topic, count))
    return rate


# What is measured.

WORK = {
    "send_one": "send, one after the other",
    "send": "send, many in flight",
    "consume": "consume, push",
}


def measure(
    namesrv: str, run: Callable[[str, str, int], float], counts: dict[str, int], rounds: int
) -> dict[str, list[float]]:
    """Messages a second of each kind of work, round by round; consuming takes what sending left."""
    rates: dict[str, list[float]] = {work: [] for work in WORK}
    for _ in range(rounds):
        topic = f"bench-{uuid.uuid4().hex[:8]}"
        on_uvloop(create(namesrv, topic))
        for work in WORK:
            count = counts["send"] + counts["send_one"] if work == "consume" else counts[work]
            rates[work].append(run(work, topic, count))
    return rates


def throughput(args: argparse.Namespace) -> None:
    table = Table(title=f"messages a second, bodies of {args.body_bytes} bytes, {args.in_flight} in flight")
    for column in ("work", "official gRPC client", "Skylark's client", "ratio"):
        table.add_column(column, justify="right" if column != "work" else "left")
    directory = Path(tempfile.mkdtemp(prefix="skylark-bench-"))
    counts = {"send": args.messages, "send_one": args.messages // 10}
    try:
        fetch()
    except (OSError, subprocess.CalledProcessError) as error:
        console.print(f"[yellow]the official client can't be had ({error}); ours alone, against Skylark")
        server = SkylarkServer(directory)
        server.start()
        try:
            mine = measure(
                server.namesrv_addr, lambda w, t, n: ours(w, server.namesrv_addr, t, n, args), counts, args.rounds
            )
        finally:
            server.kill()
        theirs: dict[str, list[float]] = {}
    else:
        with apache_with_proxy(directory) as (namesrv, endpoint):
            few = {work: max(100, count // 5) for work, count in counts.items()}  # it would take too long otherwise
            theirs = measure(namesrv, lambda w, t, n: official(w, endpoint, t, n, args, directory), few, args.rounds)
            mine = measure(namesrv, lambda w, t, n: ours(w, namesrv, t, n, args), counts, args.rounds)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if args.json is not None:
        named = [{name: rates[work] for work, name in WORK.items()} if rates else {} for rates in (theirs, mine)]
        args.json.write_text(json.dumps({"official": named[0], "ours": named[1]}))
    for work, name in WORK.items():
        our_rate = statistics.median(mine[work])
        if work in theirs:
            rate = statistics.median(theirs[work])
            table.add_row(name, f"{rate:,.0f}", f"{our_rate:,.0f}", f"{our_rate / rate:.1f}")
        else:
            table.add_row(name, "-", f"{our_rate:,.0f}", "-")
    console.print(table)


def send_blocking(namesrv: str, topic: str, count: int, body_bytes: int) -> float:
    body = b"x" * body_bytes
    with sync.Producer(namesrv, group="senders", timeout_s=30) as producer:
        producer.send(topic, body)
        begin = time.perf_counter()
        for _ in range(count):
            producer.send_soon(topic, body)
        producer.flush()
        return count / (time.perf_counter() - begin)


async def iterate(namesrv: str, topic: str, count: int) -> float:
    consumer = LitePullConsumer(namesrv, group="iterating", from_where="first")
    consumer.subscribe(topic)
    async with consumer:
        begin, seen = time.perf_counter(), 0
        async for _ in consumer:
            seen += 1
            if seen == count:
                break
        return count / (time.perf_counter() - begin)


def iterate_blocking(namesrv: str, topic: str, count: int) -> float:
    consumer = sync.LitePullConsumer(namesrv, group="blocking", from_where="first")
    consumer.subscribe(topic)
    with consumer:
        begin = time.perf_counter()
        for _ in range(count):
            next(consumer)
        return count / (time.perf_counter() - begin)


def twins(args: argparse.Namespace) -> None:
    table = Table(title=f"messages a second, bodies of {args.body_bytes} bytes")
    for column in ("work", "asyncio", "blocking twin", "ratio"):
        table.add_column(column, justify="right" if column != "work" else "left")
    rates: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        directory = Path(tempfile.mkdtemp(prefix="skylark-bench-"))
        server = SkylarkServer(directory)
        server.start()
        try:
            namesrv, topic, count = server.namesrv_addr, "twins", args.messages
            on_uvloop(create(namesrv, topic))
            for name, rate in (
                ("send", on_uvloop(send(namesrv, topic, count, 1024, args.body_bytes))),
                ("send blocking", send_blocking(namesrv, topic, count, args.body_bytes)),
                ("iterate", on_uvloop(iterate(namesrv, topic, 2 * count))),
                ("iterate blocking", iterate_blocking(namesrv, topic, 2 * count)),
            ):
                rates.setdefault(name, []).append(rate)
        finally:
            server.kill()
            shutil.rmtree(directory, ignore_errors=True)
    for name, work in (("send", "send_soon"), ("iterate", "LitePullConsumer, message by message")):
        ours, twin = statistics.median(rates[name]), statistics.median(rates[f"{name} blocking"])
        table.add_row(work, f"{ours:,.0f}", f"{twin:,.0f}", f"{twin / ours:.2f}")
    console.print(table)


async def feed(namesrv: str, topic: str, body_bytes: int) -> None:
    """Sends batches without end."""
    batch = [b"x" * body_bytes] * 100
    async with Producer(namesrv, group="feeders", timeout_s=30) as producer:
        while True:
            await asyncio.gather(*(producer.send_batch(topic, batch) for _ in range(4)))


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def watch(namesrv: str, topic: str, minutes: float, most: int) -> None:
    seen = 0

    async def handle(messages: list[Message]) -> None:
        nonlocal seen
        seen += len(messages)

    consumer = PushConsumer(namesrv, group="watchers", listener=handle, from_where="first", batch_size=32)
    consumer.subscribe(topic)
    end = time.monotonic() + minutes * 60
    async with consumer:
        while time.monotonic() < end and seen < most:
            await asyncio.sleep(min(10.0, max(0.1, end - time.monotonic())))
            console.print(f"{seen:>12,} messages consumed, {resident_mib():7.1f} MiB resident")


def memory(args: argparse.Namespace) -> None:
    directory = Path(tempfile.mkdtemp(prefix="skylark-bench-"))
    server = SkylarkServer(directory)
    server.start()
    topic = "memory"
    feeder = None
    try:
        on_uvloop(create(server.namesrv_addr, topic))
        command = [sys.executable, __file__, "feed", server.namesrv_addr, topic, "--body-bytes", str(args.body_bytes)]
        feeder = subprocess.Popen(command)
        on_uvloop(watch(server.namesrv_addr, topic, args.minutes, args.messages))
    finally:
        if feeder is not None:
            feeder.kill()
            feeder.wait()
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, action in (("throughput", throughput), ("twins", twins), ("memory", memory)):
        command = commands.add_parser(name)
        command.set_defaults(action=action)
        command.add_argument("--body-bytes", type=int, default=128)
        if name == "throughput":
            command.add_argument("--messages", type=int, default=50_000)
            command.add_argument("--in-flight", type=int, default=256)
            command.add_argument("--rounds", type=int, default=3)
            command.add_argument("--json", type=Path, help="write every round's figures there")
        elif name == "twins":
            command.add_argument("--messages", type=int, default=20_000)
            command.add_argument("--rounds", type=int, default=3)
        else:
            command.add_argument("--minutes", type=float, default=10.0)
            command.add_argument("--messages", type=int, default=10_000_000, help="stop after so many")
    feeding = commands.add_parser("feed")
    feeding.add_argument("namesrv")
    feeding.add_argument("topic")
    feeding.add_argument("--body-bytes", type=int, default=128)
    feeding.set_defaults(action=lambda given: on_uvloop(feed(given.namesrv, given.topic, given.body_bytes)))
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
