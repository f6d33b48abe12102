"""How far a group got in each queue: kept in memory, and stored where the other members or the next start find it.

A group whose members share the messages (clustering) stores its offsets at the brokers. A group whose members all get
every message (broadcasting) stores those of each member in a file of its own, the one that Apache's client would use:

    <home>/.rocketmq_offsets/<id>/<group>/offsets.json     and the state before it in offsets.json.bak
    {"offsetTable": {{"brokerName": "broker-a", "queueId": 0, "topic": "orders"}: 42}}

The id is `ip@DEFAULT`, or the client id where the session has an instance name: see `skylark.client.places`.

An offset is that of the next message to consume. `update` only ever moves it forward, unless it is told otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from skylark.client.errors import BrokerError, RocketMQError
from skylark.client.places import FILE_NAME, Place, copy_of, take
from skylark.client.session import Session
from skylark.wire import fastjson
from skylark.wire.bodies import MessageQueue
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryConsumerOffset, UpdateConsumerOffset
from skylark.wire.routes import MASTER_ID
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

UNKNOWN: Final = -1
DIRECTORY_NAME: Final = ".rocketmq_offsets"


async def ask_offset(
    session: Session, queue: MessageQueue, code: int, header: msgspec.Struct, timeout_s: float | None = None
) -> int:
    """The offset in a broker's answer about one of its queues. Raises RocketMQError."""
    answer = await _ask(session, queue, code, header, timeout_s)
    return int(_checked(answer, queue).fields["offset"])


async def committed(session: Session, group: str, queue: MessageQueue, timeout_s: float, *, is_strict: bool) -> int:
    """The group's offset at the broker, UNKNOWN when there is none; see `Offsets.fetch`. Raises RocketMQError."""
    header = QueryConsumerOffset(group, queue.topic, queue.queue_id, False if is_strict else None)
    # A slave's offsets may be older than a master's.
    broker_id = await session.readable_id(queue, may_be_outdated=False)
    answer = await _ask(session, queue, RequestCode.QUERY_CONSUMER_OFFSET, header, timeout_s, broker_id)
    if answer.code == ResponseCode.QUERY_NOT_FOUND:
        return UNKNOWN
    return int(_checked(answer, queue).fields["offset"])


async def commit(session: Session, group: str, queue: MessageQueue, offset: int, timeout_s: float) -> None:
    """Stores the group's offset at the broker, or at its slave while there is no master. Raises RocketMQError."""
    header = UpdateConsumerOffset(group, queue.topic, queue.queue_id, offset)
    broker_id = await session.readable_id(queue)
    _checked(await _ask(session, queue, RequestCode.UPDATE_CONSUMER_OFFSET, header, timeout_s, broker_id), queue)


async def _ask(
    session: Session,
    queue: MessageQueue,
    code: int,
    header: msgspec.Struct,
    timeout_s: float | None,
    broker_id: int = MASTER_ID,
) -> Frame:
    return await session.ask_queue(queue, Frame(code, encode_header(header)), timeout_s, broker_id=broker_id)


def _checked(answer: Frame, queue: MessageQueue) -> Frame:
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark, queue.broker_name)
    return answer


class Offsets(Protocol):
    """What consumers need of an offset store; there are two."""

    async def fetch(self, queue: MessageQueue, *, is_strict: bool = False) -> int:
        """The stored offset, UNKNOWN when there is none. Raises RocketMQError when the store can't be asked.

        A broker answers 0 instead of UNKNOWN for a queue that it still holds from its begin on, so that a new group
        misses nothing of a young topic; not so if this is strict.
        """

    def known(self, queue: MessageQueue) -> int:
        """The offset in memory, UNKNOWN when there is none."""

    def carried(self, queue: MessageQueue) -> int:
        """The offset that a pull of this queue may commit on its way, UNKNOWN when it may not."""

    def update(self, queue: MessageQueue, offset: int, *, increase_only: bool = True) -> None:
        """Remembers an offset; `persist` stores it."""

    async def persist(self, queues: Iterable[MessageQueue]) -> None:
        """Stores what changed of these queues. What fails is logged and tried again by the next call."""

    def forget(self, queue: MessageQueue) -> None:
        """Drops the offset from memory: the queue has another owner now."""

    def table(self, topic: str | None = None) -> dict[MessageQueue, int]:
        """The offsets in memory."""

    def close(self) -> None:
        """After the last `persist`."""


