"""What operators ask of a group and its members, through the broker: Python consumers answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from servers import Server, request

from client.inbox import DEADLINE_S, Inbox
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.routes import DEFAULT_TOPIC
from skylark.client.session import Session
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.tables import SubscriptionGroupConfig


@asynccontextmanager
async def consuming(
    server: Server, topic: str, group: str, inbox: Inbox, count: int, **options: Any
) -> AsyncIterator[PushConsumer]:
    """A member that has got `count` messages."""
    async with Producer(server.namesrv_addr, group=f"{group}_p") as producer:
        for number in range(count):
            await producer.send(topic, str(number).encode())
    consumer = PushConsumer(server.namesrv_addr, group, listener=inbox, from_where="first", **options)
    consumer.subscribe(topic)
    async with consumer:
        await inbox.wait(count)
        yield consumer


async def ask(server: Server, code: int, **fields: str) -> tuple[dict[str, Any], bytes]:
    return await asyncio.to_thread(request, server.broker_addr, code, fields)


def test_running_info_holds_the_stacks_if_they_are_wanted(server: Server, topic: str, group: str) -> None:
    async def main() -> None:
        async with consuming(server, topic, group, Inbox(), 1) as consumer:
            member = {"consumerGroup": group, "clientId": consumer.client_id}
            header, body = await ask(server, RequestCode.GET_CONSUMER_RUNNING_INFO, **member, jstackEnable="true")
            assert header["code"] == 0
            assert b"skylark.client.pulling.PullLoop.run(pulling.py:" in body
            header, body = await ask(server, RequestCode.GET_CONSUMER_RUNNING_INFO, **member, jstackEnable="false")
            assert header["code"] == 0
            assert b"jstack" not in body

    asyncio.run(main())


def test_one_message_is_consumed_again_by_a_named_member(server: Server, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with consuming(server, topic, group, inbox, 1) as consumer:
            [message] = inbox.messages
            asked = {"consumerGroup": group, "topic": topic, "msgId": message.offset_msg_id}
            header, body = await ask(server, RequestCode.CONSUME_MESSAGE_DIRECTLY, **asked, clientId=consumer.client_id)
            assert header["code"] == 0
            assert json.loads(body)["consumeResult"] == "CR_SUCCESS"
            await inbox.wait(2)
            header, _ = await ask(server, RequestCode.CONSUME_MESSAGE_DIRECTLY, **asked, clientId="nobody")
            assert (header["code"], header["remark"]) == (1, f"The Consumer <{group}> <nobody> not online")

    asyncio.run(main())


def test_a_group_is_sent_back_while_it_consumes(server: Server, topic: str, group: str) -> None:
    async def main() -> None:
        inbox = Inbox()
        async with consuming(server, topic, group, inbox, 4):
            await ask(
                server, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
                group=group, topic=topic, timestamp="0", isForce="true",
            )  # fmt: skip
            # The broker tells it with the next pull, so those that wait are woken.
            async with Producer(server.namesrv_addr, group=f"{group}_p") as producer:
                for queue in await producer.queues(topic):
                    await producer.send(topic, b"wake", queue=queue)
            await inbox.until(lambda: all(inbox.bodies.count(b"%d" % number) == 2 for number in range(4)))

    asyncio.run(main())


def test_the_groups_own_limit_decides_when_a_message_is_dead(server: Server, topic: str, group: str) -> None:
    async def main() -> None:
        config = SubscriptionGroupConfig(group_name=group, retry_max_times=0)
        async with Session(server.namesrv_addr) as session:
            [broker] = (await session.routes.get(DEFAULT_TOPIC)).brokers
            update = Frame(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, encode_body(config))
            assert (await session.ask_broker(broker, update)).code == 0
        reader = LitePullConsumer(server.namesrv_addr, f"{group}_dead", from_where="first")
        reader.subscribe(f"%DLQ%{group}")
        async with consuming(server, topic, group, Inbox(lambda message: False), 1), reader:
            async with asyncio.timeout(DEADLINE_S):
                message = await anext(reader)
            assert (message.body, message.reconsume_times) == (b"0", 1)
            assert message.properties["RETRY_TOPIC"] == topic

    asyncio.run(main())
