"""Messages sent by hand, one request each, for tests of what reads them."""

from __future__ import annotations

from skylark.client.session import Session
from skylark.wire.bodies import MessageQueue
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic, SendMessage
from skylark.wire.records import encode_properties
from skylark.wire.typed import encode_header


async def create_topic(
    session: Session, topic: str, queues: int = 4, attributes: str | None = None
) -> list[MessageQueue]:
    """On every broker; what can be read of it then, in order."""
    model = await session.routes.get("TBW102")
    header = CreateTopic(topic, "TBW102", queues, queues, 6, "SINGLE_TAG", 0, attributes=attributes)
    for broker in model.brokers:
        answer = await session.ask_broker(broker, Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header)), 10)
        assert answer.code == 0, answer.remark
    return list((await session.routes.get(topic, refresh=True)).read_queues)


async def send(
    session: Session, queue: MessageQueue, *bodies: bytes, tag: str | None = None, sys_flag: int = 0
) -> None:
    properties = encode_properties({"TAGS": tag} if tag else {}).decode()
    for body in bodies:
        header = SendMessage("senders", queue.topic, "TBW102", 4, queue.queue_id, sys_flag, 1, 0, properties)
        request = Frame(RequestCode.SEND_MESSAGE, encode_header(header), body)
        # Apache's broker refuses what waited for 200 ms, as on a machine that is busy with other tests.
        while (answer := await session.ask_broker(queue.broker_name, request, 10)).code == ResponseCode.SYSTEM_BUSY:
            pass
        assert answer.code == 0, answer.remark
