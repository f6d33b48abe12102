"""Where a message waits that is to come later: in the queue of its delay level, or in the queue of timers.

A level goes before a time. A parked message has its real topic and queue in its properties. `delay.py` and `timers.py`
put it back when it is due.

A timer's time is within (T, T + precision]; T, the moment of its slot, becomes its property TIMER_OUT_MS. A message
that has it comes from there, or is a copy of one that did, and does not wait again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from skylark.broker.config import BrokerConfig
from skylark.broker.topics import RETRY_PREFIX, SCHEDULE_TOPIC
from skylark.net.connection import RequestFailed
from skylark.store import TIMER_TOPIC
from skylark.wire.codes import ResponseCode
from skylark.wire.message import (
    PROPERTY_DELAY_LEVEL,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DELAY_MS,
    PROPERTY_TIMER_DELAY_SEC,
    PROPERTY_TIMER_DELETE_KEY,
    PROPERTY_TIMER_DELIVER_MS,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_UNIQUE_KEY,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
    Message,
)
from skylark.wire.numbers import java_int, java_long
from skylark.wire.recall import RecallHandle

_TIMER_PROPERTIES: Final = frozenset((PROPERTY_TIMER_DELAY_SEC, PROPERTY_TIMER_DELAY_MS, PROPERTY_TIMER_DELIVER_MS))
DELAY_PROPERTIES: Final = _TIMER_PROPERTIES | {PROPERTY_DELAY_LEVEL}
_UNFINISHED: Final = frozenset((SYS_TRANSACTION_PREPARED, SYS_TRANSACTION_ROLLBACK))


class Parking:
    """Moves messages that are to come later to where they wait."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._levels = len(config.message_delay_level.split())
        # As Apache takes it: the next smaller of four.
        self.precision_ms = next((step for step in (1000, 500, 200) if config.timer_precision_ms >= step), 100)
        self.timers_at: Callable[[int], int] = lambda slot_ms: 0

    def park(self, message: Message, now_ms: int) -> None:
        """Changes topic and queue of a message that has one of `DELAY_PROPERTIES`. Raises RequestFailed."""
        properties = message.properties
        if message.sys_flag & SYS_TRANSACTION_MASK in _UNFINISHED:
            return
        level = _delay_level(properties)
        if level > 0:
            self._park_by_level(message, level)
        elif (
            message.topic != TIMER_TOPIC
            and PROPERTY_TIMER_OUT_MS not in properties
            and not _TIMER_PROPERTIES.isdisjoint(properties)
        ):
            self._park_by_time(message, now_ms)

    def _park_by_level(self, message: Message, level: int) -> None:
        properties = message.properties
        for name in _TIMER_PROPERTIES:
            properties.pop(name, None)
        level = min(level, self._levels)
        properties[PROPERTY_DELAY_LEVEL] = str(level)
        _move(message, SCHEDULE_TOPIC, level - 1)

    def _park_by_time(self, message: Message, now_ms: int) -> None:
        config = self._config
        if not config.timer_wheel_enable:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, "accurate timer message is not enabled, timerWheelEnable is false"
            )
        deliver_ms = _deliver_ms(message.properties, now_ms)
        limit_ms = config.timer_max_delay_sec * 1000
        is_past = deliver_ms is not None and deliver_ms <= now_ms
        if is_past and PROPERTY_TIMER_DELETE_KEY not in message.properties:
            return
        if deliver_ms is None or is_past or deliver_ms - now_ms > limit_ms:
            raise RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL,
                f"timer message illegal, the delay time should not be bigger than the max delay {limit_ms}ms; or if "
                "set del msg, the delay time should be bigger than the current time",
            )
        slot_ms = (deliver_ms - 1) // self.precision_ms * self.precision_ms
        self._refuse_if_crowded(slot_ms)
        message.properties[PROPERTY_TIMER_OUT_MS] = str(slot_ms)
        _move(message, TIMER_TOPIC, 0)

    def _refuse_if_crowded(self, slot_ms: int) -> None:
        """Above the limit of a slot the more messages are refused, by chance, the nearer it is to twice the limit.

        Apache's broker means the same, but has the odds the wrong way round.
        """
        limit = self._config.timer_congest_num_each_slot
        above = self.timers_at(slot_ms) - limit
        if above > 0 and (above >= limit or random.random() < above / limit):
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"timer message is under flow control, max num limit is {limit * 2} or the current value is greater "
                f"than {limit} and less than {limit * 2}, trigger random flow control",
            )


def recall_handle(properties: dict[str, str], broker_name: str) -> str | None:
    """What the sender of a parked timer can recall it by."""
    slot_ms, topic = java_long(properties.get(PROPERTY_TIMER_OUT_MS)), properties.get(PROPERTY_REAL_TOPIC)
    if slot_ms is None or topic is None or topic.startswith(RETRY_PREFIX):
        return None
    # A millisecond later: the time of the recall is then within the same slot.
    return RecallHandle(topic, broker_name, str(slot_ms + 1), properties[PROPERTY_UNIQUE_KEY]).encode()


def _move(message: Message, topic: str, queue_id: int) -> None:
    message.properties[PROPERTY_REAL_TOPIC] = message.topic
    message.properties[PROPERTY_REAL_QUEUE_ID] = str(message.queue_id)
    message.topic = topic
    message.queue_id = queue_id


def _deliver_ms(properties: dict[str, str], now_ms: int) -> int | None:
    """When a timer is to be delivered; None if that can't be read."""
    for name, since_ms, unit_ms in (
        (PROPERTY_TIMER_DELAY_SEC, now_ms, 1000),
        (PROPERTY_TIMER_DELAY_MS, now_ms, 1),
        (PROPERTY_TIMER_DELIVER_MS, 0, 1),
    ):
        if name in properties:
            number = java_long(properties[name])
            return None if number is None else since_ms + number * unit_ms
    return None


def _delay_level(properties: dict[str, str]) -> int:
    text = properties.get(PROPERTY_DELAY_LEVEL)
    if text is None:
        return 0
    level = java_int(text)
    if level is None:
        raise RequestFailed(
            ResponseCode.MESSAGE_ILLEGAL, f"the property DELAY is {text[:40]!r}: a delay level is a whole number"
        )
    return level
