"""What follows a queue of the broker's own goes on, whatever it finds there: what its followers share.

A record that can't be read, or that says what no broker says, stays so however often it is tried; so does one that the
store refuses to take a copy of, and one whose queue can't be written: it must not stop all others. That is final: it
gets one line in the log, with its place, and the queue goes on. Only a store that takes nothing at all, like one on a
full disk, is waited for; so is a queue of the broker's own, since everything goes through those.
"""

from __future__ import annotations

import logging
import struct
from typing import Final

from skylark.net.connection import RequestFailed
from skylark.store import QueueEntry, Store
from skylark.wire.codes import ResponseCode
from skylark.wire.message import StoredMessage

log = logging.getLogger(__name__)

UNREADABLE: Final = (ValueError, LookupError, ArithmeticError, TypeError, struct.error)
"""What handling a record with something odd in it may raise, beside what is foreseen."""

MOST_BYTES_A_TURN: Final = 1 << 20
"""A turn of a follower that has copied so much ends with that message: large ones hold up the broker as many do."""

_FINAL: Final = (ResponseCode.MESSAGE_ILLEGAL, ResponseCode.SYSTEM_ERROR)


def is_final(failure: RequestFailed) -> bool:
    """Whether the store takes others, but not this message."""
    return failure.code in _FINAL


def pass_over(topic: str, queue_id: int, offset: int, reason: object) -> None:
    """Tells that the message at a place of a queue is not handled; the caller goes on behind it."""
    log.error("%s-%d: message %d is passed over: %s", topic, queue_id, offset, reason)


def message_behind(
    store: Store, entry: QueueEntry | None, topic: str, queue_id: int, offset: int
) -> StoredMessage | None:
    """The message that the entry at a place of a queue leads to; None if the log has none, or another one, there."""
    message = store.message_at(entry.log_offset) if entry is not None else None
    if message is None or (message.topic, message.queue_id, message.queue_offset) != (topic, queue_id, offset):
        return None
    return message
