"""The two servers: how each is started for a measurement, and what its processes cost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from servers import ApacheServer, Server, SkylarkServer, request

from skylark.net.blocking import BlockingConnection
from skylark.wire.bodies import TopicConfigs, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.tables import TopicConfig

APACHE, SKYLARK = "apache", "skylark"
CONTENDERS = (APACHE, SKYLARK)
# What Apache's runbroker.sh sets, with a heap of 2 GB. One is left out, which touches the whole heap at the start: the
# server would start later and its memory would look larger than what it uses.
HEAP = ("-Xms2g", "-Xmx2g")
APACHE_OPTIONS = (
    *HEAP,
    *("-XX:+UseG1GC", "-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25", "-XX:InitiatingHeapOccupancyPercent=30"),
    *("-XX:SoftRefLRUPolicyMSPerMB=0", "-XX:-OmitStackTraceInFastThrow", "-XX:-UseLargePages"),
)
SETTLE_S = 60.0
_MB = 1 << 20
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def make_server(name: str, directory: Path, settings: dict[str, str]) -> Server:
    if name == SKYLARK:
        return SkylarkServer(directory, None, **settings)
    server = ApacheServer(directory, None, **settings)
    server.java_options = APACHE_OPTIONS
    return server


class Memory(msgspec.Struct, frozen=True):
    """Resident: `own_mb` can't be given back, `mapped_mb` are pages of files that the kernel drops at need."""

    own_mb: float
    mapped_mb: float


def memory(pids: list[int]) -> Memory:
    kb = {"RssAnon:": 0, "RssFile:": 0, "RssShmem:": 0}
    for pid in pids:
        words = Path(f"/proc/{pid}/status").read_text().split()
        for name in kb:
            kb[name] += int(words[words.index(name) + 1])
    return Memory(kb["RssAnon:"] * 1024 / _MB, (kb["RssFile:"] + kb["RssShmem:"]) * 1024 / _MB)


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
    with BlockingConnection(server.broker_addr, SETTLE_S) as connection:
        answer = connection.request(Frame(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body))
    if answer.code != 0:
        raise RuntimeError(f"{wanted[0].topic_name} can't be created: {answer.remark}")


def max_offset(server: Server, topic: str, queue: int) -> int:
    answer, _ = request(server.broker_addr, RequestCode.GET_MAX_OFFSET, {"topic": topic, "queueId": str(queue)})
    return int(answer["extFields"]["offset"])


def settled_offsets(server: Server, topic: str, queues: int, expected: int) -> list[int]:
    """The end of each queue, once all messages are in them: Apache's queues follow its log."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        ends = [max_offset(server, topic, queue) for queue in range(queues)]
        if sum(ends) >= expected or time.monotonic() > deadline:
            return ends
        time.sleep(0.1)
