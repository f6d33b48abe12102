"""Where a read begins and ends: the options about queues and offsets, turned into numbers by asking the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from skylark.client.errors import NotReachable, RocketMQError, RouteNotFound
from skylark.spark.cluster import Cluster
from skylark.spark.options import BadOption, Reading, assigned_queues, per_queue
from skylark.spark.queues import EARLIEST, LATEST, Offsets, Queue


class DataLost(RocketMQError):
    """Messages that were to be read are not there any more, or never were."""


def queues_of(cluster: Cluster, options: Reading, known: Iterable[str] = ()) -> list[Queue]:
    """The queues that the options name, as they are now. Raises RouteNotFound or BadOption.

    Of the topics that are `known` those that are missing are left out: their brokers may be away. Raises NotReachable
    if nothing is there, unless the user does not mind that messages are lost.
    """
    queues = _named_queues(cluster, options, known)
    if known and not queues and options.fail_on_data_loss and options.subscribe_pattern is None:
        raise NotReachable(f"topic {', '.join(sorted(known))}: none of its brokers is there, or it does not exist now")
    return queues


def _named_queues(cluster: Cluster, options: Reading, known: Iterable[str]) -> list[Queue]:
    if options.assign is not None:
        return _assigned(cluster, options.assign, known)
    if options.subscribe is not None:
        topics = [topic for topic in re.split(r"\s*,\s*", options.subscribe.strip()) if topic]
        if not topics:
            raise BadOption("option subscribe names no topic")
    else:
        topics = cluster.topics(options.subscribe_pattern or "")
        if not topics and not known:
            raise RouteNotFound(f"option subscribePattern={options.subscribe_pattern!r} matches no topic")
    return sorted(queue for topic in topics for queue in _queues(cluster, topic, known))


def _queues(cluster: Cluster, topic: str, known: Iterable[str]) -> list[Queue]:
    try:
        return cluster.queues(topic)
    except RouteNotFound:
        if topic in known:
            return []
        raise


def starting(cluster: Cluster, options: Reading, queues: Iterable[Queue], *, otherwise: str) -> Offsets:
    """The offset that each queue is read from; `otherwise` is taken when no option says."""
    queues = list(queues)
    if options.starting_timestamp is not None:
        return _since(cluster, options, dict.fromkeys(queues, options.starting_timestamp), "startingTimestamp")
    if options.starting_offsets_by_timestamp is not None:
        name = "startingOffsetsByTimestamp"
        times_ms = _named(per_queue(options.starting_offsets_by_timestamp, name), queues, name)
        return {**cluster.min_offsets(queues), **_since(cluster, options, times_ms, name)}
    return _offsets(cluster, options, queues, options.starting_offsets or otherwise, "startingOffsets", EARLIEST)


def ending(cluster: Cluster, options: Reading, queues: Iterable[Queue]) -> Offsets:
    """The offset before which each queue's read ends."""
    queues = list(queues)
    if options.ending_timestamp is not None:
        return cluster.offsets_at(dict.fromkeys(queues, options.ending_timestamp))
    if options.ending_offsets_by_timestamp is not None:
        name = "endingOffsetsByTimestamp"
        times_ms = _named(per_queue(options.ending_offsets_by_timestamp, name), queues, name)
        return {**cluster.max_offsets(queues), **cluster.offsets_at(times_ms)}
    if options.ending_offsets in ("earliest", "group"):
        raise BadOption(f"option endingOffsets={options.ending_offsets}: expected latest or JSON per queue")
    return _offsets(cluster, options, queues, options.ending_offsets, "endingOffsets", LATEST)


def check_order(options: Reading, start: Offsets, end: Offsets) -> None:
    """Raises BadOption for a queue that by its options ends before it begins."""
    if not (options.starting_offsets or "").lstrip().startswith("{") or options.ending_offsets == "latest":
        return
    for queue in sorted(end):
        if end[queue] < start[queue]:
            raise BadOption(f"option endingOffsets: {queue} ends at {end[queue]} and begins at {start[queue]}")


def _since(cluster: Cluster, options: Reading, times_ms: Mapping[Queue, int], option: str) -> Offsets:
    found = cluster.offsets_at(times_ms)
    if options.starting_offsets_by_timestamp_strategy == "error":
        ends = cluster.max_offsets(times_ms)
        for queue, offset in found.items():
            if offset >= ends[queue]:
                raise BadOption(
                    f"option {option}: no message of {queue} was stored at or after {times_ms[queue]}; "
                    "set startingOffsetsByTimestampStrategy=latest to start at its end"
                )
    return found


def _offsets(cluster: Cluster, options: Reading, queues: list[Queue], text: str, option: str, unnamed: int) -> Offsets:
    if text == "earliest":
        return cluster.min_offsets(queues)
    if text == "latest":
        return cluster.max_offsets(queues)
    if text == "group":
        return {**cluster.min_offsets(queues), **cluster.committed_offsets(options.group or "", queues)}
    if not text.lstrip().startswith("{"):
        raise BadOption(f"option {option}={text!r}: expected earliest, latest, group, or JSON per queue")
    named = _named(per_queue(text, option), queues, option)
    wanted = {queue: named.get(queue, unnamed) for queue in queues}
    low, high = cluster.min_offsets(queues), cluster.max_offsets(queues)
    found = {}
    for queue, offset in wanted.items():
        if offset < EARLIEST:
            raise BadOption(f"option {option}: {offset} for {queue} is neither an offset nor -2 or -1")
        found[queue] = {EARLIEST: low[queue], LATEST: high[queue]}.get(offset, offset)
        if not low[queue] <= found[queue] <= high[queue]:
            if options.fail_on_data_loss:
                raise DataLost(
                    f"option {option}: offset {offset} is outside {queue}, which holds {low[queue]} to {high[queue]}; "
                    "set failOnDataLoss=false to take the nearest one"
                )
            found[queue] = min(max(offset, low[queue]), high[queue])
    return found


def _named(given: Offsets, queues: list[Queue], option: str) -> Offsets:
    unknown = sorted(given.keys() - set(queues))
    if unknown:
        raise BadOption(f"option {option}: there is no {unknown[0]} among those that are read")
    return given


def _assigned(cluster: Cluster, text: str, known: Iterable[str]) -> list[Queue]:
    tree = assigned_queues(text)
    wanted = sorted(
        Queue(topic, broker, number)
        for topic, brokers in tree.items()
        for broker in brokers
        for number in brokers[broker]
    )
    if not wanted:
        raise BadOption(f"option assign={text!r} names no queue")
    there = {queue for topic in tree for queue in _queues(cluster, topic, known)}
    for queue in wanted:
        if queue not in there and not known:  # a stream that goes on knows them
            raise BadOption(f"option assign: there is no {queue}")
    return [queue for queue in wanted if queue in there]
