"""Real servers for the interop tests: Skylark's command and Apache RocketMQ 5.5.0, behind one interface.

Each is a process (two for Apache) with a directory of its own, on free ports, ended by its process id. Start-up is
waited for by the line that the server prints when it serves.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "interop"
APACHE_VERSION = "5.5.0"
# Only what hangs takes so long, on the slowest machine too.
START_DEADLINE_S = 240.0
STOP_DEADLINE_S = 240.0
REQUEST_DEADLINE_S = 60.0
POLL_S = 0.05
# So that a test of open transactions need not wait half a minute for the broker's question. Apache's broker also asks
# for what has ended, and delivers it twice, unless it notes the end sooner than it asks: each end is noted at once. By
# the interval it must not do so: from the first end on, its thread turns without a pause whenever nothing has ended for
# that long.
SOON_ASKED = {
    "transactionTimeOut": "3000",
    "transactionCheckInterval": "3000",
    "transactionOpBatchInterval": "86400000",
    "transactionOpMsgMaxSize": "1",
    "transactionCheckMax": "30",
}
QUERY_CONSUMER_OFFSET = 14
GET_ROUTEINFO_BY_TOPIC = 105
GET_MAX_OFFSET = 30
GET_BROKER_RUNTIME_INFO = 28

# Netty and the mapped files reach into the JDK; Apache's start scripts open the same packages.
JAVA_OPENS = [
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in ("java.nio", "sun.nio.ch", "java.lang", "java.util", "jdk.internal.ref", "jdk.internal.misc")
]


def apache_command(main: str, conf: Path, directory: Path, java_options: Sequence[str]) -> list[str]:
    """Apache's program of that name; it writes into the directory only, also what a killed one leaves behind."""
    return [
        *("java", *java_options, *JAVA_OPENS, f"-Djava.io.tmpdir={directory}"),
        *(f"-Drocketmq.home.dir={directory}", f"-Duser.home={directory}"),
        *("-cp", f"{CACHE / APACHE_VERSION}/*", f"org.apache.rocketmq.{main}", "-c", str(conf)),
    ]


QUEUES_OF_REQUESTS = "Send Pull LitePull Heartbeat Transaction Ack AdminBroker".split()


class ServerError(Exception):
    """A server did not start; carries what it printed."""


_leases: list[socket.socket] = []


def free_port() -> int:
    """A port below the ephemeral range whose neighbour two below is free too: Apache's broker listens on both.

    It is nobody else's until this process ends, even while no server listens there: the UDP port of that number is held
    for it, so another run of tests on this machine takes another one.
    """
    while True:
        port = random.randrange(20_000, 32_000, 4)
        lease = socket.socket(type=socket.SOCK_DGRAM)
        try:
            lease.bind(("127.0.0.1", port))
            for wanted in (port, port - 2):
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", wanted))
        except OSError:
            lease.close()
            continue
        _leases.append(lease)
        return port


def free_addresses() -> tuple[str, str]:
    return f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"


def fetch_apache() -> None:
    """Apache's jars and the compiled drivers; quick when they are there."""
    setup = [sys.executable, str(ROOT / "tools" / "interop_setup.py"), "java"]
    done = subprocess.run(setup, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServerError(done.stderr)


def clean_environment() -> dict[str, str]:
    """The environment without what would send Apache's parts to another server."""
    return {key: value for key, value in os.environ.items() if key not in {"NAMESRV_ADDR", "ROCKETMQ_HOME"}}


def request(address: str, code: int, fields: dict[str, str]) -> tuple[dict[str, Any], bytes]:
    """Ask a server one question on a connection of its own; the answer's header and body."""
    header = {"code": code, "language": "JAVA", "version": 0, "opaque": 0, "flag": 0, "extFields": fields}
    text = json.dumps(header).encode()
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), REQUEST_DEADLINE_S) as connection:
        connection.sendall(struct.pack(">ii", 4 + len(text), len(text)) + text)
        with connection.makefile("rb") as answer:
            size, header_size = struct.unpack(">iI", answer.read(8))
            header_size &= 0xFFFFFF  # the top byte tells the encoding, JSON like the question's
            parsed: dict[str, Any] = json.loads(answer.read(header_size))
            return parsed, answer.read(size - 4 - header_size)


