"""One TCP connection that speaks frames, in both directions: it answers the peer's requests and sends its own.

A handler takes a request and the connection it came on. It returns the response, or None (the peer gets no answer), or
an awaitable of either where it really has to wait. Responses of one read leave in one write. What a handler waits for
is cancelled when the connection closes.

Back-pressure: a peer that does not read its answers, or that has too many requests waiting, is not read from. A
connection that was dialled is always read from: what comes there are answers, and if both ends waited for the other to
read first, neither would. Whoever sends much on it waits until it is `writable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final, cast

from skylark.wire.codes import ResponseCode
from skylark.wire.frame import MAX_FRAME_BYTES, ONEWAY_FLAG, RESPONSE_FLAG, BadFrame, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.records import encode_host
from skylark.wire.typed import BadHeader

log = logging.getLogger(__name__)

MAX_WAITING_REQUESTS: Final = 16_384
INTERNAL_ERROR: Final = "the request failed inside this server: its log tells why"
_MAX_OPAQUE: Final = 0x7FFFFFFF
_WRITE_BYTES: Final = 1 << 20

Handler = Callable[[Frame, "Connection"], "Frame | Awaitable[Frame | None] | None"]
Handlers = Mapping[int, Handler]
Settle = Callable[["Frame | ConnectionError"], None]
"""Takes the response to a request, or the error that there will be none. It must not raise."""


class RequestFailed(Exception):
    """Raised by a handler to answer with an error: a response code and a remark that says what to do."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(remark)
        self.code = code
        self.remark = remark


