"""What one peer makes this server hold, in bytes: the connection counts it here, and its host's allowance is told.

- Unhandled is what was read and is not done: an unfinished frame, the requests of the backlog, and those that wait,
  with their answers if those were made before. Busy is the part of it that waits for nothing but this server.
- Unread is what was written and is not taken: the outbox of this turn of the loop, and what the transport has held at
  most since the peer stopped to read. Late is the part of it that answers requests that waited, as long as anything is
  unread.

A connection that was dialled is not told of: what is written there was asked for.
"""

from __future__ import annotations

from skylark.net.allowance import UNLIMITED, Allowance
from skylark.wire.framing import FrameDecoder


class Account:
    """Of one connection. Its fields may change several at a time, and then the allowance is told once (`tell_...`)."""

    def __init__(self, decoder: FrameDecoder, *, dialled: bool) -> None:
        """The decoder has the unfinished frame."""
        self.allowance: Allowance = UNLIMITED
        self._decoder = decoder
        self._dialled = dialled
        self.backlog_bytes = 0
        self.waiting_bytes = 0
        self.busy_bytes = 0
        self.unhandled_bytes = 0  # as the allowance knows it
        self.outbox_bytes = 0
        self.blocked_bytes = 0
        self.late_bytes = 0
        self.unread_bytes = 0  # as the allowance knows it
        self._unread_late_bytes = 0  # the same

    @property
    def held_bytes(self) -> int:
        """What is here because of this peer."""
        return self.unread_bytes + self.unhandled_bytes - self.busy_bytes

    def wait(self, size_bytes: int) -> None:
        """A request waits."""
        self.allowance.waiting += 1
        self.waiting_bytes += size_bytes
        self.tell_unhandled()

    def stop_waiting(self, size_bytes: int) -> None:
        self.allowance.waiting -= 1
        self.waiting_bytes -= size_bytes
        self.tell_unhandled()

    def tell_unhandled(self) -> None:
        held_bytes = self._decoder.held_bytes + self.backlog_bytes + self.waiting_bytes
        change_bytes = held_bytes - self.unhandled_bytes
        if change_bytes:
            self.unhandled_bytes = held_bytes
            self.allowance.count_unhandled(change_bytes)

    def tell_unread(self) -> None:
        if self._dialled:
            return
        held_bytes = self.outbox_bytes + self.blocked_bytes
        if not held_bytes:
            self.late_bytes = 0
        late_bytes = min(self.late_bytes, held_bytes)
        change_bytes = held_bytes - self.unread_bytes
        late_change_bytes = late_bytes - self._unread_late_bytes
        if change_bytes or late_change_bytes:
            self.unread_bytes = held_bytes
            self._unread_late_bytes = late_bytes
            self.allowance.count_unread(change_bytes, late_change_bytes)

    def close(self, waiting: int) -> None:
        """The peer is gone, whatever was here because of it too, and so many requests wait no more."""
        self.allowance.waiting -= waiting
        self._decoder.clear()
        self.backlog_bytes = self.waiting_bytes = self.busy_bytes = 0
        self.outbox_bytes = self.blocked_bytes = 0
        self.tell_unhandled()
        self.tell_unread()
