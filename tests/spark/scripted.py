"""A cluster in memory for tests of Spark's parts without sockets, servers and time: a script of what goes wrong.

Name server and brokers answer the requests that Spark's sink makes, with the codes and fields of real ones. Brokers
keep what they stored, as with a disk. Whoever waits makes the clock go on, and what is planned for then happens.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import msgspec
import pytest

from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_PREPARED, Message
from skylark.wire.records import decode_batch, decode_properties, encode_record
from skylark.wire.routes import BrokerData, ClusterInfo, KVTable, QueueData, TopicRouteData, encode_standard
from skylark.wire.tables import TopicConfig

NAME_SERVER = "names:9876"
MODEL_TOPIC = "TBW102"
_HOST = bytes(8)
_FIRST_ID = 1_000  # so that offsets in the log are no offsets in queues


class Half(msgspec.Struct):
    topic: str
    queue_id: int
    body: bytes
    properties: dict[str, str]
    group: str
    fate: int = 0


class Broker:
    """One broker. `is_up` is whether it answers, `is_named` whether the name server lists it."""

    def __init__(self, name: str, *, makes_topics: bool = True, max_message_size: int = 4 << 20) -> None:
        self.name = name
        self.address = f"{name}:10911"
        self.is_up = self.is_named = True
        self.is_skylark = True
        self.number = 0
        """its id: 0 for the master; with another it is a slave, and the master is away"""
        self.max_message_size = max_message_size
        self.topics: dict[str, TopicConfig] = {}
        self.queues: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        self.bodies: dict[str, list[bytes]] = defaultdict(list)
        """of delivered messages, by topic"""
        self.sizes: list[int] = []
        """of what came in one request"""
        self.halves: list[tuple[int, Half]] = []
        self.index: dict[tuple[str, str], list[tuple[int, bytes]]] = defaultdict(list)
        self._by_offset: dict[int, tuple[int, Half]] = {}
        self._offsets = count(_FIRST_ID)
        if makes_topics:
            self.put_topic(MODEL_TOPIC, 4, perm=7)

    def put_topic(self, name: str, queues: int = 2, perm: int = 6, **attributes: str) -> None:
        named = {key.replace("_", "."): value for key, value in attributes.items()}
        self.topics[name] = TopicConfig(
            topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm, attributes=named
        )

    def answer(self, request: Frame, now_ms: int) -> Frame:
        match request.code:
            case RequestCode.GET_BROKER_RUNTIME_INFO:
                table = {"implementation": "skylark"} if self.is_skylark else {"brokerVersionDesc": "V5_5_0"}
                return request.reply(body=encode_body(KVTable(table=table)))
            case RequestCode.GET_BROKER_CONFIG:
                return request.reply(body=f"brokerName={self.name}\nmaxMessageSize={self.max_message_size}\n".encode())
            case RequestCode.GET_TOPIC_CONFIG:
                topic = self.topics.get(request.fields["topic"])
                return _no_topic(request) if topic is None else request.reply(body=encode_body(topic))
            case RequestCode.UPDATE_AND_CREATE_TOPIC:
                fields = request.fields
                self.put_topic(fields["topic"], int(fields["readQueueNums"]), int(fields["perm"]))
                return request.reply()
            case RequestCode.SEND_MESSAGE_V2 | RequestCode.SEND_BATCH_MESSAGE:
                return self._send(request, now_ms)
            case RequestCode.GET_MAX_OFFSET:
                end = len(self.queues[request.fields["topic"], int(request.fields["queueId"])])
                return request.reply(fields={"offset": str(end)})
            case RequestCode.END_TRANSACTION:
                return self._end(request)
            case RequestCode.QUERY_MESSAGE:
                fields = request.fields
                found = self.index[fields["topic"], fields["key"]][::-1]
                end_ms = int(fields["endTimestamp"])
                some = [record for stored_ms, record in found if stored_ms <= end_ms][: min(64, int(fields["maxNum"]))]
                return request.reply(body=b"".join(some)) if some else request.reply(ResponseCode.QUERY_NOT_FOUND)
            case RequestCode.PULL_MESSAGE:
                queue = self.queues[request.fields["topic"], int(request.fields["queueId"])]
                offset = int(request.fields["queueOffset"])
                if offset >= len(queue) or not queue[offset]:
                    return request.reply(ResponseCode.PULL_OFFSET_MOVED)
                return request.reply(body=queue[offset])
        raise AssertionError(f"no answer to {request}")

    def forget(self, topic: str) -> None:
        """What retention does."""
        for (name, _), records in self.queues.items():
            if name == topic:
                records[:] = [b""] * len(records)
        for key in [key for key in self.index if key[0] == topic]:
            del self.index[key]

    def _send(self, request: Frame, now_ms: int) -> Frame:
        fields = request.fields
        name, queue_id = fields["b"], int(fields["e"])
        if name not in self.topics and MODEL_TOPIC not in self.topics:
            return _no_topic(request)
        if name not in self.topics:
            self.put_topic(name, 4)
        if not self.topics[name].perm & 2:
            return request.reply(ResponseCode.NO_PERMISSION, "the topic can't be written to")
        if len(request.body) > self.max_message_size:
            return request.reply(ResponseCode.MESSAGE_ILLEGAL, "the message is too large")
        self.sizes.append(len(request.body))
        if int(fields["f"]) & SYS_TRANSACTION_PREPARED:
            half = Half(name, queue_id, request.body, decode_properties(fields["i"]), fields["a"])
            place = next(self._offsets)
            self.halves.append((place, half))
            self._by_offset[place] = (len(self.halves) - 1, half)
            return self._stored(request, len(self.halves) - 1, place)
        if fields.get("m") == "true":
            several = [(body, properties) for _, body, properties in decode_batch(request.body)]
        else:
            several = [(request.body, decode_properties(fields["i"]))]
        first = len(self.queues[name, queue_id])
        for body, properties in several:
            place = self._store(name, queue_id, body, properties, now_ms)
        return self._stored(request, first, place)

    def _stored(self, request: Frame, queue_offset: int, place: int) -> Frame:
        return request.reply(fields={"queueOffset": str(queue_offset), "msgId": f"{'0' * 16}{place:016X}"})

    def _store(self, topic: str, queue_id: int, body: bytes, properties: dict[str, str], now_ms: int) -> int:
        place = next(self._offsets)
        queue = self.queues[topic, queue_id]
        message = Message(topic, queue_id, body, properties, born_host=_HOST)
        record = encode_record(
            message, queue_offset=len(queue), log_offset=place, store_timestamp_ms=now_ms, store_host=_HOST
        )
        queue.append(record)
        for key in properties.get("KEYS", "").split():
            self.index[topic, key].append((now_ms, record))
        self.bodies[topic].append(body)
        return place

    def _end(self, request: Frame) -> Frame:
        fields = request.fields
        number, half = self._by_offset.get(int(fields["commitLogOffset"]), (-1, None))
        if half is None or half.group != fields["producerGroup"] or number != int(fields["tranStateTableOffset"]):
            return request.reply(ResponseCode.SYSTEM_ERROR, "no such half message")
        wanted = int(fields["commitOrRollback"])
        if half.fate not in (0, wanted):
            return request.reply(ResponseCode.ILLEGAL_OPERATION, "it was ended otherwise")
        if half.fate == 0 and wanted == SYS_TRANSACTION_COMMIT:
            self._store(half.topic, half.queue_id, half.body, half.properties, 0)
        half.fate = wanted
        return request.reply()


def _no_topic(request: Frame) -> Frame:
    return request.reply(ResponseCode.TOPIC_NOT_EXIST, "there is no such topic")


class World:
    """The cluster, and its clock."""

    def __init__(self, *brokers: Broker) -> None:
        self.brokers = {broker.name: broker for broker in brokers}
        self.now_s = 1_000.0
        self.is_name_server_up = True
        self.watch: Callable[[str, Frame], None] = lambda address, request: None
        """Sees each request before it is carried out; raises what is to go wrong."""
        self.after: Callable[[str, Frame], None] = lambda address, request: None
        """The same when it is carried out, and nobody was told yet."""
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def delivered_bodies(self, topic: str) -> list[bytes]:
        """What is in the queues of a topic."""
        return [body for broker in self.brokers.values() for body in broker.bodies[topic]]

    def away(self, *names: str, for_s: float | None = None) -> None:
        """Brokers go, and the name server forgets them. They come back after a time."""
        for name in names:
            self.brokers[name].is_up = self.brokers[name].is_named = False
            if for_s is not None:
                self.plan(for_s, lambda name=name: self.back(name))  # type: ignore[misc]

    def back(self, name: str) -> None:
        self.brokers[name].is_up = self.brokers[name].is_named = True

    def plan(self, in_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._planned, (self.now_s + in_s, next(self._numbers), action))

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._planned and self._planned[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._planned)
            action()
        self.now_s = max(self.now_s, end_s)

    def answer(self, address: str, request: Frame) -> Frame:
        self.check(address)
        self.watch(address, request)
        self.check(address)
        if address == NAME_SERVER:
            return self._name(request)
        broker = next(broker for broker in self.brokers.values() if broker.address == address)
        return broker.answer(request, int(self.now_s * 1000))

    def check(self, address: str) -> None:
        if address == NAME_SERVER:
            is_up = self.is_name_server_up
        else:
            is_up = any(broker.is_up for broker in self.brokers.values() if broker.address == address)
        if not is_up:
            raise ConnectionError(f"no connection to {address}")

    def _name(self, request: Frame) -> Frame:
        there = [broker for broker in self.brokers.values() if broker.is_named]
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            table = {broker.name: _data(broker) for broker in there}
            return request.reply(body=encode_standard(ClusterInfo(broker_addr_table=table, cluster_addr_table={})))
        assert request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC, request
        name = request.fields["topic"]
        holders = [broker for broker in there if name in broker.topics]
        if not holders:
            return _no_topic(request)
        queues = [_queue_data(broker.name, broker.topics[name]) for broker in holders]
        route = TopicRouteData(broker_datas=[_data(broker) for broker in holders], queue_datas=queues)
        return request.reply(body=encode_standard(route))


def _data(broker: Broker) -> BrokerData:
    return BrokerData(broker_addrs={broker.number: broker.address}, broker_name=broker.name, cluster="c")


def _queue_data(broker: str, topic: TopicConfig) -> QueueData:
    return QueueData(
        broker_name=broker,
        perm=topic.perm,
        read_queue_nums=topic.read_queue_nums,
        write_queue_nums=topic.write_queue_nums,
    )


class Clock:
    """In place of the module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sleep = world.pass_time

    def monotonic(self) -> float:
        return self._world.now_s

    def time_ns(self) -> int:
        return int(self._world.now_s * 1_000_000_000)