class _Memory:
    """The offsets that are known, and which of them are not stored yet."""

    def __init__(self) -> None:
        self._offsets: dict[MessageQueue, int] = {}
        self._dirty: set[MessageQueue] = set()

    def known(self, queue: MessageQueue) -> int:
        return self._offsets.get(queue, UNKNOWN)

    def update(self, queue: MessageQueue, offset: int, *, increase_only: bool = True) -> None:
        if increase_only and offset <= self._offsets.get(queue, UNKNOWN):
            return
        self._offsets[queue] = offset
        self._dirty.add(queue)

    def _learn(self, queue: MessageQueue, stored: int) -> int:
        """Remembers what is stored, unless something newer is known."""
        if stored != UNKNOWN:
            self._offsets.setdefault(queue, stored)
        return stored

    def forget(self, queue: MessageQueue) -> None:
        self._offsets.pop(queue, None)
        self._dirty.discard(queue)

    def close(self) -> None:
        """Nothing to give back."""

    def table(self, topic: str | None = None) -> dict[MessageQueue, int]:
        return {queue: offset for queue, offset in self._offsets.items() if topic in (None, queue.topic)}


class RemoteOffsets(_Memory):
    """Offsets at the broker that holds the queue: for clustering.

    A queue is given up when its broker is away, and what was consumed last can't be committed then. If this member gets
    the queue back, and nobody has committed to it meanwhile, it goes on where it was.

    The first commit to each broker, for each topic, comes alone, and pulls carry none before it is answered: Apache's
    broker makes a table for the group then, and forgets what else comes at that moment.
    """

    def __init__(self, session: Session, group: str, timeout_s: float = 3.0) -> None:
        super().__init__()
        self._session = session
        self._group = group
        self._timeout_s = timeout_s
        self._failing: set[str] = set()
        self._stored: dict[MessageQueue, int] = {}  # as the broker said last, or was told
        self._left: dict[MessageQueue, tuple[int, int]] = {}  # what was stored and what was known when it was given up
        self._begun: set[tuple[str, str]] = set()  # the brokers and topics for which a commit was answered
        self._first: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def fetch(self, queue: MessageQueue, *, is_strict: bool = False) -> int:
        stored = await committed(self._session, self._group, queue, self._timeout_s, is_strict=is_strict)
        before, consumed = self._left.pop(queue, (UNKNOWN, UNKNOWN))
        self._stored[queue] = stored
        if stored == before and consumed > stored:
            self.update(queue, consumed)
            return consumed
        return self._learn(queue, stored)

    def forget(self, queue: MessageQueue) -> None:
        stored = self._stored.pop(queue, UNKNOWN)
        if queue in self._dirty:
            self._left[queue] = stored, self._offsets[queue]
        super().forget(queue)

    def carried(self, queue: MessageQueue) -> int:
        return self.known(queue) if _place(queue) in self._begun else UNKNOWN

    async def persist(self, queues: Iterable[MessageQueue]) -> None:
        places: dict[tuple[str, str], list[MessageQueue]] = {}
        for queue in queues:
            if queue in self._dirty:
                places.setdefault(_place(queue), []).append(queue)
        if places:
            await asyncio.gather(*(self._store_all(place, dirty) for place, dirty in places.items()))

    async def _store_all(self, place: tuple[str, str], queues: list[MessageQueue]) -> None:
        if place not in self._begun:
            first, *queues = queues
            async with self._first[place]:
                await self._store(first)
        await asyncio.gather(*(self._store(queue) for queue in queues))

    async def _store(self, queue: MessageQueue) -> None:
        if (offset := self.known(queue)) == UNKNOWN:
            return  # given up while another commit was waited for
        broker = queue.broker_name
        try:
            await commit(self._session, self._group, queue, offset, self._timeout_s)
        except RocketMQError as e:
            if broker not in self._failing:
                self._failing.add(broker)
                log.warning("group %s: offsets can't be committed to %s: %s", self._group, broker, e)
        else:
            self._begun.add(_place(queue))
            self._stored[queue] = offset
            # Not before: whoever is cancelled meanwhile has stored nothing, and another call must do so.
            if self._offsets.get(queue) == offset:
                self._dirty.discard(queue)
            if broker in self._failing:
                self._failing.discard(broker)
                log.info("group %s: offsets are committed to %s again", self._group, broker)


