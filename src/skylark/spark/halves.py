"""Where the half messages of a task are.

Places are held until there are enough of them for an entry of the ledger, and go there: a task holds no more of them
than that for each broker, however many rows it has.
"""

from __future__ import annotations

from array import array
from typing import Final

from skylark.spark.ledger import Ledger, Places
from skylark.spark.outbox import Pack
from skylark.wire.frame import Frame
from skylark.wire.message import SYS_TRANSACTION_ROLLBACK
from skylark.wire.records import parse_message_id

PART_HALVES: Final = 16_384


class Halves:
    """Of one attempt of a task."""

    def __init__(self, ledger: Ledger, group: str) -> None:
        self._ledger = ledger
        self._group = group
        self._held: dict[str, array[int]] = {}
        """by broker: offsets in the queue of halves and in the log, in turn"""
        self._topics: dict[str, str] = {}
        self.parts: list[int] = []
        """the entries of the ledger with the places that are held no more"""

    @property
    def held_count(self) -> int:
        return sum(len(pairs) // 2 for pairs in self._held.values())

    def stored(self, pack: Pack, reply: Frame) -> None:
        pairs = self._held.setdefault(pack.broker, array("q"))
        pairs.extend((int(reply.fields["queueOffset"]), parse_message_id(reply.fields["msgId"])[1]))
        self._topics.setdefault(pack.broker, pack.topic)
        if len(pairs) >= 2 * PART_HALVES:
            self._note(pack.broker)

    def note_all(self) -> None:
        """Brings what is still held to the ledger."""
        for broker in sorted(self._held):
            self._note(broker)

    def roll_back(self) -> None:
        """Nobody else knows of these half messages, so nobody can have decided for them."""
        for broker in sorted(self._held):
            self._ledger.end(self._places(broker), SYS_TRANSACTION_ROLLBACK)
        self._ledger.roll_back(self.parts)

    def _note(self, broker: str) -> None:
        self.parts.append(self._ledger.add_part(self._places(broker)))
        del self._held[broker]

    def _places(self, broker: str) -> Places:
        return Places.pack(broker, self._topics[broker], self._held[broker], self._group)
