"""Who a client is: its id, and which sessions of this process run under which id.

A client id is made as Apache's: `ip@instance`, with `@unit` for a client of a unit. Two clients of one process are two
members of a group, so without an instance name each session has one of its own, as Apache's clustering consumers do.
What has to be found again by the next process (the offsets of a broadcasting member) goes by the lasting id, which has
the instance name `DEFAULT` then, again as with Apache.

A group counts one client id once. Two sessions of one id would be given the same queues, and nobody the others: so in
one process the second is refused.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from skylark.client.errors import RocketMQError

if TYPE_CHECKING:
    from skylark.client.session import Session

DEFAULT_INSTANCE: Final = "DEFAULT"

_guard = threading.Lock()
_last_ns = 0
_running: weakref.WeakSet[Session] = weakref.WeakSet()


def local_ip() -> str:
    """The address that other machines would see; found without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))
            ip: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return ip


def own_instance() -> str:
    """An instance name that no other session has, not even one made within the same tick of the clock."""
    global _last_ns
    with _guard:
        _last_ns = max(time.monotonic_ns(), _last_ns + 1)
        return f"{os.getpid()}#{_last_ns}"


def make_id(ip: str, instance: str, unit: str | None) -> str:
    return f"{ip}@{instance}" + (f"@{unit}" if unit else "")


def register(session: Session) -> None:
    """The session begins to run. Raises RocketMQError if another one runs under its id at the same servers."""
    servers = session.places
    with _guard:
        for other in _running:
            if (
                other is not session
                and other.client_id == session.client_id
                and other.is_alive
                and not servers.isdisjoint(other.places)
            ):
                raise RocketMQError(
                    f"a session with the client id {session.client_id} runs in this process already, and brokers would "
                    f"take both for one member: share that session (session=...), or give this one another instance"
                )
        _running.add(session)


def unregister(session: Session) -> None:
    with _guard:
        _running.discard(session)
