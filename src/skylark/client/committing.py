"""Commits how far a lite-pull consumer is: regularly, when a queue goes to another member, and at the end."""

from __future__ import annotations

import asyncio
from typing import Final

from skylark.client.crew import Worker
from skylark.client.errors import RocketMQError
from skylark.client.failing import Failures
from skylark.client.holding import Holding
from skylark.client.pull_consumer import PullConsumer
from skylark.client.read_ahead import Owned, ReadAhead

_TEND_S: Final = 5.0


class Commits:
    """What the brokers are told of what is done."""

    def __init__(
        self,
        group: str,
        reader: PullConsumer,
        ahead: ReadAhead,
        holding: Holding,
        failures: Failures,
        *,
        is_automatic: bool,
        interval_s: float,
    ) -> None:
        self._group = group
        self._reader = reader
        self._ahead = ahead
        self._holding = holding
        self._failures = failures
        self._is_automatic = is_automatic
        self._interval_s = interval_s if is_automatic else _TEND_S
        self._partings: set[asyncio.Task[None]] = set()  # last commits of queues that were given up

    async def run(self) -> None:
        """Goes on for ever; on the way, it finds threads that are gone."""
        while True:
            await asyncio.sleep(self._interval_s)
            self._holding.look_for_ended()
            if self._is_automatic:
                for owned in list(self._ahead.owned.values()):
                    await self._commit_quietly(owned)

    async def commit(self, owned: Owned) -> None:
        """Raises RocketMQError."""
        offset = owned.done
        if offset is not None and offset != owned.committed:
            await self._reader.commit(owned.queue, offset)
            owned.committed = offset

    def part(self, owned: Owned) -> None:
        """The last commit of a queue that is given up, in the background."""
        if self._is_automatic:
            task = Worker(
                self._commit_quietly(owned), loop=asyncio.get_running_loop(), name=f"last commit of {owned.queue}"
            )
            self._partings.add(task)
            task.add_done_callback(self._partings.discard)

    async def parted(self) -> None:
        """Returns when all last commits so far are done, or have failed."""
        if self._partings:
            await asyncio.wait(self._partings)

    async def _commit_quietly(self, owned: Owned) -> None:
        where = f"commit to {owned.queue.broker_name}"
        try:
            await self.commit(owned)
        except Exception as e:
            defect = None if isinstance(e, RocketMQError) else e
            self._failures.note(where, f"group {self._group} can't {where}: {e}", error=defect)
        else:
            self._failures.works(where)
