"""A cluster in memory behind the sockets of `skylark.spark.cluster`, and Spark's way of driving a stream's reader.

The model answers the requests of a read as a broker does, from queues whose state a test changes as it likes: topics
that are deleted and made again, messages that expire, are damaged or lost from the end, brokers that go away, slaves
that are behind. It is quick enough for thousands of sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadLimit

from skylark.spark import cluster
from skylark.spark.bodies import Shape
from skylark.spark.options import stream_options
from skylark.spark.source import StreamReader, Task
from skylark.wire.bodies import TopicList, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import Message
from skylark.wire.records import encode_host, encode_record
from skylark.wire.routes import BrokerData, ClusterInfo, QueueData, TopicRouteData

NAME_SERVER = "names:9876"
HOST = encode_host("127.0.0.1", 10911)
GROUP = "skylark-spark"


class ModelQueue:
    """The messages of a queue: None is one that is damaged."""

    def __init__(self) -> None:
        self.low = 0
        self.records: list[bytes | None] = []

    @property
    def high(self) -> int:
        return self.low + len(self.records)

    def expire(self, count: int) -> None:
        count = min(count, len(self.records))
        del self.records[:count]
        self.low += count


class ModelBroker:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_up = True
        self.topics: dict[str, list[ModelQueue]] = {}
        self.slave: dict[str, list[ModelQueue]] | None = None  # serves in place of a master that is away
        self.committed: dict[tuple[str, str, int], int] = {}
        self.log_offset = 0

    @property
    def address(self) -> str:
        return f"{self.name}:10911" if self.is_up else f"{self.name}:10921"

    @property
    def serves(self) -> bool:
        return self.is_up or self.slave is not None

    @property
    def served(self) -> dict[str, list[ModelQueue]]:
        return self.topics if self.is_up or self.slave is None else self.slave


class Model:
    """A name server and its brokers. `pulls` counts requests, `most_count` and `most_bytes` limit an answer."""

    def __init__(self, *brokers: str) -> None:
        self.brokers = {name: ModelBroker(name) for name in brokers or ("a",)}
        self.clock_ms = 1_000_000
        self.most_count = 32
        self.most_bytes = 256 << 10
        self.pulls: list[tuple[str, int, int]] = []  # group, offset, count
        self.may_create_groups = True
        self.resets: dict[tuple[str, str, int], int] = {}
        self.attributes: dict[str, str] = {}  # of every topic
        self.groups: set[str] | None = None  # those that are known, if a group must be

    # What a test does.

    def create(self, topic: str, queues: int = 1) -> None:
        for broker in self.brokers.values():
            broker.topics[topic] = [ModelQueue() for _ in range(queues)]
        self.clock_ms += 1

    def delete(self, topic: str) -> None:
        for broker in self.brokers.values():
            broker.topics.pop(topic, None)
        self.clock_ms += 1

    def send(self, topic: str, *bodies: bytes | str, queue_id: int = 0, broker: str = "a", **properties: str) -> None:
        at = self.brokers[broker]
        queue = at.topics[topic][queue_id]
        for body in bodies:
            data = body.encode() if isinstance(body, str) else body
            record = encode_record(
                Message(topic, queue_id, data, properties, born_host=HOST),
                queue_offset=queue.high,
                log_offset=at.log_offset,
                store_timestamp_ms=self.clock_ms,
                store_host=HOST,
            )
            at.log_offset += len(record)
            queue.records.append(record)
        self.clock_ms += 1

    # What clients see.

    def answer(self, address: str, request: Frame) -> Frame:
        if address == NAME_SERVER:
            return self._route(request)
        broker = next(each for each in self.brokers.values() if each.serves and each.address == address)
        return self._broker(broker, request)

    def _route(self, request: Frame) -> Frame:
        up = [broker for broker in self.brokers.values() if broker.serves]
        datas = {
            broker.name: BrokerData(
                broker_addrs={0 if broker.is_up else 1: broker.address}, broker_name=broker.name, cluster="model"
            )
            for broker in up
        }
        if request.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return request.reply(
                body=encode_body(ClusterInfo(broker_addr_table=datas, cluster_addr_table={"model": sorted(datas)}))
            )
        if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            topics = {topic for broker in up for topic in broker.served}
            return request.reply(body=encode_body(TopicList(topic_list=sorted(topics))))
        topic = request.fields["topic"]
        hosts = [broker for broker in up if topic in broker.served]
        if not hosts:
            return request.reply(ResponseCode.TOPIC_NOT_EXIST, "no route")
        queues = [
            QueueData(
                broker_name=each.name,
                perm=6,
                read_queue_nums=(count := len(each.served[topic])),
                write_queue_nums=count,
            )
            for each in hosts
        ]
        route = TopicRouteData(broker_datas=[datas[each.name] for each in hosts], queue_datas=queues)
        return request.reply(body=encode_body(route))

    def _broker(self, broker: ModelBroker, request: Frame) -> Frame:
        fields = request.fields
        if request.code == RequestCode.GET_TOPIC_CONFIG:
            config = {"topicName": fields["topic"], "attributes": self.attributes}
            return request.reply(body=json.dumps(config).encode())
        topic, queue_id = fields["topic"], int(fields["queueId"])
        key = (fields.get("consumerGroup", ""), topic, queue_id)
        if request.code == RequestCode.UPDATE_CONSUMER_OFFSET:
            if self.groups is not None and key[0] not in self.groups:
                return request.reply(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "no group")
            broker.committed[key] = int(fields["commitOffset"])
            return request.reply()
        if request.code == RequestCode.QUERY_CONSUMER_OFFSET:
            if key not in broker.committed:
                return request.reply(ResponseCode.QUERY_NOT_FOUND, "none")
            return request.reply(fields={"offset": str(broker.committed[key])})
        queues = broker.served.get(topic, [])
        queue = queues[queue_id] if queue_id < len(queues) else None
        if request.code == RequestCode.PULL_MESSAGE:
            return self._pull(request, queue, key)
        offset = {
            RequestCode.GET_MIN_OFFSET: lambda queue: queue.low,
            RequestCode.GET_MAX_OFFSET: lambda queue: queue.high,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: lambda queue: self._at(queue, int(fields["timestamp"])),
        }[RequestCode(request.code)](queue or ModelQueue())
        return request.reply(fields={"offset": str(offset)})

    @staticmethod
    def _at(queue: ModelQueue, time_ms: int) -> int:
        for index, record in enumerate(queue.records):
            if record is not None and int.from_bytes(record[56:64]) >= time_ms:
                return queue.low + index
        return queue.high

    def _pull(self, request: Frame, queue: ModelQueue | None, key: tuple[str, str, int]) -> Frame:
        offset, most = int(request.fields["queueOffset"]), int(request.fields["maxMsgNums"])
        self.pulls.append((key[0], offset, most))
        if self.groups is not None:
            self.groups.add(key[0])
        if queue is None:
            return request.reply(ResponseCode.TOPIC_NOT_EXIST, "no topic")
        if not self.may_create_groups:
            return request.reply(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "no group")
        if (reset := self.resets.pop(key, None)) is not None:
            return self._outside(request, ResponseCode.PULL_OFFSET_MOVED, reset, queue)
        if not queue.low <= offset <= queue.high:
            next_offset = queue.low if offset < queue.low else queue.high
            return self._outside(request, ResponseCode.PULL_OFFSET_MOVED, next_offset, queue)
        if offset == queue.high:
            return self._outside(request, ResponseCode.PULL_NOT_FOUND, offset, queue)
        body, count, at = b"", 0, offset
        while at < queue.high and count < min(most, self.most_count):
            record = queue.records[at - queue.low]
            if record is not None:
                if count and len(body) + len(record) > self.most_bytes:
                    break
                body += record
                count += 1
            at += 1
        code = ResponseCode.SUCCESS if body else ResponseCode.PULL_RETRY_IMMEDIATELY
        return self._outside(request, code, at, queue, body)

    @staticmethod
    def _outside(request: Frame, code: int, next_offset: int, queue: ModelQueue, body: bytes = b"") -> Frame:
        numbers = {"nextBeginOffset": next_offset, "minOffset": queue.low, "maxOffset": queue.high}
        return request.reply(code, "", {name: str(number) for name, number in numbers.items()}, body)


def install(monkeypatch: pytest.MonkeyPatch, model: Model) -> Model:
    """From here on every connection of a `Cluster` leads to the model; what is retried does not wait for long."""

    class Connection:
        def __init__(self, address: str, timeout_s: float) -> None:
            self.address = address
            self._replies: dict[int, Frame] = {}
            self._reach()

        def _reach(self) -> None:
            if self.address != NAME_SERVER and all(
                not each.serves or each.address != self.address for each in model.brokers.values()
            ):
                raise ConnectionError(f"no connection to {self.address}")

        def limit(self, timeout_s: float) -> None:
            pass

        def request(self, request: Frame) -> Frame:
            return self.take(self.post_all([request])[0])

        def post(self, request: Frame) -> int:
            return self.post_all([request])[0]

        def post_all(self, requests: Iterable[Frame]) -> list[int]:
            self._reach()
            numbers = []
            for request in requests:
                numbers.append(len(self._replies))
                self._replies[numbers[-1]] = model.answer(self.address, request)
            return numbers

        def take(self, number: int) -> Frame:
            return self._replies[number]

        def close(self) -> None:
            pass

    monkeypatch.setattr(cluster, "BlockingConnection", Connection)
    monkeypatch.setattr(cluster, "_PAUSE_S", 1.0)
    return model


class Query:
    """Spark's part of a stream: what it asks its reader, and what it keeps in the checkpoint."""

    def __init__(self, **options: Any) -> None:
        self.given = {
            "nameServer": NAME_SERVER,
            "timeout": "1s",
            **{name: str(value) for name, value in options.items()},
        }
        self.planned: list[str] = []
        self.done = 0
        self.start()

    def start(self, **changed: Any) -> None:
        """A new run, by a reader that knows nothing of the one before."""
        self.given |= {name: str(value) for name, value in changed.items()}
        self._reader = StreamReader(stream_options(self.given), Shape(["broker", "queueId", "offset", "body"]))

    def finish_now(self) -> None:
        self._reader.prepareForTriggerAvailableNow()

    def plan(self) -> bool:
        """Whether there is a batch to run: the one before it that was not done, or a new one."""
        if len(self.planned) > self.done:
            return True
        start = self.planned[-1] if self.planned else json.dumps(self._reader.initialOffset())
        limit: ReadLimit = self._reader.getDefaultReadLimit()
        end = json.dumps(self._reader.latestOffset(json.loads(start), limit))
        if self.planned and end == start:
            return False
        self.planned.append(end)
        if self.done:
            self._reader.commit(json.loads(self.planned[self.done - 1]))
        return True

    def read(self) -> list[tuple[str, int, int, bytes]]:
        """The rows of the batch: broker, queue, offset, body."""
        if self.done:
            start = json.loads(self.planned[self.done - 1])
        else:
            start = json.loads(json.dumps(self._reader.initialOffset()))
        return list(self._rows(self._reader.partitions(start, json.loads(self.planned[self.done]))))

    def _rows(self, tasks: Sequence[Any]) -> Iterator[tuple[str, int, int, bytes]]:
        for task in tasks:
            assert isinstance(task, Task)
            for batch in self._reader.read(task):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)

    def batch(self) -> list[bytes]:
        """Plans, reads and commits a batch; its bodies."""
        if not self.plan():
            return []
        rows = self.read()
        self.done += 1
        return [row[3] for row in rows]

    def drain(self) -> list[bytes]:
        found = []
        while self.plan():
            found += self.batch()
        return found

    def stop(self) -> None:
        self._reader.stop()