def wait_readable(address: str, topic: str, queue: int, count: int) -> None:
    """Until the broker's queue holds so many: Apache's files what it has stored a moment later."""
    deadline = time.monotonic() + REQUEST_DEADLINE_S
    asked = {"topic": topic, "queueId": str(queue)}
    while int((answer := request(address, GET_MAX_OFFSET, asked)[0]).get("extFields", {}).get("offset", 0)) < count:
        assert time.monotonic() < deadline, answer
        time.sleep(POLL_S)


def committed_offset(address: str, topic: str, queue: int, group: str) -> int:
    """How far a group has consumed a queue, as far as the broker knows."""
    asked = {"topic": topic, "queueId": str(queue), "consumerGroup": group}
    answer, _ = request(address, QUERY_CONSUMER_OFFSET, asked)
    return int(answer.get("extFields", {}).get("offset", 0))


def wait_on_the_wheel(address: str) -> None:
    """Until all timers that the broker has stored are on its wheel."""
    deadline = time.monotonic() + REQUEST_DEADLINE_S
    while True:
        answer, body = request(address, GET_BROKER_RUNTIME_INFO, {})
        # Apache's broker may refuse the question in its first seconds.
        if answer["code"] == 0:
            behind = {name: json.loads(body)["table"][name] for name in ("dispatchBehindBytes", "timerOffsetBehind")}
            if set(behind.values()) == {"0"}:
                return
        assert time.monotonic() < deadline, (answer, body)
        time.sleep(POLL_S)


class Process:
    """A child whose output is kept in a file and watched for a line."""

    def __init__(self, command: Sequence[str], *, log: Path, ready: str, cwd: Path) -> None:
        self.log = log
        self._pattern = re.compile(ready)
        self._seen: re.Match[str] | None = None
        self._settled = threading.Event()
        self._child = subprocess.Popen(
            command,
            cwd=cwd,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout, self.log.open("ab") as log:
            for line in self._child.stdout:
                log.write(line)
                log.flush()
                if self._seen is None:
                    self._seen = self._pattern.search(line.decode("utf-8", "replace"))
                    if self._seen is not None:
                        self._settled.set()
        self._settled.set()

    def wait_ready(self) -> re.Match[str]:
        self._settled.wait(START_DEADLINE_S)
        if self._seen is None:
            self.kill()
            raise ServerError(f"{self._child.args!r} did not become ready:\n{self.log.read_text(errors='replace')}")
        return self._seen

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child.poll() is None

    def stop(self) -> int:
        """Ask it to end and wait until it did; the exit status is the answer."""
        if self.running:
            self._child.send_signal(signal.SIGTERM)
        try:
            status = self._child.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"process {self.pid} did not stop:\n{self.log.read_text(errors='replace')}") from None
        self._reader.join()
        return status

    def kill(self) -> None:
        if self.running:
            self._child.kill()
        self._child.wait()
        self._reader.join()


