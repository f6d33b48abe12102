"""Requests that take long stand in line: of each host, one is done at a time.

Such a request goes over many queues, groups or topics, and gathers an answer of up to 16 MB meanwhile. One client can
ask for thousands of them at once in a few bytes each. Side by side they would hold thousands of unfinished answers, and
copies of tables; in line they hold their frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.hosts import host_key
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

MAX_IN_LINE: Final = 512
"""Of a host, with the one that is being done."""

LONG: Final = frozenset((
    RequestCode.GET_TOPIC_STATS_INFO, RequestCode.GET_CONSUME_STATS, RequestCode.GET_BROKER_CONSUME_STATS,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, RequestCode.QUERY_TOPICS_BY_CONSUMER, RequestCode.QUERY_CONSUME_TIME_SPAN,
    RequestCode.QUERY_CORRECTION_OFFSET, RequestCode.GET_ALL_TOPIC_CONFIG, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_ALL_CONSUMER_OFFSET, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, RequestCode.GET_ALL_PRODUCER_INFO,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.CLONE_GROUP_OFFSET, RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.QUERY_MESSAGE,
))  # fmt: skip
"""Requests whose work grows with what the broker has, or with what they ask for."""


class _Line(msgspec.Struct, eq=False):
    length: int = 0
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


class Lines:
    """The lines by host; nothing is kept of a host that has none."""

    def __init__(self, max_in_line: int | None = None) -> None:
        """So many of a host, else MAX_IN_LINE."""
        self._max_in_line = max_in_line
        self._lines: dict[str, _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def in_line(self, handlers: Mapping[int, Handler], codes: Iterable[int] = LONG) -> dict[int, Handler]:
        """The handlers, of which those of `codes` stand in line."""
        return {**handlers, **{code: self._waiting(handlers[code]) for code in codes}}

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """The time in which a request of a host is done, after those that came before it. Raises RequestFailed."""
        key = host_key(host)
        line = self._lines.setdefault(key, _Line())
        most = self._max_in_line or MAX_IN_LINE
        if line.length >= most:
            raise RequestFailed(
                ResponseCode.SYSTEM_BUSY,
                f"{most} requests of {host} that take long are not done yet: ask again later",
            )
        line.length += 1
        try:
            async with line.turn:
                yield
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[key]

    def _waiting(self, handler: Handler) -> Handler:
        async def answer(request: Frame, connection: Connection) -> Frame | None:
            async with self.turn(connection.peer[0]):
                given = handler(request, connection)
                return given if given is None or isinstance(given, Frame) else await given

        return answer
