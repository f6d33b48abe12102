"""Opening a store: where the log ends, and queues and index that agree with it.

The log is the truth; it is read from a place that is known to be good, up to its last whole record.

- After a clean stop that place is the last record, or the newest one that any queue knows if somebody else stopped it.
- After a crash (the abort marker is there) it is the record that the checkpoint names: what lies before it was on disk
  with its queue entries. What the queues hold beyond it is dropped, since pages of theirs may be missing, and
  dispatched again from the log. A checkpoint without such a record (older versions wrote none) leads to the newest
  segment that begins before its time stamps, and failing that to the beginning of the log.
- The log is cut behind the last whole record, and what follows becomes zeros. What is damaged before it is passed over
  and told; a queue has blank entries in the place of messages that are lost with it.
- Records of a topic that was deleted after them enter no queue.
- Without a log there are no messages, but its directory may just not be the one that was meant: as soon as anything
  was on disk once, queues without a log are left alone, and the store does not open.
- A queue that turns out to lack entries (its files were deleted) is built again from the whole log. Files in the middle
  are missed at once, the last ones when a record follows, the first ones as long as the log has its own first segment;
  after a clean stop the checkpoint's counts tell of any. Not noticed are, after a crash, files whose loss looks like
  retention, and a queue that is lost as a whole and gets no more messages.

So the time it takes depends on what was written since the last checkpoint, not on the size of the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from skylark.store.api import StoreError
from skylark.store.checkpoint import Checkpoint
from skylark.store.commitlog import CommitLog
from skylark.store.consumequeue import ConsumeQueue, QueueTable
from skylark.store.dispatch import Dispatcher, inspect
from skylark.store.index import IndexService
from skylark.store.logscan import Damage, LogScan

log = logging.getLogger(__name__)

# Keys are looked up rarely: a broker that starts now is worth more than the keys of older messages.
INDEX_REBUILD_MAX_BYTES = 256 << 20


class Recovered(msgspec.Struct):
    """What recovery found: where it started, the end of the log and its last record, how much before that was damaged
    and from where on, and how long the record was that had been begun behind it."""

    start_offset: int = 0
    end_offset: int = 0
    last_log_offset: int = 0
    last_store_ms: int = 0
    record_count: int = 0
    index_behind: bool = False  # there was no room in it for all
    damaged_bytes: int = 0
    whole_until: int = 0  # the first damage, or the end
    cut_bytes: int = 0

    @property
    def state(self) -> str:
        """In words."""
        cut = f"{self.cut_bytes} bytes of an incomplete one cut off" if self.cut_bytes else "all whole"
        return f"{self.damaged_bytes} damaged bytes passed over, {cut}" if self.damaged_bytes else cut


def recover(
    commit_log: CommitLog,
    queues: QueueTable,
    index: IndexService | None,
    checkpoint: Checkpoint,
    dispatcher: Dispatcher,
    distrust_queues: Callable[[], None],
    *,
    clean: bool,
) -> Recovered:
    """Brings log, queues and index of a store that was just opened into agreement.

    Calls `distrust_queues` before entries that were known to be on disk are replaced by others that are not yet.
    """
    if not commit_log.segments:
        if clean or checkpoint.physic_ms:
            _refuse_lost_log(commit_log, queues)
        queues.destroy()  # else the crash came before anything was on disk
        if index is not None:
            index.truncate_from(0)
        return Recovered()
    from_the_first = commit_log.min_offset == 0  # then retention has deleted no file of a queue either
    dispatcher.lagging.update(q for q in queues if q.has_holes or (from_the_first and q.begins_within))
    if dispatcher.lagging:
        distrust_queues()
    for queue in dispatcher.lagging:
        queue.destroy()
    dispatched = _last_dispatched(commit_log, checkpoint) if clean else -1
    start = _start_after_clean_stop(commit_log, queues, dispatched) if clean else None
    if start is None:
        if clean:
            log.warning("the consume queues do not fit the log, recovering as after a crash")
            clean, dispatched = False, -1
        start = _start_after_crash(commit_log, checkpoint)
        for queue in queues:
            queue.find_end(start)
            _drop_strangers(queue, commit_log)
            dispatcher.cut(queue)
    _drop_deleted(queues, dispatcher, distrust_queues)
    damage = Damage()
    result = _dispatch_tail(commit_log, dispatcher, damage, start, dispatched, clean=clean)
    if dispatcher.lagging:
        distrust_queues()
        _rebuild(commit_log, dispatcher, dispatcher.lagging, damage, clean=clean)
    elif clean and _lost_queues(queues, checkpoint, result.end_offset):
        log.warning("consume queue files were lost while the store was closed, they are made again from the log")
        distrust_queues()
        for queue in queues:
            # Its first files may be those. One without messages stays: its next one must not get an offset again.
            if queue.first_stored_offset and queue.last_record_end()[0] >= commit_log.min_offset:
                queue.destroy()
        for record in LogScan(commit_log, commit_log.min_offset, damage):
            dispatcher.to_queue(record, lost=damage.most_records, is_complete=True)
    for queue in queues:
        queue.correct_min_offset(commit_log.min_offset)
    if index is not None:
        _recover_index(commit_log, dispatcher, index, checkpoint, result, damage, clean=clean)
    return result


def _dispatch_tail(
    commit_log: CommitLog, dispatcher: Dispatcher, damage: Damage, start: int, dispatched: int, *, clean: bool
) -> Recovered:
    """Puts the records from `start` on into their queues, those behind `dispatched`, and cuts the log behind them."""
    result = Recovered(start_offset=start)
    scan = LogScan(commit_log, start, damage, ends_whole=clean)
    from_the_first = start == commit_log.min_offset
    for record in scan:
        if record.log_offset > dispatched:
            dispatcher.to_queue(record, lost=damage.most_records, is_complete=from_the_first)
        result.last_log_offset = record.log_offset
        result.last_store_ms = record.store_ms
        result.record_count += 1
    result.end_offset = scan.end_offset
    result.damaged_bytes = damage.size_bytes
    result.whole_until = min(damage.stretches, default=scan.end_offset)
    result.cut_bytes = _begun_bytes(commit_log, scan.end_offset)
    commit_log.truncate(scan.end_offset)
    return result


def _refuse_lost_log(commit_log: CommitLog, queues: QueueTable) -> None:
    """Queues of a log that is not there are kept: most likely the log is, in another directory."""
    lost = next((queue for queue in queues if queue.has_files), None)
    if lost is not None:
        raise StoreError(
            f"{commit_log.directory} has no commit log, but there are consume queues, such as {lost.topic}-"
            f"{lost.queue_id} in {queues.directory}: set storePathCommitLog to the directory of the log, or, if that "
            "is lost, move the directory of the queues away"
        )


def _is_record(commit_log: CommitLog, log_offset: int) -> bool:
    record = commit_log.record(log_offset)
    return record is not None and inspect(record, 0, log_offset) is not None


def _begun_bytes(commit_log: CommitLog, end_offset: int) -> int:
    """What the record that is not whole claims to take, as far as its segment goes; 0 if none was begun."""
    for segment in commit_log.segments_between(end_offset, end_offset + 1):
        at = end_offset - segment.base
        claimed = int.from_bytes(segment.view[at : at + 4], "big")
        record = inspect(segment.view, at, segment.base)
        if record is None or record.size_bytes:  # else the segment is full
            return min(claimed, segment.size_bytes - at)
    return 0


def _last_dispatched(commit_log: CommitLog, checkpoint: Checkpoint) -> int:
    """The last record at our own clean stop, -1 if unknown: none up to it lacks its entry, but for deleted topics."""
    record = commit_log.record(checkpoint.logics_offset)
    if record is None or checkpoint.logics_offset + len(record) != checkpoint.counted_log_end:
        return -1
    return checkpoint.logics_offset


def _start_after_clean_stop(commit_log: CommitLog, queues: QueueTable, dispatched: int) -> int | None:
    """The newest record that was dispatched; None when it is not in the log, which a clean stop does not leave."""
    newest = dispatched
    for queue in queues:
        queue.find_end()
        newest = max(newest, queue.last_record_end()[0])
    if newest < commit_log.min_offset:
        return commit_log.min_offset
    return newest if _is_record(commit_log, newest) else None


def _start_after_crash(commit_log: CommitLog, checkpoint: Checkpoint) -> int:
    if checkpoint.logics_offset > commit_log.min_offset and _is_record(commit_log, checkpoint.logics_offset):
        return checkpoint.logics_offset
    safe_ms = checkpoint.min_timestamp_ms(with_index=False)
    for segment in reversed(commit_log.segments):
        first = inspect(segment.view, 0, segment.base)
        if first is not None and 0 < first.store_ms <= safe_ms:
            return segment.base
    return commit_log.min_offset


def _drop_strangers(queue: ConsumeQueue, commit_log: CommitLog) -> None:
    """Steps back over last entries that are not of this queue: other writers leave old entries behind the end."""
    while queue.max_offset > queue.first_stored_offset:
        log_offset, end = queue.last_record_end()
        if log_offset < commit_log.min_offset:
            return
        data = commit_log.slice(log_offset, end - log_offset)
        record = inspect(data, 0, log_offset) if data is not None else None
        place = queue.topic, queue.queue_id, queue.max_offset - 1
        if record is not None and (record.topic, record.queue_id, record.queue_offset) == place:
            return
        queue.max_offset -= 1


def _lost_queues(queues: QueueTable, checkpoint: Checkpoint, end_offset: int) -> bool:
    """Whether the queues have fewer entries than at the clean stop that wrote this same log."""
    if checkpoint.counted_log_end != end_offset:
        return False  # somebody else has written since
    count, entries, stored = queues.count()
    if count < checkpoint.queue_count or entries < checkpoint.queue_entries:
        return True
    return stored < checkpoint.stored_entries


def _drop_deleted(queues: QueueTable, dispatcher: Dispatcher, distrust_queues: Callable[[], None]) -> None:
    """Deletes queue files of deleted topics, which a crash has kept or a power cut brought back.

    Where some of them are beside those of a topic of the same name, or have lost all their entries, the queue is built
    again.
    """
    for queue in queues:
        deleted = dispatcher.deleted.offset(queue.topic)
        if not deleted:
            continue
        ends = [offset for offset in (queue.first_log_offset(), queue.last_record_end()[0]) if offset >= 0]
        if ends:
            if min(ends) >= deleted:
                continue
            if max(ends) < deleted:
                queues.remove(queue)
                continue
        elif not queue.first_stored_offset:
            continue
        distrust_queues()
        queue.destroy()
        dispatcher.lagging.add(queue)


def _rebuild(
    commit_log: CommitLog, dispatcher: Dispatcher, lagging: set[ConsumeQueue], damage: Damage, *, clean: bool
) -> None:
    names = ", ".join(sorted(f"{queue.topic}-{queue.queue_id}" for queue in lagging)[:10])
    log.warning("%d consume queues lack entries and are built again from the log: %s", len(lagging), names)
    for queue in lagging:
        queue.destroy()
    for record in LogScan(commit_log, commit_log.min_offset, damage, ends_whole=clean):
        dispatcher.to_queue(record, lost=damage.most_records, is_complete=True, only=lagging)


def _recover_index(
    commit_log: CommitLog,
    dispatcher: Dispatcher,
    index: IndexService,
    checkpoint: Checkpoint,
    result: Recovered,
    damage: Damage,
    *,
    clean: bool,
) -> None:
    if clean:
        # What was put last may have had no keys: the checkpoint then knows more than the files.
        indexed = max(index.truncate_from(result.end_offset), checkpoint.index_log_offset)
    else:
        indexed = index.recover(checkpoint.index_ms, checkpoint.index_log_offset, result.end_offset)
    start = indexed - 1  # the last record that was indexed
    if start < commit_log.min_offset or not _is_record(commit_log, start):
        start = commit_log.min_offset
    if result.end_offset - start > INDEX_REBUILD_MAX_BYTES:
        log.warning("messages in the log from offset %d to %d are not found by key", indexed, result.start_offset)
        start = max(start, result.start_offset)
    try:
        for record in LogScan(commit_log, start, damage, ends_whole=clean):
            dispatcher.to_index(record)
    except OSError as error:
        log.error("messages are not found by key until the index can be written again: %s", error)
        result.index_behind = True