class Server(ABC):
    """A name server and a broker over one store directory.

    `start` after `stop` or `kill` opens the same store again, on the same addresses. A server made with the store and
    the addresses of another takes its place: message ids contain the broker's address.
    """

    cluster = "DefaultCluster"
    namesrv_addr: str
    broker_addr: str
    store: Path

    def __init__(self, directory: Path, replaces: Server | None = None, **broker_settings: str) -> None:
        self.directory = directory
        self._settings = broker_settings
        self.store = replaces.store if replaces is not None else directory / "store"
        addresses = (replaces.namesrv_addr, replaces.broker_addr) if replaces is not None else free_addresses()
        self.namesrv_addr, self.broker_addr = addresses
        directory.mkdir(parents=True, exist_ok=True)
        self.store.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def start(self) -> None:
        """Start and return when it serves."""

    @abstractmethod
    def stop(self) -> None:
        """Stop cleanly."""

    @abstractmethod
    def kill(self) -> None:
        """End without a chance to write anything more."""

    @property
    @abstractmethod
    def broker_pid(self) -> int:
        """The process that owns the store."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """All its processes."""


class SkylarkServer(Server):
    options: Sequence[str] = ()
    """More of `skylark up`."""

    def __init__(self, directory: Path, replaces: Server | None = None, **broker_settings: str) -> None:
        super().__init__(directory, replaces, **broker_settings)
        self._process: Process | None = None

    def start(self) -> None:
        command = Path(sys.executable).with_name("skylark")
        ports = [address.rpartition(":")[2] for address in (self.namesrv_addr, self.broker_addr)]
        conf = self.directory / "broker.conf"
        conf.write_text("".join(f"{key}={value}\n" for key, value in self._settings.items()))
        self._process = Process(
            [
                *(str(command), "up", "--host", "127.0.0.1", "--store", str(self.store), "-c", str(conf)),
                *("--namesrv-port", ports[0], "--broker-port", ports[1], *self.options),
            ],
            log=self.directory / "skylark.log",
            ready=r"ready namesrv=(\S+) broker=(\S+)",
            cwd=self.directory,
        )
        self.namesrv_addr, self.broker_addr = self._process.wait_ready().groups()

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    @property
    def broker_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        return [self.broker_pid]


class ApacheServer(Server):
    # Small and soon up, for tests; a measurement sets what the server needs to be quick. With TLS each process makes a
    # key first, which takes it 2 to 3 s; no client here asks for TLS.
    java_options: Sequence[str] = (
        *("-Xms128m", "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
        "-Dtls.server.mode=disabled",
    )
    # What the broker does by itself would cost more than the tests. The thread that writes the transactions' figures
    # turns without a pause until the first interval is over, 10 s by itself. The wheel of timers is copied as a whole
    # each time that it is written, by itself each second. Brokers that work together learn of each other's topics every
    # 30 s. It would also refuse what has waited for long, a send for
    # 200 ms, which says nothing but that the machine is busy. A measurement sets none.
    housekeeping: Mapping[str, str] = {
        "transactionMetricFlushInterval": "500",
        "timerFlushIntervalMs": "60000",
        "loadBalancePollNameServerInterval": "1000",
        "osPageCacheBusyTimeOutMills": "60000",
        **{f"waitTimeMillsIn{kind}Queue": "60000" for kind in QUEUES_OF_REQUESTS},
    }

    def __init__(self, directory: Path, replaces: Server | None = None, **broker_settings: str) -> None:
        super().__init__(directory, replaces)
        self._settings = {
            "brokerClusterName": self.cluster,
            "brokerName": "broker-a",
            "brokerId": "0",
            "brokerIP1": "127.0.0.1",
            "listenPort": self.broker_addr.rpartition(":")[2],
            "haListenPort": str(free_port()),
            "namesrvAddr": self.namesrv_addr,
            "storePathRootDir": str(self.store),
            "storePathCommitLog": str(self.store / "commitlog"),
            "autoCreateTopicEnable": "true",
            # A developer's disk may be fuller than a server's should be.
            "diskMaxUsedSpaceRatio": "95",
            **broker_settings,
        }
        self._namesrv: Process | None = None
        self._broker: Process | None = None

    def start(self) -> None:
        namesrv_conf = self.directory / "namesrv.conf"
        broker_conf = self.directory / "broker.conf"
        namesrv_conf.write_text(
            f"listenPort={self.namesrv_addr.rpartition(':')[2]}\n"
            f"kvConfigPath={self.directory / 'kvConfig.json'}\n"
            f"configStorePath={self.directory / 'namesrv.properties'}\n"
        )
        settings = {**self.housekeeping, **self._settings}
        broker_conf.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        if self._namesrv is None or not self._namesrv.running:
            self._namesrv = self._java("namesrv", "namesrv.NamesrvStartup", namesrv_conf)
            self._namesrv.wait_ready()
        self._broker = self._java("broker", "broker.BrokerStartup", broker_conf)
        self._broker.wait_ready()
        self._wait_registered()

    def _wait_registered(self) -> None:
        """The broker tells that it is up a moment before the name server knows its topics."""
        deadline = time.monotonic() + START_DEADLINE_S
        while request(self.namesrv_addr, GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"})[0]["code"] != 0:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.broker_addr} did not register with {self.namesrv_addr}")
            time.sleep(POLL_S)

    def _java(self, name: str, main: str, conf: Path) -> Process:
        return Process(
            apache_command(main, conf, self.directory, self.java_options),
            log=self.directory / f"{name}.log",
            ready="boot success",
            cwd=self.directory,
        )

    def stop(self) -> None:
        if self._broker is not None:
            self._broker.stop()
        if self._namesrv is not None:
            self._namesrv.kill()  # it keeps nothing, and stopping it politely takes seconds

    def kill(self) -> None:
        for process in (self._broker, self._namesrv):
            if process is not None:
                process.kill()

    @property
    def broker_pid(self) -> int:
        assert self._broker is not None
        return self._broker.pid

    @property
    def pids(self) -> list[int]:
        assert self._namesrv is not None
        return [self._namesrv.pid, self.broker_pid]


SERVERS: dict[str, type[Server]] = {"skylark": SkylarkServer, "apache": ApacheServer}
