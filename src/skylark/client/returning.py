"""Giving messages back that could not be consumed, to be tried again or to end as dead letters.

Normally the broker that holds the message copies it to the group's retry topic, after a delay that grows with each try
(`send_back`). When that broker can't do it, and for orderly consumers, which try in place, the message is sent anew to
the retry topic, wherever that is; the receiving broker makes it a dead letter when it was tried often enough.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Final

from skylark.client.errors import BrokerError, NotReachable, RocketMQError
from skylark.client.listening import DEAD_LETTER_LEVEL
from skylark.client.message import Message
from skylark.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES
from skylark.client.session import Session
from skylark.client.subscriptions import retry_topic
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import ConsumerSendMsgBack, SendMessageV2
from skylark.wire.mapping import LOGICAL_BROKER_PREFIX
from skylark.wire.message import (
    PROPERTY_CONSUME_START_TIME,
    PROPERTY_DELAY_LEVEL,
    PROPERTY_MAX_RECONSUME_TIMES,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_RETRY_TOPIC,
    PROPERTY_TRANSACTION_PREPARED,
)
from skylark.wire.records import encode_properties
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 5.0
_NOT_TAKEN_ALONG: Final = (
    PROPERTY_CONSUME_START_TIME,
    PROPERTY_TRANSACTION_PREPARED,
    PROPERTY_RECONSUME_TIME,
    PROPERTY_MAX_RECONSUME_TIMES,
)
_ATTEMPTS: Final = 3
_FIRST_RETRY_LEVEL: Final = 3
_INNER_PRODUCER: Final = "CLIENT_INNER_PRODUCER"

# The broker stored the message; how safely is its own affair.
_STORED: Final = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    )
)


class Returns:
    """The way back for the messages of one group."""

    def __init__(
        self, session: Session, group: str, max_reconsume_times: int | None, now_ms: Callable[[], int]
    ) -> None:
        """Without a limit of the consumer's own, the group's setting at the broker decides when a message is dead."""
        self._session = session
        self._group = group
        self._max_times = max_reconsume_times
        self._now_ms = now_ms

    async def send_back(self, message: Message, delay_level: int, *, may_send_anew: bool = True) -> bool:
        """Gives a message back, or up; False when that did not work, and it has to be tried here again."""
        is_dead = delay_level == DEAD_LETTER_LEVEL
        if message.broker.startswith(LOGICAL_BROKER_PREFIX):  # its place in the log is told by no broker's name
            return may_send_anew and await self.send_anew(message, is_dead=is_dead)
        header = ConsumerSendMsgBack(
            offset=message.log_offset,
            group=self._group,
            delay_level=delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=self._session.namespace.wrap(message.topic),
            max_reconsume_times=self._max_times,
        )
        request = Frame(RequestCode.CONSUMER_SEND_MSG_BACK, encode_header(header))
        try:
            answer = await self._session.ask_broker(message.broker, request, TIMEOUT_S)
            if answer.code != ResponseCode.SUCCESS:
                raise BrokerError(answer.code, answer.remark, message.broker)
        except RocketMQError as e:
            log.warning("%s did not take message %s back: %s", message.broker, message.msg_id, e)
            return may_send_anew and await self.send_anew(message, is_dead=is_dead)
        return True

    async def send_anew(self, message: Message, *, is_dead: bool = False) -> bool:
        """Sends a message to the group's retry topic, at any broker; False when none takes it.

        From there a broker takes it to the dead letters when it was tried too often, and at once if it `is_dead`.
        """
        topic = retry_topic(self._group)
        failure: RocketMQError | None = None
        failed: set[str] = set()
        for _ in range(_ATTEMPTS):
            try:
                route = await self._session.routes.get(topic, refresh=bool(failed))
                queues = [queue for queue in route.write_queues if queue.broker_name not in failed]
                if not queues:
                    raise failure or NotReachable(f"no broker takes messages for {topic}")
                queue = random.choice(queues)
                failed.add(queue.broker_name)
                request = self._anew(message, topic, queue.queue_id, 0 if is_dead else self._max_times)
                answer = await self._session.ask_broker(queue.broker_name, request, TIMEOUT_S)
                if answer.code in _STORED:
                    return True
                failure = BrokerError(answer.code, answer.remark, queue.broker_name)
            except RocketMQError as e:
                failure = e
        log.warning("message %s can't be given back and is tried here again: %s", message.msg_id, failure)
        return False

    def _anew(self, message: Message, topic: str, queue_id: int, max_times: int | None) -> Frame:
        properties = dict(message.properties)
        properties.setdefault(PROPERTY_ORIGIN_MESSAGE_ID, message.msg_id)
        properties[PROPERTY_RETRY_TOPIC] = self._session.namespace.wrap(message.topic)
        properties[PROPERTY_DELAY_LEVEL] = str(_FIRST_RETRY_LEVEL + message.reconsume_times)
        for name in _NOT_TAKEN_ALONG:
            properties.pop(name, None)
        header = SendMessageV2(
            producer_group=_INNER_PRODUCER,
            topic=topic,
            default_topic=DEFAULT_TOPIC,
            default_topic_queue_nums=DEFAULT_TOPIC_QUEUES,
            queue_id=queue_id,
            sys_flag=0,  # the body is inflated by now
            born_timestamp=self._now_ms(),
            flag=message.flag,
            properties=encode_properties(properties).decode(),
            reconsume_times=message.reconsume_times + 1,
            unit_mode=self._session.unit_mode,
            batch=False,
            max_reconsume_times=max_times,
        )
        return Frame(RequestCode.SEND_MESSAGE_V2, encode_header(header), message.body)
