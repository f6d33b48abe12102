"""How many requests wait because the broker asks a client on somebody's behalf.

Each keeps some 6 KB until the client has answered or has had its seconds, though it came in a hundred bytes, and a
client may never answer. So they are counted, and divided among the hosts that ask (`shares.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from skylark.broker.shares import Shares
from skylark.net.connection import Connection, RequestFailed
from skylark.wire.codes import ResponseCode

MAX_QUESTIONS: Final = 4_096


class Questions:
    def __init__(self, max_questions: int = MAX_QUESTIONS) -> None:
        self._max_questions = max_questions
        self._shares = Shares()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def check_room(self, asker: Connection, questions: int = 1) -> None:
        """Raises RequestFailed if there is none."""
        host = asker.peer[0]
        if not self._shares.has_room(host, questions, self._max_questions - self._count - questions):
            raise RequestFailed(
                ResponseCode.SYSTEM_BUSY,
                f"{questions} clients can't be asked now: {host} waits for {self._shares.held(host)} answers, all wait "
                f"for {self._count}, of {self._max_questions}: ask again in some seconds",
            )

    @contextmanager
    def counted(self, asker: Connection, questions: int = 1) -> Iterator[None]:
        """For as long as `asker` waits for so many answers. Raises RequestFailed if there is no room."""
        self.check_room(asker, questions)
        host = asker.peer[0]
        self._add(host, questions)
        try:
            yield
        finally:
            self._add(host, -questions)

    def _add(self, host: str, more: int) -> None:
        self._count += more
        self._shares.add(host, more)