class Connection(asyncio.Protocol):
    """The protocol of a served or of a dialled connection."""

    def __init__(
        self,
        handlers: Handlers,
        opened: Callable[[Connection], None] | None = None,
        closed: Callable[[Connection], None] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        *,
        dialled: bool = False,
        stamp: dict[str, str] | None = None,
    ) -> None:
        """`stamp` goes into the fields of every request that is sent."""
        self._handlers = handlers
        self._stamp = stamp
        self._dialled = dialled
        self._opened = opened
        self._closed = closed
        self._decoder = FrameDecoder(max_frame_bytes)
        self._pending: dict[int, Settle] = {}
        self._outbox: list[bytes] = []  # what this turn of the loop sends, which leaves in one write
        self._writers: list[asyncio.Future[None]] = []  # who waits until the connection takes more
        self._waiting: set[asyncio.Future[Frame | None]] = set()
        self._next_opaque = 0
        self._write_blocked = False
        self._backlog: list[Frame] = []  # what was read, but comes after answers that the peer has not read
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.peer = ("", 0)
        self.peer_host = b""
        self.last_received_s = self._loop.time()

    def __repr__(self) -> str:
        return f"{self.peer[0]}:{self.peer[1]}"

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        name = transport.get_extra_info("peername") or ("0.0.0.0", 0)
        self.peer = (name[0].removeprefix("::ffff:"), name[1])
        self.peer_host = encode_host(*self.peer)
        if self._opened is not None:
            self._opened(self)

    def data_received(self, data: bytes) -> None:
        self.last_received_s = self._loop.time()
        try:
            frames = self._decoder.feed(data)
        except BadFrame as e:
            log.warning("closing %r: %s", self, e)
            self.abort()
            return
        if self._backlog:
            self._backlog += frames
        else:
            self._work(frames)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        pending, self._pending = self._pending, {}
        for settle in pending.values():
            settle(ConnectionError(f"the connection to {self!r} closed"))
        self._outbox.clear()
        self._wake_writers()
        for later in tuple(self._waiting):
            later.cancel()
        if self._closed is not None:
            self._closed(self)

    def pause_writing(self) -> None:
        self._write_blocked = True
        self._throttle()

    def resume_writing(self) -> None:
        self._write_blocked = False
        self._wake_writers()
        if self._backlog:
            frames, self._backlog = self._backlog, []
            self._work(frames)
        self._throttle()

    # What the rest of the program calls.

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """Whether the connection is open and its peer has read enough of what was written."""
        return self.is_open and not self._write_blocked

    def close(self) -> None:
        """Closes after what was written has left."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()

    def notify(self, request: Frame, after_s: float = 0.0) -> None:
        """Sends a one-way request, now or some time later."""
        if after_s > 0:
            self._loop.call_later(after_s, self.notify, request)
            return
        request.opaque = self._take_opaque()
        request.flag |= ONEWAY_FLAG
        self._post(request)

    def begin(self, request: Frame, settle: Settle) -> int:
        """Sends a request and returns at once with its opaque. `settle` is called with the response, once, unless the
        request is forgotten before. Raises ConnectionError."""
        if self._transport is None:
            raise ConnectionError(f"the connection to {self!r} is closed")
        opaque = request.opaque = self._take_opaque()
        self._pending[opaque] = settle
        self._post(request)
        return opaque

    def forget(self, opaque: int) -> None:
        """Nobody waits for that response any more."""
        self._pending.pop(opaque, None)

    async def request(self, request: Frame, timeout_s: float) -> Frame:
        """Sends a request and waits for its response. Raises ConnectionError or TimeoutError."""
        future: asyncio.Future[Frame] = self._loop.create_future()

        def settle(answer: Frame | ConnectionError) -> None:
            if future.done():
                return
            if type(answer) is Frame:
                future.set_result(answer)
            else:
                future.set_exception(cast(ConnectionError, answer))

        opaque = self.begin(request, settle)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._pending.pop(opaque, None)

    async def writable(self) -> None:
        """Returns when the peer has read enough of what was written, or the connection is closed."""
        while self._write_blocked and self._transport is not None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._writers.append(waiter)
            await waiter

    async def drained(self) -> None:
        """Returns when no request waits for its handler any more."""
        if self._waiting:
            await asyncio.wait(self._waiting)

    def _work(self, frames: list[Frame]) -> None:
        """Handles frames until the peer does not read their answers any more; the rest waits for it."""
        out: list[bytes] = []
        size = 0
        for done, frame in enumerate(frames, 1):
            if frame.flag & RESPONSE_FLAG:
                self._settle(frame)
                continue
            answer = self._handle(frame)
            if answer is not None:
                out.append(answer)
                size += len(answer)
                if size >= _WRITE_BYTES:
                    self._write(out)
                    size = 0
                    if self._write_blocked:
                        self._backlog = frames[done:]
                        return
        if out:
            self._write(out)

    def _write(self, out: list[bytes]) -> None:
        if self._transport is not None:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()

    def _post(self, request: Frame) -> None:
        if self._stamp:
            request.fields = request.fields | self._stamp
        self._write_soon(encode_frame(request))

    def _write_soon(self, data: bytes) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(data)

    def _flush(self) -> None:
        if self._outbox:
            self._write(self._outbox)

    def _wake_writers(self) -> None:
        writers, self._writers = self._writers, []
        for waiter in writers:
            if not waiter.done():
                waiter.set_result(None)

    def _take_opaque(self) -> int:
        self._next_opaque = (self._next_opaque + 1) & _MAX_OPAQUE
        return self._next_opaque

    def _settle(self, response: Frame) -> None:
        settle = self._pending.pop(response.opaque, None)
        if settle is not None:
            settle(response)

    def _handle(self, request: Frame) -> bytes | None:
        """The answer, if there is one at once."""
        handler = self._handlers.get(request.code)
        if handler is None:
            log.info("%r asked for request code %d, which is not supported", self, request.code)
            answer: Frame | Awaitable[Frame | None] | None = request.reply(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f" request type {request.code} not supported"
            )
        else:
            try:
                answer = handler(request, self)
            except Exception as e:
                answer = self._failure(request, e)
        if answer is None or type(answer) is Frame:
            return None if answer is None or request.flag & ONEWAY_FLAG else encode_frame(answer)
        later = asyncio.ensure_future(cast("Awaitable[Frame | None]", answer))
        self._waiting.add(later)
        later.add_done_callback(partial(self._finish, request))
        if len(self._waiting) == MAX_WAITING_REQUESTS:
            self._throttle()
        return None

    def _finish(self, request: Frame, later: asyncio.Future[Frame | None]) -> None:
        """Answers a request whose handler had to wait. The answers of one turn of the loop leave in one write."""
        self._waiting.discard(later)
        if len(self._waiting) == MAX_WAITING_REQUESTS - 1:
            self._throttle()
        if later.cancelled():
            return
        error = later.exception()
        answer = later.result() if error is None else self._failure(request, error)
        if answer is not None and not request.flag & ONEWAY_FLAG and self._transport is not None:
            self._write_soon(encode_frame(answer))

    def _failure(self, request: Frame, error: BaseException) -> Frame:
        if isinstance(error, RequestFailed):
            return request.reply(error.code, error.remark)
        if isinstance(error, BadHeader) or isinstance(error, BadFrame):  # noqa: SIM101  # mypyc takes no union of its own
            return request.reply(ResponseCode.SYSTEM_ERROR, str(error))
        log.error("request code %d of %r failed", request.code, self, exc_info=error)
        return request.reply(ResponseCode.SYSTEM_ERROR, INTERNAL_ERROR)

    def _throttle(self) -> None:
        """Reads from the peer exactly while it reads its answers and has room for another waiting request."""
        if self._transport is None or self._transport.is_closing():
            return
        if (self._write_blocked and not self._dialled) or len(self._waiting) >= MAX_WAITING_REQUESTS:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
