"""What a rolling restart does to a group: three brokers, one producer, two members, each broker restarted in turn.

    .venv/bin/python bench/rolling_restarts.py                              # Apache's Java clients, 2 to 3 minutes
    .venv/bin/python bench/rolling_restarts.py --clients python --orderly
    .venv/bin/python bench/rolling_restarts.py --server apache --down 5

Each client is a process of its own with the intervals that its users have: heartbeats every 30 s, routes every 30 s,
queues shared out every 20 s. The report counts sends that failed, messages that were lost or came twice, who got them
twice and how long after the start of a broker, and the longest that a message waited. The jars come from
`tools/interop_setup.py java`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "interop"))

from drivers import Driver, DriverError, Session
from servers import (
    APACHE_VERSION,
    CACHE,
    ApacheServer,
    Process,
    apache_command,
    clean_environment,
    free_port,
    request,
)

from skylark.client.message import Message
from skylark.client.push_consumer import PushConsumer
from skylark.wire.codes import RequestCode

TOPIC, GROUP, QUEUES, BROKERS = "Rolling", "rolling", 4, 3
BATCH = 10
INTERVAL_S = 30.0
QUIET_S = 25.0
"""Before the first restart and behind the last: the members agree on their queues, and nobody waits any more."""


class Delivery(msgspec.Struct, frozen=True):
    member: str
    broker: str
    queue: int
    offset: int
    body: str
    at_ms: int
    stored_ms: int


class Restart(msgspec.Struct, frozen=True):
    broker: str
    stop_ms: int
    ready_ms: int


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Cluster:
    """A name server and brokers of one kind, on ports that they keep."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._names_port = free_port()
        self.namesrv = f"127.0.0.1:{self._names_port}"
        self.ports = {f"broker-{letter}": free_port() for letter in "abcdefgh"[:BROKERS]}
        self._processes: dict[str, Process] = {}

    def start(self) -> None:
        self._processes["namesrv"] = self._run("namesrv", self._names_port, f"listenPort={self._names_port}\n")
        self._processes["namesrv"].wait_ready()
        for name in self.ports:
            self.start_broker(name)
        fields = {
            **{
                "topic": TOPIC,
                "defaultTopic": "TBW102",
                "perm": "6",
                "topicFilterType": "SINGLE_TAG",
                "order": "false",
            },
            **{"readQueueNums": str(QUEUES), "writeQueueNums": str(QUEUES), "topicSysFlag": "0"},
        }
        for port in self.ports.values():
            answer, _ = request(f"127.0.0.1:{port}", RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
            assert answer["code"] == 0, answer

    def start_broker(self, name: str) -> None:
        settings = {
            **{"brokerName": name, "brokerClusterName": "c", "brokerId": "0", "brokerIP1": "127.0.0.1"},
            **{"listenPort": str(self.ports[name]), "haListenPort": str(free_port()), "namesrvAddr": self.namesrv},
            **{"storePathRootDir": str(self._directory / name), "mappedFileSizeCommitLog": str(1 << 26)},
            "storePathCommitLog": str(self._directory / name / "commitlog"),
            "diskMaxUsedSpaceRatio": "95",
        }
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        self._processes[name] = self._run("broker", self.ports[name], text, name)
        self._processes[name].wait_ready()

    def stop_broker(self, name: str) -> None:
        self._processes.pop(name).stop()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _run(self, what: str, port: int, settings: str, name: str = "namesrv") -> Process:
        home = self._directory / f"{name}-home"
        home.mkdir(exist_ok=True)
        conf = home / f"{what}.conf"
        conf.write_text(settings)
        if self._kind == "apache":
            main = {"namesrv": "namesrv.NamesrvStartup", "broker": "broker.BrokerStartup"}[what]
            command = apache_command(main, conf, home, ApacheServer.java_options)
        else:
            command = [
                sys.executable,
                "-m",
                "skylark",
                what,
                "-c",
                str(conf),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
            ]
        ready = "boot success" if self._kind == "apache" else "ready "
        return Process(command, log=self._directory / f"{name}.log", ready=ready, cwd=home)


def java_client(directory: Path, name: str) -> Driver:
    """A process with Apache's client as its users have it; what it does is in its log."""
    home = directory / name
    home.mkdir()
    return Driver(
        [
            *("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={home}"),
            *(f"-Drocketmq.client.logRoot={home}/logs", "-Drocketmq.client.logLevel=INFO"),
            f"-Drocketmq.client.localOffsetStoreDir={home}/offsets",
            *("-cp", f"{CACHE / f'driver-{APACHE_VERSION}'}:{CACHE / APACHE_VERSION}/*", "skylark.LatestDriver"),
        ],
        log=home / "driver.log",
    )


class JavaMember:
    def __init__(self, directory: Path, namesrv: str, name: str, *, orderly: bool) -> None:
        self._name = name
        self._driver = java_client(directory, name)
        self._session = Session(self._driver, namesrv)
        mode = "orderly" if orderly else "concurrent"
        self._consumer = self._session.consumer(
            GROUP, TOPIC, instance=name, mode=mode, pollNameServerMs=30_000, awaitMs=5_000
        )

    def deliveries(self) -> Iterator[Delivery]:
        for event in self._consumer.seen():
            yield Delivery(
                self._name, event["broker"], event["queue"], event["offset"], event["body"], event["at"],
                event["storeTimestamp"],
            )  # fmt: skip

    def close(self) -> None:
        self._session.close(wait=True)
        self._driver.close()


class PythonMember:
    def __init__(self, directory: Path, namesrv: str, name: str, *, orderly: bool) -> None:
        home = directory / name
        home.mkdir()
        self._found: list[Delivery] = []
        with (home / "member.log").open("wb") as errors:
            self._child = subprocess.Popen(
                [sys.executable, __file__, "--be-member", namesrv, name, str(int(orderly))],
                env=clean_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout:
            for line in self._child.stdout:
                self._found.append(msgspec.json.decode(line, type=Delivery))

    def deliveries(self) -> Iterator[Delivery]:
        found, self._found = self._found, []
        yield from found

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(60)
        self._reader.join()


async def be_member(namesrv: str, name: str, *, orderly: bool) -> None:
    """The process of a Python member: a line per delivery, until its input ends."""

    async def told(message: Message) -> None:
        delivery = Delivery(
            name, message.broker, message.queue_id, message.queue_offset, message.body.decode(), now_ms(),
            message.store_timestamp_ms,
        )  # fmt: skip
        sys.stdout.buffer.write(msgspec.json.encode(delivery) + b"\n")
        sys.stdout.buffer.flush()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    consumer = PushConsumer(namesrv, group=GROUP, listener=told, orderly=orderly, from_where="first")
    consumer.subscribe(TOPIC)
    async with consumer:
        await asyncio.to_thread(sys.stdin.read)


class Sender:
    """Sends batch after batch at about a rate, in a thread, and counts."""

    def __init__(self, directory: Path, namesrv: str, rate: int) -> None:
        self._driver = java_client(directory, "producer")
        self._session = Session(self._driver, namesrv)
        self._producer = self._session.producer("senders", timeoutMs=3_000, pollNameServerMs=30_000)
        self._pause_s = BATCH / rate
        self._stopped = threading.Event()
        self.sent: set[str] = set()
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number, due = 0, time.monotonic()
        while not self._stopped.is_set():
            body = f"m{number}"
            try:
                self._producer.send(TOPIC, body, count=BATCH)
                self.sent.update(f"{body}-{i}" for i in range(BATCH))
            except DriverError as e:
                self.failed.append(str(e)[:300])
            number += 1
            due = max(due + self._pause_s, time.monotonic() - 1)
            self._stopped.wait(max(0.0, due - time.monotonic()))

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._session.close(wait=True)
        self._driver.close()


def run(arguments: argparse.Namespace, directory: Path) -> tuple[Sender, list[Delivery], list[Restart]]:
    member_of = {"java": JavaMember, "python": PythonMember}[arguments.clients]
    found: list[Delivery] = []
    restarts: list[Restart] = []
    with ExitStack() as stack:
        cluster = Cluster(arguments.server, directory)
        stack.callback(cluster.close)
        cluster.start()
        members: list[Any] = []
        for name in ("member1", "member2"):
            members.append(member_of(directory, cluster.namesrv, name, orderly=arguments.orderly))
            stack.callback(members[-1].close)
        sender = Sender(directory, cluster.namesrv, arguments.rate)
        # Else each run would restart the brokers at the same point of the clients' intervals.
        time.sleep(QUIET_S + random.uniform(0, INTERVAL_S))
        for name in cluster.ports:
            stopped = now_ms()
            cluster.stop_broker(name)
            time.sleep(arguments.down)
            cluster.start_broker(name)
            restarts.append(Restart(name, stopped, now_ms()))
            time.sleep(arguments.pause)
        time.sleep(QUIET_S)
        sender.close()
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not sender.sent <= {delivery.body for delivery in found}:
            time.sleep(1)
            found += [delivery for member in members for delivery in member.deliveries()]
        time.sleep(6)
        found += [delivery for member in members for delivery in member.deliveries()]
    return sender, found, restarts


def report(sender: Sender, found: list[Delivery], restarts: list[Restart]) -> dict[str, Any]:
    found.sort(key=lambda delivery: delivery.at_ms)
    places: dict[tuple[str, int, int], list[Delivery]] = defaultdict(list)
    for delivery in found:
        places[delivery.broker, delivery.queue, delivery.offset].append(delivery)
    again = [each for deliveries in places.values() for each in deliveries[1:]]
    started = min(delivery.at_ms for delivery in found)
    seconds: Counter[str] = Counter()
    for delivery in again:
        before = [restart for restart in restarts if restart.stop_ms <= delivery.at_ms]
        if before:
            since_s = (delivery.at_ms - before[-1].ready_ms) // 1000
            own = "own" if before[-1].broker == delivery.broker else "other"
            seconds[f"{before[-1].broker} {since_s:+03d}s, {own} queues"] += 1
        else:
            seconds[f"before, {(delivery.at_ms - started) // 1000} s"] += 1
    waits: dict[str, int] = defaultdict(int)
    for deliveries in places.values():
        first = deliveries[0]
        waits[first.broker] = max(waits[first.broker], first.at_ms - first.stored_ms)
    return {
        "sent": len(sender.sent),
        "failed sends": len(sender.failed),
        "lost": len(sender.sent - {delivery.body for delivery in found}),
        "twice": len(again),
        "to another member": sum(len({each.member for each in many}) > 1 for many in places.values()),
        "down ms": [restart.ready_ms - restart.stop_ms for restart in restarts],
        "longest wait ms": dict(waits),
        "when": dict(sorted(seconds.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Restart three brokers one after the other.")
    parser.add_argument("--server", choices=("skylark", "apache"), default="skylark")
    parser.add_argument("--clients", choices=("java", "python"), default="java", help="the members; Java sends")
    parser.add_argument("--orderly", action="store_true")
    parser.add_argument("--rate", type=int, default=200, help="messages per second")
    parser.add_argument("--down", type=float, default=1.0, help="seconds between a broker's end and its start")
    parser.add_argument("--pause", type=float, default=15.0, help="seconds between restarts")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--directory", type=Path, help="keep everything there, the clients' logs too")
    parser.add_argument("--be-member", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_member:
        namesrv, name, orderly = arguments.be_member
        asyncio.run(be_member(namesrv, name, orderly=orderly == "1"))
        return
    for number in range(arguments.runs):
        with tempfile.TemporaryDirectory() as scratch:
            directory = (arguments.directory or Path(scratch)) / f"run{number}"
            directory.mkdir(parents=True, exist_ok=True)
            print(json.dumps(report(*run(arguments, directory)), indent=1), flush=True)


if __name__ == "__main__":
    main()
