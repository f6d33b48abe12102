"""One TCP connection that speaks frames, in both directions: it answers the peer's requests and sends its own.

A handler takes a request and the connection it came on. It returns the response, or None (the peer gets no answer), or
an awaitable of either where it really has to wait. Responses of one read leave in one write. What a handler waits for
is cancelled when the connection closes.

What a peer can make a server hold is counted (`Account`) and bounded, for each connection here and for all connections
of a host by its `Allowance`:

- What was written and not read. A connection that holds any of it is not read from, and its requests are not handled,
  so that nothing is added but the answers to those few that are under way. A request that waits for an event is
  `Suspended`: its answer is made when the peer takes it, not when the event comes. Answers of other handlers that had
  to wait are dropped if they are large, and what the server sends by itself has little room.
- What was read and not done: an unfinished frame, the requests behind answers that are not read, requests that wait.
- The event loop's time: what comes when the host has used its part of a turn waits for the next one (`Turn`), and what
  takes long to look through comes in a body, whose length handlers check, not in a header.
- Time: a peer that neither finishes a frame nor takes what was written is aborted by the server (`is_silent`).

A connection that was dialled is always read from: what comes there are answers, and if both ends waited for the other
to read first, neither would. Whoever sends much on it waits until it is `writable`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from fcntl import ioctl
from functools import partial
from termios import TIOCOUTQ
from time import perf_counter
from typing import Any, Final, Protocol, cast

from skylark.net.account import Account
from skylark.net.allowance import Allowance
from skylark.net.suspended import Suspended
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

MAX_HEADER_BYTES: Final = 256 << 10
"""Of a request that comes here: what the properties of a message can be, and more."""
_DECODED_HEADER_BYTES: Final = 1 << 20  # a longer one is not even read to tell so

MAX_PUSHED_BYTES: Final = 64 << 10
"""What a server sends by itself to a peer that does not read; more is dropped."""

LEAST_TAKEN_BYTES: Final = 64 << 10
"""Who takes less of what was written between two looks at it, and sends nothing, is silent."""

CLOSE_S: Final = 10.0
_MAX_OPAQUE: Final = 0x7FFFFFFF
_WRITE_BYTES: Final = 1 << 20
_SMALL_BYTES: Final = 1 << 10
_FRAME_BYTES: Final = 512
"""For the objects of a request that is put off: the smallest has 29 bytes on the wire."""

Handler = Callable[[Frame, "Connection"], "Frame | Awaitable[Frame | None] | None"]
Handlers = Mapping[int, Handler]
Settle = Callable[["Frame | ConnectionError"], None]
"""Takes the response to a request, or the error that there will be none. It must not raise."""


class Watch(Protocol):
    """Sees the requests that a connection sends, and their responses. It must not raise."""

    def before(self, request: Frame, connection: Connection) -> None:
        """Just before the request is encoded; it may change the fields."""

    def after(self, request: Frame, settle: Settle, connection: Connection) -> Settle:
        """What is called with the response in place of `settle`, which it calls in turn."""


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
        watch: Watch | None = None,
    ) -> None:
        """`stamp` goes into the fields of every request that is sent, and `watch` sees it."""
        self._handlers = handlers
        self._stamp = stamp
        self._watch = watch
        self._dialled = dialled
        self._opened = opened
        self._closed = closed
        self._max_frame_bytes = max_frame_bytes
        self._decoder = (
            FrameDecoder(max_frame_bytes) if dialled else FrameDecoder(max_frame_bytes, _DECODED_HEADER_BYTES)
        )
        self._account = Account(self._decoder, dialled=dialled)
        self._pending: dict[int, Settle] = {}
        self._writers: list[asyncio.Future[None]] = []  # who waits until the connection takes more
        self._next_opaque = 0
        self._write_blocked = False
        self._is_stopped = False  # no request is handled now
        self._awaits_turn = False  # its host has used its part of this turn of the loop
        # What was read: requests behind answers that the peer has not read, those that wait for their handler, and
        # those whose event came but whose answer the peer does not take yet.
        self._backlog: list[Frame] = []
        self._waiting: set[asyncio.Future[Any]] = set()
        self._woken: deque[tuple[Frame, Suspended]] = deque()
        self._unpassed: list[Suspended] = []  # those of them that wait for a turn, not for the peer
        # What is written.
        self._outbox: list[bytes] = []  # what this turn of the loop sends, which leaves in one write
        self._written_bytes = 0  # in all
        self._pushed_bytes = 0
        self._delayed: set[tuple[object, ...]] = set()  # what is to be sent later; the same once
        self._taken_bytes = 0  # when it was looked at last
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
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
            elif not self.allowance.turn.is_open:
                self._put_off(frames)
                self._await_turn()
            else:
                self._work(frames)
        if self._decoder.held_bytes or self._account.unhandled_bytes:
            self._account.tell_unhandled()
            if not self.allowance.unhandled.is_open:
                self.allowance.received(self, len(data), is_finished=bool(frames))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        pending, self._pending = self._pending, {}
        for settle in pending.values():
            settle(ConnectionError(f"the connection to {self!r} closed"))
        self._outbox.clear()
        self._backlog.clear()
        self._account.close(len(self._waiting) + len(self._woken))
        self._woken.clear()
        self._give_away()
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
        self._pushed_bytes = 0
        was_open = self.allowance.takes_late
        self._account.blocked_bytes = 0
        self._account.tell_unread()
        if was_open or not self.allowance.takes_late:  # else the host's connections go on in turn
            self.go_on()

    # What the rest of the program calls.

    @property
    def allowance(self) -> Allowance:
        """That of the peer's host."""
        return self._account.allowance

    @allowance.setter
    def allowance(self, allowance: Allowance) -> None:
        self._account.allowance = allowance

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_writable(self) -> bool:
        """Whether the connection is open and its peer has read enough of what was written to be sent what can wait."""
        return self.is_open and not self._write_blocked and self.allowance.takes_late

    @property
    def is_amid_frame(self) -> bool:
        return self._decoder.held_bytes > 0

    @property
    def missing_bytes(self) -> int:
        """How much may still come of the frame that is not whole."""
        return self._decoder.missing_bytes

    @property
    def busy_bytes(self) -> int:
        """Of requests that wait for nothing but this server."""
        account = self._account
        return account.busy_bytes + (account.backlog_bytes if self._awaits_turn else 0)

    @property
    def is_behind(self) -> bool:
        """Whether the peer has not read all that was written, or sent more before it had."""
        return self._account.unread_bytes > 0 or bool(self._backlog)

    @property
    def held_bytes(self) -> int:
        """What is here because of this peer: unread, unfinished or waiting."""
        return self._account.held_bytes

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
        if self._backlog and not self._is_stopped and not self.allowance.turn.is_open:
            self._await_turn()
        elif self._backlog and not self._is_stopped:
            frames, self._backlog = self._backlog, []
            self._account.backlog_bytes = 0
            self._work(frames)
            self._account.tell_unhandled()
        if self.is_writable:
            self._wake_writers()
        self.throttle()

    def take_turn(self) -> None:
        """Goes on with what its host had no time for."""
        self._awaits_turn = False
        self.go_on()

    def throttle(self) -> None:
        """Reads from the peer exactly while its requests can be handled and there is room for what it sends."""
        self._is_stopped = self._must_stop()
        if self._transport is None or self._transport.is_closing():
            return
        allowance = self.allowance
        if (
            self._is_stopped
            or self._awaits_turn
            or len(self._waiting) + len(self._woken) >= MAX_WAITING_REQUESTS
            or not (allowance.unhandled.is_open or allowance.reader is self)
        ):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def notify(self, request: Frame, after_s: float = 0.0) -> bool:
        """Sends a one-way request, now or some time later. False if the peer misses it, because it does not read."""
        if after_s > 0:
            key = (request.code, *request.fields.values())
            if key not in self._delayed:
                self._delayed.add(key)
                self._loop.call_later(after_s, self._notify_now, key, request)
            return True
        request.opaque = self._take_opaque()
        request.flag |= ONEWAY_FLAG
        data = self._encode_request(request)
        if self._write_blocked and not self._dialled:
            self._pushed_bytes += len(data)
            if self._pushed_bytes > MAX_PUSHED_BYTES or not self.allowance.unread.is_open:
                log.warning("%r does not read, and misses a request of code %d", self, request.code)
                return False
        self._write_soon(data)
        return True

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
        if self._watch is not None:
            settle = self._watch.after(request, settle, self)
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
                if not self.is_writable:
                    await self.writable()
                opaque = self.begin(request, settle)
                return await future
        finally:
            self._pending.pop(opaque, None)

    async def writable(self) -> None:
        """Returns when the peer has read enough of what was written, or the connection is closed."""
        while self._transport is not None and not self.is_writable:
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

    def _must_stop(self) -> bool:
        if self._dialled:
            return False
        account = self._account
        return self._write_blocked or not account.allowance.unread.is_open or account.waiting_bytes >= MAX_WAITING_BYTES

    def _await_turn(self) -> None:
        if not self._awaits_turn:
            self._awaits_turn = True
            self.allowance.turn.queue(self)
            self.throttle()

    def _work(self, frames: list[Frame]) -> None:
        """Handles frames until the peer does not read their answers any more, or its host has no time left; the rest
        waits for that."""
        out: list[bytes] = []
        size = 0
        turn = self.allowance.turn
        began_s = perf_counter()
        for done, frame in enumerate(frames, 1):
            if frame.flag & RESPONSE_FLAG:
                self._settle(frame)
                continue
            answer = self._handle(frame)
            ended_s = perf_counter()
            turn.use(ended_s - began_s)
            began_s = ended_s
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
            if not turn.is_open and done < len(frames):
                self._put_off(frames[done:])
                self._await_turn()
                break
        if out:
            self._write(out)

    def _put_off(self, frames: list[Frame]) -> None:
        self._backlog += frames
        self._account.backlog_bytes += sum([frame.wire_bytes + _FRAME_BYTES for frame in frames])
        self._account.tell_unhandled()

    def _write(self, out: list[bytes]) -> None:
        if self._transport is not None:
            data = out[0] if len(out) == 1 else b"".join(out)
            self._written_bytes += len(data)
            self._transport.write(data)
            if self._write_blocked:
                self._account.blocked_bytes += len(data)
                self._account.tell_unread()
        out.clear()

    def _encode_request(self, request: Frame) -> bytes:
        if self._stamp:
            request.fields = request.fields | self._stamp
        if self._watch is not None:
            self._watch.before(request, self)
        return encode_frame(request)

    def _write_soon(self, data: bytes) -> None:
        """What is written in one turn of the loop leaves in one write, unless it is much."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(data)
        account = self._account
        account.outbox_bytes += len(data)
        if account.outbox_bytes >= _WRITE_BYTES:
            self._flush()
        else:
            account.tell_unread()

    def _flush(self) -> None:
        if self._outbox:
            self._account.outbox_bytes = 0
            self._write(self._outbox)
            self._account.tell_unread()

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
        if request.wire_bytes - len(request.body) > MAX_HEADER_BYTES and not self._dialled:
            remark = f"the header of the request has {request.wire_bytes - len(request.body)} bytes"
            answer: Frame | Awaitable[Frame | None] | None = request.reply(
                ResponseCode.MESSAGE_ILLEGAL, f"{remark}, and may have up to {MAX_HEADER_BYTES}"
            )
        elif handler is None:
            log.info("%r asked for request code %d, which is not supported", self, request.code)
            answer = request.reply(
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
            self._account.busy_bytes += request.wire_bytes
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
        account = self._account
        self._waiting.add(later)
        account.wait(size_bytes)
        later.add_done_callback(done)
        if len(self._waiting) + len(self._woken) == MAX_WAITING_REQUESTS or account.waiting_bytes >= MAX_WAITING_BYTES:
            self.throttle()

    def _stop_waiting(self, size_bytes: int) -> None:
        """A request is about to be answered."""
        account = self._account
        was_full = account.waiting_bytes >= MAX_WAITING_BYTES
        account.stop_waiting(size_bytes)
        if was_full and account.waiting_bytes < MAX_WAITING_BYTES:
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
        self._account.busy_bytes -= request.wire_bytes
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
            # What was read can be read again; an acknowledgement, which has no body, is owed, and so is what a server
            # asked for.
            if len(answer.body) > _SMALL_BYTES and not self._dialled and not self.is_writable:
                data = self._encode(request, request.reply(ResponseCode.SYSTEM_BUSY, "what was written is not read"))
            self._write_soon(data)

    def _wake(self, request: Frame, suspended: Suspended, ready: asyncio.Future[Any]) -> None:
        """The event came that a request waits for."""
        self._waiting.discard(ready)
        if self._transport is None:
            if not ready.cancelled():
                ready.exception()  # looked at
                suspended.give_away()
            return
        if ready.cancelled():
            self._stop_waiting(request.wire_bytes + suspended.held_bytes)
            return
        self._woken.append((request, suspended))
        self._unpassed.append(suspended)
        self._answer_woken()

    def _answer_woken(self) -> None:
        """Makes answers as long as the peer takes them."""
        turn = self.allowance.turn
        while self._woken and self.is_writable:
            if not turn.is_open:
                self._await_turn()
                return
            began_s = perf_counter()
            request, suspended = self._woken.popleft()
            suspended.pass_on = None
            self._stop_waiting(request.wire_bytes + suspended.held_bytes)
            try:
                answer = suspended.answer()
            except Exception as e:
                answer = self._failure(request, e)
            data = self._encode_answer(request, answer)
            if data is not None:
                self._account.late_bytes += len(data)
                self._write_soon(data)
            turn.use(perf_counter() - began_s)
        self._give_away()

    def _give_away(self) -> None:
        """What the peer does not take now, or did already, is not for it alone."""
        unpassed, self._unpassed = self._unpassed, []
        for suspended in unpassed:
            suspended.give_away()

    def _failure(self, request: Frame, error: BaseException) -> Frame:
        if isinstance(error, RequestFailed):
            return request.reply(error.code, error.remark)
        if isinstance(error, BadHeader) or isinstance(error, BadFrame):  # noqa: SIM101  # mypyc takes no union of its own
            return request.reply(ResponseCode.SYSTEM_ERROR, str(error))
        log.error("request code %d of %r failed", request.code, self, exc_info=error)
        return request.reply(ResponseCode.SYSTEM_ERROR, INTERNAL_ERROR)


def _unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """What the kernel keeps. Its buffer takes bytes in lumps, so that the transport's alone tells little."""
    try:
        size = ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
    except (OSError, AttributeError, ValueError):
        return 0
    return int.from_bytes(size, sys.byteorder)
