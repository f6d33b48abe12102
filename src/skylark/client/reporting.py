"""What operators may ask a consumer, in Apache's words: its running info, and how it took one message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from skylark.client.assignment import Assignment
from skylark.client.consuming import Tally
from skylark.client.listening import Outcome
from skylark.client.offsets import Offsets
from skylark.client.timing import steady_ms
from skylark.wire.bodies import Subscription

_WINDOW: Final = 13
_MIB: Final = 1024 * 1024


class Rates:
    """How fast the listener works, over the last minute or so: fed with a sample every few seconds."""

    def __init__(self, now_ms: int) -> None:
        self._samples: deque[tuple[int, dict[str, Tally]]] = deque([(now_ms, {})], maxlen=_WINDOW)

    def sample(self, now_ms: int, tallies: Mapping[str, Tally]) -> None:
        copies = {topic: Tally(tally.ok, tally.failed, tally.spent_ms) for topic, tally in tallies.items()}
        self._samples.append((now_ms, copies))

    def status(self, topic: str, now_ms: int, tallies: Mapping[str, Tally]) -> dict[str, float | int]:
        """Apache's ConsumeStatus."""
        since_ms, before = self._samples[0]
        now, then = tallies.get(topic, Tally()), before.get(topic, Tally())
        seconds = max((now_ms - since_ms) / 1000, 0.001)
        calls = now.ok + now.failed - then.ok - then.failed
        return {
            "consumeFailedMsgs": now.failed,
            "consumeFailedTPS": (now.failed - then.failed) / seconds,
            "consumeOKTPS": (now.ok - then.ok) / seconds,
            "consumeRT": (now.spent_ms - then.spent_ms) / calls if calls else 0.0,
        }


def running_info(
    properties: Mapping[str, str],
    subscriptions: Iterable[Subscription],
    assignments: Iterable[Assignment],
    offsets: Offsets,
    statuses: Mapping[str, Mapping[str, float | int]],
) -> dict[str, object]:
    """Apache's ConsumerRunningInfo."""
    return {
        "mqPopTable": {},
        "mqTable": {assignment.queue: _queue_info(assignment, offsets) for assignment in assignments},
        "properties": dict(properties),
        "statusTable": dict(statuses),
        "subscriptionSet": sorted(subscriptions, key=lambda subscription: subscription.topic),
        "userConsumerInfo": {},
    }


def _queue_info(assignment: Assignment, offsets: Offsets) -> dict[str, int | bool]:
    buffer = assignment.buffer
    held = len(buffer) > 0
    return {
        "cachedMsgCount": len(buffer),
        "cachedMsgMaxOffset": buffer.last_offset if held else 0,
        "cachedMsgMinOffset": buffer.first_offset if held else 0,
        "cachedMsgSizeInMiB": buffer.size_bytes // _MIB,
        "commitOffset": offsets.known(assignment.queue),
        "droped": assignment.revoked,
        "lastConsumeTimestamp": assignment.last_consume_ms,
        "lastLockTimestamp": assignment.last_lock_ms,
        "lastPullTimestamp": assignment.pull_loop.last_pull_ms if assignment.pull_loop is not None else 0,
        "locked": assignment.is_locked(steady_ms()),
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }


def direct_result(outcome: Outcome, *, is_orderly: bool, spent_ms: int, auto_commit: bool = True) -> dict[str, object]:
    """Apache's ConsumeMessageDirectlyResult for one message."""
    if outcome.error is not None:
        result, remark = "CR_THROW_EXCEPTION", f"{type(outcome.error).__name__}: {outcome.error}"
    elif outcome.commits or outcome.rolls_back:
        result, remark = "CR_COMMIT" if outcome.commits else "CR_ROLLBACK", None
    else:
        result, remark = "CR_SUCCESS" if outcome.done else "CR_LATER", None
    return {
        "autoCommit": auto_commit,
        "consumeResult": result,
        "order": is_orderly,
        "remark": remark,
        "spentTimeMills": spent_ms,
    }
