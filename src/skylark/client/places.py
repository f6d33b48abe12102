"""Where a broadcasting member keeps its offsets, so that its next start finds them.

    <directory>/<lasting id>/<group>       with offsets.json, offsets.json.bak and offsets.lock
    <directory>/<lasting id>#2/<group>     the second member of the group on this machine at the same time, and so on

The lasting id is `ip@DEFAULT`, as Apache's client has it for broadcasting, or the client id of a session with an
instance name. A member takes the first place that nobody has, and has it until it ends, however it ends: so members
that run side by side never share a file, and each start goes on where a member has stopped.

The lock is a record lock of the process, which no child inherits; within the process a set says what is taken.

Versions before this one had a directory for each start, `ip@<process id>#<number>`. The first place, when it is new,
takes over the newest of those files whose process is over; no start could have found them any more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from pathlib import Path
from typing import Final

from skylark.client.identity import DEFAULT_INSTANCE

log = logging.getLogger(__name__)

FILE_NAME: Final = "offsets.json"
_LOCK_NAME: Final = "offsets.lock"
_MAX_PLACES: Final = 1000
_PER_START: Final = re.compile(r"(?P<ip>[^@]+)@(?P<pid>[0-9]+)#[0-9]+(?P<unit>@.+)?")

_guard = threading.RLock()  # the garbage collector may end a place while another one is taken
_taken: set[tuple[int, Path]] = set()  # with the process that took it: a child has none of its parent's places


def copy_of(path: Path) -> Path:
    """The state before the last one."""
    return path.with_name(path.name + ".bak")


class Place:
    """A directory that is this member's until it leaves."""

    def __init__(self, directory: Path, lock: int | None) -> None:
        """Without a lock, where the file system has none, others are not kept out."""
        self.directory = directory
        self._lock = lock

    def leave(self) -> None:
        """Once."""
        with _guard:
            if self._lock is None:
                return
            if (os.getpid(), self.directory) in _taken:  # a child has the number of a file that is its parent's
                _taken.discard((os.getpid(), self.directory))
                os.close(self._lock)
            self._lock = None

    __del__ = leave  # of a member whose end was cancelled


def take(directory: Path, lasting_id: str, group: str) -> Place:
    """The first place that nobody has. It blocks for as long as the disk does."""
    for number in range(1, _MAX_PLACES + 1):
        own = directory / (lasting_id if number == 1 else f"{lasting_id}#{number}") / group
        try:
            place = _try(own)
        except OSError as e:
            log.warning("%s can't be kept for one member of %s: %s", own, group, e)
            return Place(own, None)
        if place is not None:
            if number == 1:
                _take_over(directory, lasting_id, group, own)
            else:
                log.info("%d members of %s run on this machine; the offsets of this one are in %s", number, group, own)
            return place
    raise OSError(f"{_MAX_PLACES} members of group {group} keep their offsets in {directory}")


def _try(own: Path) -> Place | None:
    own.mkdir(parents=True, exist_ok=True)
    with _guard:
        own = own.resolve()
        key = (os.getpid(), own)
        if key in _taken:
            return None  # before the file is opened: closing it would give up the lock
        lock = os.open(own / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(lock)
            return None
        except OSError:
            os.close(lock)
            raise
        _taken.add(key)
    return Place(own, lock)


def _take_over(directory: Path, lasting_id: str, group: str, own: Path) -> None:
    """Moves what an earlier version left."""
    if any(path.exists() for path in (own / FILE_NAME, copy_of(own / FILE_NAME))):
        return
    try:
        left = sorted(_left_by_earlier_versions(directory, lasting_id, group), key=lambda path: path.stat().st_mtime)
        if left:
            newest = left[-1]
            if copy_of(newest).exists():
                copy_of(newest).replace(copy_of(own / FILE_NAME))
            newest.replace(own / FILE_NAME)
            log.info("group %s goes on with the offsets in %s, which are in %s now", group, newest, own)
    except OSError as e:
        log.warning("the offsets of group %s that an earlier version left can't be taken over: %s", group, e)


def _left_by_earlier_versions(directory: Path, lasting_id: str, group: str) -> list[Path]:
    ip, _, rest = lasting_id.partition("@")
    instance, at, unit = rest.partition("@")
    if instance != DEFAULT_INSTANCE:
        return []
    found = []
    for each in directory.iterdir():
        name = _PER_START.fullmatch(each.name)
        if name is None or name["ip"] != ip or (name["unit"] or "") != at + unit:
            continue
        path = each / group / FILE_NAME
        if path.is_file() and not _is_running(int(name["pid"])):
            found.append(path)
    return found


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
