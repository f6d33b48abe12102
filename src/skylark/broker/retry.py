"""CONSUMER_SEND_MSG_BACK: a message that could not be consumed goes to its group's retry topic, later each time, and to
the dead-letter topic in the end.

It waits in the delay queues first, at the level the consumer named or at `3 + times tried`, so 10 s, 30 s, 1 m, ... A
group with a retry policy of its own waits as long as that says, or up to the next delay level. (Apache's broker keeps
the policy for its proxy and passes over it here: whoever gives a group a policy wants it to count.)

A message that has no room for what a retry says goes to the dead letters as it is: refused, it would come back to its
consumer for ever and hold up the group's offset.

Each dead letter, whoever buried it, is told in the log and counted.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from skylark.broker.config import BrokerConfig
from skylark.broker.following import is_final
from skylark.broker.groups import Groups
from skylark.broker.internal import PROPERTY_REVIVED
from skylark.broker.put import Put
from skylark.broker.stats import Stats
from skylark.broker.topics import DLQ_PREFIX, MAX_RETRY_NAME_LENGTH, RETRY_PREFIX, Topics, suggest
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store import Appended, Store
from skylark.store.api import parse_delay_levels
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import ConsumerSendMsgBack
from skylark.wire.message import (
    PROPERTY_DELAY_LEVEL,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT_STORE_OK,
    Message,
    StoredMessage,
    message_id,
)
from skylark.wire.numbers import INT_MAX
from skylark.wire.tables import PERM_READ, PERM_WRITE, UNIT_SUBSCRIPTION, GroupRetryPolicy
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

_DLQ_QUEUES: Final = 1
_FIRST_RETRY_LEVEL: Final = 3


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def bury(message: Message, group: str, topics: Topics) -> None:
    """Sends a message to its group's dead letters instead, at once."""
    message.topic = DLQ_PREFIX + group
    message.queue_id = random.randrange(_DLQ_QUEUES)
    message.properties.pop(PROPERTY_DELAY_LEVEL, None)
    topics.create_for_send_back(message.topic, _DLQ_QUEUES, PERM_READ | PERM_WRITE, 0)


def buried(message: Message, group: str, origin: str, appended: Appended, stats: Stats, reason: object = "") -> None:
    """Tells of a dead letter that is stored; `origin` is the topic that it was sent to."""
    properties = message.properties
    message_id = properties.get(PROPERTY_UNIQUE_KEY) or properties.get(PROPERTY_ORIGIN_MESSAGE_ID) or ""
    log.warning(
        "message %.100s of topic %s, tried %d times, is a dead letter of group %s now, at offset %d%s",
        message_id, origin, message.reconsume_times, group, appended.queue_offset, reason and f": {reason}",
    )  # fmt: skip
    stats.dead_letter(group, origin)


def origin_of(properties: Mapping[str, str], topic: str, topics: Topics) -> str:
    """The topic that a message was sent to first, if its properties name one that there is; else the given one."""
    origin = properties.get(PROPERTY_RETRY_TOPIC, topic)
    return origin if origin in topics else topic


class Retries:
    """Takes back what consumers could not handle."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        put: Put,
        topics: Topics,
        groups: Groups,
        stats: Stats,
        clock: Callable[[], int],
    ) -> None:
        self._config = config
        self._store = store
        self._put = put
        self._topics = topics
        self._groups = groups
        self._stats = stats
        self._clock = clock
        self._delays_ms = parse_delay_levels(config.message_delay_level)

    def handlers(self) -> dict[int, Handler]:
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        header = decode_header(ConsumerSendMsgBack, request)
        group = self._groups.get(header.group, connection)
        if group is None:
            raise RequestFailed(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"subscription group not exist, {header.group} {suggest()}"
            )
        if not self._config.broker_permission & PERM_WRITE:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION, f"the broker[{self._config.broker_ip1}] sending message is forbidden"
            )
        if group.retry_queue_nums <= 0:
            return request.reply()
        sys_flag = UNIT_SUBSCRIPTION if header.unit_mode else 0
        name = retry_topic(header.group)
        is_too_long = len(name) > MAX_RETRY_NAME_LENGTH  # there is no such topic: only dead letters are left
        if is_too_long:
            name = DLQ_PREFIX + header.group
        topic = self._topics.create_for_send_back(
            name, _DLQ_QUEUES if is_too_long else group.retry_queue_nums, PERM_READ | PERM_WRITE, sys_flag
        )
        if topic is None:
            raise RequestFailed(
                ResponseCode.SERVICE_NOT_AVAILABLE, f"{name} can't be created: the broker has too many topics"
            )
        if not topic.perm & PERM_WRITE:
            raise RequestFailed(
                ResponseCode.NO_PERMISSION, f"the topic[{topic.topic_name}] sending message is forbidden"
            )
        original = self._store.message_at(header.offset)
        if original is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {header.offset}")
        limit = group.retry_max_times if header.max_reconsume_times is None else header.max_reconsume_times
        is_spent = is_too_long or original.reconsume_times >= limit or header.delay_level < 0
        message = self._again(original)
        origin = origin_of(message.properties, original.topic, self._topics)
        reason: object = ""
        if is_spent:
            bury(message, header.group, self._topics)
        else:
            message.topic = topic.topic_name
            message.queue_id = random.randrange(min(group.retry_queue_nums, topic.write_queue_nums))
            level = header.delay_level or self._level(group.group_retry_policy, original.reconsume_times)
            message.properties[PROPERTY_DELAY_LEVEL] = str(level)
        try:
            appended = self._put.one(message, self._clock())
        except RequestFailed as e:
            if not is_final(e):
                raise
            is_spent, reason = True, f"it can't be tried again: {e}"
            message.properties = dict(original.properties)
            bury(message, header.group, self._topics)
            appended = self._put.copy(message, self._clock())
        self._stats.sent_back(header.group, origin)
        if is_spent:
            buried(message, header.group, origin, appended, self._stats, reason)
        reply = request.reply()
        # The consumer forgets the message once it has this answer, so it waits for the disk whatever the message says.
        return self._put.when_flushed(appended, reply) if self._put.is_synchronous else reply

    def _level(self, policy: GroupRetryPolicy, times: int) -> int:
        if policy.own is None:
            return _FIRST_RETRY_LEVEL + times
        wanted_ms = policy.delay_ms(times)
        levels = enumerate(self._delays_ms, 1)
        return next((level for level, delay_ms in levels if delay_ms >= wanted_ms), len(self._delays_ms))

    @staticmethod
    def _again(original: StoredMessage) -> Message:
        properties = dict(original.properties)
        properties.pop(PROPERTY_REVIVED, None)
        properties.setdefault(PROPERTY_RETRY_TOPIC, original.topic)
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message_id(original.store_host, original.log_offset))
        properties[PROPERTY_WAIT_STORE_OK] = "false"
        return Message(
            original.topic,
            0,
            original.body,
            properties,
            original.flag,
            original.sys_flag,
            original.born_timestamp_ms,
            original.born_host,
            min(original.reconsume_times + 1, INT_MAX),
        )
