"""Makes the formats known to a Spark session, and has the progress of its streams committed to their groups.

Spark tells a source of its progress one batch late, and never of the last one; a listener in the driver hears of every
batch. Both commit, neither backwards.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
from typing import Any, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from skylark.client.errors import RocketMQError
from skylark.spark.cluster import Cluster
from skylark.spark.commits import commit
from skylark.spark.offline import RocketMQCommitLog
from skylark.spark.queues import Offsets, from_spark
from skylark.spark.source import RocketMQ

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 5.0
_MOST_GROUPS: Final = 1024
_LAST_EVENTS_MS: Final = 5_000


def register(spark: SparkSession) -> None:
    """Registers the formats with the session. May be called again."""
    _use_this_python(spark)
    for source in (RocketMQ, RocketMQCommitLog):
        spark.dataSource.register(source)
    if not getattr(spark, "_skylark_listener", None):
        listener = GroupProgress()
        spark.streams.addListener(listener)
        spark._skylark_listener = listener  # type: ignore[attr-defined]
        atexit.register(_leave, spark, listener)


def _leave(spark: SparkSession, listener: StreamingQueryListener) -> None:
    """Takes the listener back when the script ends: Spark lives longer than its Python, and would call into nothing.

    A call that is under way is let finish. After spark.stop() there is nothing to do; if Spark died, nothing to tell.
    """
    context = getattr(spark, "sparkContext", None)  # a session of Spark Connect has none
    if context is None or context._jsc is None:
        return
    with contextlib.suppress(Py4JError, PySparkException, OSError):
        spark.streams.removeListener(listener)
        context._jsc.sc().listenerBus().waitUntilEmpty(_LAST_EVENTS_MS)


def _use_this_python(spark: SparkSession) -> None:
    """Has the workers of a local Spark run the driver's Python, unless another was chosen.

    Spark takes the first python3 of the PATH, which is not that of a virtual environment and has no Skylark.
    """
    context = getattr(spark, "sparkContext", None)  # a session of Spark Connect has none
    if context is None:
        return
    is_chosen = "PYSPARK_PYTHON" in os.environ or context.getConf().contains("spark.pyspark.python")
    if not is_chosen and (context.master or "").startswith("local"):
        context.pythonExec = sys.executable


class GroupProgress(StreamingQueryListener):
    """Commits the end of every batch to the group that its source names."""

    def __init__(self) -> None:
        self._committed: dict[tuple[str, str], Offsets] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for source in event.progress.sources:
            stored = _ours(source.endOffset)
            if stored is not None:
                self._commit(stored["g"], stored["n"], from_spark(stored))

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass

    def _commit(self, group: str, name_server: str, offsets: Offsets) -> None:
        known = self._committed.get((group, name_server), {})
        ahead = {queue: offset for queue, offset in offsets.items() if offset > known.get(queue, -1)}
        if not ahead:
            return
        try:
            with Cluster(name_server, _TIMEOUT_S) as cluster:
                done = commit(cluster, group, ahead)
        except RocketMQError as e:
            # The stream itself goes on by its checkpoint; the group catches up with the next batch.
            log.warning("the progress of group %s can't be committed: %s", group, e)
            return
        if len(self._committed) >= _MOST_GROUPS:
            self._committed.clear()
        self._committed[group, name_server] = {**known, **done}


def _ours(end_offset: str | None) -> dict[str, Any] | None:
    """The offsets in a source's progress, if the source is one of ours that commits."""
    try:
        stored = json.loads(end_offset or "null")
    except ValueError:
        return None
    return stored if isinstance(stored, dict) and {"g", "n", "o", "v"} <= stored.keys() else None
