"""The two servers: how each is started for a measurement, and what its processes cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from servers import ApacheServer, Server, ServerError, SkylarkServer, request

from bench.suite.figures import Sample
from skylark.net.blocking import BlockingConnection
from skylark.wire.bodies import TopicConfigs, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.tables import TopicConfig

APACHE, SKYLARK = "apache", "skylark"
CONTENDERS = (APACHE, SKYLARK)
BROKERS = ("one broker", "two brokers")
# What Apache's runbroker.sh sets, with a heap of 2 GB. One is left out, which touches the whole heap at the start: the
# server would start later and its memory would look larger than what it uses.
HEAP = ("-Xms2g", "-Xmx2g")
APACHE_OPTIONS = (
    *HEAP,
    *("-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25", "-XX:InitiatingHeapOccupancyPercent=30"),
    *("-XX:SoftRefLRUPolicyMSPerMB=0", "-XX:-OmitStackTraceInFastThrow", "-XX:-UseLargePages"),
)
CREATE_DEADLINE_S = 60.0
SETTLE_S = 5.0
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class SkylarkFleet(SkylarkServer):
    """`skylark up --brokers N`; its broker's address is all of them."""

    def __init__(self, directory: Path, brokers: int, settings: dict[str, str]) -> None:
        super().__init__(directory, None, **settings)
        self.options = ("--brokers", str(brokers))

    @property
    def pids(self) -> list[int]:
        parent = self.broker_pid
        return [parent, *map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]


def make_server(name: str, directory: Path, settings: dict[str, str]) -> Server:
    if name == SKYLARK:
        return SkylarkServer(directory, None, **settings)
    server = ApacheServer(directory, None, **settings)
    server.java_options = APACHE_OPTIONS
    server.housekeeping = {}
    return server


def memory(pids: list[int]) -> Sample:
    """Resident: all of it, and the anonymous part; the rest are pages of files, which the kernel drops at need."""
    kb = {"VmRSS:": 0, "RssAnon:": 0}
    for pid in pids:
        words = Path(f"/proc/{pid}/status").read_text().split()
        for name in kb:
            kb[name] += int(words[words.index(name) + 1])
    return {"rss_mb": kb["VmRSS:"] / 1024, "own_mb": kb["RssAnon:"] / 1024}


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of all threads."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_A_SECOND


def create_topics(server: Server, topics: Iterable[str], queues: int) -> None:
    """All at once: a server writes down its topics after each request that changes them."""
    wanted = [TopicConfig(topic, queues, queues) for topic in topics]
    body = encode_body(TopicConfigs(topic_config_list=wanted))
    for broker in server.broker_addr.split(";"):
        with BlockingConnection(broker, CREATE_DEADLINE_S) as connection:
            answer = connection.request(Frame(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body))
        if answer.code != 0:
            raise ServerError(f"{wanted[0].topic_name} can't be created: {answer.remark}")


def max_offset(server: Server, topic: str, queue: int) -> int:
    answer, _ = request(server.broker_addr, RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": str(queue)})
    return int(answer["extFields"]["offset"])


def stored(server: Server, topic: str, queues: int) -> int:
    """How many messages are in the queues of the topic."""
    return sum(max_offset(server, topic, queue) for queue in range(queues))


def settled(server: Server, topic: str, queues: int, expected: int) -> int:
    """How many are there when all are, or when none has come for a while: Apache's queues follow its log."""
    count, since_s = -1, time.monotonic()
    while True:
        before, count = count, stored(server, topic, queues)
        if count > before:
            since_s = time.monotonic()
        if count >= expected or time.monotonic() - since_s > SETTLE_S:
            return count
        time.sleep(0.1)
