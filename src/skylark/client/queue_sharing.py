"""Keeps a lite-pull consumer's share of the queues of the topics that it subscribes to.

The brokers hear first what this member wants; then its share is computed, when they say that the group has changed, and
every 20 s in any case. What fails, of whatever kind, is said once and tried again soon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from skylark.client.allocate import Strategy
from skylark.client.errors import RocketMQError
from skylark.client.failing import Failures
from skylark.client.message import MessageQueue
from skylark.client.questions import ConsumerMember
from skylark.client.routes import NOTHING_TO_READ
from skylark.client.session import Session
from skylark.client.sharing import share_of
from skylark.wire.bodies import Subscription

log = logging.getLogger(__name__)

UNBALANCED_PAUSE_S: Final = 1.0


async def look_at(session: Session, topic: str, *, refresh: bool = False) -> None:
    """Asks for the route of a topic that may have none."""
    try:
        await session.routes.get(topic, refresh=refresh)
    except RocketMQError as e:
        log.debug("the route of %s is not known: %s", topic, e)


class QueueSharing:
    """One member's part in sharing out queues."""

    def __init__(
        self,
        session: Session,
        member: ConsumerMember,
        subscriptions: Mapping[str, Subscription],
        failures: Failures,
        *,
        strategy: Strategy,
        interval_s: float,
        own: Callable[[str, Iterable[MessageQueue]], None],
    ) -> None:
        """`own` is told the share of each topic; `subscriptions` may change later on."""
        self._session = session
        self._member = member
        self._subscriptions = subscriptions
        self._failures = failures
        self._strategy = strategy
        self._interval_s = interval_s
        self._own = own
        self._has_joined = False
        self._told: dict[str, int] = {}  # topic -> the version of its subscription that the brokers have heard of
        self._asked = asyncio.Event()

    def soon(self) -> None:
        """Something changed."""
        self._asked.set()

    async def leave(self) -> None:
        """Leaves the group, if this member is in it."""
        self._has_joined = False
        await self._session.remove_consumer(self._member)

    async def run(self, balanced: bool) -> None:
        """Goes on for ever; `balanced` says how the last sharing went."""
        group = self._member.group
        while True:
            try:
                async with asyncio.timeout(self._interval_s if balanced else UNBALANCED_PAUSE_S):
                    await self._asked.wait()
            except TimeoutError:
                pass  # time to look again, told or not
            try:
                balanced = await self.share()
                self._failures.works("join")
            except Exception as e:
                balanced = False
                defect = None if isinstance(e, RocketMQError) else e
                self._failures.note("join", f"group {group} can't be joined: {e}", error=defect)

    async def share(self) -> bool:
        """Brings what is owned in line with what should be; False when that has to be tried again soon."""
        self._asked.clear()
        await self._announce()
        balanced = True
        for topic in list(self._subscriptions):
            what = f"sharing the queues of {topic}"
            try:
                balanced = await self._share_topic(topic) and balanced
                self._failures.works(what)
            except Exception as e:
                balanced = False
                defect = None if isinstance(e, RocketMQError) else e
                text = f"group {self._member.group}: {what} failed, and is tried again: {e}"
                self._failures.note(what, text, error=defect)
        return balanced

    async def _announce(self) -> None:
        """Sees to it that the brokers of all topics know what this member wants, before it takes its share."""
        told = {topic: subscription.sub_version for topic, subscription in self._subscriptions.items()}
        if self._has_joined and told == self._told:
            return
        for topic in told:
            await look_at(self._session, topic)
        self._told = told
        if self._has_joined:
            await self._session.heartbeat()
        else:
            await self._join()

    async def _join(self) -> None:
        await self._session.add_consumer(self._member)
        self._has_joined = True

    async def _share_topic(self, topic: str) -> bool:
        route = await self._session.routes.get(topic)
        share = await share_of(self._session, self._member.group, route, self._strategy)
        if topic in self._subscriptions:
            self._own(topic, share or [])
        reading = f"reading {topic}"
        if route.read_queues:
            self._failures.works(reading)
        else:
            self._failures.note(reading, f"group {self._member.group}: {reading} is not possible: {NOTHING_TO_READ}")
        return share is not None
