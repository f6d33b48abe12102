"""Consumer groups as the brokers know them: which there are, and how far each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from skylark.client.errors import BrokerError, RocketMQError, RouteNotFound
from skylark.client.query import TOOLS_GROUP
from skylark.client.subscriptions import DLQ_PREFIX, retry_topic
from skylark.client.validation import check_group
from skylark.pipelines.errors import PipelineError
from skylark.pipelines.report.figures import Lag, QueueLag
from skylark.pipelines.report.times import as_time
from skylark.pipelines.topics import TIMEOUT_S
from skylark.spark.cluster import Cluster, Filter, pull_fields, pull_request
from skylark.spark.queues import Queue
from skylark.spark.reading import DEFAULT_GROUP
from skylark.wire.bodies import GroupList, decode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import QueryTopicConsumeByWho
from skylark.wire.pop import pop_retry_topic
from skylark.wire.records import decode_records
from skylark.wire.typed import encode_header

_OF_THE_SYSTEM: Final = "CID_RMQ_SYS_"


def retry_topics(group: str, topics: Iterable[str]) -> list[str]:
    """Where messages that the group failed on may lie; those that it popped have a topic of their own."""
    popped = [pop_retry_topic(topic, group, v2=v2) for topic in topics for v2 in (False, True)]
    return [retry_topic(group), *popped]


def dead_letter_topic(group: str) -> str:
    return DLQ_PREFIX + group


def known_groups(name_server: str, topics: Sequence[str], named: Sequence[str]) -> list[str]:
    """The groups to report on: those named, or all that consume the topics. Raises PipelineError for an unknown one."""
    try:
        for group in named:
            check_group(group)
        with Cluster(name_server, TIMEOUT_S) as cluster:
            found = {group for topic in topics for group in _groups_of(cluster, topic)}
            for group in named:
                if group not in found and not _has(cluster, retry_topic(group)):
                    known = f"they are consumed by {', '.join(sorted(found))}" if found else "no group consumes them"
                    raise PipelineError(f"there is no group {group!r} that consumed {', '.join(topics)}: {known}")
    except RocketMQError as e:
        raise PipelineError(str(e)) from e
    return list(dict.fromkeys(named)) or sorted(found)


def queue_lag(name_server: str, groups: Sequence[str], topics: Sequence[str], now_ms: int) -> list[QueueLag]:
    """Every queue of the topics, and of their retry topics, that a group has committed anything for."""
    try:
        with Cluster(name_server, TIMEOUT_S) as cluster:
            return [
                row
                for group in groups
                for topic in [*topics, *retry_topics(group, topics)]
                if topic in topics or _has(cluster, topic)
                for row in _lag_of(cluster, group, topic, now_ms)
            ]
    except RocketMQError as e:
        raise PipelineError(str(e)) from e


def summed_lag(queues: Iterable[QueueLag]) -> list[Lag]:
    by_topic: dict[tuple[str, str], list[QueueLag]] = {}
    for row in queues:
        by_topic.setdefault((row.group, row.topic), []).append(row)
    return [
        Lag(
            group=group,
            topic=topic,
            queues=len(rows),
            behind=sum(row.behind for row in rows),
            behind_s=max((row.behind_s for row in rows if row.behind_s is not None), default=None),
        )
        for (group, topic), rows in by_topic.items()
    ]


def _groups_of(cluster: Cluster, topic: str) -> Iterator[str]:
    request = Frame(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, encode_header(QueryTopicConsumeByWho(topic)))
    for broker in cluster.route(topic).brokers:
        for group in decode_body(GroupList, cluster.ask(broker, topic, request).body).group_list:
            if group != TOOLS_GROUP and not group.startswith(_OF_THE_SYSTEM):
                yield group


def _has(cluster: Cluster, topic: str) -> bool:
    try:
        cluster.route(topic)
    except RouteNotFound:
        return False
    return True


def _lag_of(cluster: Cluster, group: str, topic: str, now_ms: int) -> list[QueueLag]:
    queues = cluster.queues(topic)
    committed = cluster.committed_offsets(group, queues)
    if not committed:
        return []
    first, end = cluster.min_offsets(queues), cluster.max_offsets(queues)
    rows = []
    for queue in sorted(queues):
        # What expired before it was consumed is not waiting any more.
        next_offset = max(committed.get(queue, 0), first[queue])
        behind = max(0, end[queue] - next_offset)
        stored_ms = _stored_ms(cluster, queue, next_offset) if behind else None
        rows.append(
            QueueLag(
                group=group,
                topic=topic,
                broker=queue.broker,
                queue=queue.queue_id,
                committed=committed.get(queue),
                end=end[queue],
                behind=behind,
                next_stored=as_time(stored_ms),
                behind_s=None if stored_ms is None else max(0, now_ms - stored_ms) / 1000,
            )
        )
    return rows


def _stored_ms(cluster: Cluster, queue: Queue, offset: int) -> int | None:
    """When the message at the offset was stored; None if it expired just now."""
    try:
        pull = pull_request(pull_fields(DEFAULT_GROUP, queue, Filter()), offset, 1)
        reply = cluster.ask(queue.broker, queue.topic, pull)
    except BrokerError:
        return None
    return next((record.store_timestamp_ms for record in decode_records(reply.body)), None)
