"""What a client that does not read its answers costs a broker, and its neighbours; and how large answers get."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from broker.live import BRINGS_SUBSCRIPTION, MAY_SUSPEND, Live, live_broker, messages_of
from net.test_limits import held_bytes, small_peer, turns, until, until_blocked
from net.test_server import Peer
from skylark.broker.arrivals import Arrivals
from skylark.broker.send import MAX_BATCH_MESSAGES
from skylark.net.allowance import GAUGE_BYTES, MAX_WAITING_OF_HOST
from skylark.net.server import Server
from skylark.wire import pop
from skylark.wire.bodies import ConsumerData, Heartbeat, Subscription, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import MAX_LENIENT_BYTES
from skylark.wire.frame import MAX_FRAME_BYTES, MAX_RECORDS_BYTES, Frame
from skylark.wire.framing import encode_frame
from skylark.wire.records import encode_batch

MIB = 1 << 20
WAIT_MS = 60_000


def server_of(broker: Live) -> Server:
    assert broker._broker is not None
    return broker._broker._server


def frame(code: int, body: bytes = b"", opaque: int = 0, **fields: object) -> bytes:
    return encode_frame(Frame(code, {name: str(value) for name, value in fields.items()}, body, opaque))


def waiting_pull(opaque: int, offset: int, queue_id: int = 0) -> bytes:
    return frame(
        RequestCode.PULL_MESSAGE, opaque=opaque, consumerGroup="readers", topic="t", queueId=queue_id,
        queueOffset=offset, maxMsgNums=32, sysFlag=BRINGS_SUBSCRIPTION | MAY_SUSPEND, commitOffset=0,
        suspendTimeoutMillis=WAIT_MS, subscription="*", subVersion=0,
    )  # fmt: skip


def waiting_pop(opaque: int) -> bytes:
    return frame(
        RequestCode.POP_MESSAGE, opaque=opaque, consumerGroup="readers", topic="t", queueId=0, maxMsgNums=1,
        invisibleTime=WAIT_MS, pollTime=WAIT_MS, bornTime=0, initMode=pop.FROM_MIN,
    )  # fmt: skip


async def peer_of(broker: Live) -> Peer:
    return await small_peer(int(broker.address.rpartition(":")[2]))


async def until_waiting(server: Server, count: int) -> None:
    await until(lambda: sum(allowance.waiting for allowance in server._allowances.values()) >= count)


def test_waiting_pulls_of_a_client_that_does_not_read(tmp_path: Path) -> None:
    async def run() -> None:
        count = 40
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            server = server_of(broker)
            peer = await peer_of(broker)
            peer.write(b"".join(waiting_pull(opaque, 1) for opaque in range(count)))
            await until_waiting(server, count)
            await broker.send("t", bytes(MIB))
            await turns()
            assert held_bytes(server) <= 3 * MIB
            for _ in range(count):
                answer = await peer.receive()
                assert (answer.code, len(answer.body) > MIB) == (0, True)
            peer.close()

    asyncio.run(run())


def test_as_many_pulls_as_may_wait_fit_into_what_a_host_may_hold(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            peer, count = await peer_of(broker), 500
            peer.write(waiting_pull(0, 1))
            await until_waiting(server_of(broker), 1)
            tracemalloc.start()
            try:
                peer.write(b"".join(waiting_pull(each, 1) for each in range(count)))
                await until_waiting(server_of(broker), 1 + count)
                taken_bytes, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert taken_bytes / count * MAX_WAITING_OF_HOST < 64 * MIB
            peer.close()

    asyncio.run(run())


def test_a_large_message_for_many_clients(tmp_path: Path) -> None:
    async def run() -> None:
        count = 10
        async with live_broker(tmp_path) as broker:
            await broker.send("t")
            server = server_of(broker)
            peers = [await peer_of(broker) for _ in range(count)]
            for peer in peers:
                peer.write(waiting_pull(0, 1))
            await until_waiting(server, count)
            sent = asyncio.create_task(broker.send("t", bytes(4 * MIB - 1024)))
            await until_waiting(server, 0)
            await until_blocked(server)
            await turns()
            assert held_bytes(server) <= GAUGE_BYTES + 5 * MIB
            answers = await asyncio.gather(*(peer.receive() for peer in peers))
            assert {answer.code for answer in answers} == {0}
            assert {len(answer.body) // MIB for answer in answers} == {3}
            assert (await sent).code == 0
            for peer in peers:
                peer.close()

    asyncio.run(run())


def test_a_message_for_a_pop_that_is_not_read_goes_to_another(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await broker.send("t", bytes(3 * MIB), queueId=1)
            server = server_of(broker)
            deaf = await peer_of(broker)
            deaf.write(waiting_pop(2))
            await until_waiting(server, 1)
            deaf.write(waiting_pull(1, 0, queue_id=1) * 4)
            await until_blocked(server)
            other = await peer_of(broker)
            other.write(waiting_pop(4))
            await until_waiting(server, 2)
            await broker.send("t", b"for whom?")
            assert [message.body for message in messages_of(await other.receive())] == [b"for whom?"]
            deaf.close()
            other.close()

    asyncio.run(run())


def test_a_pop_is_answered_when_the_disk_has_its_check_point(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path, flushDiskType="SYNC_FLUSH") as broker:
            await broker.send("t", b"first")
            peer = await peer_of(broker)
            peer.write(waiting_pop(1) + waiting_pop(2))
            first = await peer.receive()
            assert [message.body for message in messages_of(first)] == [b"first"]
            await broker.send("t", b"second")
            second = await peer.receive()
            assert [message.body for message in messages_of(second)] == [b"second"]
            assert (first.opaque, second.opaque) == (1, 2)
            assert held_bytes(server_of(broker)) == 0
            peer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "body", "count"),
    [
        (RequestCode.GET_CONSUMER_RUNNING_INFO, bytes(MAX_LENIENT_BYTES), 32 * MIB // MAX_LENIENT_BYTES),
        (RequestCode.CONSUME_MESSAGE_DIRECTLY, b"", 32),  # the broker adds the message
    ],
)
def test_questions_to_a_client_that_does_not_read(tmp_path: Path, code: int, body: bytes, count: int) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            message_id = (await broker.send("t", bytes(MIB))).fields["msgId"]
            server = server_of(broker)
            deaf = await peer_of(broker)
            data = ConsumerData(
                group_name="readers",
                consume_type="CONSUME_PASSIVELY",
                message_model="CLUSTERING",
                consume_from_where="CONSUME_FROM_LAST_OFFSET",
                subscription_data_set=[Subscription(topic="t", sub_string="*", sub_version=1)],
            )
            beat = encode_body(Heartbeat(client_id="deaf", consumer_data_set=[data]))
            deaf.write(frame(RequestCode.HEART_BEAT, beat))
            assert (await deaf.receive()).code == 0
            asking = [
                asyncio.create_task(
                    broker.ask(code, body, consumerGroup="readers", clientId="deaf", topic="t", msgId=message_id)
                )
                for _ in range(count)
            ]
            await until_blocked(server)
            await turns()
            assert sum(connection.buffered_bytes for connection in server.connections) <= 3 * MIB
            assert held_bytes(server) <= GAUGE_BYTES + 3 * MIB
            for task in asking:
                task.cancel()
            deaf.close()

    asyncio.run(run())


class TestLargeAnswers:
    settings: dict[str, Any] = {  # noqa: RUF012 (never changed)
        "maxMessageSize": 16 * MIB,
        "maxTransferBytesOnMessageInMemory": 1 << 30,
        "maxTransferCountOnMessageInMemory": 1000,
        "mappedFileSizeCommitLog": 1 << 26,
    }

    def test_a_pull_fits_into_a_frame(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with live_broker(tmp_path, **self.settings) as broker:
                for _ in range(3):
                    await broker.send("t", bytes(7 * MIB))
                answer = await broker.pull("t", 0, maxMsgNums=1000)
                assert len(messages_of(answer)) == 2
                assert answer.fields["nextBeginOffset"] == "2"

        asyncio.run(run())

    def test_a_message_that_fits_into_no_answer_is_refused(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with live_broker(tmp_path, **self.settings) as broker:
                assert (await broker.send("t", bytes(MAX_RECORDS_BYTES + 1))).code == ResponseCode.MESSAGE_ILLEGAL
                assert (await broker.send("t", bytes(MAX_RECORDS_BYTES), {"a": "x" * 32_000})).code == 0
                (largest,) = messages_of(await broker.pull("t", 0))
                assert len(largest.body) == MAX_RECORDS_BYTES

        asyncio.run(run())

    @pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.PEEK_MESSAGE])
    def test_a_pop_of_many_queues_fits_into_a_frame(self, tmp_path: Path, code: int) -> None:
        async def run() -> None:
            async with live_broker(tmp_path, **self.settings) as broker:
                for queue_id in range(4):
                    await broker.send("t", bytes(7 * MIB), queueId=queue_id)
                fields: dict[str, object] = {
                    "consumerGroup": "readers", "topic": "t", "queueId": -1, "maxMsgNums": 32, "pollTime": 0,
                    "invisibleTime": WAIT_MS, "bornTime": 0, "initMode": pop.FROM_MIN,
                }  # fmt: skip
                answer = await broker.ask(code, **fields)
                assert answer.code == 0, answer.remark
                assert len(answer.body) <= MAX_FRAME_BYTES
                assert len(messages_of(answer)) == 2
                if code == RequestCode.POP_MESSAGE:
                    assert answer.fields["restNum"] == "2"
                    assert len(messages_of(await broker.ask(code, **fields))) == 2

        asyncio.run(run())

    def test_a_batch_has_no_more_messages_than_its_acknowledgement_can_name(self, tmp_path: Path) -> None:
        async def run() -> None:
            async with live_broker(tmp_path, **self.settings) as broker:
                batch = encode_batch([(0, b"", {})]) * (MAX_BATCH_MESSAGES + 1)
                refusal = await broker.send("t", batch, batch=True)
                assert refusal.code == ResponseCode.MESSAGE_ILLEGAL
                assert "65537 messages" in (refusal.remark or "")

        asyncio.run(run())


def test_who_asks_for_much_at_once_gets_all_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        count = 8
        async with live_broker(tmp_path) as broker:
            for _ in range(2):
                assert (await broker.send("t", bytes(MIB), {"KEYS": "k"})).code == 0
            fields = {"topic": "t", "key": "k", "maxNum": "32", "beginTimestamp": "0", "endTimestamp": f"{1 << 62}"}
            peer = await peer_of(broker)
            asked = (Frame(RequestCode.QUERY_MESSAGE, fields, opaque=each) for each in range(count))
            peer.write(b"".join(map(encode_frame, asked)))
            await until_blocked(server_of(broker))
            await turns()
            answers = [await peer.receive() for _ in range(count)]
            assert [(each.opaque, each.code) for each in answers] == [(each, 0) for each in range(count)]
            assert {len(each.body) > 2 * MIB for each in answers} == {True}
            peer.close()

    asyncio.run(run())


def test_a_waiter_that_left_leaves_no_timer() -> None:
    async def run() -> None:
        arrivals = Arrivals()
        waiter = arrivals.wait("t", 0, None, 60.0)
        waiter.arrived.cancel()
        await asyncio.sleep(0)
        assert len(arrivals) == 0
        assert waiter._timer is not None
        assert waiter._timer.cancelled()

    asyncio.run(run())


def test_slow_readers_of_a_host_do_not_hold_up_its_others(tmp_path: Path) -> None:
    """A pull that waits is answered, and a batch acknowledged, though others of the host leave much unread."""

    async def run() -> None:
        async with live_broker(tmp_path, flushDiskType="SYNC_FLUSH") as broker:
            await broker.send("t", bytes(3 * MIB))
            await broker.send("polled")
            server = server_of(broker)
            (allowance,) = server._allowances.values()
            readers = [await peer_of(broker) for _ in range(3)]
            for reader in readers:
                reader.write(waiting_pull(1, 0) * 4)  # the kernel takes some
            await until(lambda: allowance.unread.held_bytes > GAUGE_BYTES // 2)
            poll = asyncio.create_task(broker.pull("polled", 1, wait_ms=WAIT_MS))
            await until_waiting(server, 1)
            batch = encode_batch([(0, b"x", {"UNIQ_KEY": f"{number:032d}"}) for number in range(100)])
            sent = await broker.send("polled", batch, batch="true")
            assert (sent.code, sent.fields["msgId"].count(",")) == (ResponseCode.SUCCESS, 99)
            assert messages_of(await poll)
            assert allowance.unread.held_bytes > GAUGE_BYTES // 2, "nobody had to go for that"
            for reader in readers:
                reader.close()

    asyncio.run(run())
