"""Who was in each consumer group when the broker was stopped, and is expected back after a restart.

A restarted broker hears of a group's members one by one: who has queues here within seconds, the others with their next
heartbeat. A member that asked in between who is in the group saw itself alone, took the queues of all brokers, and both
consumed them until the others had come. So the broker counts those in that it still expects: everybody keeps the queues
that it had.

Nobody waits for long. A broker that was down for minutes expects nobody. A member that says that it leaves is not
expected any more, one that was unknown takes the place of a missing one (so a client that was restarted together with
the broker gets its whole share at once), and after one interval of heartbeats those who are missing are given up.

Clients fetch routes every 30 s. One that did so while the broker was away has given up the broker's queues, and when it
knows of them again, which a heartbeat follows, it takes them with its next turn only, up to 20 s later. So those who
are back are told with their heartbeats to share the queues out.

The table is written when the broker is stopped and taken away when it starts: it is true once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from skylark.store.tables import load, save
from skylark.wire.numbers import Long

log = logging.getLogger(__name__)

EXPECTED_FOR_MS: Final = 40_000
"""A heartbeat's interval, 30 s, and time for the one that just missed the broker to be sent again."""
MAX_DOWN_MS: Final = 300_000
MAX_REMEMBERED: Final = 20_000
_MAX_ID_LENGTH: Final = 255


class _Table(msgspec.Struct, rename="camel"):
    """formerMembers.json; group -> client ids."""

    stopped_ms: Long = 0
    members: dict[str, list[str]] = {}


class FormerMembers:
    """The members that are expected back, by group."""

    def __init__(self, members: Mapping[str, Collection[str]] | None = None) -> None:
        self._expected = {group: set(ids) for group, ids in (members or {}).items() if ids}
        self._known = {group: set(ids) for group, ids in self._expected.items()}
        self._since_ms: int | None = None

    def expected(self, group: str) -> list[str]:
        """The client ids that are still missing."""
        return sorted(self._expected.get(group, ()))

    def has_restarted(self, group: str) -> bool:
        """Whether the group had members before a start that was just now."""
        return group in self._known

    def came(self, group: str, client_id: str) -> None:
        """A client is a member now, again or for the first time."""
        expected = self._expected.get(group)
        if expected is None:
            return
        if client_id not in self._known[group]:
            self._known[group].add(client_id)
            client_id = min(expected, key=lambda missing: (_host(missing) != _host(client_id), missing))
        self.left(group, client_id)

    def left(self, group: str, client_id: str) -> bool:
        """A client will not come, or need not be expected any more; whether it was."""
        expected = self._expected.get(group)
        if expected is None or client_id not in expected:
            return False
        expected.discard(client_id)
        if not expected:
            del self._expected[group]
        return True

    def expire(self, now_ms: int) -> list[str]:
        """Gives up who has not come in time; called every few seconds. The groups that had such members."""
        if self._since_ms is None:
            self._since_ms = now_ms
        if not self._known or 0 <= now_ms - self._since_ms < EXPECTED_FOR_MS:
            return []
        for group, ids in self._expected.items():
            log.info("%d former members of group %s have not come back: its queues go to the others", len(ids), group)
        given_up = list(self._expected)
        self._expected.clear()
        self._known.clear()
        return given_up


def take(directory: Path, now_ms: int) -> FormerMembers:
    """Reads what the last stop wrote, and takes it away. Raises BadTable."""
    path = _path(directory)
    table = load(path, _Table, expendable=True) or _Table()
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        log.warning("%s can't be taken away, and counts again after the next start: %s", path, e)
    if not 0 <= now_ms - table.stopped_ms <= MAX_DOWN_MS:
        return FormerMembers()
    return FormerMembers(table.members)


def write(directory: Path, members: Iterable[tuple[str, list[str]]], now_ms: int) -> None:
    """Writes who is in each group now, as far as they share queues. Raises OSError."""
    remembered: dict[str, list[str]] = {}
    room = MAX_REMEMBERED
    for group, ids in members:
        if len(ids) <= room and max(map(len, ids)) <= _MAX_ID_LENGTH:
            remembered[group] = sorted(ids)
            room -= len(ids)
    if remembered:
        save(_path(directory), _Table(now_ms, remembered))


def _path(directory: Path) -> Path:
    return directory / "formerMembers.json"


def _host(client_id: str) -> str:
    """Where the client runs: an id begins with its address."""
    return client_id.partition("@")[0]
