"""JSON bodies that say how a broker is doing: positions of topics and groups, counters, runtime info.

`fastjson.dumps(struct)` gives the bytes that Apache's `RemotingSerializable` writes, `fastjson.decode(data, type)`
reads them. The tables by queue have whole objects as keys.
"""

from __future__ import annotations

import msgspec

from skylark.wire.bodies import MessageQueue, Subscription
from skylark.wire.numbers import Int, Long


class TopicOffset(msgspec.Struct, rename="camel", kw_only=True):
    """What a queue holds; the time is that of its last message, 0 if it never had one."""

    last_update_timestamp: Long = 0
    max_offset: Long = 0
    min_offset: Long = 0


class TopicStats(msgspec.Struct, rename="camel", kw_only=True):
    offset_table: dict[MessageQueue, TopicOffset] = {}
    topic_put_tps: float = 0.0


class ConsumeOffset(msgspec.Struct, rename="camel", kw_only=True):
    """Where a group stands in a queue: the broker's end, what it has consumed, what it has pulled."""

    broker_offset: Long = 0
    consumer_offset: Long = 0
    last_timestamp: Long = 0
    pull_offset: Long = 0


class ConsumeStats(msgspec.Struct, rename="camel", kw_only=True):
    consume_tps: float = 0.0
    offset_table: dict[MessageQueue, ConsumeOffset] = {}

    @property
    def lag(self) -> int:
        """Messages that wait to be consumed."""
        return sum(queue.broker_offset - queue.consumer_offset for queue in self.offset_table.values())

    @property
    def in_flight(self) -> int:
        """Messages that were pulled and are not consumed yet."""
        return sum(queue.pull_offset - queue.consumer_offset for queue in self.offset_table.values())


class BrokerConsumeStats(msgspec.Struct, rename="camel", kw_only=True):
    """All groups of a broker: a map with one entry for each group, with one `ConsumeStats` for each of its topics."""

    broker_addr: str | None = None
    consume_stats_list: list[dict[str, list[ConsumeStats]]] = []
    total_diff: Long = 0
    total_inflight_diff: Long = 0


class KeyValues(msgspec.Struct, rename="camel", kw_only=True):
    """Apache's KVTable: the runtime info."""

    table: dict[str, str] = {}


class QueueTimeSpan(msgspec.Struct, rename="camel", kw_only=True):
    """The store times of a queue's first and last message and of the last one consumed; -1 where there is none.

    The times as text are for people, in the broker's time zone. `delay_time` is the age of the next message to consume.
    """

    consume_time_stamp: Long = 0
    consume_time_stamp_str: str | None = None
    delay_time: Long = 0
    max_time_stamp: Long = 0
    max_time_stamp_str: str | None = None
    message_queue: MessageQueue
    min_time_stamp: Long = 0
    min_time_stamp_str: str | None = None


class ConsumeTimeSpans(msgspec.Struct, rename="camel", kw_only=True):
    consume_time_span_set: list[QueueTimeSpan] = []


class CorrectionOffsets(msgspec.Struct, rename="camel", kw_only=True):
    """The smallest consumed offset of each queue among a topic's groups."""

    correction_offsets: dict[Int, Long] = {}


class StatsItem(msgspec.Struct, kw_only=True):
    """A counter over a window: its sum, the sum a second, and the sum of an average call."""

    avgpt: float = 0.0
    sum: Long = 0
    tps: float = 0.0


class BrokerStatsData(msgspec.Struct, rename="camel", kw_only=True):
    stats_day: StatsItem
    stats_hour: StatsItem
    stats_minute: StatsItem


class ConsumeQueueEntry(msgspec.Struct, rename="camel", kw_only=True):
    """An entry of a consume queue: where its record is in the log, and its tag code."""

    bit_map: str | None = None
    eval: bool = False
    extend_data_json: str | None = None
    msg: str | None = None
    physic_offset: Long
    physic_size: Int
    tags_code: Long


class ConsumeQueue(msgspec.Struct, rename="camel", kw_only=True):
    filter_data: str | None = None
    max_queue_index: Long = 0
    min_queue_index: Long = 0
    queue_data: list[ConsumeQueueEntry] = []
    subscription_data: Subscription | None = None
