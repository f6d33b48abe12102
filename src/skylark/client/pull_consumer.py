"""A consumer that reads where you tell it to: you name queue and offset, nothing is remembered unless you commit it.

    async with PullConsumer("localhost:9876", group="audit") as consumer:
        for queue in await consumer.queues("orders"):
            pulled = await consumer.pull(queue, await consumer.min_offset(queue))

It is not a member of its group: it takes no part in sharing queues and does not disturb those that do. The group is the
name under which offsets are committed and by which the broker permits reading.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Self

import msgspec

from skylark.client import offsets
from skylark.client.addresses import NameServers
from skylark.client.errors import ClientClosed, InvalidMessage, NotReachable
from skylark.client.message import MessageQueue
from skylark.client.pulling import Pulled, PullStatus, pull
from skylark.client.session import Session, session_of
from skylark.client.subscriptions import ALL, build_subscription
from skylark.wire.bodies import Subscription
from skylark.wire.codes import RequestCode
from skylark.wire.headers import (
    GetMaxOffset,
    GetMinOffset,
    SearchOffset,
)
from skylark.wire.routes import MASTER_ID

__all__ = ["PullConsumer", "PullStatus", "Pulled"]

MAX_PULL: Final = 1024


def time_ms(when: datetime | int) -> int:
    """Milliseconds since 1970 of a point in time, which may be given as such."""
    return when if isinstance(when, int) else round(when.timestamp() * 1000)


class PullConsumer:
    """Reads messages by queue and offset."""

    def __init__(
        self,
        name_servers: NameServers = None,
        group: str = "DEFAULT_CONSUMER",
        *,
        session: Session | None = None,
        request_timeout_s: float = 3.0,
        namespace: str = "",
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `group`: whose offsets are asked for and committed.
        - `session`: shares the connections of a session; without one, the consumer has its own.
        - `request_timeout_s`: of each request.
        - `namespace`: stands before the names of group and topics on the wire; a session may bring one too.
        """
        self._session = session_of(session, name_servers, namespace, request_timeout_s)
        self._namespace = self._session.namespace
        self.group = self._namespace.wrap(group)
        self._timeout_s = request_timeout_s
        self._started = False
        self._suggested: dict[MessageQueue, int] = {}  # which broker of the name to read from; bounded by the queues

    async def start(self) -> None:
        """Connects; `async with` does it."""
        if not self._started:
            await self._session.acquire()
            self._started = True

    async def close(self) -> None:
        """Leaves the session."""
        if self._started:
            self._started = False
            await self._session.release()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of a topic that can be read, by broker and number. Raises RouteNotFound."""
        self._check_started()
        route = await self._session.routes.get(self._namespace.wrap(topic))
        return [self._namespace.unwrap_queue(queue) for queue in route.read_queues]

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int = 32,
        *,
        tag: str = ALL,
        sql: str | None = None,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Pulled:
        """Up to `max_count` messages from `offset` on; the broker may give fewer. Go on at `next_offset`.

        With `wait_s` the broker waits that long for a message when there is none. `timeout_s` bounds the rest.
        Messages whose body can't be inflated have it as it was sent, and are named in `unreadable`.
        """
        queue = self._namespace.wrap_queue(queue)
        subscription = build_subscription(queue.topic, tag=tag, sql=sql, version=0)
        return await self.pull_for(subscription, queue, offset, max_count, wait_s=wait_s, timeout_s=timeout_s)

    async def min_offset(self, queue: MessageQueue) -> int:
        """The offset of the oldest message that is still there."""
        queue = self._namespace.wrap_queue(queue)
        header = GetMinOffset(queue.topic, queue.queue_id)
        return await self._offset(RequestCode.GET_MIN_OFFSET, queue, header)

    async def max_offset(self, queue: MessageQueue) -> int:
        """The offset that the next message will have."""
        queue = self._namespace.wrap_queue(queue)
        header = GetMaxOffset(queue.topic, queue.queue_id)
        return await self._offset(RequestCode.GET_MAX_OFFSET, queue, header)

    async def offset_for_time(self, queue: MessageQueue, when: datetime | int) -> int:
        """The offset of the first message stored at `when` or later; a number is milliseconds since 1970."""
        queue = self._namespace.wrap_queue(queue)
        header = SearchOffset(queue.topic, queue.queue_id, time_ms(when))
        return await self._offset(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, queue, header)

    async def committed(self, queue: MessageQueue) -> int | None:
        """The offset that the group committed, or None when it never did."""
        queue = self._namespace.wrap_queue(queue)
        await self._check_route(queue)
        offset = await offsets.committed(self._session, self.group, queue, self._timeout_s, is_strict=True)
        return None if offset == offsets.UNKNOWN else offset

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Makes `offset`, that of the next message to read, the group's place in the queue."""
        queue = self._namespace.wrap_queue(queue)
        await self._check_route(queue)
        await offsets.commit(self._session, self.group, queue, offset, self._timeout_s)

    async def pull_for(
        self,
        subscription: Subscription,
        queue: MessageQueue,
        offset: int,
        max_count: int,
        *,
        wait_s: float,
        timeout_s: float | None,
    ) -> Pulled:
        """`pull` with the tags or the expression of a subscription."""
        if not 0 < max_count <= MAX_PULL:
            raise InvalidMessage(f"a pull takes 1 to {MAX_PULL} messages, not {max_count}")
        if offset < 0:
            raise InvalidMessage(f"an offset is 0 or more, not {offset}")
        await self._check_route(queue)
        try:
            pulled = await pull(
                self._session,
                self.group,
                queue,
                subscription,
                offset,
                max_messages=max_count,
                suspend_ms=round(wait_s * 1000),
                brings_subscription=True,
                broker_id=self._suggested.get(queue, MASTER_ID),
                timeout_s=wait_s + (self._timeout_s if timeout_s is None else timeout_s),
            )
        except NotReachable:
            self._suggested.pop(queue, None)  # a slave that is gone must not keep us from the master
            raise
        if pulled.suggested_broker_id == MASTER_ID:
            self._suggested.pop(queue, None)
        else:
            self._suggested[queue] = pulled.suggested_broker_id
        if self._namespace:
            for message in pulled.messages:
                message.topic = self._namespace.unwrap(message.topic)
        return pulled

    async def _offset(self, code: int, queue: MessageQueue, header: msgspec.Struct) -> int:
        await self._check_route(queue)
        return await offsets.ask_offset(self._session, queue, code, header, self._timeout_s)

    async def _check_route(self, queue: MessageQueue) -> None:
        self._check_started()
        if self._session.routes.broker_of(queue) not in self._session.routes.brokers:
            await self._session.routes.get(queue.topic, refresh=True)

    def _check_started(self) -> None:
        if not self._started:
            raise ClientClosed("the consumer is not started, or closed already: use it within `with` or `async with`")
