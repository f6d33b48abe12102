"""One TCP connection that speaks frames, in both directions: it answers the peer's requests and sends its own.

A handler takes a request and the connection it came on. It returns the response, or None (the peer gets no answer), or
an awaitable of either where it really has to wait. Responses of one read leave in one write. What a handler waits for
is cancelled when the connection closes.

What a peer can make a server hold is bounded, for each connection here and for all connections of a host by its
`Allowance`:

- What was written and not read. A connection that holds any of it is not read from, and its requests are not handled,
  so that nothing is added but the answers to those few that are under way. A request that waits for an event is
  `Suspended`: its answer is made when the peer takes it, not when the event comes. Answers of other handlers that had
  to wait are dropped if they are large, and what the server sends by itself has little room.
- What was read and not done: an unfinished frame, the requests behind answers that are not read, requests that wait.
- Time: a peer that neither finishes a frame nor takes what was written is aborted by the server (`is_silent`).

A connection that was dialled is always read from: what comes there are answers, and if both ends waited for the other
to read first, neither would. Whoever sends much on it waits until it is `writable`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping
from fcntl import ioctl
from functools import partial
from termios import TIOCOUTQ
from typing import Any, Final, cast

from skylark.net.allowance import UNLIMITED, Allowance
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import MAX_FRAME_BYTES, ONEWAY_FLAG, RESPONSE_FLAG, BadFrame, Frame
from skylark.wire.framing import FrameDecoder, FrameTooLong, encode_frame
from skylark.wire.records import encode_host
from skylark.wire.typed import BadHeader

log = logging.getLogger(__name__)

MAX_WAITING_REQUESTS: Final = 16_384
INTERNAL_ERROR: Final = "the request failed inside this server: its log tells why"
MAX_WAITING_BYTES: Final = 8 << 20
"""Of a connection's requests that wait, and of their answers if those were made before; then it is not read from."""

MAX_PUSHED_BYTES: Final = 64 << 10
"""What a server sends by itself to a peer that does not read; more is dropped."""

LEAST_TAKEN_BYTES: Final = 64 << 10
"""Who takes less of what was written between two looks at it, and sends nothing, is silent."""

CLOSE_S: Final = 10.0
_MAX_OPAQUE: Final = 0x7FFFFFFF
_WRITE_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 10

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


