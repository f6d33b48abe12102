"""POP consumption with a whole broker: its timers, both header encodings, restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import Live, MovableClock, live_broker
from broker.pop_broker import Popped, bodies, popped
from skylark.wire import pop
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding

TOPIC, GROUP = "orders", "workers"
INVISIBLE_MS = 60_000
HOUR_MS = 3_600_000


async def take(live: Live, **more: object) -> list[Popped]:
    fields: dict[str, object] = {
        "consumerGroup": GROUP,
        "topic": TOPIC,
        "queueId": -1,
        "maxMsgNums": 32,
        "invisibleTime": INVISIBLE_MS,
        "pollTime": 10_000,
        "bornTime": 0,
        "initMode": pop.FROM_MIN,
    }
    answer = await live.ask(RequestCode.POP_MESSAGE, encoding=Encoding.JSON, **(fields | more))
    assert answer.code in (0, ResponseCode.POLLING_TIMEOUT), answer.remark
    return popped(answer)


async def take_all(live: Live, count: int) -> list[Popped]:
    """Waits until so many messages came, in one pop or in several."""
    taken: list[Popped] = []
    while len(taken) < count:
        taken += await take(live)
    return taken


async def acknowledge(live: Live, taken: Popped) -> None:
    handle = taken.handle
    answer = await live.ask(
        RequestCode.ACK_MESSAGE,
        encoding=Encoding.JSON,
        consumerGroup=GROUP,
        topic=pop.real_topic(TOPIC, GROUP, handle.kind),
        queueId=handle.queue_id,
        extraInfo=handle.encode(),
        offset=handle.offset,
    )
    assert answer.code == 0, answer.remark


def test_what_is_not_acknowledged_comes_back_by_the_clock(tmp_path: Path) -> None:
    async def main() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock, reviveInterval=50) as live:
            await live.send(TOPIC, b"a")
            await live.send(TOPIC, b"b")
            taken = await take_all(live, 2)
            await acknowledge(live, next(each for each in taken if each.body == "a"))
            clock.ahead_ms += 2 * INVISIBLE_MS
            (again,) = await take_all(live, 1)
            assert (again.body, again.message.reconsume_times) == ("b", 1)
            await acknowledge(live, again)

    asyncio.run(main())


def test_a_pop_survives_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        clock = MovableClock()
        async with live_broker(tmp_path, clock, reviveInterval=50) as live:
            for body in (b"a", b"b"):
                await live.send(TOPIC, body)
            taken = await take_all(live, 2)
            await acknowledge(live, taken[0])
        async with live_broker(tmp_path, clock, reviveInterval=50) as live:
            clock.ahead_ms += 2 * INVISIBLE_MS
            (again,) = await take_all(live, 1)
            assert again.body == taken[1].body

    asyncio.run(main())


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_is_popped_comes_back_although_the_clock_was_ahead(tmp_path: Path, is_restarted: bool) -> None:
    async def main() -> None:
        clock = MovableClock()
        settings = {"reviveInterval": 50, "reviveQueueNum": 1}
        async with live_broker(tmp_path, clock, **settings) as live:
            await live.send(TOPIC, b"early")
            await take_all(live, 1)
            clock.ahead_ms += HOUR_MS
            (early,) = await take_all(live, 1)  # so far have the timers come
            assert early.body == "early"
            await acknowledge(live, early)
            await live.send(TOPIC, b"meanwhile")
            assert await take(live, invisibleTime=1000)
            clock.ahead_ms -= HOUR_MS
            if not is_restarted:
                await comes_back(live, clock)
        if is_restarted:
            async with live_broker(tmp_path, clock, **settings) as live:
                await comes_back(live, clock)

    async def comes_back(live: Live, clock: MovableClock) -> None:
        await live.send(TOPIC, b"after")
        taken = await take_all(live, 1)
        while "after" not in bodies(taken):
            taken += await take_all(live, 1)
        clock.ahead_ms += 2 * INVISIBLE_MS
        while {each.body for each in taken if each.message.reconsume_times} != {"meanwhile", "after"}:
            taken += await take_all(live, 1)

    asyncio.run(main())


def test_binary_headers_cut_the_codes_off(tmp_path: Path) -> None:
    """A Java client can be set to write binary headers, and its codes lose their upper bits then."""

    async def main() -> None:
        async with live_broker(tmp_path) as live:
            await live.send(TOPIC, b"a")
            answer = await live.ask(
                RequestCode.POLLING_INFO & 0xFFFF,
                encoding=Encoding.BINARY,
                consumerGroup=GROUP,
                topic=TOPIC,
                queueId=-1,
            )
            assert (answer.code, answer.fields) == (0, {"pollingNum": "0"})

    asyncio.run(main())


STOPS: dict[str, tuple[RequestCode, bytes, dict[str, object]]] = {
    "topic": (
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        b"",
        {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 2,
         "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False},
    ),
    "group": (
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        b'{"groupName":"%s","consumeEnable":false}' % GROUP.encode(),
        {},
    ),
    "broker": (RequestCode.UPDATE_BROKER_CONFIG, b"brokerPermission=2", {}),
}  # fmt: skip


@pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION])
@pytest.mark.parametrize("stopped", STOPS)
def test_who_waits_to_pop_gets_nothing_once_that_is_forbidden(tmp_path: Path, stopped: str, code: RequestCode) -> None:
    async def main() -> None:
        async with live_broker(tmp_path) as broker:
            assert (await broker.send(TOPIC)).code == 0
            assert len(await take_all(broker, 1)) == 1
            fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": -1, "maxMsgNums": 1, "pollTime": 15_000}
            more = {"invisibleTime": INVISIBLE_MS, "bornTime": 0, "initMode": 0}
            waiting = asyncio.create_task(broker.ask(code, encoding=Encoding.JSON, **fields, **more))
            assert broker._broker is not None
            popping = broker._broker._popping
            while not len(popping._waiters) + len(popping._notified):  # noqa: ASYNC110
                await asyncio.sleep(0)
            change, body, of_change = STOPS[stopped]
            assert (await broker.ask(change, body, **of_change)).code == 0
            assert (await broker.send(TOPIC)).code == 0
            answer = await waiting
            assert (answer.code, answer.body) == (ResponseCode.NO_PERMISSION, b"")

    asyncio.run(main())
