"""Namespaces: tenants of one cluster whose topics and groups have the same names and nothing to do with each other.

A name travels with its namespace before it, after the prefix of a retry or dead-letter topic if it has one:

    orders           tenant%orders
    %RETRY%billing   %RETRY%tenant%billing

Users give and get names without it. What belongs to the system has no namespace.
"""

from __future__ import annotations

from typing import Final

from skylark.client.message import MessageQueue
from skylark.client.subscriptions import DLQ_PREFIX, RETRY_PREFIX

SEPARATOR: Final = "%"
_SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
_SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
_SYSTEM_TOPICS: Final = frozenset(
    """
    TBW102 SCHEDULE_TOPIC_XXXX BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC
    RMQ_SYS_TRACE_TOPIC RMQ_SYS_TRANS_OP_HALF_TOPIC RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC
    SELF_TEST_TOPIC OFFSET_MOVED_EVENT CHECKPOINT_TOPIC
    """.split()
)


class Namespace:
    """Puts a namespace before names and takes it off again; an empty one leaves them as they are."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._start = name + SEPARATOR

    def __bool__(self) -> bool:
        return bool(self.name)

    def wrap(self, name: str) -> str:
        """The name as brokers know it. One that has the namespace already stays as it is.

        >>> Namespace("tenant").wrap("%RETRY%billing")
        '%RETRY%tenant%billing'
        """
        if not self.name or not name or _is_system(name):
            return name
        prefix, rest = _split(name)
        return name if rest.startswith(self._start) else f"{prefix}{self._start}{rest}"

    def unwrap(self, name: str) -> str:
        """The name as users know it. One of another namespace stays as it is.

        >>> Namespace("tenant").unwrap("tenant%orders")
        'orders'
        """
        if not self.name:
            return name
        prefix, rest = _split(name)
        return prefix + rest.removeprefix(self._start)

    def wrap_queue(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(queue.broker_name, queue.queue_id, self.wrap(queue.topic)) if self.name else queue

    def unwrap_queue(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(queue.broker_name, queue.queue_id, self.unwrap(queue.topic)) if self.name else queue


def _split(name: str) -> tuple[str, str]:
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


def _is_system(name: str) -> bool:
    return name in _SYSTEM_TOPICS or name.startswith((_SYSTEM_TOPIC_PREFIX, _SYSTEM_GROUP_PREFIX))
