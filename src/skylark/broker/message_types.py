"""What kind a message is, and what follows from it: the queue of one with a priority, and the check by a topic's type.

The kind is read from the properties, in an order that makes the kinds exclude each other. A message with a priority
goes to the queue of that number, or to the last one: consumers that pop read the queues of a topic of the type PRIORITY
from the highest number down.

`message.type` is the attribute of a topic that says which kind it takes; without one it takes NORMAL. Apache's proxy
refuses others and its broker does not. Here the broker does, when `enableTopicMessageTypeCheck` is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from skylark.broker.attributes import MESSAGE_TYPE
from skylark.broker.topics import DLQ_PREFIX, RETRY_PREFIX
from skylark.net.connection import RequestFailed
from skylark.wire.codes import ResponseCode
from skylark.wire.message import (
    PROPERTY_DELAY_LEVEL,
    PROPERTY_LITE_TOPIC,
    PROPERTY_PRIORITY,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TRANSACTION_PREPARED,
    Message,
)
from skylark.wire.numbers import java_count
from skylark.wire.tables import TopicConfig

NORMAL: Final = "NORMAL"
MIXED: Final = "MIXED"
PRIORITY: Final = "PRIORITY"

_DELAYS: Final = frozenset(
    (PROPERTY_DELAY_LEVEL, PROPERTY_TIMER_DELIVER_MS, PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS)
)


def type_of_message(properties: Mapping[str, str]) -> str:
    """The type that a topic must have to take a message with these properties."""
    if properties.get(PROPERTY_TRANSACTION_PREPARED, "").lower() == "true":
        return "TRANSACTION"
    if not _DELAYS.isdisjoint(properties):
        return "DELAY"
    if PROPERTY_SHARDING_KEY in properties:
        return "FIFO"
    if PROPERTY_PRIORITY in properties:
        return PRIORITY
    if PROPERTY_LITE_TOPIC in properties:
        return "LITE"
    return NORMAL


def type_of_topic(topic: TopicConfig) -> str:
    return topic.attributes.get(MESSAGE_TYPE, NORMAL)


def check_type(topic: TopicConfig, properties: Mapping[str, str]) -> None:
    """Raises RequestFailed for a message that is not of the topic's type. Retries and dead letters keep their kind."""
    if topic.topic_name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        return
    expected, actual = type_of_topic(topic), type_of_message(properties)
    if expected not in (actual, MIXED):
        raise RequestFailed(
            ResponseCode.MESSAGE_ILLEGAL,
            f"TopicMessageType validate failed, the expected type is {expected}, but actual type is {actual}",
        )


def place_by_priority(message: Message, topic: TopicConfig) -> None:
    """Moves a message that has a priority to its queue; one of another kind loses the priority."""
    priority = java_count(message.properties[PROPERTY_PRIORITY])
    if priority is None:
        return
    if type_of_message(message.properties) != PRIORITY:
        del message.properties[PROPERTY_PRIORITY]
    elif topic.write_queue_nums > 0:
        message.queue_id = min(priority, topic.write_queue_nums - 1)
