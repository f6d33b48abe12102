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
from typing import Final

import msgspec

from skylark.config.properties import ConfigError
from skylark.nameserver.threads import in_thread
from skylark.wire.bodies import encode_body
from skylark.wire.routes import KVTable

log = logging.getLogger(__name__)

MAX_BYTES: Final = 8 << 20
"""Of namespaces, keys and values, each entry with its share of the tables. Every change writes them all to the disk."""
_ENTRY_BYTES: Final = 200


class _File(msgspec.Struct, rename="camel"):
    config_table: dict[str, dict[str, str | None]] = {}


class TooLarge(Exception):
    """The table is full."""


class KVConfig:
    """namespace -> key -> value. Reads are plain calls; changes wait for the disk and may raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._table: dict[str, dict[str, str]] = {}
        self._bytes = 0
        self._encoded: dict[str, bytes] = {}
        self._is_damaged = False  # the file, which must not become the backup then
        self._writing = asyncio.Lock()
        self._changes = 0
        self._saved = 0  # so many of them

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
        self._bytes = _table_bytes(self._table)

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """All keys of a namespace; None if it was never used."""
        return self._table.get(namespace)

    def encoded(self, namespace: str) -> bytes | None:
        """The same as the body of an answer. It is kept: every broker is told of the ordered topics every 30 s."""
        body = self._encoded.get(namespace)
        table = self._table.get(namespace)
        if body is None and table is not None:
            body = self._encoded[namespace] = encode_body(KVTable(table=table))
        return body

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Raises TooLarge or OSError."""
        if not self._has_room(namespace, key, value):
            # Namespaces that lost all their keys are remembered only as long as nobody needs the room.
            for space in [space for space, entries in self._table.items() if not entries]:
                self._bytes -= _bytes(space)
                self._encoded.pop(space, None)
                del self._table[space]
            if not self._has_room(namespace, key, value):
                raise TooLarge
        self._encoded.pop(namespace, None)
        self._bytes += self._growth(namespace, key, value)
        self._table.setdefault(namespace, {})[key] = value
        await self._save()

    def _has_room(self, namespace: str, key: str, value: str) -> bool:
        growth = self._growth(namespace, key, value)
        return growth <= 0 or self._bytes + growth <= MAX_BYTES

    def _growth(self, namespace: str, key: str, value: str) -> int:
        old = self.get(namespace, key)
        growth = _bytes(key, value) - (0 if old is None else _bytes(key, old))
        return growth if namespace in self._table else growth + _bytes(namespace)

    async def delete(self, namespace: str, key: str) -> None:
        """Raises OSError."""
        old = self._table.get(namespace, {}).pop(key, None)
        if old is not None:
            self._encoded.pop(namespace, None)
            self._bytes -= _bytes(key, old)
            await self._save()

    async def _save(self) -> None:
        self._changes += 1
        change = self._changes
        async with self._writing:
            if self._saved >= change:
                return  # who wrote before wrote this as well
            # Encoded under the lock: whoever writes last writes everything.
            content = msgspec.json.encode({"configTable": self._table}, order="deterministic")
            changes = self._changes
            await in_thread(lambda: self._replace(content))
            self._saved = changes

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


def _bytes(*texts: str) -> int:
    """What an entry of a table takes."""
    return _ENTRY_BYTES + sum(len(text.encode()) for text in texts)


def _table_bytes(table: dict[str, dict[str, str]]) -> int:
    return sum(_bytes(space) + sum(_bytes(*entry) for entry in entries.items()) for space, entries in table.items())


def _read(path: Path) -> dict[str, dict[str, str]]:
    table = msgspec.json.decode(path.read_bytes(), type=_File).config_table
    return {space: {k: v for k, v in entries.items() if v is not None} for space, entries in table.items()}
