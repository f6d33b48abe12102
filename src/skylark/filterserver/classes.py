"""The filter classes that consumers have uploaded: one a topic and group, each with a process of its own.

An upload is checked (name, size, checksum), loaded, and only then takes the place of the one before it. Consumers
upload with every heartbeat; what is neither uploaded nor used for a while is forgotten.

A class that fails stops its own consumers, and nobody else: their pulls are answered with the reason, and nothing is
skipped. Its process is started again with growing pauses.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Final
from zlib import crc32

from skylark.filterserver.child import Order
from skylark.filterserver.config import FiltersrvConfig
from skylark.filterserver.worker import ClassFailed, Worker

log = logging.getLogger(__name__)

MAX_SOURCE_BYTES: Final = 64 << 10
MAX_WAITING: Final = 64
FORGOTTEN_AFTER_MS: Final = 180_000
_LONGEST_PAUSE_MS: Final = 60_000
_NAME: Final = re.compile(r"(?=.{1,255}$)[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)

_Key = tuple[str, str]
"""Topic and group."""


class Refused(Exception):
    """An upload that is not taken; the text says why."""


class FilterClass:
    """One uploaded class. At most one process, one batch at a time, and so many that wait for their turn."""

    def __init__(self, order: Order, crc: int, clock: Callable[[], int], worker: Worker) -> None:
        self.order = order
        self.crc = crc
        self.used_ms = clock()
        self._clock = clock
        self._worker: Worker | None = worker
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._failures = 0
        self._rests_until_ms = 0
        self._reason = ""

    async def judge(self, records: bytes) -> list[bool]:
        """Whether each of the records matches. Raises ClassFailed."""
        self.used_ms = self._clock()
        if self._waiting >= MAX_WAITING:
            raise ClassFailed(f"{self.order.class_name} is too slow: {MAX_WAITING} pulls wait for it")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._judge(records)
        finally:
            self._waiting -= 1

    async def _judge(self, records: bytes) -> list[bool]:
        now_ms = self._clock()
        if now_ms < self._rests_until_ms:
            raise ClassFailed(f"{self._reason}; it is tried again in {self._rests_until_ms - now_ms} ms")
        try:
            if self._worker is None or not self._worker.is_alive:
                self._worker = await Worker.start(self.order)
            matches = await self._worker.judge(records)
        except ClassFailed as e:
            self._failures += 1
            self._reason = str(e)
            self._rests_until_ms = self._clock() + min(500 << min(self._failures, 10), _LONGEST_PAUSE_MS)
            log.warning("%s", e)
            raise
        self._failures = 0
        return matches

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()


class Classes:
    """The classes by topic and group."""

    def __init__(self, config: FiltersrvConfig, broker_name: Callable[[], str], clock: Callable[[], int]) -> None:
        self._config = config
        self._broker_name = broker_name
        self._clock = clock
        self._classes: dict[_Key, FilterClass] = {}
        self._loading = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._classes)

    def get(self, topic: str, group: str) -> FilterClass | None:
        return self._classes.get((topic, group))

    async def register(self, topic: str, group: str, class_name: str, crc: int, source: bytes) -> None:
        """Takes a class in; the same one again costs nothing. Raises Refused."""
        if not self._config.client_upload_filter_class_enable:
            raise Refused(
                "this filter server takes no classes: their code would run on its machine. "
                "Start it with clientUploadFilterClassEnable=true if you trust those who can reach it"
            )
        if self._is_known(topic, group, class_name, crc):
            return
        text = _checked(class_name, crc, source)
        async with self._loading:  # one at a time: a new process is the most expensive thing that can be asked for
            # All members of a group upload its class when they start, and the first of them has done it by now.
            if not self._is_known(topic, group, class_name, crc):
                await self._load(topic, group, class_name, crc, text)

    def _is_known(self, topic: str, group: str, class_name: str, crc: int) -> bool:
        """Whether the group has this class already; then it is used again."""
        known = self._classes.get((topic, group))
        if known is None or known.crc != crc or known.order.class_name != class_name:
            return False
        known.used_ms = self._clock()
        return True

    async def _load(self, topic: str, group: str, class_name: str, crc: int, text: str) -> None:
        key = (topic, group)
        old = self._classes.get(key)
        if old is None and len(self._classes) >= self._config.max_filter_classes:
            raise Refused(f"{len(self._classes)} classes are in use, as many as maxFilterClasses allows")
        order = Order(
            class_name,
            text,
            self._broker_name(),
            self._config.filter_max_memory_megabytes << 20,
            self._config.filter_timeout_millis / 1000,
        )
        try:
            worker = await Worker.start(order)
        except ClassFailed as e:
            raise Refused(str(e)) from None
        self._classes[key] = FilterClass(order, crc, self._clock, worker)
        log.info("%s filters %s by %s", group, topic, class_name)
        if old is not None:
            await old.stop()

    async def forget_idle(self) -> None:
        """Called every few seconds."""
        oldest_ms = self._clock() - FORGOTTEN_AFTER_MS
        for key, known in list(self._classes.items()):
            if known.used_ms < oldest_ms:
                log.info("%s of %s is not used any more", known.order.class_name, key)
                del self._classes[key]
                await known.stop()

    async def close(self) -> None:
        await asyncio.gather(*(known.stop() for known in self._classes.values()))
        self._classes.clear()


def _checked(class_name: str, crc: int, source: bytes) -> str:
    if _NAME.fullmatch(class_name) is None:
        raise Refused(f"{class_name[:100]!r} is not the name of a class")
    if not 0 < len(source) <= MAX_SOURCE_BYTES:
        raise Refused(f"the source has {len(source)} bytes; 1 to {MAX_SOURCE_BYTES} are allowed")
    if crc and crc != crc32(source) & 0x7FFFFFFF:
        raise Refused(f"the source fails its checksum: {crc} was announced, {crc32(source) & 0x7FFFFFFF} came")
    try:
        return source.decode()
    except UnicodeDecodeError as e:
        raise Refused(f"the source is not UTF-8: {e}") from None
