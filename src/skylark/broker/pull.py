"""PULL_MESSAGE: read from a queue, or wait until there is something to read.

What a lookup finds decides the answer: FOUND sends the messages; nothing new suspends the request, if the client allows
that, until a message that it wants arrives or its time is up; an offset outside the queue sends the one to go on from.
The answer to a suspended request is made when its client takes it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from functools import partial
from typing import Final

from skylark.broker.arrivals import Arrivals, Waiter, too_late
from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.filterdata import FilterTable
from skylark.broker.filters import BadExpression, Filter, is_by_tag, message_filter, requested_filter, retry_filter
from skylark.broker.groups import Groups
from skylark.broker.offsets import Offsets
from skylark.broker.stats import Stats
from skylark.broker.topics import RETRY_PREFIX, Topics, suggest
from skylark.broker.waiting_filters import WaitingFilters
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.suspended import Suspended
from skylark.selectors import Selector
from skylark.store import ReadResult, ReadStatus, Store
from skylark.wire.bodies import BROADCASTING, Subscription
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import MAX_RECORDS_BYTES, Frame
from skylark.wire.headers import PullMessage
from skylark.wire.tables import PERM_READ, SubscriptionGroupConfig, TopicConfig
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

_COMMIT_OFFSET: Final = 1
_MAY_SUSPEND: Final = 2
_BRINGS_SUBSCRIPTION: Final = 4
_MAX_SUSPEND_MS: Final = 120_000

_CODES: Final = {
    ReadStatus.FOUND: ResponseCode.SUCCESS,
    ReadStatus.MESSAGE_WAS_REMOVING: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.NO_MATCHED_MESSAGE: ResponseCode.PULL_RETRY_IMMEDIATELY,
    ReadStatus.OFFSET_FOUND_NULL: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: ResponseCode.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: ResponseCode.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: ResponseCode.PULL_OFFSET_MOVED,
}


class Pulls:
    """Gives messages to consumers."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        clients: Clients,
        arrivals: Arrivals,
        stats: Stats,
        filters: FilterTable,
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._clients = clients
        self._arrivals = arrivals
        self._stats = stats
        self._filters = filters
        self._waiting = WaitingFilters()

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.PULL_MESSAGE: self.pull, RequestCode.LITE_PULL_MESSAGE: self.pull}

    def pull(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame | None]:
        header = decode_header(PullMessage, request)
        reply, wanted = self._answer(request, header, connection, commits=bool(header.sys_flag & _COMMIT_OFFSET))
        if reply.code == ResponseCode.PULL_NOT_FOUND and header.sys_flag & _MAY_SUSPEND:
            # Registered before anything else can run: a message that arrives from now on wakes this pull.
            timeout_ms = min(header.suspend_timeout_millis, _MAX_SUSPEND_MS)
            if not self._config.long_polling_enable:
                timeout_ms = self._config.short_polling_time_mills
            waiter = self._wait(header, wanted, timeout_ms / 1000, connection)
            # From the start: an operator may have stopped the group or moved its offset meanwhile.
            return Suspended(waiter.arrived, lambda: self._answer(request, header, connection, commits=False)[0])
        return reply

    def _wait(self, header: PullMessage, wanted: Filter, timeout_s: float, connection: Connection) -> Waiter:
        if not wanted.text and not wanted.wants:
            return self._arrivals.wait(header.topic, header.queue_id, wanted.wants, timeout_s, wanted.accepts)
        held = self._waiting.take(wanted, connection.peer[0])
        wanted = held.filter
        waiter = self._arrivals.wait(header.topic, header.queue_id, wanted.wants, timeout_s, wanted.accepts)
        waiter.arrived.add_done_callback(partial(self._waiting.give_back, held))
        return waiter

    def _answer(
        self, request: Frame, header: PullMessage, connection: Connection, *, commits: bool
    ) -> tuple[Frame, Filter]:
        """The answer as things are now, and the filter that it was found with."""
        group, topic = self._check(header, connection)
        wanted = self._filter(header, group, connection)
        reset = self._offsets.take_reset(header.consumer_group, header.topic, header.queue_id)
        if reset is not None:
            return self._reset(request, header, group, topic, reset), wanted
        reply = self._look(request, header, group, topic, wanted)
        if commits:
            self._offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset, connection)
        return reply, wanted

    def _look(
        self,
        request: Frame,
        header: PullMessage,
        group: SubscriptionGroupConfig,
        topic: TopicConfig,
        wanted: Filter,
    ) -> Frame:
        result = self._store.read(
            header.topic,
            header.queue_id,
            header.queue_offset,
            header.max_msg_nums,
            MAX_RECORDS_BYTES,
            wants=wanted.wants,
            accepts=wanted.accepts,
        )
        code = _CODES.get(result.status)
        if code is None:  # no such queue, or an empty one
            code = ResponseCode.PULL_OFFSET_MOVED if header.queue_offset else ResponseCode.PULL_NOT_FOUND
        if code == ResponseCode.PULL_OFFSET_MOVED:
            log.info(
                "%s asked for offset %d of %s-%d, which holds %d to %d: it is sent to %d",
                header.consumer_group, header.queue_offset, header.topic, header.queue_id,
                result.min_offset, result.max_offset, result.next_offset,
            )  # fmt: skip
        body = b""
        if code == ResponseCode.SUCCESS:
            body = b"".join(result.records)
            self._stats.got(header.consumer_group, header.topic, result.count, result.size_bytes)
        else:
            self._stats.missed()
        self._offsets.pulled(header.consumer_group, header.topic, header.queue_id, result.next_offset)
        return request.reply(code, result.status.name, self._fields(result, group, topic), body)

    def _reset(
        self, request: Frame, header: PullMessage, group: SubscriptionGroupConfig, topic: TopicConfig, offset: int
    ) -> Frame:
        """An operator has moved this queue's offset: the consumer is sent there, whatever it asked for."""
        fields = {
            "suggestWhichBrokerId": "0",
            "nextBeginOffset": str(offset),
            "minOffset": str(self._store.min_offset(header.topic, header.queue_id)),
            "maxOffset": str(self._store.max_offset(header.topic, header.queue_id)),
            "topicSysFlag": str(topic.topic_sys_flag),
            "groupSysFlag": str(group.group_sys_flag),
        }
        return request.reply(ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET", fields)

    def _fields(self, result: ReadResult, group: SubscriptionGroupConfig, topic: TopicConfig) -> dict[str, str]:
        broker_id = 0
        if self._config.slave_read_enable:
            broker_id = group.which_broker_when_consume_slowly if result.from_disk else group.broker_id
        return {
            "suggestWhichBrokerId": str(broker_id),
            "nextBeginOffset": str(result.next_offset),
            "minOffset": str(result.min_offset),
            "maxOffset": str(result.max_offset),
            "topicSysFlag": str(topic.topic_sys_flag),
            "groupSysFlag": str(group.group_sys_flag),
        }

    def _check(self, header: PullMessage, connection: Connection) -> tuple[SubscriptionGroupConfig, TopicConfig]:
        if self._arrivals.closed:
            raise too_late()
        if not self._config.broker_permission & PERM_READ:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION, f"the broker[{self._config.broker_ip1}] pulling message is forbidden"
            )
        group = self._groups.get(header.consumer_group, connection)
        if group is None:
            raise RequestFailed(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group [{header.consumer_group}] does not exist, {suggest()}",
            )
        if not group.consume_enable:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}"
            )
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestFailed(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist, apply first please! {suggest()}"
            )
        if not topic.perm & PERM_READ:
            raise RequestFailed(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pulling message is forbidden")
        if not 0 <= header.queue_id < topic.read_queue_nums:
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] topicConfig.readQueueNums:"
                f"[{topic.read_queue_nums}] consumer:[{connection!r}]",
            )
        return group, topic

    def _filter(self, header: PullMessage, group: SubscriptionGroupConfig, connection: Connection) -> Filter:
        """What the group subscribed to: as the request says, or as its members' heartbeats say."""
        try:
            if header.sys_flag & _BRINGS_SUBSCRIPTION:
                self._check_switch(header.expression_type)
                return requested_filter(header.subscription, header.expression_type)
            subscription = self._known_subscription(header, group)
            if subscription.is_by_tag:
                return message_filter(subscription)
            self._check_switch(subscription.expression_type)
            selector = self._known_selector(header, subscription, connection)
        except BadExpression as e:
            raise RequestFailed(
                ResponseCode.SUBSCRIPTION_PARSE_FAILED, f"parse the consumer's subscription failed: {e}"
            ) from None
        if self._config.filter_support_retry and header.topic.startswith(RETRY_PREFIX):
            return retry_filter(lambda topic: self._filters.selector(topic, header.consumer_group))
        return message_filter(subscription, selector)

    def _check_switch(self, expression_type: str | None) -> None:
        """Comes first: to understand an expression takes long."""
        if not self._config.enable_property_filter and not is_by_tag(expression_type):
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"The broker does not support consumer to filter message by {expression_type}",
            )

    def _known_selector(self, header: PullMessage, subscription: Subscription, connection: Connection) -> Selector:
        data = self._filters.get(header.topic, header.consumer_group)
        selector = None if data is None else self._filters.selector(header.topic, header.consumer_group)
        if data is not None and selector is not None and data.client_version >= header.sub_version:
            return selector
        lack = self._filters.lack_of_room(header.consumer_group, subscription, connection.peer[0])
        if data is None or selector is None:
            raise RequestFailed(
                ResponseCode.FILTER_DATA_NOT_EXIST,
                lack or "The broker's consumer filter data is not exist!Your expression may be wrong!",
            )
        raise RequestFailed(
            ResponseCode.FILTER_DATA_NOT_LATEST, lack or "the consumer's consumer filter data not latest"
        )

    def _known_subscription(self, header: PullMessage, group: SubscriptionGroupConfig) -> Subscription:
        members = self._clients.group(header.consumer_group)
        if members is None:
            raise RequestFailed(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's group info not exist{suggest()}")
        if not group.consume_broadcast_enable and members.message_model == BROADCASTING:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] can not consume by broadcast way",
            )
        if self._groups.is_forbidden(header.consumer_group, header.topic):
            raise RequestFailed(
                ResponseCode.NO_PERMISSION,
                f"the consumer group[{header.consumer_group}] is forbidden for topic[{header.topic}]",
            )
        subscription = members.subscriptions.get(header.topic)
        if subscription is None:
            raise RequestFailed(
                ResponseCode.SUBSCRIPTION_NOT_EXIST, f"the consumer's subscription not exist{suggest()}"
            )
        if subscription.sub_version < header.sub_version:
            raise RequestFailed(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
        return subscription