class Suspended:
    """An answer that waits for an event: `answer` makes it once `ready` is done and the peer takes it.

    Until then a peer that does not read costs nothing but the request, and `held_bytes` if the answer is made already.
    If it does not read when the event comes, `pass_on` is called: somebody else may want to know of it.
    """

    def __init__(
        self,
        ready: asyncio.Future[Any],
        answer: Callable[[], Frame | Awaitable[Frame | None] | None],
        pass_on: Callable[[], object] | None = None,
        held_bytes: int = 0,
    ) -> None:
        self.ready = ready
        self.answer = answer
        self.pass_on = pass_on
        self.held_bytes = held_bytes

    def __await__(self) -> Generator[Any, None, Frame | None]:
        return self._wait().__await__()

    async def _wait(self) -> Frame | None:
        """The answer for whoever is no connection."""
        await self.ready
        answer = self.answer()
        return answer if answer is None or isinstance(answer, Frame) else await answer


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
        self._max_frame_bytes = max_frame_bytes
        self._decoder = FrameDecoder(max_frame_bytes)
        self._pending: dict[int, Settle] = {}
        self._writers: list[asyncio.Future[None]] = []  # who waits until the connection takes more
        self._next_opaque = 0
        self._write_blocked = False
        self._is_stopped = False  # no request is handled now
        # What was read: requests behind answers that the peer has not read, those that wait for their handler, and
        # those whose event came but whose answer the peer does not take yet.
        self._backlog: list[Frame] = []
        self._backlog_bytes = 0
        self._waiting: set[asyncio.Future[Any]] = set()
        self._woken: deque[tuple[Frame, Suspended]] = deque()
        self._waiting_bytes = 0
        self._busy_bytes = 0  # the part of it that waits for nothing but this server
        self._unhandled_bytes = 0  # all of that, as the allowance knows it
        # What is written.
        self._outbox: list[bytes] = []  # what this turn of the loop sends, which leaves in one write
        self._outbox_bytes = 0
        self._written_bytes = 0  # in all
        self._blocked_bytes = 0  # what the transport has held at most since the peer stopped to read
        self._pushed_bytes = 0
        self._delayed: set[tuple[object, ...]] = set()  # what is to be sent later; the same once
        self._unread_bytes = 0  # outbox and transport, as the allowance knows it
        self._late_bytes = 0  # answers to requests that waited, as long as anything is unread
        self._unread_late_bytes = 0  # the part of them that is unread, as the allowance knows it
        self._taken_bytes = 0  # when it was looked at last
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.allowance: Allowance = UNLIMITED
        self.peer = ("", 0)
        self.peer_host = b""
        self.last_received_s = self._loop.time()
        self.last_frame_s = self.last_received_s  # the last one that came whole

    def __repr__(self) -> str:
        return f"{self.peer[0]}:{self.peer[1]}"

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if not self._dialled:
            self._transport.set_write_buffer_limits(0)  # `pause_writing` is called whenever anything is left to write
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
        if frames:
            self.last_frame_s = self.last_received_s
            if self._backlog or self._is_stopped:
                self._put_off(frames)
            else:
                self._work(frames)
        if self._decoder.held_bytes or self._unhandled_bytes:
            self._count_unhandled()
            if not self.allowance.unhandled.is_open:
                self.allowance.received(self, len(data), is_finished=bool(frames))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        pending, self._pending = self._pending, {}
        for settle in pending.values():
            settle(ConnectionError(f"the connection to {self!r} closed"))
        self._forget_all()
        self._wake_writers()
        for later in tuple(self._waiting):
            later.cancel()
        if self._closed is not None:
            self._closed(self)

    def pause_writing(self) -> None:
        self._write_blocked = True
        self.throttle()

    def resume_writing(self) -> None:
        self._write_blocked = False
        self._blocked_bytes = 0
        self._pushed_bytes = 0
        was_open = self.allowance.takes_late
        self._count_unread()
        if was_open or not self.allowance.takes_late:  # else the host's connections go on in turn
            self.go_on()

    # What the rest of the program calls.

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """Whether the connection is open and its peer has read enough of what was written."""
        return self.is_open and not self._write_blocked and self.allowance.takes_late

    @property
    def is_amid_frame(self) -> bool:
        return self._decoder.held_bytes > 0

    @property
    def is_behind(self) -> bool:
        """Whether the peer has not read all that was written, or sent more before it had."""
        return self._unread_bytes > 0 or bool(self._backlog)

    @property
    def held_bytes(self) -> int:
        """What is here because of this peer: unread, unfinished or waiting."""
        return self._unread_bytes + self._unhandled_bytes - self._busy_bytes

    @property
    def buffered_bytes(self) -> int:
        """What the transport has still to write."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def unsent_bytes(self) -> int:
        """The same, with what the kernel keeps until the peer has it, where there is anything."""
        size_bytes = self.buffered_bytes
        if self._transport is None or not size_bytes:
            return 0
        return size_bytes + _unacknowledged_bytes(self._transport)

    def is_silent(self, since_s: float) -> bool:
        """Whether the peer finished no frame since then, nor took enough of what was written since the last such
        question."""
        taken_bytes = self._written_bytes - self.buffered_bytes
        is_taking = taken_bytes - self._taken_bytes >= LEAST_TAKEN_BYTES
        self._taken_bytes = taken_bytes
        return self.last_frame_s < since_s and not is_taking

    def close(self, within_s: float = CLOSE_S) -> None:
        """Closes after what was written has left, or some seconds later if the peer does not read it."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
            if self.buffered_bytes:
                self._loop.call_later(within_s, self.abort)

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()

    def go_on(self) -> None:
        """Does what had to wait, as far as the peer and its host's allowance let it."""
        self._is_stopped = self._must_stop()
        self._answer_woken()
        if self._backlog and not self._is_stopped:
            frames, self._backlog = self._backlog, []
            self._backlog_bytes = 0
            self._work(frames)
            self._count_unhandled()
        if self._takes_late:
            self._wake_writers()
        self.throttle()

    def throttle(self) -> None:
        """Reads from the peer exactly while its requests can be handled and there is room for what it sends."""
        self._is_stopped = self._must_stop()
        if self._transport is None or self._transport.is_closing():
            return
        allowance = self.allowance
        if (
            self._is_stopped
            or len(self._waiting) + len(self._woken) >= MAX_WAITING_REQUESTS
            or not (allowance.unhandled.is_open or allowance.reader is self)
        ):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def notify(self, request: Frame, after_s: float = 0.0) -> None:
        """Sends a one-way request, now or some time later. A peer that does not read may miss it."""
        if after_s > 0:
            key = (request.code, *request.fields.values())
            if key not in self._delayed:
                self._delayed.add(key)
                self._loop.call_later(after_s, self._notify_now, key, request)
            return
        request.opaque = self._take_opaque()
        request.flag |= ONEWAY_FLAG
        data = self._encode_request(request)
        if self._write_blocked and not self._dialled:
            self._pushed_bytes += len(data)
            if self._pushed_bytes > MAX_PUSHED_BYTES or not self.allowance.unread.is_open:
                log.warning("%r does not read, and misses a request of code %d", self, request.code)
                return
        self._write_soon(data)

    def _notify_now(self, key: tuple[object, ...], request: Frame) -> None:
        self._delayed.discard(key)
        self.notify(request)

    def begin(self, request: Frame, settle: Settle) -> int:
        """Sends a request and returns at once with its opaque. `settle` is called with the response, once, unless the
        request is forgotten before. Raises ConnectionError or FrameTooLong."""
        if self._transport is None:
            raise ConnectionError(f"the connection to {self!r} is closed")
        opaque = request.opaque = self._take_opaque()
        data = self._encode_request(request)
        self._pending[opaque] = settle
        self._write_soon(data)
        return opaque

    def forget(self, opaque: int) -> None:
        """Nobody waits for that response any more."""
        self._pending.pop(opaque, None)

    async def request(self, request: Frame, timeout_s: float) -> Frame:
        """Sends a request, when the peer takes it, and waits for the response. Raises ConnectionError or
        TimeoutError."""
        future: asyncio.Future[Frame] = self._loop.create_future()

        def settle(answer: Frame | ConnectionError) -> None:
            if future.done():
                return
            if type(answer) is Frame:
                future.set_result(answer)
            else:
                future.set_exception(cast(ConnectionError, answer))

        opaque = -1
        try:
            async with asyncio.timeout(timeout_s):
                if self._write_blocked or not self.allowance.takes_late:
                    await self.writable()
                opaque = self.begin(request, settle)
                return await future
        finally:
            self._pending.pop(opaque, None)

    async def writable(self) -> None:
        """Returns when the peer has read enough of what was written, or the connection is closed."""
        while (self._write_blocked or not self.allowance.takes_late) and self._transport is not None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._writers.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._writers:
                    self._writers.remove(waiter)
                raise

    async def drained(self) -> None:
        """Returns when no request waits for its handler any more."""
        if self._waiting:
            await asyncio.wait(self._waiting)

    @property
    def _takes_late(self) -> bool:
        """Whether what is not urgent can be written."""
        return self._dialled or (not self._write_blocked and self.allowance.takes_late)

    def _must_stop(self) -> bool:
        if self._dialled:
            return False
        return self._write_blocked or not self.allowance.unread.is_open or self._waiting_bytes >= MAX_WAITING_BYTES

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
                    if self._write_blocked or not self.allowance.unread.is_open:
                        self._put_off(frames[done:])
                        return
            elif self._is_stopped:
                self._put_off(frames[done:])
                break
        if out:
            self._write(out)

    def _put_off(self, frames: list[Frame]) -> None:
        self._backlog += frames
        self._backlog_bytes += sum([frame.wire_bytes for frame in frames])
        self._count_unhandled()

    def _write(self, out: list[bytes]) -> None:
        if self._transport is not None:
            data = out[0] if len(out) == 1 else b"".join(out)
            self._written_bytes += len(data)
            self._transport.write(data)
            if self._write_blocked:
                self._blocked_bytes += len(data)
                self._count_unread()
        out.clear()

    def _encode_request(self, request: Frame) -> bytes:
        if self._stamp:
            request.fields = request.fields | self._stamp
        return encode_frame(request)

    def _write_soon(self, data: bytes) -> None:
        """What is written in one turn of the loop leaves in one write, unless it is much."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(data)
        self._outbox_bytes += len(data)
        if self._outbox_bytes >= _WRITE_BYTES:
            self._flush()
        else:
            self._count_unread()

    def _flush(self) -> None:
        if self._outbox:
            self._outbox_bytes = 0
            self._write(self._outbox)
            self._count_unread()

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

    # Requests and their answers.

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
        return self._encode_answer(request, answer)

    def _encode_answer(self, request: Frame, answer: Frame | Awaitable[Frame | None] | None) -> bytes | None:
        """The bytes of an answer, if there is one at once; else it is waited for."""
        if answer is None:
            return None
        if type(answer) is Frame:
            return None if request.flag & ONEWAY_FLAG else self._encode(request, answer)
        if isinstance(answer, Suspended):
            # An answer that is made already has taken its messages, and may wait.
            if not answer.held_bytes and not self.allowance.has_room_to_wait(request.wire_bytes):
                answer.ready.cancel()
                busy = request.reply(ResponseCode.SYSTEM_BUSY, "too many requests of this host wait")
                return self._encode(request, busy)
            self._wait_for(answer.ready, request.wire_bytes + answer.held_bytes, partial(self._wake, request, answer))
        else:
            later: asyncio.Future[Any] = asyncio.ensure_future(cast("Awaitable[Frame | None]", answer))
            self._busy_bytes += request.wire_bytes
            self._wait_for(later, request.wire_bytes, partial(self._finish, request))
        return None

    def _encode(self, request: Frame, answer: Frame) -> bytes:
        try:
            data = encode_frame(answer)
        except FrameTooLong as e:
            return encode_frame(request.reply(ResponseCode.SYSTEM_ERROR, f"there is no room for the answer: {e}"))
        if len(data) - 4 > self._max_frame_bytes:
            remark = f"the answer has {len(data) - 4} bytes, and a frame {self._max_frame_bytes} at most"
            return encode_frame(request.reply(ResponseCode.SYSTEM_ERROR, remark))
        return data

    def _wait_for(
        self, later: asyncio.Future[Any], size_bytes: int, done: Callable[[asyncio.Future[Any]], None]
    ) -> None:
        self._waiting.add(later)
        self.allowance.waiting += 1
        self._waiting_bytes += size_bytes
        self._count_unhandled()
        later.add_done_callback(done)
        if len(self._waiting) + len(self._woken) == MAX_WAITING_REQUESTS or self._waiting_bytes >= MAX_WAITING_BYTES:
            self.throttle()

    def _stop_waiting(self, size_bytes: int) -> None:
        """A request is about to be answered."""
        self.allowance.waiting -= 1
        was_full = self._waiting_bytes >= MAX_WAITING_BYTES
        self._waiting_bytes -= size_bytes
        self._count_unhandled()
        if was_full and self._waiting_bytes < MAX_WAITING_BYTES:
            self._loop.call_soon(self.go_on)
        elif len(self._waiting) + len(self._woken) == MAX_WAITING_REQUESTS - 1:
            self.throttle()

    def _finish(self, request: Frame, later: asyncio.Future[Frame | None]) -> None:
        """Answers a request whose handler had to wait."""
        self._waiting.discard(later)
        if self._transport is None:
            if not later.cancelled():
                later.exception()  # looked at
            return
        self._busy_bytes -= request.wire_bytes
        self._stop_waiting(request.wire_bytes)
        if later.cancelled():
            return
        error = later.exception()
        if error is None:
            answer = later.result()
        else:
            answer = self._failure(request, error)
            # Its frames and its task keep each other, and the request's body, until the next garbage collection.
            error.__traceback__ = error.__context__ = None
        if answer is not None and not request.flag & ONEWAY_FLAG:
            data = self._encode(request, answer)
            # What was read can be read again; an acknowledgement, which has no body, is owed.
            if len(answer.body) > _SMALL_BYTES and not self._takes_late:
                data = self._encode(request, request.reply(ResponseCode.SYSTEM_BUSY, "what was written is not read"))
            self._write_soon(data)

    def _wake(self, request: Frame, suspended: Suspended, ready: asyncio.Future[Any]) -> None:
        """The event came that a request waits for."""
        self._waiting.discard(ready)
        if self._transport is None:
            if not ready.cancelled():
                ready.exception()  # looked at
            return
        if ready.cancelled():
            self._stop_waiting(request.wire_bytes + suspended.held_bytes)
            return
        self._woken.append((request, suspended))
        self._answer_woken()
        if self._woken and suspended.pass_on is not None:
            suspended.pass_on()

    def _answer_woken(self) -> None:
        """Makes answers as long as the peer takes them."""
        while self._woken and self.is_writable:
            request, suspended = self._woken.popleft()
            self._stop_waiting(request.wire_bytes + suspended.held_bytes)
            try:
                answer = suspended.answer()
            except Exception as e:
                answer = self._failure(request, e)
            data = self._encode_answer(request, answer)
            if data is not None:
                self._late_bytes += len(data)
                self._write_soon(data)

    def _failure(self, request: Frame, error: BaseException) -> Frame:
        if isinstance(error, RequestFailed):
            return request.reply(error.code, error.remark)
        if isinstance(error, BadHeader) or isinstance(error, BadFrame):  # noqa: SIM101  # mypyc takes no union of its own
            return request.reply(ResponseCode.SYSTEM_ERROR, str(error))
        log.error("request code %d of %r failed", request.code, self, exc_info=error)
        return request.reply(ResponseCode.SYSTEM_ERROR, INTERNAL_ERROR)

    # What the allowance of the host is told.

    def _count_unhandled(self) -> None:
        held_bytes = self._decoder.held_bytes + self._backlog_bytes + self._waiting_bytes
        change_bytes = held_bytes - self._unhandled_bytes
        if change_bytes:
            self._unhandled_bytes = held_bytes
            self.allowance.count_unhandled(change_bytes)

    def _count_unread(self) -> None:
        if self._dialled:
            return
        held_bytes = self._outbox_bytes + self._blocked_bytes
        if not held_bytes:
            self._late_bytes = 0
        late_bytes = min(self._late_bytes, held_bytes)
        change_bytes = held_bytes - self._unread_bytes
        late_change_bytes = late_bytes - self._unread_late_bytes
        if change_bytes or late_change_bytes:
            self._unread_bytes = held_bytes
            self._unread_late_bytes = late_bytes
            self.allowance.count_unread(change_bytes, late_change_bytes)

    def _forget_all(self) -> None:
        """The peer is gone, and whatever was here because of it."""
        self.allowance.waiting -= len(self._waiting) + len(self._woken)
        self._outbox.clear()
        self._backlog.clear()
        self._woken.clear()
        self._decoder.clear()
        self._outbox_bytes = self._blocked_bytes = self._backlog_bytes = self._waiting_bytes = 0
        self._busy_bytes = 0
        self._count_unhandled()
        self._count_unread()


def _unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """What the kernel keeps. Its buffer takes bytes in lumps, so that the transport's alone tells little."""
    try:
        size = ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
    except (OSError, AttributeError, ValueError):
        return 0
    return int.from_bytes(size, sys.byteorder)
