"""Messages sent by hand, one request each, for tests of what reads them."""

from __future__ import annotations

import asyncio

from client.inbox import DEADLINE_S
from skylark.client.offsets import ask_offset
from skylark.client.session import Session
from skylark.wire.bodies import MessageQueue
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic, GetMaxOffset, SendMessage
from skylark.wire.records import encode_properties
from skylark.wire.typed import encode_header


async def create_topic(
    session: Session, topic: str, queues: int = 4, attributes: str | None = None
) -> list[MessageQueue]:
    """On every broker; what can be read of it then, in order."""
    model = await session.routes.get("TBW102")
    header = CreateTopic(topic, "TBW102", queues, queues, 6, "SINGLE_TAG", 0, attributes=attributes)
    for broker in model.brokers:
        answer = await session.ask_broker(
            broker, Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header)), DEADLINE_S
        )
        assert answer.code == 0, answer.remark
    return list((await session.routes.get(topic, refresh=True)).read_queues)


async def until_readable(session: Session, queue: MessageQueue, count: int) -> None:
    """Until the queue holds so many: Apache's broker files what it has stored a moment later."""
    header = GetMaxOffset(queue.topic, queue.queue_id)
    async with asyncio.timeout(DEADLINE_S):
        while await ask_offset(session, queue, RequestCode.GET_MAX_OFFSET, header, DEADLINE_S) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def send(
    session: Session, queue: MessageQueue, *bodies: bytes, tag: str | None = None, sys_flag: int = 0
) -> None:
    properties = encode_properties({"TAGS": tag} if tag else {}).decode()
    for body in bodies:
        header = SendMessage("senders", queue.topic, "TBW102", 4, queue.queue_id, sys_flag, 1, 0, properties)
        request = Frame(RequestCode.SEND_MESSAGE, encode_header(header), body)
        answer = await session.ask_broker(queue.broker_name, request, DEADLINE_S)
        assert answer.code == 0, answer.remark
