"""Values that operators keep in the name server, by namespace and key, in Apache's `kvConfig.json`.

    {"configTable": {"ORDER_TOPIC_CONFIG": {"TopicTest": "broker-a:4"}}}

A change counts as done when the file holds it: the new content goes into a file beside it, is synced, and takes the
name. The content before stays as `kvConfig.json.bak`, as with Apache, and is read if the file itself is damaged.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

import msgspec

from skylark.config.properties import ConfigError

log = logging.getLogger(__name__)

MAX_ENTRIES = 100_000


class _File(msgspec.Struct, rename="camel"):
    config_table: dict[str, dict[str, str | None]] = {}


class TooManyEntries(Exception):
    """The table is full."""


class KVConfig:
    """namespace -> key -> value. Reads are plain calls; changes wait for the disk and may raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table: dict[str, dict[str, str]] = {}
        self._is_damaged = False  # the file, which must not become the backup then
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Reads the file, if there is one. Raises ConfigError if neither it nor its backup can be used."""
        if not self._path.exists():
            return
        backup = self._path.with_name(self._path.name + ".bak")
        try:
            self._table = _read(self._path)
        except (OSError, ValueError) as error:
            try:
                self._table = _read(backup)
            except (OSError, ValueError):
                raise ConfigError(
                    f"cannot use {self._path}: {error}; nor its backup. Put a good copy in its place, or move it "
                    f"away to start without what it holds"
                ) from error
            log.warning("%s is damaged (%s); read %s instead", self._path, error, backup.name)
            self._is_damaged = True

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All keys of a namespace; None if it was never used."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Raises TooManyEntries or OSError."""
        if self.get(namespace, key) is None and sum(map(len, self._table.values())) >= MAX_ENTRIES:
            raise TooManyEntries
        self._table.setdefault(namespace, {})[key] = value
        await self._save()

    async def delete(self, namespace: str, key: str) -> None:
        """Raises OSError."""
        if self._table.get(namespace, {}).pop(key, None) is not None:
            await self._save()

    async def _save(self) -> None:
        async with self._writing:
            # Encoded under the lock: whoever writes last writes everything.
            content = msgspec.json.encode({"configTable": self._table}, order="deterministic")
            await asyncio.to_thread(self._replace, content)

    def _replace(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(self._path.name + ".tmp")
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if self._path.exists() and not self._is_damaged:
            shutil.copyfile(self._path, self._path.with_name(self._path.name + ".bak"))
        fresh.replace(self._path)
        self._is_damaged = False
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read(path: Path) -> dict[str, dict[str, str]]:
    table = msgspec.json.decode(path.read_bytes(), type=_File).config_table
    return {space: {k: v for k, v in entries.items() if v is not None} for space, entries in table.items()}
