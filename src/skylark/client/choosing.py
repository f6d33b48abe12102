"""Which queue of its topic a message goes to, where its sender has a say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skylark.client.calling import call
from skylark.client.errors import InvalidMessage
from skylark.client.message import MessageQueue
from skylark.wire.records import java_hash

Select = Callable[[Sequence[MessageQueue], Any], MessageQueue]
"""Picks a queue of those that a topic has, by the argument of the call."""


Choice = MessageQueue | Callable[[Sequence[MessageQueue]], MessageQueue]
"""The queue that the sender named, or how one of the topic's is picked."""


def choice_of(
    queue: MessageQueue | None, select: Select | None, arg: Any, ordering_key: str | int | None
) -> Choice | None:
    """What a call says about the queue; None leaves it to the producer. Raises InvalidMessage for several answers."""
    if (queue is not None) + (select is not None) + (ordering_key is not None) > 1:
        raise InvalidMessage("queue, select and ordering_key exclude each other")
    if queue is not None and not isinstance(queue, MessageQueue):
        raise InvalidMessage(f"queue is {queue!r}; it must be a MessageQueue, one of those that `queues` gives")
    if select is not None:
        if not callable(select):
            raise InvalidMessage(f"select is {select!r}; it must be a function of the queues and `arg`")
        return lambda queues: call(select, list(queues), arg)  # the route's own list stays as it is
    if ordering_key is not None:
        return lambda queues: select_by_hash(queues, ordering_key)
    return queue


def select_by_hash(queues: Sequence[MessageQueue], key: Any) -> MessageQueue:
    """The queue that Apache's SelectMessageQueueByHash picks: messages of one key share a queue."""
    if isinstance(key, int):
        value = key
        if not -(1 << 31) <= key < 1 << 31:
            bits = key & 0xFFFFFFFFFFFFFFFF
            value = ((bits ^ bits >> 32) + 0x80000000 & 0xFFFFFFFF) - 0x80000000  # Long.hashCode
    else:
        value = java_hash(str(key))
    return queues[abs(value) % len(queues)]
