"""A name server and brokers that do what a test tells them, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from skylark.net.connection import Connection
from skylark.net.server import Server, bind
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import BrokerData, QueueData, TopicQueueMappingInfo, TopicRouteData

HOST = "127.0.0.1"
Answer = Callable[[Frame], "Frame | Awaitable[Frame | None] | None"]


def stored(request: Frame) -> Frame:
    """The answer to a send that went well."""
    fields = {"msgId": "7F00000100002A9F0000000000000000", "queueId": request.fields["e"], "queueOffset": "5"}
    return request.reply(fields=fields)


async def never(_: Frame) -> Frame | None:
    """A broker that keeps its answer for itself."""
    await asyncio.Event().wait()
    return None


def refuses(code: int, remark: str = "no") -> Answer:
    return lambda request: request.reply(code, remark)


class ScriptedBroker:
    """Answers sends with `answer` and agrees to everything else."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer: Answer = stored
        self.sends: list[Frame] = []
        self.others: list[Frame] = []
        self.connections: list[Connection] = []
        self.heard: dict[int, asyncio.Event] = {}
        codes = (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
        self._handlers = dict.fromkeys(codes, self._send) | dict.fromkeys(
            (RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT, RequestCode.GET_MAX_OFFSET), self._other
        )
        self._server: Server | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    async def start(self) -> None:
        self._server = Server(self._handlers)
        self.port = await self._server.start(bind(HOST, self.port))

    async def stop(self) -> None:
        """At once: requests in hand are not answered."""
        if self._server is not None:
            await self._server.stop(grace_s=0)
            self._server = None

    async def until(self, code: int) -> None:
        """A request of that code has come."""
        await self.heard.setdefault(code, asyncio.Event()).wait()

    def _send(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame | None] | None:
        self._note(request, connection)
        self.sends.append(request)
        return self.answer(request)

    def _other(self, request: Frame, connection: Connection) -> Frame:
        self._note(request, connection)
        self.others.append(request)
        return request.reply()

    def _note(self, request: Frame, connection: Connection) -> None:
        if connection not in self.connections:
            self.connections.append(connection)
        self.heard.setdefault(request.code, asyncio.Event()).set()


class ScriptedCluster:
    """Brokers, and a name server that knows the topics that a test gives it: name -> queues at each broker."""

    def __init__(self, names: Sequence[str]) -> None:
        self.brokers = [ScriptedBroker(name) for name in names]
        self.topics: dict[str, int] = {}
        self.leaders: dict[str, str] = {}
        """static topic -> the broker that leads its queues"""
        self.queries: list[str] = []
        self.gate: asyncio.Event | None = None
        """if there is one, the name server answers once it is set"""
        self.namesrv = ""

    def route(self, topic: str) -> TopicRouteData:
        count = self.topics[topic]
        return TopicRouteData(
            broker_datas=[BrokerData(broker_addrs={0: b.address}, broker_name=b.name) for b in self.brokers],
            queue_datas=[
                QueueData(broker_name=b.name, perm=6, read_queue_nums=count, write_queue_nums=count)
                for b in self.brokers
            ],
            topic_queue_mapping_by_broker=self._mapping(topic, count) if topic in self.leaders else None,
        )

    def _mapping(self, topic: str, count: int) -> dict[str, TopicQueueMappingInfo]:
        leader, led = self.leaders[topic], {number: number for number in range(count)}
        mapping = TopicQueueMappingInfo(topic=topic, bname=leader, total_queues=count, curr_id_map=led)
        return {leader: mapping}

    async def tell(self, request: Frame, _: Connection) -> Frame:
        topic = request.fields["topic"]
        self.queries.append(topic)
        if self.gate is not None:
            await self.gate.wait()
        if topic not in self.topics:
            return request.reply(ResponseCode.TOPIC_NOT_EXIST, "no such topic")
        return request.reply(body=encode_body(self.route(topic)))


@asynccontextmanager
async def scripted_cluster(*names: str, **topics: int) -> AsyncIterator[ScriptedCluster]:
    cluster = ScriptedCluster(names or ("broker-a",))
    cluster.topics = dict(topics)
    name_server = Server({RequestCode.GET_ROUTEINFO_BY_TOPIC: cluster.tell})
    cluster.namesrv = f"{HOST}:{await name_server.start(bind(HOST, 0))}"
    try:
        for broker in cluster.brokers:
            await broker.start()
        yield cluster
    finally:
        for broker in cluster.brokers:
            await broker.stop()
        await name_server.stop(grace_s=0)
