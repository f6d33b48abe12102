"""A filter server: it stands between a broker and consumers whose filter is a class of their own.

A consumer uploads its class (302) and pulls here (11) what it would pull from the broker. The pull is forwarded, under
the consumer's own group, so that the broker's rules hold; what comes back is given to the class, and the consumer gets
the messages that match. A class that fails lets nothing through and skips nothing.

The filter server tells its broker every 10 s that it is there (301); consumers find it in the routes of the name
server.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from typing import Final

import msgspec

from skylark.filterserver.classes import Classes, Refused
from skylark.filterserver.config import FiltersrvConfig
from skylark.filterserver.worker import ClassFailed
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.pool import Pool
from skylark.net.server import Server, bind
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import PullMessage, RegisterFilterServer, RegisterMessageFilterClass
from skylark.wire.typed import decode_header, encode_header

log = logging.getLogger(__name__)

REGISTER_INTERVAL_S: Final = 10.0
RETRY_INTERVAL_S: Final = 1.0
_REQUEST_S: Final = 5.0
_MAX_SUSPEND_MS: Final = 30_000
_BRINGS_SUBSCRIPTION: Final = 4
_CLASS_FILTER: Final = 8
_SIZE: Final = struct.Struct(">i")


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class FilterServer:
    """A filter server of one broker; can be started and stopped once."""

    def __init__(self, config: FiltersrvConfig, clock: Callable[[], int] = monotonic_ms) -> None:
        self.config = config
        self._broker_name = ""
        self._pool = Pool()
        self._classes = Classes(config, lambda: self._broker_name, clock)
        self._server = Server(self._handlers())
        self._address = ""
        self._is_registered = True
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens, tells the broker, and returns the port. Raises OSError."""
        bound = await self._server.start(bind(host, port))
        reachable = self.config.filter_server_ip or ("127.0.0.1" if host in ("", "0.0.0.0", "::") else host)
        self._address = f"[{reachable}]:{bound}" if ":" in reachable else f"{reachable}:{bound}"
        await self._register()
        self._task = asyncio.create_task(self._run())
        return bound

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._pool.close()
        await self._classes.close()
        await self._server.stop()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_INTERVAL_S if self._is_registered else RETRY_INTERVAL_S)
            await self._register()
            await self._classes.forget_idle()

    async def _register(self) -> None:
        broker = self.config.connect_which_broker
        request = Frame(RequestCode.REGISTER_FILTER_SERVER, encode_header(RegisterFilterServer(self._address)))
        try:
            answer = await self._pool.request(broker, request, _REQUEST_S)
        except (OSError, TimeoutError) as e:
            self._note(str(e))
            return
        if answer.code == ResponseCode.SUCCESS:
            self._broker_name = answer.fields.get("brokerName", "")
            self._note("")
        else:
            self._note((answer.remark or f"it answers with code {answer.code}").strip())

    def _note(self, failure: str) -> None:
        if failure and self._is_registered:
            log.warning("broker %s does not know this filter server: %s", self.config.connect_which_broker, failure)
        elif not failure and not self._is_registered:
            log.warning("broker %s knows this filter server again", self.config.connect_which_broker)
        self._is_registered = not failure

    def _handlers(self) -> dict[int, Handler]:
        return {RequestCode.REGISTER_MESSAGE_FILTER_CLASS: self._upload, RequestCode.PULL_MESSAGE: self._pull}

    async def _upload(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(RegisterMessageFilterClass, request)
        try:
            await self._classes.register(
                header.topic, header.consumer_group, header.class_name, header.class_crc, request.body
            )
        except Refused as e:
            log.warning("%r uploads %s for %s: %s", connection, header.class_name, header.consumer_group, e)
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"the filter class is not taken: {e}") from None
        return request.reply()

    async def _pull(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(PullMessage, request)
        known = self._classes.get(header.topic, header.consumer_group)
        if known is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "Find Filter class failed, not registered")
        answer = await self._forward(header)
        if answer.code != ResponseCode.SUCCESS:
            return request.reply(answer.code, answer.remark, answer.fields)
        try:
            matches = await known.judge(answer.body)
        except ClassFailed as e:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"do Message Filter Exception, ConsumerGroup: {header.consumer_group} Topic: {header.topic} {e}",
            ) from None
        body = _chosen(answer.body, matches)
        code = ResponseCode.SUCCESS if body else ResponseCode.PULL_RETRY_IMMEDIATELY
        return request.reply(code, answer.remark, answer.fields, body)

    async def _forward(self, header: PullMessage) -> Frame:
        suspend_ms = min(header.suspend_timeout_millis, _MAX_SUSPEND_MS)
        header = msgspec.structs.replace(
            header,
            sys_flag=header.sys_flag & ~_CLASS_FILTER | _BRINGS_SUBSCRIPTION,
            subscription="*",
            expression_type=None,
            suspend_timeout_millis=max(suspend_ms - 1000, 0),  # the consumer must not give up before the broker does
        )
        request = Frame(RequestCode.PULL_MESSAGE, encode_header(header))
        try:
            return await self._pool.request(self.config.connect_which_broker, request, suspend_ms / 1000 + _REQUEST_S)
        except (OSError, TimeoutError) as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"Pull Callback Exception, {e}") from None


def _chosen(records: bytes, matches: list[bool]) -> bytes:
    """The records that match."""
    chosen = []
    at = 0
    for is_wanted in matches:
        (size,) = _SIZE.unpack_from(records, at)
        if is_wanted:
            chosen.append(records[at : at + size])
        at += size
    return b"".join(chosen)
