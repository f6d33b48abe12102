"""A network that delays, cuts in pieces, stalls and resets, between the client and its servers.

Every byte between client, name server and broker goes through `LossyProxy`, which decides by a seed. The promises:
what was acknowledged is stored, every message is consumed at least once, and no call outlasts its timeout.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import pytest

from patience import DEADLINE_S
from skylark.client.errors import RocketMQError
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message, Receipt
from skylark.client.producer import Producer
from skylark.client.pull_consumer import PullConsumer
from skylark.client.push_consumer import PushConsumer
from skylark.testing import LocalCluster

SEEDS: Final = [1, 2, 3]
SEND_TIMEOUT_S: Final = 30.0  # long enough for all retries on a slow machine
SILENT_TIMEOUT_S: Final = 2.0


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What may happen: how far a connection gets on average, and the chances of each piece of data."""

    reset_after_bytes: int = 8_000

    cut: float = 0.5
    delay: float = 0.3
    longest_delay_s: float = 0.01
    stall: float = 0.005
    longest_stall_s: float = 0.5


class Life(msgspec.Struct):
    """How many bytes, of both directions, a connection still passes on."""

    left_bytes: int


class LossyProxy:
    """Passes connections on to a server, badly. `rewrite` replaces bytes by as many others in what the server says."""

    def __init__(self, target: str, seed: int, faults: Faults, rewrite: dict[bytes, bytes] | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._faults = faults
        self._rewrite = rewrite or {}
        self._links: set[asyncio.Task[None]] = set()
        self.resets = 0
        self.is_silent = False
        """Nothing passes any more, and nobody is told."""

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            self._links.discard(link)
            return
        life = Life(round(self._random.expovariate(1 / self._faults.reset_after_bytes)))
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, {}, life)),
            asyncio.create_task(self._pump(far_reader, writer, self._rewrite, life)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            writer.transport.abort()
            far_writer.transport.abort()
            self._links.discard(link)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rewrite: dict[bytes, bytes], life: Life
    ) -> None:
        """Passes data on until either end, or chance, closes."""
        try:
            while data := await (self._read_frame(reader) if rewrite else reader.read(4096)):
                for old, new in rewrite.items():
                    data = data.replace(old, new)
                for piece in self._pieces(data):
                    await self._suffer()
                    writer.write(piece[: life.left_bytes])
                    await writer.drain()
                    life.left_bytes -= len(piece)
                    if life.left_bytes <= 0:
                        self.resets += 1
                        return
        except (OSError, asyncio.IncompleteReadError):
            return

    async def _read_frame(self, reader: asyncio.StreamReader) -> bytes:
        size = await reader.readexactly(4)
        return size + await reader.readexactly(int.from_bytes(size, "big"))

    def _pieces(self, data: bytes) -> list[bytes]:
        if len(data) < 2 or self._random.random() >= self._faults.cut:
            return [data]
        at = self._random.randrange(1, len(data))
        return [data[:at], data[at:]]

    async def _suffer(self) -> None:
        chance, faults = self._random.random, self._faults
        if self.is_silent:
            await asyncio.get_running_loop().create_future()  # until the link is cut
        if chance() < faults.stall:
            await asyncio.sleep(chance() * faults.longest_stall_s)
            self.resets += 1
            raise ConnectionResetError
        if chance() < faults.delay:
            await asyncio.sleep(chance() * faults.longest_delay_s)


@asynccontextmanager
async def lossy(cluster: LocalCluster, seed: int, faults: Faults) -> AsyncIterator[tuple[str, list[LossyProxy]]]:
    """The name server's address behind proxies, whose routes lead to the broker behind another."""
    to_broker = LossyProxy(cluster.broker.address, seed, faults)
    hidden = (await to_broker.start()).encode()
    shown = cluster.broker.address.encode()
    assert len(hidden) == len(shown), "ports that the system gives have five digits"
    to_name_server = LossyProxy(cluster.name_servers, seed + 1000, faults, rewrite={shown: hidden})
    address = await to_name_server.start()
    try:
        yield address, [to_broker, to_name_server]
    finally:
        await to_broker.stop()
        await to_name_server.stop()


