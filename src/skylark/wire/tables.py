"""The records of a broker's tables that travel on the wire too: data versions, topics, consumer groups.

Names, defaults and meaning are those of Apache RocketMQ 5.5; the fields' JSON names are its camelCase.
"""

from __future__ import annotations

from typing import Final

import msgspec

from skylark.wire.enums import RETRY_POLICIES, TOPIC_FILTER_TYPES, EnumName
from skylark.wire.numbers import Int, Long

PERM_READ = 4
PERM_WRITE = 2
PERM_INHERIT = 1

# Bits of a topic's system flag: the topic, or only who subscribes to it, belongs to a unit of a larger deployment.
UNIT_TOPIC = 1
UNIT_SUBSCRIPTION = 2

SINGLE_TAG = "SINGLE_TAG"
EXPONENTIAL = "EXPONENTIAL"
CUSTOMIZED = "CUSTOMIZED"

MAX_QUEUES: Final = 65_536
"""Of a topic. Apache sets no limit, and clients and servers go through the queues one by one, however many there are
said to be."""

_MAX_EXPONENT = 32
_UNUSED_DELAYS = 2
_SECOND_MS, _MINUTE_MS, _HOUR_MS = 1_000, 60_000, 3_600_000
_LEVEL_DELAYS_MS = (
    *(seconds * _SECOND_MS for seconds in (1, 5, 10, 30)),
    *(minutes * _MINUTE_MS for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)),
    *(hours * _HOUR_MS for hours in (1, 2)),
)


class DataVersion(msgspec.Struct, rename="camel"):
    """Tells whether a table has changed. Two are equal only if all three numbers are."""

    state_version: Long = 0
    timestamp_ms: Long = msgspec.field(name="timestamp", default=0)
    counter: Long = 0

    def next_version(self, now_ms: int, state_version: int = 0) -> None:
        """Marks a change: the counter goes up by one and the time is now, whatever the clock did before."""
        self.timestamp_ms = now_ms
        self.state_version = state_version
        self.counter += 1

    def compare(self, other: DataVersion) -> int:
        """1, 0 or -1: which is newer, by state version, then counter, then time."""
        mine = (self.state_version, self.counter, self.timestamp_ms)
        theirs = (other.state_version, other.counter, other.timestamp_ms)
        return (mine > theirs) - (mine < theirs)


class TopicConfig(msgspec.Struct, rename="camel"):
    """A topic of a broker: how many queues it has and who may do what."""

    topic_name: str = ""
    read_queue_nums: Int = 16
    write_queue_nums: Int = 16
    perm: Int = PERM_READ | PERM_WRITE
    topic_filter_type: EnumName = SINGLE_TAG
    topic_sys_flag: Int = 0
    order: bool = False
    attributes: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.topic_filter_type != SINGLE_TAG:
            # An unknown one stays as it is: whoever creates the topic is told.
            self.topic_filter_type = TOPIC_FILTER_TYPES.read(self.topic_filter_type) or self.topic_filter_type


class ExponentialRetryPolicy(msgspec.Struct, rename="camel"):
    """Delays that grow from `initial` to `max` by a factor, in milliseconds."""

    initial: Long = 5_000
    max: Long = 7_200_000
    multiplier: Long = 2

    def delay_ms(self, times: int) -> int:
        """How long to wait before the next try of a message that was tried again `times` times."""
        growth: int = self.multiplier ** min(max(times, 0), _MAX_EXPONENT)
        return min(self.max, self.initial * growth)


class CustomizedRetryPolicy(msgspec.Struct, rename="camel"):
    """The delays one by one, in milliseconds; those of the delay levels unless told otherwise."""

    next: list[Long] = msgspec.field(default_factory=lambda: list(_LEVEL_DELAYS_MS))

    def delay_ms(self, times: int) -> int:
        """The same as with delay levels, of which the first two are never used: the third delay, then the fourth, …"""
        delays_ms = self.next or _LEVEL_DELAYS_MS
        return delays_ms[min(max(times, 0) + _UNUSED_DELAYS, len(delays_ms) - 1)]


class GroupRetryPolicy(msgspec.Struct, rename="camel"):
    """Which of the two policies a group retries by; without an own one, the default delays."""

    type: EnumName = CUSTOMIZED
    exponential_retry_policy: ExponentialRetryPolicy | None = None
    customized_retry_policy: CustomizedRetryPolicy | None = None

    def __post_init__(self) -> None:
        self.type = RETRY_POLICIES.read(self.type) or CUSTOMIZED

    @property
    def own(self) -> ExponentialRetryPolicy | CustomizedRetryPolicy | None:
        """The policy that somebody gave the group; None if it goes by the default."""
        return self.exponential_retry_policy if self.type == EXPONENTIAL else self.customized_retry_policy

    def delay_ms(self, times: int) -> int:
        """How long a message waits for its next try, when it has been tried again `times` times before."""
        return (self.own or CustomizedRetryPolicy()).delay_ms(times)


class SimpleSubscriptionData(msgspec.Struct, rename="camel"):
    """A subscription that was fixed for a group on the server side."""

    topic: str = ""
    expression_type: str | None = None
    expression: str | None = None
    version: Long = 0


class SubscriptionGroupConfig(msgspec.Struct, rename="camel"):
    """A consumer group of a broker."""

    group_name: str = ""
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Int = 1
    retry_max_times: Int = 16
    group_retry_policy: GroupRetryPolicy = msgspec.field(default_factory=GroupRetryPolicy)
    broker_id: Long = 0
    which_broker_when_consume_slowly: Long = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: Int = 0
    consume_timeout_minute: Int = 15
    subscription_data_set: list[SimpleSubscriptionData] | None = None
    attributes: dict[str, str] = {}
