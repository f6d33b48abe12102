"""The same wire over a plain socket, for code without an event loop: Spark's driver and workers.

Requests can be pipelined: `post` several, then `take` the replies by their number in any order. Every wait has the
connection's time limit, and every error names the address.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from itertools import count
from types import TracebackType
from typing import Self

from skylark.net.pool import split_address
from skylark.wire.frame import BadFrame, Frame
from skylark.wire.framing import FrameDecoder, encode_frame

_RECEIVE_BYTES = 1 << 20


class BlockingConnection:
    """One open connection, used by one thread. After an error it is closed and of no more use."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Dials. Raises ConnectionError or TimeoutError, with the address in the text."""
        self.address = address
        self._timeout_s = timeout_s
        self._numbers = count(1)
        self._decoder = FrameDecoder()
        self._replies: dict[int, Frame] = {}
        try:
            self._socket = socket.create_connection(split_address(address), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no connection to {address} within {timeout_s:g} s") from None
        except (OSError, ValueError) as e:
            raise ConnectionError(f"no connection to {address}: {e}") from e
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def limit(self, timeout_s: float) -> None:
        """How long each wait may last from now on."""
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def request(self, request: Frame) -> Frame:
        """Asks and waits for the reply, whatever its code is."""
        return self.take(self.post(request))

    def post(self, request: Frame) -> int:
        """Sends without waiting; the number is for `take`."""
        return self.post_all((request,))[0]

    def post_all(self, requests: Iterable[Frame]) -> list[int]:
        """The same for several at once."""
        numbers = []
        data = bytearray()
        for request in requests:
            request.opaque = next(self._numbers)
            numbers.append(request.opaque)
            data += encode_frame(request)
        try:
            self._socket.sendall(data)
        except OSError as e:
            raise self._broken(e) from e
        return numbers

    def take(self, number: int) -> Frame:
        """The reply to the request that was posted under this number."""
        while number not in self._replies:
            self._receive()
        return self._replies.pop(number)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionError("the other side closed it")
            frames = self._decoder.feed(data)
        except (OSError, BadFrame) as e:
            raise self._broken(e) from e
        # What a server asks of its clients by itself (a group's members changed, say) is of no interest here.
        self._replies.update((frame.opaque, frame) for frame in frames if frame.is_response)

    def _broken(self, error: Exception) -> Exception:
        self.close()
        if isinstance(error, TimeoutError):
            return TimeoutError(f"{self.address} did not answer within {self._timeout_s:g} s")
        return ConnectionError(f"the connection to {self.address} broke: {error}")
