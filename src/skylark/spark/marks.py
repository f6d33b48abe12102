"""Marks: messages by which one incarnation of a queue is told from the next, and what became of a queue since.

A topic that was deleted and made again starts at offset 0, and may since have got more messages than were read of the
one before. Offsets don't show that, but the message that was read last does: it has another place in the broker's log
now, which only grows. The same shows that a broker lost the tail of its log and has filled it anew. Where all that was
read has expired, the mark says that there is nothing: if there is something later, the queue was made anew. A message
that expired since, or that a compacted topic dropped, says nothing, and then nothing is known.

One look costs one pull of one message for each queue, all on their way at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from skylark.spark.cluster import Cluster
from skylark.spark.queues import NO_MESSAGE, Mark, Marks, Offsets, Queue
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import BadRecord, StoredMessage
from skylark.wire.records import decode_record


def marks_before(cluster: Cluster, ends: Mapping[Queue, int], begins: Mapping[Queue, int] | None = None) -> Marks:
    """The last message before each of the offsets, where it is there.

    If it is damaged, the first one that is whole since `begins` stands for it, wherever that one is.
    """
    begins = begins or {}
    marks = {}
    damaged = {}
    for queue, reply in cluster.messages_at({queue: end - 1 for queue, end in ends.items() if end > 0}).items():
        offset = ends[queue] - 1
        low = int(reply.fields.get("minOffset", 0))
        mark = _mark(reply, offset)
        if mark is not None:
            marks[queue] = mark
        elif low > offset:
            marks[queue] = Mark(offset, NO_MESSAGE, 0)
        else:
            damaged[queue] = max(low, begins.get(queue, 0))
    for queue, reply in cluster.messages_at(damaged).items():
        record = _record(reply)
        if record is not None:
            marks[queue] = Mark(record.queue_offset, record.log_offset, record.store_timestamp_ms)
    return marks


def made_anew(cluster: Cluster, marks: Mapping[Queue, Mark]) -> list[Queue]:
    """Those whose message at the mark is another one now."""
    replies = cluster.messages_at({queue: mark.offset for queue, mark in marks.items()})
    changed = []
    damaged = {}
    for queue, reply in replies.items():
        found, mark = _mark(reply, marks[queue].offset), marks[queue]
        if found is None:
            low = int(reply.fields.get("minOffset", 0))
            if low <= mark.offset and mark.is_message:
                damaged[queue] = low
        elif found != mark and (mark.is_message or cluster.has_master(queue)):
            changed.append(queue)  # a slave may keep longer what has expired at its master
    for queue, reply in cluster.messages_at(damaged).items():
        first = _record(reply)
        if (
            first is not None
            and first.queue_offset <= marks[queue].offset
            and first.log_offset > marks[queue].log_offset
        ):
            changed.append(queue)
    return sorted(changed)


def first_new(cluster: Cluster, queues: Iterable[Queue], marks: Mapping[Queue, Mark]) -> Offsets:
    """Where the messages begin that these queues, which were made anew or lost their tail, got since their marks."""
    low = cluster.min_offsets(queues)
    marked = {queue: marks[queue] for queue in low if queue in marks}
    replies = cluster.messages_at({queue: low[queue] for queue in marked})
    tails = {}
    for queue, reply in replies.items():
        first = _mark(reply, low[queue])
        # What was in the log before the mark was there when the mark was read: only what follows it is new.
        if (
            first is not None
            and first.log_offset <= marked[queue].log_offset
            and first.stored_ms <= marked[queue].stored_ms
        ):
            tails[queue] = marked[queue].stored_ms + 1
    return {**low, **(cluster.offsets_at(tails) if tails else {})}


def _mark(reply: Frame, offset: int) -> Mark | None:
    record = _record(reply)
    if record is None or record.queue_offset > offset:
        return None
    return Mark(offset, record.log_offset, record.store_timestamp_ms)


def _record(reply: Frame) -> StoredMessage | None:
    if reply.code != ResponseCode.SUCCESS or not reply.body:
        return None
    try:
        return decode_record(memoryview(reply.body), check_crc=False)
    except BadRecord:
        return None  # whoever reads it says so
