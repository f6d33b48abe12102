"""Routes: their order, what is cached, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from skylark.client import routes as module
from skylark.client.errors import BrokerError, NotReachable, RouteNotFound
from skylark.client.routes import Routes, TopicRoute, build_route
from skylark.wire.bodies import MessageQueue, encode_body
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.routes import BrokerData, QueueData, TopicQueueMappingInfo, TopicRouteData


def route_data(*brokers: str, queues: int = 2, perm: int = 6, order: str | None = None) -> TopicRouteData:
    return TopicRouteData(
        broker_datas=[BrokerData(broker_addrs={0: f"{name}:1", 1: f"{name}:2"}, broker_name=name) for name in brokers],
        queue_datas=[
            QueueData(broker_name=name, perm=perm, read_queue_nums=queues, write_queue_nums=queues) for name in brokers
        ],
        order_topic_conf=order,
    )


class NameServer:
    """Answers from a table of topics; `trouble` is raised instead, when there is any."""

    def __init__(self, **topics: TopicRouteData) -> None:
        self.topics = topics
        self.asked: list[str] = []
        self.trouble: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def ask(self, request: Frame, timeout_s: float) -> Frame:
        topic = request.fields["topic"]
        self.asked.append(topic)
        if self.gate is not None:
            await self.gate.wait()
        if self.trouble is not None:
            raise self.trouble
        if topic not in self.topics:
            return request.reply(ResponseCode.TOPIC_NOT_EXIST, "no topic")
        return request.reply(body=encode_body(self.topics[topic]))


def with_routes(test: Callable[[NameServer, Routes], Awaitable[None]], **topics: TopicRouteData) -> None:
    async def run() -> None:
        server = NameServer(**topics)
        await test(server, Routes(server.ask))

    asyncio.run(run())


def places(route: TopicRoute, *, write: bool = True) -> list[tuple[str, int]]:
    queues = route.write_queues if write else route.read_queues
    return [(queue.broker_name, queue.queue_id) for queue in queues]


def test_queues_are_ordered_by_broker_and_number() -> None:
    route = build_route("t", route_data("b", "a"))
    assert places(route) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert places(route, write=False) == places(route)
    assert route.brokers == {"b": {0: "b:1", 1: "b:2"}, "a": {0: "a:1", 1: "a:2"}}


def test_permissions_decide() -> None:
    assert places(build_route("t", route_data("a", perm=4))) == []
    assert places(build_route("t", route_data("a", perm=4)), write=False) == [("a", 0), ("a", 1)]
    assert places(build_route("t", route_data("a", perm=2)), write=False) == []


def test_without_a_master_a_broker_is_only_read_from() -> None:
    data = route_data("a")
    data.broker_datas[0].broker_addrs = {1: "a:2"}
    assert places(build_route("t", data)) == []
    assert places(build_route("t", data), write=False) == [("a", 0), ("a", 1)]


def test_an_ordered_topic_keeps_its_queues() -> None:
    route = build_route("t", route_data("a", order="b:1;a:2"))
    assert places(route) == [("b", 0), ("a", 0), ("a", 1)]
    assert route.is_ordered


def test_a_route_is_asked_for_once() -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        server.gate = asyncio.Event()
        calls = [asyncio.create_task(routes.get("t")) for _ in range(5)]
        await asyncio.sleep(0)
        server.gate.set()
        assert len({id(await call) for call in calls}) == 1
        assert await routes.get("t") is routes.known("t")
        assert server.asked == ["t"]
        await routes.get("t", refresh=True)
        assert server.asked == ["t", "t"]

    with_routes(run, t=route_data("a"))


def test_a_missing_topic_is_not_remembered() -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        with pytest.raises(RouteNotFound, match="'t'"):
            await routes.get("t")
        server.topics["t"] = route_data("a")
        assert places(await routes.get("t")) == [("a", 0), ("a", 1)]

    with_routes(run)


def test_a_producer_gets_the_model_for_a_missing_topic() -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        route = await routes.get_for_send("t", default_queues=4)
        assert route.is_default
        assert places(route) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]
        assert {queue.topic for queue in route.write_queues} == {"t"}
        assert routes.known("t") is None, "a consumer must not see it"
        assert routes.known_for_send("t") is route
        assert routes.brokers["a"][0] == "a:1"
        server.topics["t"] = route_data("a", queues=3)
        await routes.refresh()
        route = await routes.get_for_send("t")
        assert not route.is_default
        assert len(route.write_queues) == 3

    with_routes(run, TBW102=route_data("a", queues=8))


def test_a_topic_whose_broker_registers_right_now_is_not_taken_for_a_new_one() -> None:
    """As after a restart of the name server: first nothing is known, then all."""

    async def test(server: NameServer, routes: Routes) -> None:
        async def ask(request: Frame, timeout_s: float) -> Frame:
            answer = await server.ask(request, timeout_s)
            server.topics = {"t": route_data("a", queues=1), "TBW102": route_data("a", queues=8)}
            return answer

        routes._ask = ask
        assert places(await routes.get_for_send("t")) == [("a", 0)]
        assert places(await routes.get_for_send("new", default_queues=2)) == [("a", 0), ("a", 1)]
        assert server.asked == ["t", "TBW102", "t", "new"]

    with_routes(test)


def test_a_model_that_lost_a_broker_is_asked_for_again() -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        assert len((await routes.get_for_send("t")).write_queues) == 4
        server.topics["TBW102"] = route_data("a")
        await routes.refresh()
        assert places(await routes.get_for_send("t")) == [("a", 0), ("a", 1)]
        assert set(routes.brokers) == {"a"}

    with_routes(run, TBW102=route_data("a", "b"))


def test_subscribers_hear_of_changes_only() -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        heard: list[TopicRoute] = []
        stop = routes.subscribe(heard.append)
        await routes.get("t")
        await routes.refresh()
        assert len(heard) == 1
        server.topics["t"] = route_data("a", "b")
        await routes.refresh()
        assert [len(route.read_queues) for route in heard] == [2, 4]
        stop()
        stop()
        server.topics["t"] = route_data("b")
        await routes.refresh()
        assert len(heard) == 2

    with_routes(run, t=route_data("a"))


def test_what_cannot_be_refreshed_stays_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        route = await routes.get("t")
        server.trouble = NotReachable("nobody there")
        for _ in range(3):
            await routes.refresh()
        assert routes.known("t") is route
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        server.trouble = None
        del server.topics["t"]
        await routes.refresh()
        assert routes.known("t") is route, "a name server that was just started knows nothing yet"

    with_routes(run, t=route_data("a"))


def test_an_error_of_the_name_server_is_told() -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        async def refuse(request: Frame, timeout_s: float) -> Frame:
            return request.reply(ResponseCode.SYSTEM_ERROR, "broken")

        with pytest.raises(BrokerError, match="broken"):
            await Routes(refuse).get("t")

        async def mumble(request: Frame, timeout_s: float) -> Frame:
            return request.reply(body=b"{")

        with pytest.raises(BrokerError, match="can't be read"):
            await Routes(mumble).get("t")

    with_routes(run)


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOPICS", 3)

    async def run(server: NameServer, routes: Routes) -> None:
        for number in range(10):
            server.topics[f"t{number}"] = route_data("a")
            await routes.get(f"t{number}")
        assert [number for number in range(10) if routes.known(f"t{number}")] == [7, 8, 9]
        assert (await routes.get("t0")).topic == "t0"

    with_routes(run)


def mapping(broker: str, epoch: int, led: dict[int, int], total: int = 3) -> TopicQueueMappingInfo:
    return TopicQueueMappingInfo(topic="t", bname=broker, epoch=epoch, total_queues=total, curr_id_map=led)


def test_a_static_topic_has_logical_queues_that_their_newest_leader_answers_for() -> None:
    mappings = {
        "broker-a": mapping("broker-a", 1, {0: 0, 1: 1}, total=2),
        "broker-b": mapping("broker-b", 2, {1: 0}),
    }
    data = TopicRouteData(
        broker_datas=[BrokerData(broker_name=name, broker_addrs={0: f"{name}:1"}) for name in mappings],
        queue_datas=[QueueData(broker_name=name, read_queue_nums=2, write_queue_nums=2, perm=6) for name in mappings],
        topic_queue_mapping_by_broker=mappings,
    )
    route = build_route("t", data)
    queues = [MessageQueue("__syslo__global__", number, "t") for number in range(3)]
    assert route.write_queues == route.read_queues == queues
    assert [route.broker_of(queue) for queue in queues] == ["broker-a", "broker-b", "__syslo__none__"]
    assert route.brokers == {"broker-a": {0: "broker-a:1"}, "broker-b": {0: "broker-b:1"}}
    physical = build_route("t", msgspec.structs.replace(data, topic_queue_mapping_by_broker=None))
    assert physical.broker_of(physical.write_queues[0]) == "broker-a"


def test_where_a_broker_is_the_newest_route_says() -> None:
    """Not that of a topic which is gone, although it was the last to be learnt."""

    async def run(server: NameServer, routes: Routes) -> None:
        await routes.get("t")
        await routes.get("gone")
        del server.topics["gone"]
        moved = route_data("a")
        moved.broker_datas[0].broker_addrs = {0: "elsewhere:1"}
        server.topics["t"] = moved
        await routes.refresh()
        assert routes.brokers == {"a": {0: "elsewhere:1"}}
        assert routes.known("gone") is not None, "who started anew may not know it yet"
        server.topics["gone"] = route_data("a")
        await routes.get("gone", refresh=True)
        assert routes.brokers == {"a": {0: "a:1", 1: "a:2"}}, "it is there again, as it was, and the newest"
        await routes.get("t", refresh=True)
        assert routes.brokers == {"a": {0: "elsewhere:1"}}, "so is this one, which did not change either"

    with_routes(run, t=route_data("a"), gone=route_data("a"))


def test_a_name_server_that_forgot_everything_takes_no_broker_away() -> None:
    async def run(server: NameServer, routes: Routes) -> None:
        await routes.get("t")
        await routes.get_for_send("new")
        server.topics.clear()
        await routes.refresh()
        assert set(routes.brokers) == {"a", "b"}

    with_routes(run, t=route_data("a"), TBW102=route_data("b"))
