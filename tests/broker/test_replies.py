"""Replies at a running broker: who gets them, what is kept, what is answered when nobody does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import DEADLINE_S, HOST, Live, live_broker, messages_of
from skylark.net.connection import Connection
from skylark.net.pool import Pool
from skylark.wire.bodies import Heartbeat, ProducerData, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import PushReply, SendMessageV2
from skylark.wire.records import decode_properties, encode_properties
from skylark.wire.typed import decode_header, encode_header

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
REQUESTER = "10.0.0.1@1#2"


class Requester:
    """A client in a producer group that takes what is pushed to it."""

    def __init__(self, broker: Live, client_id: str = REQUESTER) -> None:
        self._broker = broker
        self._client_id = client_id
        self.pushed: list[Frame] = []
        self.answer_code = int(ResponseCode.SUCCESS)
        self.pool = Pool({RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self._take})

    def _take(self, request: Frame, _: Connection) -> Frame:
        self.pushed.append(request)
        return request.reply(self.answer_code)

    async def beat(self) -> None:
        beat = Heartbeat(client_id=self._client_id, producer_data_set=[ProducerData(group_name="askers")])
        request = Frame(RequestCode.HEART_BEAT, {}, encode_body(beat))
        await self.pool.request(self._broker.address, request, DEADLINE_S)

    async def leave(self) -> None:
        fields = {"clientID": self._client_id, "producerGroup": "askers"}
        await self.pool.request(self._broker.address, Frame(RequestCode.UNREGISTER_CLIENT, fields), DEADLINE_S)


async def reply(broker: Live, properties: dict[str, str], topic: str = REPLY_TOPIC, queue_id: int = 0) -> Frame:
    text = encode_properties(properties).decode()
    header = SendMessageV2("responders", topic, "TBW102", 4, queue_id, 0, 1_700_000_000_000, 3, text)
    return await broker.ask(RequestCode.SEND_REPLY_MESSAGE_V2, b"answer", **encode_header(header))


LEADS_BACK = {"MSG_TYPE": "reply", "CORRELATION_ID": "c1", "REPLY_TO_CLIENT": REQUESTER, "TTL": "3000"}


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_reply_reaches_its_requester_and_is_kept(tmp_path: Path, is_stored: bool) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, storeReplyMessageEnable=is_stored) as broker:
            requester = Requester(broker)
            await requester.beat()
            answer = await reply(broker, LEADS_BACK, queue_id=-1)
            assert (answer.code, answer.remark) == (ResponseCode.SUCCESS, None)
            assert (answer.fields["MSG_REGION"], answer.fields["TRACE_ON"]) == ("DefaultRegion", "true")
            (push,) = requester.pushed
            header = decode_header(PushReply, push)
            assert (push.body, header.topic, header.queue_id, header.flag) == (b"answer", REPLY_TOPIC, -1, 3)
            assert (header.producer_group, header.store_host) == ("responders", broker.address)
            assert header.born_host.startswith(f"{HOST}:")
            properties = decode_properties(header.properties or "")
            assert int(properties.pop("PUSH_REPLY_TIME")) == header.store_timestamp
            assert properties == LEADS_BACK
            kept = messages_of(await broker.pull(REPLY_TOPIC, 0))
            assert [(m.body, m.properties) for m in kept] == ([(b"answer", LEADS_BACK)] if is_stored else [])
            assert answer.fields["msgId"] == (kept[0].message_id if is_stored else "0")
            requester.pool.close()

    asyncio.run(run())


def test_nobody_to_reply_to(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            answer = await reply(broker, LEADS_BACK)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert answer.remark == f"push reply message fail, channel of <{REQUESTER}> not found."
            answer = await reply(broker, {"MSG_TYPE": "reply", "CORRELATION_ID": "c1"})
            assert answer.remark == "reply message properties[REPLY_TO_CLIENT] is null"
            assert len(messages_of(await broker.pull(REPLY_TOPIC, 0))) == 2, "kept, though nobody took them"
            requester = Requester(broker)
            await requester.beat()
            requester.answer_code = ResponseCode.SYSTEM_ERROR
            answer = await reply(broker, LEADS_BACK)
            assert answer.code == ResponseCode.SYSTEM_ERROR
            assert answer.remark == f"push reply message to {REQUESTER}fail."
            await requester.leave()
            assert "not found" in ((await reply(broker, LEADS_BACK)).remark or "")
            requester.pool.close()

    asyncio.run(run())


def test_a_requester_that_came_back_is_found_on_its_new_connection(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            old, new = Requester(broker), Requester(broker)
            await old.beat()
            await new.beat()
            await old.leave()
            assert (await reply(broker, LEADS_BACK)).code == ResponseCode.SUCCESS
            assert (len(old.pushed), len(new.pushed)) == (0, 1)
            new.pool.close()
            while (answer := await reply(broker, LEADS_BACK)).code == ResponseCode.SUCCESS:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert "fail" in (answer.remark or "")
            old.pool.close()

    asyncio.run(run())


def test_a_reply_obeys_the_rules_of_sends(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            assert (await reply(broker, LEADS_BACK, queue_id=9)).code == ResponseCode.INVALID_PARAMETER
            assert (await reply(broker, LEADS_BACK, topic="SCHEDULE_TOPIC_XXXX")).code == ResponseCode.NO_PERMISSION

    asyncio.run(run())
