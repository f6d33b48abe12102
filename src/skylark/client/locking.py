"""Locks on queues at their brokers: an orderly consumer only works on a queue while it holds the lock.

A lock lasts 60 s at the broker and is asked for again every 20 s; the consumer itself relies on it for 30 s only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from skylark.client.errors import BrokerError, RocketMQError
from skylark.client.session import Session
from skylark.wire.bodies import BadBody, LockedQueues, LockRequest, MessageQueue, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 3.0


class QueueLocks:
    """Asks brokers for locks, one request a broker."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        self._failing: set[str] = set()

    async def lock(self, queues: Iterable[MessageQueue]) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """The queues that are locked for this member now, and those whose broker did not answer."""
        answers = await asyncio.gather(
            *(self._lock(broker, group) for broker, group in self._by_broker(queues).items())
        )
        locked = {queue for answer in answers if isinstance(answer, set) for queue in answer}
        unknown = {queue for answer in answers if isinstance(answer, list) for queue in answer}
        return locked, unknown

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Gives locks back. If a broker does not hear it, they expire."""
        await asyncio.gather(*(self._unlock(broker, group) for broker, group in self._by_broker(queues).items()))

    async def _lock(self, broker: str, queues: list[MessageQueue]) -> set[MessageQueue] | list[MessageQueue]:
        """Locked queues as a set; all queues as a list when it is not known whether they are."""
        try:
            answer = await self._ask(RequestCode.LOCK_BATCH_MQ, broker, queues)
            locked = set(decode_body(LockedQueues, answer.body).lock_ok_mq_set)
        except (RocketMQError, BadBody) as e:
            if broker not in self._failing:
                self._failing.add(broker)
                log.warning("%s can't lock queues at %s and goes on trying: %s", self._group, broker, e)
            return queues
        self._failing.discard(broker)
        return locked

    async def _unlock(self, broker: str, queues: list[MessageQueue]) -> None:
        try:
            await self._ask(RequestCode.UNLOCK_BATCH_MQ, broker, queues)
        except RocketMQError as e:
            log.info("%s did not unlock %d queues at %s, they expire: %s", self._group, len(queues), broker, e)

    async def _ask(self, code: int, broker: str, queues: list[MessageQueue]) -> Frame:
        body = LockRequest(client_id=self._session.client_id, consumer_group=self._group, mq_set=queues)
        answer = await self._session.ask_broker(broker, Frame(code, {}, encode_body(body)), TIMEOUT_S)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark, broker)
        return answer

    def _by_broker(self, queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
        groups: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            groups.setdefault(self._session.routes.broker_of(queue), []).append(queue)
        return groups
