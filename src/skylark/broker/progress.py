"""Where topics and groups stand: what the queues hold, how far each group has come, who consumes what.

A group that is online is asked about only for topics it subscribes to: offsets of topics that it used to consume would
show a lag that nobody works on. A group that is offline is shown with every topic it has offsets of.

The queues of a static topic are those that this broker has. A group without an offset in one stands at -1 there, not at
0: it may have an offset in a queue of another broker that the logical queue was in before, and whoever asks looks there
then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final

import msgspec

from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups
from skylark.broker.offsets import Offsets
from skylark.broker.stats import Stats
from skylark.broker.topics import Topics
from skylark.broker.turns import Turns, beside, steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store.store import Store
from skylark.wire import fastjson
from skylark.wire.bodies import GroupList, MessageQueue, TopicList
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import EncodedMap, encode_entry
from skylark.wire.frame import MAX_FRAME_BYTES, Frame
from skylark.wire.headers import (
    GetConsumeStats,
    GetConsumeStatsInBroker,
    GetTopicStatsInfo,
    QueryConsumeTimeSpan,
    QueryCorrectionOffset,
    QueryTopicConsumeByWho,
    QueryTopicsByConsumer,
)
from skylark.wire.pop import origin_topic
from skylark.wire.stats import (
    ConsumeOffset,
    ConsumeTimeSpans,
    CorrectionOffsets,
    QueueTimeSpan,
    TopicOffset,
)
from skylark.wire.tables import TopicConfig
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = MAX_FRAME_BYTES - 65_536
_TIME_SPAN_BYTES: Final = 512  # of one queue's, at the most
_LONG_MAX: Final = 2**63 - 1


class _Told(msgspec.Struct, rename="camel"):
    """`TopicStats` as an answer."""

    offset_table: EncodedMap
    topic_put_tps: float


class _ToldStats(msgspec.Struct, rename="camel"):
    """`ConsumeStats` as an answer."""

    consume_tps: float
    offset_table: EncodedMap


class _Entries:
    """What an answer tells, queue by queue, as long as it fits into a frame."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.size_bytes = 0
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Raises RequestFailed if it is too much."""
        self.size_bytes += len(text) + 1
        if self.size_bytes > self._most_bytes:
            raise _too_much()
        self.texts.append(text)


def _too_much() -> RequestFailed:
    return RequestFailed(
        ResponseCode.INVALID_PARAMETER, "there are more queues to tell of than fit into an answer: ask for some of them"
    )


class _Stats:
    """What there is to tell of a group and topics."""

    def __init__(self, most_bytes: int) -> None:
        self.tps = 0.0
        self.lag = 0
        self.in_flight = 0
        self.entries = _Entries(most_bytes)

    def told(self) -> _ToldStats:
        return _ToldStats(self.tps, EncodedMap(self.entries.texts))


class _BrokerStats(msgspec.Struct, rename="camel"):
    """`BrokerConsumeStats` as an answer."""

    broker_addr: str
    consume_stats_list: list[dict[str, list[_ToldStats]]] = []
    total_diff: int = 0
    total_inflight_diff: int = 0


class Progress:
    """Answers questions about positions; changes nothing."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        clients: Clients,
        stats: Stats,
        clock: Callable[[], int],
        broker_addr: str,
        is_static: Callable[[str], bool],
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._is_static = is_static
        self._groups = groups
        self._offsets = offsets
        self._clients = clients
        self._stats = stats
        self._clock = clock
        self._broker_addr = broker_addr

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.GET_TOPIC_STATS_INFO: self._topic_stats,
            RequestCode.GET_CONSUME_STATS: self._consume_stats,
            RequestCode.GET_BROKER_CONSUME_STATS: self._broker_consume_stats,
            RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: self._groups_of_topic,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self._topics_of_group,
            RequestCode.QUERY_CONSUME_TIME_SPAN: self._time_spans,
            RequestCode.QUERY_CORRECTION_OFFSET: self._correction_offsets,
        }

    # What is asked.

    async def topic_stats(self, topic: TopicConfig) -> bytes:
        name = topic.topic_name
        entries = _Entries(_MAX_BODY_BYTES)
        async for queue_id in steps(range(max(topic.read_queue_nums, topic.write_queue_nums))):
            end = max(0, self._store.max_offset(name, queue_id))
            offset = TopicOffset(
                min_offset=max(0, self._store.min_offset(name, queue_id)),
                max_offset=end,
                last_update_timestamp=self._store.store_time(name, queue_id, end - 1) if end else 0,
            )
            entries.add(encode_entry(self._queue(name, queue_id), offset))
        return fastjson.dumps(_Told(EncodedMap(entries.texts), topic_put_tps=self._stats.put_tps(name)))

    async def consume_stats(
        self,
        group: str,
        topics: Iterable[TopicConfig],
        most_bytes: int,
        is_unset: Callable[[str], bool] = lambda topic: False,
        turns: Turns | None = None,
    ) -> _Stats:
        """Where the group stands in each queue of the topics. Raises RequestFailed if that is too much to tell.

        `is_unset(topic)` tells if a group without an offset there stands at -1; `turns` are those of a longer walk.
        """
        stats = _Stats(most_bytes)
        turns = turns or Turns()
        for topic in topics:
            lowest = -1 if is_unset(topic.topic_name) else 0
            async for queue_id in turns.through(range(topic.read_queue_nums)):
                queue = self._queue(topic.topic_name, queue_id)
                offset = self._consume_offset(group, queue, lowest)
                stats.entries.add(encode_entry(queue, offset))
                stats.lag += offset.broker_offset - offset.consumer_offset
                stats.in_flight += offset.pull_offset - offset.consumer_offset
            stats.tps += self._stats.get_tps(group, topic.topic_name)
        return stats

    def topics_to_show(self, group: str, named: Iterable[str] | None = None) -> list[TopicConfig]:
        """The topics, by name or all that the group has offsets of, that exist and that it subscribes to if online."""
        names = sorted(self._offsets.topics_of(group)) if named is None else named
        online = self._clients.group(group)
        if online is not None and online.subscriptions:
            # Who pops a topic consumes the group's retry topic of it too, without saying so.
            names = [name for name in names if origin_topic(name, group) in online.subscriptions]
        return self._existing(names)

    async def broker_consume_stats(self, only_ordered: bool) -> bytes:
        answer = _BrokerStats(self._broker_addr)
        topics_by_group = self._offsets.topics_by_group()
        left_bytes = _MAX_BODY_BYTES
        turns = Turns()
        async for group in turns.through([group.group_name for group in self._groups.all()]):
            shown = self.topics_to_show(group, sorted(topics_by_group.get(group, ())))
            shown = [topic for topic in shown if topic.order or not only_ordered]
            stats = []
            for topic in shown:
                stats.append(await self.consume_stats(group, [topic], left_bytes, turns=turns))
                left_bytes -= stats[-1].entries.size_bytes
            answer.consume_stats_list.append({group: [each.told() for each in stats]})
            answer.total_diff += sum(each.lag for each in stats)
            answer.total_inflight_diff += sum(each.in_flight for each in stats)
        return await beside(lambda: fastjson.dumps(answer))

    def groups_of_topic(self, topic: str) -> list[str]:
        """Groups that are online with the topic in their subscriptions, and those that have consumed it before."""
        return sorted(self._offsets.groups_of(topic) | self._clients.groups_of(topic))

    async def time_spans(self, group: str, topic: TopicConfig) -> list[QueueTimeSpan]:
        if topic.write_queue_nums * _TIME_SPAN_BYTES > _MAX_BODY_BYTES:
            raise _too_much()
        queue_ids = steps(range(topic.write_queue_nums))
        return [self._time_span(group, topic.topic_name, queue_id) async for queue_id in queue_ids]

    async def correction_offsets(self, topic: str, compare_group: str, passed_over: set[str]) -> dict[int, int]:
        """The smallest offset that is still there, of all groups but some, for each queue.

        Where the group to compare is further back than that, the answer is the largest number there is.
        """
        smallest: dict[int, int] = {}
        turns = Turns()
        for group in self._offsets.groups_of(topic) - passed_over:
            async for queue_id, offset in turns.through(list(self._offsets.of(group, topic).items())):
                if offset >= self._store.min_offset(topic, queue_id):
                    smallest[queue_id] = min(offset, smallest.get(queue_id, _LONG_MAX))
        async for queue_id, offset in turns.through(list(self._offsets.of(compare_group, topic).items())):
            if smallest.get(queue_id, _LONG_MAX) > offset:
                smallest[queue_id] = _LONG_MAX
        return smallest

    # The requests.

    async def _topic_stats(self, request: Frame, connection: Connection) -> Frame:
        topic = self._topic(decode_header(GetTopicStatsInfo, request).topic)
        return request.reply(body=await self.topic_stats(topic))

    async def _consume_stats(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(GetConsumeStats, request)
        named = [name for name in (header.topic_list or "").split(";") if name]
        if named:
            # Whoever gives a list wants exactly these, subscribed or not.
            topics = self._existing(named)
        else:
            topics = self.topics_to_show(header.consumer_group, [header.topic] if header.topic else None)
        stats = await self.consume_stats(header.consumer_group, topics, _MAX_BODY_BYTES, self._is_static)
        return request.reply(body=fastjson.dumps(stats.told()))

    async def _broker_consume_stats(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(GetConsumeStatsInBroker, request)
        return request.reply(body=await self.broker_consume_stats(header.order))

    def _groups_of_topic(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(QueryTopicConsumeByWho, request)
        return request.reply(body=fastjson.dumps(GroupList(group_list=self.groups_of_topic(header.topic))))

    def _topics_of_group(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(QueryTopicsByConsumer, request)
        topics = sorted(self._offsets.topics_of(header.group))
        return request.reply(body=fastjson.dumps(TopicList(topic_list=topics, broker_addr=self._broker_addr)))

    async def _time_spans(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(QueryConsumeTimeSpan, request)
        spans = await self.time_spans(header.group, self._topic(header.topic))
        body = ConsumeTimeSpans(consume_time_span_set=spans)
        return request.reply(body=await beside(lambda: fastjson.dumps(body)))

    async def _correction_offsets(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(QueryCorrectionOffset, request)
        passed_over = set((header.filter_groups or "").split(","))
        offsets = await self.correction_offsets(header.topic, header.compare_group, passed_over)
        return request.reply(body=await beside(lambda: fastjson.dumps(CorrectionOffsets(correction_offsets=offsets))))

    # Their parts.

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(self._config.broker_name, queue_id, topic)

    def _topic(self, name: str) -> TopicConfig:
        topic = self._topics.get(name)
        if topic is None:
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return topic

    def _existing(self, names: Iterable[str]) -> list[TopicConfig]:
        """The topics behind the names, each once."""
        return [topic for name in dict.fromkeys(names) if (topic := self._topics.get(name)) is not None]

    def _consume_offset(self, group: str, queue: MessageQueue, lowest: int) -> ConsumeOffset:
        topic, queue_id = queue.topic, queue.queue_id
        consumed = max(lowest, self._offsets.query(group, topic, queue_id))
        return ConsumeOffset(
            broker_offset=max(0, self._store.max_offset(topic, queue_id)),
            consumer_offset=consumed,
            pull_offset=max(consumed, self._offsets.query_pulled(group, topic, queue_id)),
            last_timestamp=max(0, self._store.store_time(topic, queue_id, consumed - 1)) if consumed > 0 else 0,
        )

    def _time_span(self, group: str, topic: str, queue_id: int) -> QueueTimeSpan:
        end = self._store.max_offset(topic, queue_id)
        first_ms = self._store.earliest_store_time(topic, queue_id)
        last_ms = self._store.store_time(topic, queue_id, end - 1)
        consumed = self._offsets.query(group, topic, queue_id)
        consumed_ms = self._store.store_time(topic, queue_id, consumed - 1) if consumed > 0 else first_ms
        delay_ms = 0
        if consumed < end:
            # A group that never consumed, or whose next message has been deleted, has the first one before it.
            next_offset = max(consumed, self._store.min_offset(topic, queue_id))
            delay_ms = self._clock() - self._store.store_time(topic, queue_id, next_offset)
        return QueueTimeSpan(
            message_queue=self._queue(topic, queue_id),
            min_time_stamp=first_ms,
            min_time_stamp_str=_local_time(first_ms),
            max_time_stamp=last_ms,
            max_time_stamp_str=_local_time(last_ms),
            consume_time_stamp=consumed_ms,
            consume_time_stamp_str=_local_time(consumed_ms),
            delay_time=delay_ms,
        )


def _local_time(timestamp_ms: int) -> str:
    """As Apache writes times for people: 2026-11-16#00:43:17:042"""
    local = datetime.fromtimestamp(timestamp_ms // 1000)
    return f"{local:%Y-%m-%d#%H:%M:%S}:{timestamp_ms % 1000:03}"
