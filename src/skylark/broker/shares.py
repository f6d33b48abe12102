"""How the clients of different hosts divide the room of a table among themselves.

A host may hold as much as it leaves free: alone half of the room, beside another that took its half a quarter. So
whoever takes all it can leaves room for those who come later, and who needs little never notices. A share is that large
because many clients may be behind one address. It says only who gets more: what a host holds already it keeps, and may
renew.
"""

from __future__ import annotations

from skylark.net.hosts import host_key


class Shares:
    """How much of a table each host holds, in whatever the table is measured by. A host is given by any of its
    addresses, and the broker itself by ""."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def held(self, host: str) -> int:
        return self._held.get(host_key(host), 0)

    def has_room(self, host: str, more: int, left: int) -> bool:
        """Whether a host may hold so much more, after which so much would be left for all."""
        if more <= 0:
            return True
        return left >= (self.held(host) + more if host else 0)

    def add(self, host: str, more: int) -> None:
        """A host holds more, or less."""
        if host:
            key = host_key(host)
            held = self._held.get(key, 0) + more
            if held:
                self._held[key] = held
            else:
                self._held.pop(key, None)
