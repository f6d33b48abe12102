"""Requests that take long stand in line: of each host, one is done at a time.

Such a request goes over many queues, groups or topics, and gathers an answer of up to 16 MB meanwhile. One client can
ask for thousands of them at once in a few bytes each. Side by side they would hold thousands of unfinished answers, and
copies of tables; in line they hold their frames. Each is done when its peer has taken the answers before it: one that
asks for several at once gets all of them, however large they are.

What was begun of a change goes on to its end, and has its place in line as long, also when its client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import msgspec

from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.hosts import host_key
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import MAX_LENIENT_BYTES
from skylark.wire.frame import Frame

MAX_IN_LINE: Final = 512
"""Of a host, with the one that is being done."""

_UNREAD_S: Final = 10.0
_TURNS_TO_WRITE: Final = 2
"""Of the loop, after which it shows whether a peer has taken the answer before."""

LONG: Final = frozenset((
    RequestCode.GET_TOPIC_STATS_INFO, RequestCode.GET_CONSUME_STATS, RequestCode.GET_BROKER_CONSUME_STATS,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, RequestCode.QUERY_TOPICS_BY_CONSUMER, RequestCode.QUERY_CONSUME_TIME_SPAN,
    RequestCode.QUERY_CORRECTION_OFFSET, RequestCode.GET_ALL_TOPIC_CONFIG, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_ALL_CONSUMER_OFFSET, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, RequestCode.GET_ALL_PRODUCER_INFO,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.CLONE_GROUP_OFFSET, RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.CLEAN_UNUSED_TOPIC, RequestCode.QUERY_MESSAGE,
))  # fmt: skip
"""Requests whose work grows with what the broker has, or with what they ask for."""

CHANGES: Final = frozenset((
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.CLONE_GROUP_OFFSET, RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.CLEAN_UNUSED_TOPIC,
))  # fmt: skip
"""Those of them of which a part must not be all that is done."""


_Waiting = Callable[[Frame, Connection], Coroutine[Any, Any, Frame | None]]


class _Line(msgspec.Struct, eq=False):
    length: int = 0
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


class Lines:
    """The lines by host; nothing is kept of a host that has none."""

    def __init__(self, max_in_line: int | None = None) -> None:
        """So many of a host, else MAX_IN_LINE."""
        self._max_in_line = max_in_line
        self._lines: dict[str, _Line] = {}
        self._changes: set[asyncio.Future[Frame | None]] = set()

    def __len__(self) -> int:
        return len(self._lines)

    def in_line(self, handlers: Mapping[int, Handler], codes: Iterable[int] = LONG) -> dict[int, Handler]:
        """The handlers, of which those of `codes` stand in line."""
        waiting = {code: self._waiting(handlers[code]) for code in codes}
        return {**handlers, **waiting, **{code: self._to_the_end(waiting[code]) for code in CHANGES & waiting.keys()}}

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """The time in which a request of a host is done, after those that came before it. Raises RequestFailed."""
        with self._place(host) as line:
            async with line.turn:
                yield

    @contextmanager
    def _place(self, host: str) -> Iterator[_Line]:
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
            yield line
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[key]

    def _to_the_end(self, handler: _Waiting) -> Handler:
        async def answer(request: Frame, connection: Connection) -> Frame | None:
            change = asyncio.ensure_future(handler(request, connection))
            self._changes.add(change)
            change.add_done_callback(self._ended)
            return await asyncio.shield(change)

        return answer

    def _ended(self, change: asyncio.Future[Frame | None]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # looked at: there may be nobody else

    def _waiting(self, handler: Handler) -> _Waiting:
        async def answer(request: Frame, connection: Connection) -> Frame | None:
            refuse_large_body(request)
            with self._place(connection.peer[0]) as line:
                while True:
                    await _until_read(connection)  # not in the others' time
                    async with line.turn:
                        for _ in range(_TURNS_TO_WRITE):
                            await asyncio.sleep(0)
                        if not connection.is_open:
                            return None  # nobody waits for it
                        if connection.is_writable:
                            given = handler(request, connection)
                            return given if given is None or isinstance(given, Frame) else await given

        return answer


def refuse_large_body(request: Frame) -> None:
    """For requests that wait, and say all in their headers. Raises RequestFailed: what waits counts against its host,
    and a few of 16 MB would keep all others there waiting as well.
    """
    if len(request.body) > MAX_LENIENT_BYTES:
        raise RequestFailed(
            ResponseCode.MESSAGE_ILLEGAL,
            f"the request has a body of {len(request.body)} bytes, and may have up to {MAX_LENIENT_BYTES}",
        )


async def _until_read(connection: Connection) -> None:
    """Returns when a peer takes an answer. Raises RequestFailed if that takes too long."""
    if connection.is_writable:
        return
    try:
        async with asyncio.timeout(_UNREAD_S):
            await connection.writable()
    except TimeoutError:
        raise RequestFailed(ResponseCode.SYSTEM_BUSY, "former answers are not read: ask again when they are") from None
