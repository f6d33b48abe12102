"""Where a consumer begins in a queue in which its group has no offset.

Its client decides that, in two steps: it asks for the group's offset and, if there is none, for the end of the queue or
whatever it is set to. A message that came between the two never reached a group that begins at the end. So a push
consumer of such a group is told the end at once, as its offset. It commits that, so the place is the group's from then
on, whichever member gets the queue next.

Everybody else is told that there is no offset: tools, which are no members; members that pull by themselves and may ask
just to know that, unless the queue is empty, where every beginning is 0; and readers of a retry topic, who begin at 0.
"""

from __future__ import annotations

from typing import Final, Protocol

from skylark.broker.clients import Clients
from skylark.broker.topics import RETRY_PREFIX
from skylark.net.connection import Connection
from skylark.wire.bodies import PUSH

NOWHERE: Final = -1
_FROM_LAST: Final = "CONSUME_FROM_LAST_OFFSET"


class QueueReader(Protocol):
    """What of the store is asked here."""

    def max_offset(self, topic: str, queue_id: int) -> int: ...

    def is_cached(self, topic: str, queue_id: int, offset: int) -> bool: ...


class Beginnings:
    def __init__(self, store: QueueReader, clients: Clients) -> None:
        self._store = store
        self._clients = clients

    def find(self, connection: Connection, group: str, topic: str, queue_id: int) -> int:
        """The offset to tell, or -1 when the client is to find its own."""
        # The first message is still there and in memory: a new group then starts at the beginning.
        if self._store.is_cached(topic, queue_id, 0):
            return 0
        consumers = self._clients.group(group)
        if consumers is None or connection not in consumers.members:
            return NOWHERE
        if consumers.consume_from_where != _FROM_LAST or topic.startswith(RETRY_PREFIX):
            return NOWHERE
        end = self._store.max_offset(topic, queue_id)
        return end if end == 0 or consumers.consume_type == PUSH else NOWHERE
