"""A whole broker, with its name server, in this process and on free ports, and a plain client for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from skylark.broker.app import Broker, wall_clock_ms
from skylark.broker.config import BrokerConfig, from_mapping
from skylark.nameserver.app import NameServer
from skylark.nameserver.config import NamesrvConfig
from skylark.net.pool import Pool
from skylark.wire.bodies import ConsumerData, Heartbeat, Subscription, encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.message import StoredMessage
from skylark.wire.records import decode_records, encode_properties

HOST = "127.0.0.1"
MAY_SUSPEND = 2
BRINGS_SUBSCRIPTION = 4
DEADLINE_S = 120.0


class MovableClock:
    """The time of day, which a test can move on."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> int:
        return wall_clock_ms() + self.ahead_ms


class Live:
    """A running broker as a client sees it."""

    def __init__(self, broker: Broker, config: BrokerConfig, namesrv: str, address: str, pool: Pool) -> None:
        self._broker: Broker | None = broker
        self.config = config
        self.namesrv = namesrv
        self.address = address
        self.pool = pool

    async def stop(self) -> None:
        """Stops the broker before the end of its block."""
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()

    async def ask(
        self,
        code: int,
        body: bytes = b"",
        *,
        encoding: Encoding = Encoding.BINARY,
        timeout_s: float = DEADLINE_S,
        version: int = 513,
        **fields: object,
    ) -> Frame:
        request = Frame(code, {key: text(value) for key, value in fields.items()}, body, encoding=encoding)
        request.version = version
        return await self.pool.request(self.address, request, timeout_s)

    async def send(
        self, topic: str, body: bytes = b"hello", properties: dict[str, str] | None = None, **more: object
    ) -> Frame:
        fields: dict[str, object] = {
            "producerGroup": "producers",
            "topic": topic,
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 4,
            "queueId": 0,
            "sysFlag": 0,
            "bornTimestamp": 1_700_000_000_000,
            "flag": 0,
            "properties": encode_properties(properties or {}).decode(),
        }
        return await self.ask(RequestCode.SEND_MESSAGE, body, **(fields | more))

    async def pull(
        self, topic: str, offset: int, *, tags: str = "*", wait_ms: int = 0, group: str = "readers", **more: object
    ) -> Frame:
        fields: dict[str, object] = {
            "consumerGroup": group,
            "topic": topic,
            "queueId": 0,
            "queueOffset": offset,
            "maxMsgNums": 32,
            "sysFlag": BRINGS_SUBSCRIPTION | (MAY_SUSPEND if wait_ms else 0),
            "commitOffset": 0,
            "suspendTimeoutMillis": wait_ms,
            "subscription": tags,
            "subVersion": 0,
        }
        return await self.ask(RequestCode.PULL_MESSAGE, **(fields | more))

    async def heartbeat(self, group: str, topic: str, tags: str = "*", version: int = 1) -> Frame:
        data = ConsumerData(
            group_name=group,
            consume_type="CONSUME_PASSIVELY",
            message_model="CLUSTERING",
            consume_from_where="CONSUME_FROM_LAST_OFFSET",
            subscription_data_set=[Subscription(topic=topic, sub_string=tags, sub_version=version)],
        )
        beat = Heartbeat(client_id=f"client@{group}", consumer_data_set=[data])
        return await self.ask(RequestCode.HEART_BEAT, encode_body(beat))

    async def until_found(self, topic: str, offset: int = 0, group: str = "readers") -> list[StoredMessage]:
        """Waits, by long polling, until the queue has a message at the offset."""
        while True:
            answer = await self.pull(topic, offset, wait_ms=10_000, group=group)
            if answer.code == 0:
                return messages_of(answer)
            await asyncio.sleep(0)


@asynccontextmanager
async def live_broker(root: Path, clock: Callable[[], int] = wall_clock_ms, **settings: object) -> AsyncIterator[Live]:
    """Settings are Apache's keys; at a `namesrvAddr` it registers too. The index is small: it starts quickly."""
    wanted = {
        "brokerName": "broker-a",
        "storePathRootDir": root,
        "mappedFileSizeCommitLog": 1 << 24,
        "maxHashSlotNum": 1000,
        "maxIndexNum": 4000,
    } | settings
    name_server = NameServer(NamesrvConfig(kv_config_path=str(root / "kvConfig.json")))
    namesrv = f"{HOST}:{await name_server.start(HOST, 0)}"
    config = from_mapping({key: text(value) for key, value in wanted.items()}, source="test")
    config.namesrv_addr = ";".join(filter(None, (namesrv, config.namesrv_addr)))
    broker = Broker(config, clock)
    pool = Pool(connect_timeout_s=DEADLINE_S)
    try:
        port = await broker.start(HOST, 0)
        live = Live(broker, config, namesrv, f"{HOST}:{port}", pool)
        try:
            yield live
        finally:
            await live.stop()
    finally:
        pool.close()
        await name_server.stop()


def messages_of(answer: Frame) -> list[StoredMessage]:
    return list(decode_records(answer.body))


def text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
