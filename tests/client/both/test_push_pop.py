"""Push consumers that pop, against Skylark and against Apache RocketMQ."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from client.inbox import Inbox, eventually, numbered
from client.plain import create_topic, send
from skylark.client import popping
from skylark.client.errors import InvalidMessage
from skylark.client.listening import RetryLater, Suspend
from skylark.client.message import Message, MessageQueue
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.pop import SetMessageRequestMode


@asynccontextmanager
async def popper(namesrv: str, group: str, topic: str, listener: Any, **options: Any) -> AsyncIterator[PushConsumer]:
    tag = options.pop("tag", "*")
    consumer = PushConsumer(namesrv, group, listener=listener, **{"from_where": "first", "mode": "pop", **options})
    consumer.subscribe(topic, tag)
    async with consumer:
        yield consumer


async def set_mode(session: Session, queue: MessageQueue, group: str, mode: str) -> None:
    body = encode_body(SetMessageRequestMode(group, mode, 0, queue.topic))
    answer = await session.ask_broker(queue.broker_name, Frame(RequestCode.SET_MESSAGE_REQUEST_MODE, {}, body))
    assert answer.code == ResponseCode.SUCCESS, answer


def test_members_take_from_all_queues_and_nothing_comes_twice(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        inboxes = [Inbox(), Inbox()]
        async with Session(namesrv) as session, AsyncExitStack() as stack:
            queues = await create_topic(session, topic, 4)
            for inbox in inboxes:
                await stack.enter_async_context(popper(namesrv, group, topic, inbox, tag="a || b"))
            for number, body in enumerate(numbered(60)):
                await send(session, queues[number % 4], body, tag="abc"[number % 3])
            await eventually(lambda: sum(len(inbox.messages) for inbox in inboxes) >= 40)
            got = Counter(body for inbox in inboxes for body in inbox.bodies)
            assert got == Counter(body for number, body in enumerate(numbered(60)) if number % 3 != 2)

    asyncio.run(main())


def test_a_refused_message_comes_again_and_then_is_a_dead_letter(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        inbox, letters = Inbox(lambda _: RetryLater(1)), Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            await send(session, queues[0], b"doomed", tag="a")
            async with popper(namesrv, group, topic, inbox, max_reconsume_times=1):
                await inbox.wait(2)
                async with popper(
                    namesrv, f"{group}_undertaker", f"%DLQ%{group}", letters, mode="pull", rebalance_interval_s=0.5
                ):
                    [letter] = await letters.wait(1)
            assert [(each.topic, each.reconsume_times) for each in inbox.messages] == [(topic, 0), (topic, 1)]
            assert (letter.body, letter.tag) == (b"doomed", "a")

    asyncio.run(main())


def test_a_long_listener_keeps_its_message(
    namesrv: str, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bytes] = []
    extended: list[int] = []
    change_invisible = popping.change_invisible

    async def extend(session: Session, group: str, message: Message, invisible_ms: int, **options: Any) -> None:
        await change_invisible(session, group, message, invisible_ms, **options)
        extended.append(invisible_ms)

    async def slow(message: Message) -> None:
        started.append(message.body)
        # Each time when half of its time is over: by the third, the message would have come again.
        await eventually(lambda: len(extended) == 3)

    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            [queue] = await create_topic(session, topic, 1)
            await send(session, queue, b"long")
            monkeypatch.setattr(popping, "change_invisible", extend)
            async with popper(namesrv, group, topic, slow, invisible_s=4):
                await eventually(lambda: started == [b"long"])
                async with popper(namesrv, group, topic, inbox):
                    await eventually(lambda: len(extended) == 3)
        assert started == [b"long"]
        assert inbox.messages == []

    asyncio.run(main())


def test_in_order_a_failed_message_holds_up_its_queue(namesrv: str, topic: str, group: str) -> None:
    seen: list[tuple[bytes, int]] = []

    def answer(message: Message) -> object:
        seen.append((message.body, message.reconsume_times))
        if message.body == b"m1" and message.reconsume_times == 0:
            raise Suspend(0.5)
        return True

    async def main() -> None:
        inbox = Inbox(answer)
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 1)
            for body in numbered(4):
                await send(session, queues[0], body)
            async with popper(namesrv, group, topic, inbox, orderly=True):
                await inbox.until(lambda: len(seen) >= 5)
        assert [body for body, _ in seen] == [b"m0", b"m1", b"m1", b"m2", b"m3"]
        assert dict(seen)[b"m1"] == 1

    asyncio.run(main())


def test_the_broker_decides_who_pops(namesrv: str, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with Session(namesrv) as session:
            queues = await create_topic(session, topic, 2)
            async with popper(namesrv, group, topic, inbox, mode="broker", rebalance_interval_s=0.2) as consumer:
                await eventually(lambda: {each for each in consumer.queues if each.topic == topic} == set(queues))
                await send(session, queues[0], b"pulled")
                await inbox.wait(1)
                await consumer.commit()
                await set_mode(session, queues[0], group, "POP")
                anything = MessageQueue(queues[0].broker_name, -1, topic)
                await eventually(lambda: {each for each in consumer.queues if each.topic == topic} == {anything})
                await send(session, queues[1], b"popped")
                await inbox.wait(2)
                assert inbox.bodies == [b"pulled", b"popped"]
                assert [bool(each.receipt_handle) for each in inbox.messages] == [False, True]

    asyncio.run(main())


def test_bad_modes_are_refused() -> None:
    for options, reason in (
        ({"mode": "push"}, "it takes 'pull', 'pop' or 'broker'"),
        ({"mode": "pop", "model": "broadcasting"}, "pulls by itself"),
        ({"mode": "pop", "invisible_s": 0.5}, "must be between 1 and 43200"),
    ):
        with pytest.raises(InvalidMessage, match=reason):
            PushConsumer(group="g", listener=print, **options)
