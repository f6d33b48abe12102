"""What one anonymous client can take from the others: memory, the time of the event loop, and room in the log.

Memory is what the process of a broker and its name server has of its own (RssAnon), looked at while the client goes
on. Time is the CPU time of the longest callback of the event loop, the least of three tries: other work on the machine
makes it larger, never smaller.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from asyncio import Handle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from broker.live import live_broker
from patience import DEADLINE_S
from skylark.net.blocking import BlockingConnection
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.framing import encode_frame

MEMORY_BYTES = 64 << 20
HOLD_NS = 50_000_000
LOG_BYTES_PER_S = 1 << 20
TRIES = 3


class Victim:
    """A running `skylark up` in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], namesrv: str, broker: str, log: Path) -> None:
        self._status = Path(f"/proc/{process.pid}/status")
        self.namesrv = namesrv
        self.broker = broker
        self.log = log

    def memory(self) -> int:
        [line] = [line for line in self._status.read_text().splitlines() if line.startswith("RssAnon:")]
        return int(line.split()[1]) << 10

    @contextmanager
    def within_limits(self) -> Iterator[None]:
        """What is done inside may not take more memory at any moment."""
        before = self.memory()
        most = before
        over = threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.02):
                most = max(most, self.memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
            self.settle()
        finally:
            over.set()
            watcher.join()
        taken = max(most, self.memory()) - before
        assert taken < MEMORY_BYTES, f"{taken >> 20} MB"

    def settle(self) -> None:
        """Returns when both servers have answered another client, twice: they are through with what came before."""
        for address in (self.broker, self.namesrv, self.broker, self.namesrv):
            with BlockingConnection(address, DEADLINE_S) as connection:
                connection.request(Frame(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    store = tmp_path_factory.mktemp("victim")
    log = store / "log"
    arguments = ["up", "--namesrv-port", "0", "--broker-port", "0", "--store", str(store / "data")]
    with log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-m", "skylark", *arguments], stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    try:
        ready = next((line for line in process.stdout if line.startswith(b"ready ")), b"")
        assert ready, log.read_text()
        words = dict(word.split("=") for word in ready.decode().split()[1:])
        yield Victim(process, words["namesrv"], words["broker"], log)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def frame(code: int, body: bytes = b"", opaque: int = 1, **fields: object) -> bytes:
    request = Frame(code, {key: str(value) for key, value in fields.items()}, body)
    request.opaque = opaque
    return encode_frame(request)


def dial(address: str) -> socket.socket:
    """A connection whose client reads nothing."""
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), DEADLINE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


def send_request(topic: str, body: bytes) -> bytes:
    return frame(
        RequestCode.SEND_MESSAGE, body, producerGroup="p", topic=topic, defaultTopic="TBW102", defaultTopicQueueNums=1,
        queueId=0, sysFlag=0, bornTimestamp=1, flag=0, properties="",
    )  # fmt: skip


def pull_request(topic: str, opaque: int, offset: int = 1, expression: str = "*", kind: str = "TAG") -> bytes:
    return frame(
        RequestCode.PULL_MESSAGE, opaque=opaque, consumerGroup="g", topic=topic, queueId=0, queueOffset=offset,
        maxMsgNums=32, sysFlag=6, commitOffset=0, suspendTimeoutMillis=30_000, subscription=expression, subVersion=0,
        expressionType=kind,
    )  # fmt: skip


def ask(address: str, request: bytes) -> Frame:
    """Sends a request as it is, and reads its answer."""
    with BlockingConnection(address, DEADLINE_S) as connection:
        connection._socket.sendall(request)
        return connection.take(1)


def beat(client_id: str, *groups: str) -> bytes:
    data = [
        {
            "groupName": group, "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": [], "unitMode": False,
        }
        for group in groups
    ]  # fmt: skip
    body = {"clientID": client_id, "producerDataSet": [], "consumerDataSet": data}
    return json.dumps(body).encode()


# Memory.


def test_waiting_pulls_whose_answers_nobody_reads(victim: Victim) -> None:
    assert ask(victim.broker, send_request("Woken", b"first")).code == 0
    with victim.within_limits(), dial(victim.broker) as reader:
        for opaque in range(800):
            reader.sendall(pull_request("Woken", opaque))
        victim.settle()
        assert ask(victim.broker, send_request("Woken", bytes(4_000_000))).code == 0


def test_pulls_of_many_connections_that_nobody_reads(victim: Victim) -> None:
    assert ask(victim.broker, send_request("Wide", bytes(4_000_000))).code == 0
    with victim.within_limits(), ExitStack() as stack:
        for _ in range(40):
            reader = stack.enter_context(dial(victim.broker))
            reader.sendall(b"".join(pull_request("Wide", opaque, 0) for opaque in range(20)))
        victim.settle()


def test_questions_to_a_member_that_does_not_read(victim: Victim) -> None:
    question = frame(
        RequestCode.GET_CONSUMER_RUNNING_INFO, bytes(8_000_000), consumerGroup="Deaf", clientId="deaf",
        jstackEnable="true",
    )  # fmt: skip
    with victim.within_limits(), ExitStack() as stack:
        member = stack.enter_context(dial(victim.broker))
        member.sendall(frame(RequestCode.HEART_BEAT, beat("deaf", "Deaf")))
        victim.settle()
        for _ in range(20):
            asker = stack.enter_context(dial(victim.broker))
            asker.setblocking(False)
            _push(asker, question * 2)
        victim.settle()


def test_unfinished_frames(victim: Victim) -> None:
    with victim.within_limits(), ExitStack() as stack:
        for address in (victim.broker, victim.namesrv):
            for _ in range(40):
                sender = stack.enter_context(dial(address))
                sender.setblocking(False)
                _push(sender, (16_000_000).to_bytes(4, "big") + bytes(15_000_000))
        victim.settle()


def _push(connection: socket.socket, data: bytes) -> None:
    """Sends until the other side has taken nothing for a while."""
    sent = 0
    waited = 0
    while sent < len(data) and waited < 10:
        try:
            sent += connection.send(data[sent:])
            waited = 0
        except BlockingIOError:
            waited += 1
            time.sleep(0.005)
        except ConnectionError:
            return


def test_locks_of_clients_that_are_gone(victim: Victim) -> None:
    with victim.within_limits():
        for number in range(60):
            queues = [
                {"topic": f"{'t' * 200}{number}", "brokerName": f"{'b' * 200}", "queueId": queue_id}
                for queue_id in range(5_000)
            ]
            body = json.dumps({"clientId": "c" * 200, "consumerGroup": f"G{number}", "mqSet": queues}).encode()
            with BlockingConnection(victim.broker, DEADLINE_S) as connection:
                connection.request(Frame(RequestCode.LOCK_BATCH_MQ, {}, body))


def test_subscriptions_and_filters(victim: Victim) -> None:
    expression = " OR ".join(f"a{number} = 'x{'y' * 900}'" for number in range(60))
    with victim.within_limits():
        for number in range(30):
            wanted = [
                {"topic": f"T{number}-{topic}", "subString": expression, "expressionType": "SQL92", "subVersion": 1}
                for topic in range(200)
            ]
            data = [
                {
                    "groupName": f"F{number}", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING",
                    "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET", "subscriptionDataSet": wanted, "unitMode": False,
                }
            ]  # fmt: skip
            body = json.dumps({"clientID": "c", "producerDataSet": [], "consumerDataSet": data}).encode()
            with BlockingConnection(victim.broker, DEADLINE_S) as connection:
                connection.request(Frame(RequestCode.HEART_BEAT, {}, body))


def test_registrations(victim: Victim) -> None:
    with victim.within_limits():
        for number in range(60):
            topics = {
                name: {
                    "topicName": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "order": False,
                    "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0,
                }
                for name in (f"{'n' * 100}{number}-{topic}" for topic in range(3_000))
            }  # fmt: skip
            version = {"counter": number, "stateVersion": 0, "timestamp": number}
            wrapper = {"topicConfigTable": topics, "dataVersion": version}
            body = json.dumps({"topicConfigSerializeWrapper": wrapper, "filterServerList": []}).encode()
            fields = {
                "brokerName": f"b{number}", "brokerAddr": f"127.0.0.1:{20_000 + number}", "clusterName": "c",
                "haServerAddr": "127.0.0.1:1", "brokerId": "0", "compressed": "false", "bodyCrc32": "0",
            }  # fmt: skip
            with BlockingConnection(victim.namesrv, DEADLINE_S) as connection:
                connection.request(Frame(RequestCode.REGISTER_BROKER, fields, body))


def test_log_lines(victim: Victim) -> None:
    """Requests that are refused, as fast as they go, for a second or more."""
    victim.settle()
    before, began = victim.log.stat().st_size, time.monotonic()
    with BlockingConnection(victim.broker, DEADLINE_S) as connection:
        while (passed := time.monotonic() - began) < 2:
            connection.take(connection.post_all([Frame(RequestCode.LOCK_BATCH_MQ, {}, b'{"x"' * 30)] * 100)[-1])
            connection.take(connection.post_all([Frame(9_999, {"a": "b" * 1000})] * 100)[-1])
    assert (victim.log.stat().st_size - before) / passed < LOG_BYTES_PER_S


# Time.


@contextmanager
def longest_hold() -> Iterator[list[int]]:
    """The list gets the CPU time of the longest callback meanwhile, in ns."""
    run = Handle._run  # type: ignore[attr-defined]
    longest = 0

    def timed(self: Handle) -> None:
        nonlocal longest
        began = time.thread_time_ns()
        run(self)
        longest = max(longest, time.thread_time_ns() - began)

    Handle._run = timed  # type: ignore[attr-defined]
    result: list[int] = []
    try:
        yield result
    finally:
        Handle._run = run  # type: ignore[attr-defined]
        result.append(longest)


def lags(names: str) -> list[bytes]:
    return [frame(RequestCode.GET_CONSUME_STATS, consumerGroup="g", topicList=names)]


def heartbeat(number: int) -> list[bytes]:
    return [frame(RequestCode.HEART_BEAT, beat("c", *(f"group-{number}-{group}" for group in range(200))))]


def locks(count: int) -> list[bytes]:
    queues = [{"topic": "t", "brokerName": "b", "queueId": number} for number in range(count)]
    body = {"clientId": "c", "consumerGroup": "g", "mqSet": queues}
    return [frame(RequestCode.LOCK_BATCH_MQ, json.dumps(body, separators=(",", ":")).encode())]


def filters(number: int) -> list[bytes]:
    """Pulls that wait with a filter each, and a message that none of them is for."""
    expression = " OR ".join(f"a{part} = 'x'" for part in range(500))
    pulls = [pull_request("Filtered", n + 2, 10**6, f"{expression} OR b = {number}", "SQL92") for n in range(1_000)]
    return [*pulls, send_request("Filtered", b"")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(lambda number: lags("WIDE;" * 50), id="a-wide-topic"),
        pytest.param(lambda number: lags(";".join(f"name-{n}" for n in range(4_000))), id="many-topics"),
        pytest.param(lambda number: [frame(RequestCode.HEART_BEAT, b"{" + b"1:1," * 3_500_000 + b"1:1}")], id="keys"),
        pytest.param(lambda number: locks(300_000), id="locks"),
        pytest.param(heartbeat, id="groups"),
        pytest.param(filters, id="filters"),
    ],
)
def test_no_request_holds_the_loop(requests: Callable[[int], list[bytes]], tmp_path: Path) -> None:
    def attack(address: str, number: int) -> int:
        parts = requests(number)
        with BlockingConnection(address, DEADLINE_S) as connection, longest_hold() as held:
            for part in parts:
                connection._socket.sendall(part)
            connection.take(1)
            connection.request(Frame(RequestCode.GET_BROKER_RUNTIME_INFO))
        return held[0]

    async def run() -> int:
        async with live_broker(tmp_path, enablePropertyFilter="true") as live:
            await live.ask(
                RequestCode.UPDATE_AND_CREATE_TOPIC, topic="WIDE", defaultTopic="TBW102", readQueueNums=65_536,
                writeQueueNums=65_536, perm=6, topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false",
            )  # fmt: skip
            await live.send("Filtered")
            return min([await asyncio.to_thread(attack, live.address, number) for number in range(TRIES)])

    assert asyncio.run(run()) < HOLD_NS
