"""What is deleted, and when: the oldest log segments, and the queue and index files that only speak of them.

A round is due in the hours of `delete_when`, or when the disk is used beyond `disk_max_used_ratio`, or when somebody
asks for one. It deletes segments that were last written `file_reserved_hours` ago; above `disk_clean_forcibly_ratio`
the oldest ones whatever their age, unless `clean_forcibly` is off, and then tells which messages are gone. Never the
last segment, none that a reader holds, none that is not flushed, and no more than `delete_batch_max` in a round. Where
timers wait, nothing expires; forcibly, it goes as everything else. Above `disk_warning_ratio` the store takes no
messages until usage is back below the forcible ratio.

The queues follow the log in turns of so many each, since a store may have thousands of them. Until its turn a queue
has entries of messages that are gone, which every reader can bear.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final

from skylark.store.api import CleanReport, StoreConfig
from skylark.store.commitlog import CommitLog
from skylark.store.consumequeue import ConsumeQueue, QueueTable
from skylark.store.index import IndexService

log = logging.getLogger(__name__)

_MANUAL_ROUNDS: Final = 20
_HOUR_MS: Final = 3_600_000
_REMINDER_MS: Final = 600_000
_MOST_QUEUES_A_TURN: Final = 64
_MOST_QUEUES_TOLD: Final = 20


def disk_usage(path: Path) -> float:
    """The used part of the file system that a path is on, from 0 to 1, as an ordinary user sees it; -1 if unknown."""
    try:
        info = os.statvfs(path)
    except OSError:
        return -1.0
    used = info.f_blocks - info.f_bfree
    whole = used + info.f_bavail
    return -(-used * 100 // whole) / 100 if whole else -1.0


class Unexpired:
    """The messages that were deleted before their time, by queue."""

    def __init__(self, from_log_offset: int) -> None:
        self._from_log_offset = from_log_offset
        self._lost: list[tuple[int, str, int, int]] = []  # count, topic, queue id, first offset

    def note(self, queue: ConsumeQueue, log_min_offset: int) -> None:
        """To be called before the queue follows the log."""
        low = max(queue.min_offset, queue.first_stored_offset)
        first = queue.first(lambda offset, _: offset >= self._from_log_offset, low, queue.max_offset)
        behind = queue.first(lambda offset, _: offset >= log_min_offset, first, queue.max_offset)
        if behind > first:
            self._lost.append((behind - first, queue.topic, queue.queue_id, first))

    def __str__(self) -> str:
        """How many, and which; those of the queues that lost most, if there are many queues."""
        self._lost.sort(key=lambda lost: (-lost[0], lost[1:]))
        told = [f"{topic}-{queue_id} {first} to {first + count - 1}" for count, topic, queue_id, first in self._lost]
        more = len(told) - _MOST_QUEUES_TOLD
        words = ", ".join(told[:_MOST_QUEUES_TOLD]) + (f" and of {more} more queues" if more > 0 else "")
        return f"{sum(lost[0] for lost in self._lost)} messages: {words}"


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
        self._followers: deque[ConsumeQueue] = deque()  # that have not followed the log yet
        self._unexpired: Unexpired | None = None  # that this round deleted
        self._kept: str | None = None  # why the last round deleted nothing
        self._kept_told: tuple[str, int] | None = None  # what the log says of that, and since when
        self.lowest_needed: Callable[[], int | None] = lambda: None
        self.space_refusal: str | None = None

    def delete_soon(self) -> None:
        """Makes the next rounds due at any hour."""
        self._manual_rounds = _MANUAL_ROUNDS

    def disk_ratio(self) -> float:
        """The used part of the fuller of the two disks, that of the log and that of the queues."""
        return max(self._usage(self._log.directory), self._usage(self._config.root))

    @property
    def is_following(self) -> bool:
        """Whether a round is under way."""
        return bool(self._followers)

    def clean(self, now_ms: int) -> CleanReport:
        """A turn: deletes segments if a round is due, and lets some queues follow."""
        report = CleanReport()
        if not self._followers:
            self._begin(now_ms, report)
        if self._followers:
            self._follow(report)
        return report

    def _begin(self, now_ms: int, report: CleanReport) -> None:
        ratio = self.disk_ratio()
        forcibly = self._judge_space(ratio)
        is_crowded = ratio > _between(10, self._config.disk_max_used_ratio, 95)
        if not (forcibly or is_crowded or ratio < 0 or self._is_hour(now_ms) or self._manual_rounds > 0):
            return
        self._manual_rounds = max(self._manual_rounds - 1, 0)
        report.log_files = self._delete_segments(now_ms, forcibly=forcibly and self._config.clean_forcibly)
        if report.log_files:
            log.info("deleted %d log segments, the log now begins at %d", report.log_files, self._log.min_offset)
            self._followers.extend(self._queues)
            if self._index is not None:
                report.index_files = self._index.delete_before(self._log.min_offset)
        elif is_crowded:
            self._tell_kept(ratio, now_ms, is_full=forcibly)
        if not is_crowded:
            self._kept_told = None

    def _tell_kept(self, ratio: float, now_ms: int, *, is_full: bool) -> None:
        """Says why no room is made: once, and again as long as it stays so."""
        kept = self._kept or "the one that is written to is the only one"
        if is_full and not self._config.clean_forcibly:
            kept += "; cleanFileForciblyEnable=false keeps it: make room, or lower fileReservedTime"
        told = self._kept_told
        if told is None or told[0] != kept or not 0 <= now_ms - told[1] < _REMINDER_MS:
            self._kept_told = kept, now_ms
            log.warning("%.0f%% of the disk is used, and no file of the log can go: %s", ratio * 100, kept)

    def _judge_space(self, ratio: float) -> bool:
        """Sets `space_refusal`; whether segments must go whatever their age."""
        warning = _between(35, self._config.disk_warning_ratio, 90)
        forcible = _between(30, self._config.disk_clean_forcibly_ratio, 85)
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
        self._kept = None
        for segment in self._log.segments[:-1]:
            if deleted >= self._config.delete_batch_max:
                break
            is_needed = needed is not None and segment.base + segment.size_bytes > needed
            has_expired = segment.path.stat().st_mtime_ns // 1_000_000 <= oldest_ms
            if segment.base + segment.size_bytes > self._flushed_offset():
                self._kept = "the oldest is not flushed yet"
            elif not forcibly and not has_expired:
                hours = self._config.file_reserved_hours
                self._kept = f"the oldest was written to within the {hours} hours of fileReservedTime"
            elif not forcibly and is_needed:
                self._kept = "the oldest has messages that wait for their time"
            elif not self._log.delete_first():
                self._kept = "the oldest is being read"
            if self._kept is not None:
                log.debug("%s stays: %s", segment.path, self._kept)
                break
            if not has_expired and self._unexpired is None:
                self._unexpired = Unexpired(segment.base)
            if is_needed:
                log.error("%s was deleted to make room, and with it timers that were not due yet", segment.path)
            deleted += 1
        return deleted

    def _follow(self, report: CleanReport) -> None:
        log_min_offset = self._log.min_offset
        for _ in range(min(len(self._followers), _MOST_QUEUES_A_TURN)):
            queue = self._followers.popleft()
            if queue not in self._queues:
                continue
            if self._unexpired is not None:
                self._unexpired.note(queue, log_min_offset)
            report.queue_files += queue.delete_before(log_min_offset)
        report.more = bool(self._followers)
        if self._unexpired is not None and not report.more:
            log.error(
                "the disk is nearly full: to make room, messages were deleted before the %d hours of fileReservedTime "
                "were over, %s (with cleanFileForciblyEnable=false new ones would be refused instead)",
                self._config.file_reserved_hours, self._unexpired,
            )  # fmt: skip
            self._unexpired = None


def _between(least: int, percent: int, most: int) -> float:
    """A setting in percent as a part of one, within Apache's limits."""
    return min(max(percent, least), most) / 100
