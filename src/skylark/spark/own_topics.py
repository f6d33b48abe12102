"""Which topics RocketMQ and Skylark keep for themselves: nobody means them by a pattern."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

_PREFIXES: Final = ("rmq_sys_", "RMQ_SYS_", "%RETRY%", "%DLQ%", "%LMQ%")
_REPLIES: Final = "_REPLY_TOPIC"
_TOPICS: Final = frozenset(
    (
        "TBW102", "SCHEDULE_TOPIC_XXXX", "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT",
        "CHECKPOINT_TOPIC", "BenchmarkTest", "DefaultHeartBeatSyncerTopic",
    )
)  # fmt: skip
LEDGER: Final = "skylark_spark_ledger"
"""Of exactly-once writes, unless they name another: a stream that read it would make it longer with every batch."""
REDRIVEN: Final = "SKYLARK_REDRIVEN"
"""What was sent back of the dead letters."""


def is_own(topic: str) -> bool:
    """Whether the topic is one that RocketMQ keeps for itself, or for the groups of consumers, as far as names tell."""
    return _has_own_name(topic) or topic.endswith(_REPLIES)


def is_own_of(topic: str, clusters: Collection[str], brokers: Collection[str]) -> bool:
    """The same where it is known which clusters and brokers there are: each has topics that are named after it."""
    return (
        _has_own_name(topic)
        or topic in clusters
        or topic in brokers
        or (topic.endswith(_REPLIES) and topic.removesuffix(_REPLIES) in clusters)
    )


def _has_own_name(topic: str) -> bool:
    return topic in _TOPICS or topic in (LEDGER, REDRIVEN) or topic.startswith(_PREFIXES)