async def stored(cluster: LocalCluster, topic: str) -> dict[str, Message]:
    """Every message of the topic, read without the proxy, by its id."""
    found: dict[str, Message] = {}
    async with PullConsumer(cluster.name_servers, group="check") as consumer:
        for queue in await consumer.queues(topic):
            offset, end = 0, await consumer.max_offset(queue)
            while offset < end:
                pulled = await consumer.pull(queue, offset)
                found |= {message.msg_id: message for message in pulled.messages}
                offset = pulled.next_offset
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_acknowledged_is_stored_and_nothing_hangs(seed: int) -> None:
    async def main() -> None:
        receipts: dict[bytes, Receipt] = {}
        failures = 0

        async def send(producer: Producer, body: bytes) -> None:
            nonlocal failures
            async with asyncio.timeout(DEADLINE_S):
                try:
                    receipts[body] = await producer.send("orders", body)
                except RocketMQError:
                    failures += 1

        async def send_some(producer: Producer, worker: int) -> None:
            for number in range(40):
                await send(producer, b"%d-%d" % (worker, number))

        async with (
            LocalCluster(topics={"orders": 4}) as cluster,
            lossy(cluster, seed, Faults()) as (address, proxies),
            Producer(address, group="senders", timeout_s=SEND_TIMEOUT_S, retries=5) as producer,
        ):
            await asyncio.gather(*(send_some(producer, worker) for worker in range(8)))
            assert sum(proxy.resets for proxy in proxies) > 0, "nothing was tested"
            found = await stored(cluster, "orders")
            for body, receipt in receipts.items():
                assert found[receipt.msg_id].body == body
            # Retries make up for almost all of it.
            assert failures < 32

    asyncio.run(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_many_in_flight_each_get_an_answer(seed: int) -> None:
    async def main() -> None:
        async with (
            LocalCluster(topics={"orders": 4}) as cluster,
            lossy(cluster, seed, Faults()) as (address, _),
            Producer(address, group="senders", timeout_s=SEND_TIMEOUT_S, max_in_flight=64) as producer,
        ):
            futures = []
            for number in range(400):
                async with asyncio.timeout(DEADLINE_S):
                    try:
                        futures.append(await producer.send_soon("orders", b"%d" % number))
                    except RocketMQError:
                        continue
            async with asyncio.timeout(DEADLINE_S):
                results = await asyncio.gather(*futures, return_exceptions=True)
            assert all(isinstance(result, Receipt | RocketMQError) for result in results)
            receipts = [result for result in results if isinstance(result, Receipt)]
            assert receipts, "nothing got through"
            assert {receipt.msg_id for receipt in receipts} <= (await stored(cluster, "orders")).keys()

    asyncio.run(main())


def test_a_network_that_falls_silent_ends_calls_in_time() -> None:
    async def main() -> None:
        async with (
            LocalCluster(topics={"orders": 1}) as cluster,
            lossy(cluster, 1, Faults(reset_after_bytes=1 << 40, stall=0.0)) as (address, proxies),
        ):
            producer = Producer(address, group="senders", timeout_s=SILENT_TIMEOUT_S)
            reader = PullConsumer(address, group="readers", request_timeout_s=SILENT_TIMEOUT_S)
            consumer = LitePullConsumer(address, group="members", request_timeout_s=SILENT_TIMEOUT_S)
            consumer.subscribe("orders")
            await asyncio.gather(producer.start(), reader.start(), consumer.start())
            receipt = await producer.send("orders", b"hello", timeout_s=DEADLINE_S)
            assert len(await reader.queues("orders")) == 1
            for proxy in proxies:
                proxy.is_silent = True
            async with asyncio.timeout(DEADLINE_S):
                *failed, polled = await asyncio.gather(
                    producer.send("orders", b"into the void"),
                    reader.pull(receipt.queue, 0, wait_s=0.2),
                    reader.queues("unknown"),
                    consumer.poll(timeout_s=0.2),
                    return_exceptions=True,
                )
            assert all(isinstance(failure, RocketMQError) for failure in failed), failed
            assert isinstance(polled, list)
            assert [message.body for message in polled] in ([], [b"hello"])
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.gather(producer.close(), reader.close(), consumer.close())

    asyncio.run(main())


async def fill(cluster: LocalCluster, count: int) -> set[bytes]:
    async with Producer(cluster.name_servers, group="senders") as producer:
        bodies = [b"%d" % number for number in range(count)]
        for start in range(0, count, 50):
            await producer.send_batch("orders", bodies[start : start + 50])
    return set(bodies)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_push_consumer_gets_everything(seed: int) -> None:
    async def main() -> None:
        got: Counter[bytes] = Counter()
        everything = asyncio.Event()
        async with (
            LocalCluster(topics={"orders": 4}) as cluster,
            lossy(cluster, seed, Faults(reset_after_bytes=30_000)) as (address, proxies),
        ):
            sent = await fill(cluster, 1000)

            async def handle(message: Message) -> None:
                got[message.body] += 1
                if got.keys() == sent:
                    everything.set()

            consumer = PushConsumer(address, group="readers", listener=handle, from_where="first", pull_batch_size=8)
            consumer.subscribe("orders")
            async with asyncio.timeout(DEADLINE_S), consumer:
                await everything.wait()
            assert sum(proxy.resets for proxy in proxies) > 0, "nothing was tested"

    asyncio.run(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lite_pull_consumer_gets_everything_in_order(seed: int) -> None:
    async def main() -> None:
        got: dict[int, list[int]] = {}
        async with (
            LocalCluster(topics={"orders": 4}) as cluster,
            lossy(cluster, seed, Faults(reset_after_bytes=30_000)) as (address, proxies),
        ):
            sent = await fill(cluster, 1000)
            bodies: set[bytes] = set()
            consumer = LitePullConsumer(address, group="readers", from_where="first", pull_batch_size=8)
            consumer.subscribe("orders")
            async with asyncio.timeout(DEADLINE_S), consumer:
                async for message in consumer:
                    bodies.add(message.body)
                    got.setdefault(message.queue_id, []).append(message.queue_offset)
                    if bodies == sent:
                        break
            assert sum(proxy.resets for proxy in proxies) > 0, "nothing was tested"
            # One member alone reads every queue from its begin to its end, once.
            assert all(offsets == list(range(len(offsets))) for offsets in got.values())

    asyncio.run(main())