def _place(queue: MessageQueue) -> tuple[str, str]:
    return queue.broker_name, queue.topic


class OffsetFile(msgspec.Struct, rename="camel"):
    """The content of `offsets.json`."""

    offset_table: dict[MessageQueue, int] = {}


class LocalOffsets(_Memory):
    """Offsets in a file of this member: for broadcasting. Between `load` and `close` nobody else has that file.

    Writing replaces the file in one step, so a crash leaves either the old or the new one.
    """

    def __init__(self, lasting_id: str, group: str, directory: Path | None = None) -> None:
        super().__init__()
        self._directory = directory or default_directory()
        self._lasting_id = lasting_id
        self._group = group
        self.path = self._directory / lasting_id / group / FILE_NAME
        self._place: Place | None = None
        self._is_closed = False
        self._taking = threading.Lock()
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Takes a place, and reads its file, or the copy before it if the file is empty or damaged.

        Raises RocketMQError if what is stored can't be read: to begin anew would pass messages over.
        """
        if self._place is None:
            place = take(self._directory, self._lasting_id, self._group)
            with self._taking:  # it runs in a thread, and goes on there when whoever waited was cancelled
                if self._is_closed:
                    place.leave()
                    return
                self._place = place
            self.path = place.directory / FILE_NAME
        stored = self._read()
        self._offsets = dict(stored.offset_table)
        self._dirty.clear()

    async def fetch(self, queue: MessageQueue, *, is_strict: bool = False) -> int:
        stored = await asyncio.to_thread(self._read)
        return self._learn(queue, stored.offset_table.get(queue, UNKNOWN))

    def carried(self, queue: MessageQueue) -> int:
        return UNKNOWN

    def close(self) -> None:
        with self._taking:
            self._is_closed = True
            if self._place is not None:
                self._place.leave()
                self._place = None

    async def persist(self, queues: Iterable[MessageQueue]) -> None:
        wanted = list(queues)
        async with self._writing:
            changed = {queue: self._offsets[queue] for queue in wanted if queue in self._dirty}
            if not changed:
                return
            self._dirty -= changed.keys()
            writing = asyncio.ensure_future(asyncio.to_thread(self._merge, changed))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # it goes on in its thread, and the next one must not overtake it
                self._wrote(writing, changed)
                raise
            except (OSError, RocketMQError):
                pass
            self._wrote(writing, changed)

    def _wrote(self, writing: asyncio.Future[None], changed: dict[MessageQueue, int]) -> None:
        error = writing.exception()
        if error is not None:
            self._dirty |= changed.keys() & self._offsets.keys()
            log.warning("offsets can't be written to %s: %s", self.path, error)

    def _read(self) -> OffsetFile:
        damage = None
        for path in (self.path, copy_of(self.path)):
            try:
                data = path.read_bytes()
                if data:
                    return fastjson.decode(data, OffsetFile)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as e:
                raise RocketMQError(f"the offsets of group {self._group} can't be read from {path}: {e}") from e
            except fastjson.BadJson as e:
                damage = e
                log.warning("%s can't be read: %s", path, e)
        if damage is not None:
            raise RocketMQError(
                f"the offsets of group {self._group} in {self.path} and its copy are damaged: {damage}; move both away "
                "to begin where from_where says"
            )
        return OffsetFile()

    def _merge(self, changed: dict[MessageQueue, int]) -> None:
        # Read again, as a topic that is not subscribed to any more keeps its place in the file.
        stored = self._read()
        content = fastjson.dumps(OffsetFile(offset_table=stored.offset_table | changed), pretty=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _replace(copy_of(self.path), self.path.read_bytes())
        _replace(self.path, content)


def default_directory() -> Path:
    """Where Apache's client keeps its files: in the user's home."""
    return Path.home() / DIRECTORY_NAME


def _replace(path: Path, content: bytes) -> None:
    written = path.with_name(path.name + ".tmp")
    written.write_bytes(content)
    written.replace(path)
