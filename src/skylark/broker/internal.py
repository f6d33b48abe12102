"""What is the broker's own: the topics that only it writes to, and the properties that only it sets.

Something follows each of these topics, and believes what it finds there: a delayed message goes to the topic that it
names, an op message ends a transaction, a check point hides messages. Apache closes some of them to clients
(`TopicValidator.isNotAllowedSendTopic`), but not the queue of timers, from which a message goes to any topic that it
names, nor the revive topic. Its other topics of the system are open, as they have to be: clients send their traces to
`rmq_sys_TRACE_DATA_*` and RMQ_SYS_TRACE_TOPIC, and their retries to `%RETRY%` and `%DLQ%`.
"""

from __future__ import annotations

from typing import Final

from skylark.broker.topics import FORBIDDEN_SEND_TOPICS
from skylark.store import TIMER_TOPIC
from skylark.wire.message import (
    PROPERTY_POP_CK,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    SYS_TRANSACTION_MASK,
)
from skylark.wire.pop import REVIVE_TOPIC_PREFIX
from skylark.wire.records import BatchPart, decode_properties, encode_properties

PROPERTY_REVIVED: Final = "__REVIVED"
"""The check point and the offset that a copy in a retry topic is of: after a crash, it is not copied again."""

PROPERTY_LOG_END: Final = "__LOG_END"
"""Where the log ended when a check point's messages were popped: they lie below."""
PROPERTY_EXTENDED: Final = "__EXTENDED"
"""A check point gives more time to a message that was popped before: its group's offset has nothing to do with it."""

INTERNAL_TOPICS: Final = FORBIDDEN_SEND_TOPICS | {TIMER_TOPIC}
INTERNAL_PROPERTIES: Final = frozenset((PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID, PROPERTY_POP_CK, PROPERTY_REVIVED))
"""Clients that send a message on with all that it had bring them along, so they are left out and not refused."""

SENDERS_FLAGS: Final = ~SYS_TRANSACTION_MASK
"""Only the broker says how a transaction stands: a commit is proven by its message, and a half is in no queue."""


def is_internal(topic: str) -> bool:
    """Whether nobody but the broker writes to the topic."""
    return topic in INTERNAL_TOPICS or topic.startswith(REVIVE_TOPIC_PREFIX)


def without_internal(properties: dict[str, str]) -> dict[str, str]:
    """What a client may say about its message."""
    for name in INTERNAL_PROPERTIES:
        properties.pop(name, None)
    return properties


def part_without_internal(part: BatchPart) -> BatchPart:
    return BatchPart(part.flag, part.body, encode_properties(without_internal(decode_properties(part.properties))))
