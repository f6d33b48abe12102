"""Keeps this broker known to every name server: at the start, every 30 s, at once when a topic changes, and not any
more after its end.

Name servers are independent: each is told by a loop of its own, and one that is away, hangs or is something else costs
nothing but a log line. Those who wait for them (a producer whose message made a topic, the start and the end of the
broker) wait for `MAX_WAIT_S` at most, and not at all for a name server that let somebody wait in vain before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from skylark.broker.announcement import Announcement
from skylark.broker.config import BrokerConfig
from skylark.broker.static_topics import StaticTopics
from skylark.broker.topics import Topics
from skylark.net.pool import Pool
from skylark.wire.bodies import BadBody, decode_body
from skylark.wire.codes import ResponseCode
from skylark.wire.routes import KVTable
from skylark.wire.tables import TopicConfig

log = logging.getLogger(__name__)

MAX_WAIT_S: Final = 1.0
"""For all name servers together; a producer waits for 3 s by default."""

_QUESTION_S: Final = 3.0


class Registration:
    """The broker's side of the name servers' routes."""

    def __init__(
        self, config: BrokerConfig, topics: Topics, address: str, ha_address: str, static_topics: StaticTopics
    ) -> None:
        self._topics = topics
        self._announcement = Announcement(config, topics, address, ha_address, static_topics)
        self._pool = Pool()
        servers = filter(None, config.namesrv_addr.split(";"))
        self._links = [_Link(server, config, self._announcement, self._pool, topics) for server in servers]
        self._tasks: list[asyncio.Task[None]] = []

    def set_filter_servers(self, addresses: Callable[[], list[str]]) -> None:
        """Where consumers may have their messages filtered."""
        self._announcement.filter_servers = addresses

    async def start(self) -> None:
        """Registers, again and again until `stop`; returns when the name servers that answer know this broker."""
        # One that has not noticed this broker's last end must not keep what it knows from before: a permission, say.
        self._topics.renew()
        self._tasks = [asyncio.create_task(link.run()) for link in self._links]
        await self.published()

    async def stop(self) -> None:
        """Says goodbye, so that clients learn of the end before their connections tell them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.leave() for link in self._links if not link.is_slow))
        self._pool.close()

    def topics_changed(self, _: list[TopicConfig]) -> None:
        """Registers again as soon as possible; many changes at once cost one registration."""
        self._announcement.changed()
        for link in self._links:
            link.changed.set()

    async def published(self) -> None:
        """Returns when the name servers that answer know the topics as they are now; at once after `stop`."""
        self.topics_changed([])
        rounds = {link.next_round: link for link in self._links if not link.is_slow}
        if rounds:
            _, late = await asyncio.wait(rounds, timeout=MAX_WAIT_S)
            for each in late:
                rounds[each].let_wait()


class _Link:
    """One name server, and the loop that tells it."""

    def __init__(
        self, server: str, config: BrokerConfig, announcement: Announcement, pool: Pool, topics: Topics
    ) -> None:
        self.changed = asyncio.Event()
        self.next_round: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when what is true now has been told, or could not be."""
        self.is_slow = False
        """It does not answer: nobody waits for it until it does."""
        self._server = server
        self._config = config
        self._announcement = announcement
        self._pool = pool
        self._topics = topics
        self._trouble = ""  # why it does not know this broker

    async def run(self) -> None:
        """Tells the name server for ever."""
        try:
            while True:
                await self._round(await self._is_changed())
        finally:
            self.next_round.set_result(None)  # and stays so: whoever comes now waits no more

    async def leave(self) -> None:
        """Tells it that the broker ends."""
        try:
            await self._pool.request(self._server, self._announcement.goodbye(), MAX_WAIT_S)
        except OSError as e:
            log.info("name server %s was not told of the end: %s", self._server, e)

    def let_wait(self) -> None:
        """Somebody waited in vain."""
        self.is_slow = True
        if not self._trouble:
            self._note(f"name server {self._server} has not answered for {MAX_WAIT_S:g} s: nobody waits until it does")

    async def _is_changed(self) -> bool:
        """Waits for a change, or for the next registration without one."""
        try:
            async with asyncio.timeout(self._config.register_name_server_period / 1000):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def _round(self, is_changed: bool) -> None:
        # Who asks from here on waits for the round after this one: this one may have read the topics already.
        this_round, self.next_round = self.next_round, asyncio.get_running_loop().create_future()
        self.changed.clear()
        try:
            await self._tell(is_changed)
        except Exception:
            log.exception("the registration failed, and is tried again")
        finally:
            this_round.set_result(None)

    async def _tell(self, is_changed: bool) -> None:
        """Notes how the registration went."""
        server = self._server
        try:
            trouble = await self._register(is_changed)
        except TimeoutError as e:
            self.is_slow = True
            self._note(f"name server {server} does not answer, and is tried again", e)
        except OSError as e:
            self.is_slow = False
            self._note(f"name server {server} can't be reached, and is tried again", e)
        else:
            self.is_slow = False
            if trouble:
                self._note(trouble)
            elif self._trouble:
                self._trouble = ""
                log.warning("name server %s knows this broker again", server)

    async def _register(self, is_changed: bool) -> str:
        """Tells the name server, unless it need not be; returns why it did not take it. Raises OSError."""
        server = self._server
        parts = await self._announcement.parts()
        force = is_changed or (self._config.force_register and len(parts) == 1)
        # A small question shows soon whether a connection of long ago still leads there; if not, there will be another.
        is_known = (not force or self._pool.is_open(server)) and await self._is_known()
        if is_known and not force:
            return ""
        for part in parts:
            response = await self._pool.request(server, await part.request(), self._timeout_s)
            if response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                return f"{server} is no name server but, it seems, a broker: correct -n or namesrvAddr"
            if response.code != ResponseCode.SUCCESS:
                return f"name server {server} refused the registration: {response.remark}"
            if response.body:  # the ordered topics, if the name server is set to tell
                try:
                    ordered = decode_body(KVTable, response.body).table
                except BadBody as e:
                    return f"name server {server} answers with what can't be read: {e}"
                self._topics.mark_ordered(ordered)
        return ""

    async def _is_known(self) -> bool:
        """Whether the name server says that it knows the topics as they are."""
        try:
            question = self._announcement.question()
            response = await self._pool.request(self._server, question, min(_QUESTION_S, self._timeout_s))
        except OSError:
            return False
        return response.code == ResponseCode.SUCCESS and response.fields.get("changed") == "false"

    @property
    def _timeout_s(self) -> float:
        return self._config.register_broker_timeout_mills / 1000

    def _note(self, trouble: str, reason: object = "") -> None:
        """Warns once of a trouble that lasts."""
        if self._trouble != trouble:
            self._trouble = trouble
            log.warning("%s%s", trouble, f": {reason}" if reason else "")
