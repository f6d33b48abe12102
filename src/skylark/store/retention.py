"""What is deleted, and when: the oldest log segments, and the queue and index files that only speak of them.

A round is due in the hours of `delete_when`, or when the disk is used beyond `disk_max_used_ratio`, or when somebody
asks for one. It deletes segments that were last written `file_reserved_hours` ago; above `disk_clean_forcibly_ratio`
the oldest ones whatever their age. Never the last segment, none that a reader holds, none that is not flushed, and no
more than `delete_batch_max` in a round. Where timers wait, nothing expires; forcibly, it goes as everything else. Above
`disk_warning_ratio` the store takes no messages until usage is back below the forcible ratio.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from skylark.store.api import CleanReport, StoreConfig
from skylark.store.commitlog import CommitLog
from skylark.store.consumequeue import QueueTable
from skylark.store.index import IndexService

log = logging.getLogger(__name__)

_MANUAL_ROUNDS = 20
_HOUR_MS = 3_600_000


def disk_usage(path: Path) -> float:
    """The used part of the file system that a path is on, from 0 to 1, as an ordinary user sees it; -1 if unknown."""
    try:
        info = os.statvfs(path)
    except OSError:
        return -1.0
    used = info.f_blocks - info.f_bfree
    whole = used + info.f_bavail
    return -(-used * 100 // whole) / 100 if whole else -1.0


class Retention:
    """Decides and deletes. `space_refusal` says why the disk allows no messages, if it does not."""

    def __init__(
        self,
        config: StoreConfig,
        commit_log: CommitLog,
        queues: QueueTable,
        index: IndexService | None,
        flushed_offset: Callable[[], int],
    ) -> None:
        self._config = config
        self._log = commit_log
        self._queues = queues
        self._index = index
        self._flushed_offset = flushed_offset
        self._usage = config.disk_usage or disk_usage
        self._manual_rounds = 0
        self.lowest_needed: Callable[[], int | None] = lambda: None
        self.space_refusal: str | None = None

    def delete_soon(self) -> None:
        """Makes the next rounds due at any hour."""
        self._manual_rounds = _MANUAL_ROUNDS

    def disk_ratio(self) -> float:
        """The used part of the fuller of the two disks, that of the log and that of the queues."""
        return max(self._usage(self._log.directory), self._usage(self._config.root))

    def clean(self, now_ms: int) -> CleanReport:
        ratio = self.disk_ratio()
        forcibly = self._judge_space(ratio)
        due = forcibly or self._is_hour(now_ms) or self._manual_rounds > 0
        due = due or ratio < 0 or ratio > self._config.disk_max_used_ratio / 100
        report = CleanReport()
        if not due:
            return report
        self._manual_rounds = max(self._manual_rounds - 1, 0)
        report.log_files = self._delete_segments(now_ms, forcibly=forcibly and self._config.clean_forcibly)
        if report.log_files:
            self._follow(report)
            log.info("deleted %d log segments, the log now begins at %d", report.log_files, self._log.min_offset)
        elif ratio > self._config.disk_max_used_ratio / 100:
            log.warning("%.0f%% of the disk is used, but there was no log segment to delete", ratio * 100)
        return report

    def _judge_space(self, ratio: float) -> bool:
        """Sets `space_refusal`; whether segments must go whatever their age."""
        warning = min(max(self._config.disk_warning_ratio / 100, 0.35), 0.90)
        forcible = min(max(self._config.disk_clean_forcibly_ratio / 100, 0.30), 0.85)
        if ratio > warning:
            if self.space_refusal is None:
                log.error("%.0f%% of the disk is used: no messages are taken", ratio * 100)
            self.space_refusal = f"{ratio:.0%} of the disk is used, messages are taken again below {forcible:.0%}"
        elif ratio <= forcible and self.space_refusal is not None:
            log.warning("%.0f%% of the disk is used: messages are taken again", ratio * 100)
            self.space_refusal = None
        return ratio > forcible

    def _is_hour(self, now_ms: int) -> bool:
        hour = datetime.fromtimestamp(now_ms / 1000).astimezone().hour
        return any(int(word) == hour for word in self._config.delete_when.split(";") if word.strip().isdigit())

    def _delete_segments(self, now_ms: int, *, forcibly: bool) -> int:
        deleted = 0
        oldest_ms = now_ms - self._config.file_reserved_hours * _HOUR_MS
        needed = self.lowest_needed()
        for segment in self._log.segments[:-1]:
            is_needed = needed is not None and segment.base + segment.size_bytes > needed
            if segment.base + segment.size_bytes > self._flushed_offset() or deleted >= self._config.delete_batch_max:
                break
            if not forcibly and (is_needed or segment.path.stat().st_mtime_ns // 1_000_000 > oldest_ms):
                break
            if not self._log.delete_first():
                log.info("%s has expired but is being read", segment.path)
                break
            if is_needed:
                log.error("%s was deleted to make room, and with it timers that were not due yet", segment.path)
            deleted += 1
        return deleted

    def _follow(self, report: CleanReport) -> None:
        log_min_offset = self._log.min_offset
        for queue in self._queues:
            report.queue_files += queue.delete_before(log_min_offset)
        if self._index is not None:
            report.index_files = self._index.delete_before(log_min_offset)