def connections(world: World) -> type[Any]:
    """In place of `BlockingConnection`."""

    class Connection:
        def __init__(self, address: str, timeout_s: float) -> None:
            world.check(address)
            self.address = address
            self._replies: dict[int, Frame | ConnectionError] = {}
            self._numbers = count(1)
            self._is_open = True

        def limit(self, timeout_s: float) -> None:
            pass

        def request(self, request: Frame) -> Frame:
            return self.take(self.post(request))

        def post(self, request: Frame) -> int:
            if not self._is_open:
                raise ConnectionError(f"the connection to {self.address} is closed")
            number = next(self._numbers)
            self._replies[number] = world.answer(self.address, request)
            try:
                world.after(self.address, request)
            except ConnectionError as e:
                self._replies[number] = e  # found when somebody looks for the answer
            return number

        def post_all(self, requests: Iterable[Frame]) -> list[int]:
            return [self.post(request) for request in requests]

        def take(self, number: int) -> Frame:
            if not self._is_open:
                raise ConnectionError(f"the connection to {self.address} is closed")
            reply = self._replies.pop(number)
            if isinstance(reply, ConnectionError):
                self.close()
                raise reply
            return reply

        def close(self) -> None:
            self._is_open = False

    return Connection


def play(patch: pytest.MonkeyPatch, world: World) -> World:
    """From now on Spark's parts talk to this cluster."""
    clock = Clock(world)
    patch.setattr("skylark.spark.cluster.BlockingConnection", connections(world))
    for module in ("cluster", "outbox", "ledger"):
        patch.setattr(f"skylark.spark.{module}.time", clock)
    return world
