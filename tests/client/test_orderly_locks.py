"""Members of an orderly group come and go at any moment: none leaves a lock behind, and nothing is overtaken."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import defaultdict

import pytest

from client.inbox import DEADLINE_S, eventually
from skylark.client import membership
from skylark.client.message import Message
from skylark.client.producer import Producer
from skylark.client.push_consumer import PushConsumer
from skylark.client.rpc_hooks import RpcHook
from skylark.client.session import Session
from skylark.testing import LocalCluster
from skylark.wire.bodies import LockedQueues, LockRequest, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import ResetOffset
from skylark.wire.typed import encode_header

QUEUES = 6
STEPS = 40
MOST_MEMBERS = 4


class Stress:
    """A group whose members join, leave and are sent elsewhere, several at a time, as a seed decides."""

    def __init__(self, cluster: LocalCluster, session: Session, seed: int) -> None:
        self._cluster = cluster
        self._session = session
        self._choice = random.Random(seed)
        self._members: list[PushConsumer] = []
        self._changes: set[asyncio.Task[None]] = set()
        self._sent = itertools.count()
        self.first_seen: dict[int, list[int]] = defaultdict(list)
        self.seen: set[int] = set()

    async def listen(self, message: Message) -> None:
        await asyncio.sleep(self._choice.random() * 0.002)
        number = int(message.body)
        if number not in self.seen:
            self.seen.add(number)
            self.first_seen[message.queue_id].append(number)

    async def run(self) -> int:
        """Makes all the changes, then has everybody leave; how many messages were sent."""
        queues = (await self._session.routes.get("orders")).read_queues
        async with Producer(group="p", session=self._session) as producer:
            for _ in range(STEPS):
                for _ in range(self._choice.randrange(8)):
                    number = next(self._sent)
                    await producer.send("orders", str(number).encode(), queue=queues[number % QUEUES])
                await self._change(queues)
                await asyncio.sleep(self._choice.random() * 0.05)
            await asyncio.gather(*self._changes)
            count = next(self._sent)
            if not self._members:
                await self._join()
            await eventually(lambda: len(self.seen) == count)
        await asyncio.gather(*(member.close() for member in self._members))
        return count

    async def _change(self, queues: list[MessageQueue]) -> None:
        kind = self._choice.random()
        if kind < 0.15:
            await self._reset()
        elif self._members and (len(self._members) >= MOST_MEMBERS or kind < 0.5):
            self._begin(self._members.pop(self._choice.randrange(len(self._members))).close())
        else:
            self._begin(self._join())

    def _begin(self, change: object) -> None:
        task = asyncio.create_task(change)  # type: ignore[arg-type]
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _join(self) -> None:
        consumer = PushConsumer(self._cluster.name_servers, "g", listener=self.listen, orderly=True, from_where="first")
        consumer.subscribe("orders")
        await consumer.start()
        self._members.append(consumer)

    async def _reset(self) -> None:
        """An operator sends the group back to the start."""
        fields = encode_header(ResetOffset(group="g", topic="orders", timestamp=0, force=True))
        await self._session.ask_broker("broker-a", Frame(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields))


@pytest.mark.parametrize("seed", [14, 17])
@pytest.mark.parametrize("server_side", ["true", "false"], ids=["reset by the broker", "reset by the members"])
def test_no_lock_is_left_behind(seed: int, server_side: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        settings = {"useServerSideResetOffset": server_side}
        async with (
            LocalCluster(topics={"orders": QUEUES}, settings=settings) as cluster,
            Session(cluster.name_servers) as session,
            asyncio.timeout(DEADLINE_S),
        ):
            stress = Stress(cluster, session, seed)
            await stress.run()
            for numbers in stress.first_seen.values():
                assert numbers == sorted(numbers)
            queues = (await session.routes.get("orders")).read_queues
            wanted = LockRequest(client_id="next", consumer_group="g", mq_set=queues)
            answer = await session.ask_broker("broker-a", Frame(RequestCode.LOCK_BATCH_MQ, {}, encode_body(wanted)))
            assert set(decode_body(LockedQueues, answer.body).lock_ok_mq_set) == set(queues)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    # The broker would have given back what a member forgot.
    assert [record.getMessage() for record in caplog.records if "did not unlock" in record.getMessage()] == []


def test_a_broker_that_was_started_anew_is_asked_for_its_locks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has forgotten them, and would give them to a member that comes, although the listener of this one runs."""
    monkeypatch.setattr(membership, "_LOCK_INTERVAL_S", 3600.0)
    asked = asyncio.Event()

    class Noting(RpcHook):
        def before_request(self, address: str, request: Frame) -> None:
            if request.code == RequestCode.LOCK_BATCH_MQ:
                asked.set()

    async def main() -> None:
        entered, may_end = asyncio.Event(), asyncio.Event()

        async def listen(_: Message) -> None:
            entered.set()
            await may_end.wait()

        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            Session(cluster.name_servers, rpc_hooks=[Noting()]) as session,
            Producer(cluster.name_servers) as producer,
        ):
            await producer.send("orders", b"1")
            consumer = PushConsumer(session=session, group="g", listener=listen, orderly=True, from_where="first")
            consumer.subscribe("orders")
            async with consumer:
                await entered.wait()
                asked.clear()
                await cluster.broker.stop()
                await cluster.broker.start()
                async with asyncio.timeout(DEADLINE_S):
                    await asked.wait()
                may_end.set()

    asyncio.run(main())
