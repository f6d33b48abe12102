"""Files beside the data of a pipeline, on whatever Spark itself writes to: a local disk, HDFS, an object store.

Hadoop's file systems are asked through Spark's own JVM, so that they have Spark's settings and credentials. A rename
of a file is atomic on disks and HDFS; on an object store the new name appears at once as a whole.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from collections.abc import Sequence
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from skylark.pipelines.errors import PipelineError

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class Files:
    """The files below one path; names are relative to it."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        assert spark._jvm is not None
        self._jvm: Any = spark._jvm
        configuration = spark._jsc.hadoopConfiguration()
        try:
            path = self._jvm.org.apache.hadoop.fs.Path(root)
            self._fs: Any = path.getFileSystem(configuration)
            self._root: Any = self._fs.makeQualified(path)
        except Py4JJavaError as e:
            raise PipelineError(f"{root!r} can't be used as a path: {e.java_exception.getMessage()}") from e

    @property
    def root(self) -> str:
        return str(self._root.toString())

    def path(self, name: str) -> str:
        """The whole name, for Spark."""
        return str(self._path(name).toString())

    def exists(self, name: str) -> bool:
        return bool(self._fs.exists(self._path(name)))

    def names(self, name: str = "") -> list[str]:
        """What is directly in a directory, in order; nothing if there is no such directory."""
        if not self.exists(name):
            return []
        return sorted(str(status.getPath().getName()) for status in self._fs.listStatus(self._path(name)))

    def below(self, name: str) -> list[str]:
        """All files in a directory and its directories, relative to it, in order."""
        start = self._path(name)
        found = []
        files = self._fs.listFiles(start, True)
        while files.hasNext():
            found.append(str(start.toUri().relativize(files.next().getPath().toUri()).getPath()))
        return sorted(found)

    def matching(self, directories: str, patterns: Sequence[str]) -> list[str]:
        """The files that have one of these patterns, in directories such as `topic=*/date=*`, in order."""
        root = re.sub(r"([\\{}\[\]*?,^])", r"\\\1", self.root)
        wanted = self._jvm.org.apache.hadoop.fs.Path(f"{root}/{directories}/{{{','.join(patterns)}}}")
        found = [str(status.getPath().toString()) for status in self._fs.globStatus(wanted) or ()]
        return sorted(name.removeprefix(self.root).lstrip("/") for name in found)

    def read(self, name: str) -> str | None:
        """The text of a small file, None if there is none."""
        if not self.exists(name):
            return None
        stream = self._fs.open(self._path(name))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Replaces a small file: whoever reads it finds all of the old text or all of the new."""
        directory, _, last = name.rpartition("/")
        aside = f"{directory}/.{last}.{uuid.uuid4().hex}" if directory else f".{last}.{uuid.uuid4().hex}"
        stream = self._fs.create(self._path(aside), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        # Hadoop's plain rename refuses to replace a file, and this one is free to disappear for a moment.
        if not self._fs.rename(self._path(aside), self._path(name)):
            self._fs.delete(self._path(name), False)
            self.rename(aside, name)

    def rename(self, old: str, new: str) -> None:
        target = self._path(new)
        self._fs.mkdirs(target.getParent())
        if not self._fs.rename(self._path(old), target):
            raise PipelineError(f"{self.path(old)} can't be renamed to {target.toString()}")

    def exchange(self, one: str, other: str) -> bool:
        """Two directories change places in one step; False where the file system can't do that."""
        uris = [self._path(name).toUri() for name in (one, other)]
        return str(uris[0].getScheme()) == "file" and _exchange(*(str(uri.getPath()) for uri in uris))

    def delete(self, name: str) -> None:
        """The file or directory, if it is there."""
        self._fs.delete(self._path(name), True)

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name) if name else self._root


def _exchange(one: str, other: str) -> bool:
    """Linux's renameat2, which Python has no name for."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)
