"""The expressions that consumer groups filter by: the table in consumerFilter.json.

A pull of a group that filters by an expression names the version of its subscription; the table knows what the
members' heartbeats said last. It outlives them: when the last member goes its entry is marked dead, and comes alive
with the next one. Entries that have been dead for a day are removed.

What the entries take is bounded, and divided among the hosts of the members that brought them (`shares.py`). A new
expression that has no room leaves the old one where it is, and pulls that need it are told why.

Apache may sort messages by these expressions when they arrive, with a Bloom filter in which each entry owns some bits.
Skylark does not, but it writes the bits, without which Apache would not take the table over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from skylark.broker.bloom import Bloom, BloomBits
from skylark.broker.config import BrokerConfig
from skylark.broker.filters import BadExpression, selector_of
from skylark.broker.shares import Shares
from skylark.broker.table_writer import Rendered, TableWriter
from skylark.selectors import MAX_LENGTH, Selector, compile_selector
from skylark.store.tables import load
from skylark.wire.bodies import Subscription
from skylark.wire.numbers import Long

log = logging.getLogger(__name__)

MAX_EXPRESSION_BYTES: Final = 8 << 20
"""Of all entries, with the names that they are under; a character may take four."""
_ENTRY_BYTES: Final = 128  # of one, besides
_CHECKED_CHARACTERS: Final = 8_192  # of expressions, per second: to understand one takes a microsecond for each


class FilterData(msgspec.Struct, rename="camel", kw_only=True):
    """What one group wants of one topic."""

    bloom_filter_data: BloomBits | None = None
    born_time: Long = 0
    client_version: Long = 0
    consumer_group: str = ""
    dead: bool = False
    dead_time: Long = 0
    expression: str = ""
    expression_type: str = ""
    topic: str = ""

    @property
    def is_dead(self) -> bool:
        return self.dead_time >= self.born_time

    @property
    def size_bytes(self) -> int:
        return _size_bytes(self.consumer_group, self.topic, self.expression)


class _TopicFilters(msgspec.Struct, rename="camel"):
    group_filter_data: dict[str, FilterData] = {}
    topic: str = ""


class _Table(msgspec.Struct, rename="camel"):
    filter_data_by_topic: dict[str, _TopicFilters] = {}


class FilterTable:
    """The expressions by group and topic."""

    def __init__(self, config_dir: Path, config: BrokerConfig, now_ms: int) -> None:
        path = config_dir / "consumerFilter.json"
        self._config = config
        self.writer = TableWriter(path, self._capture)
        self._size_bytes = 0
        self._shares = Shares()
        self._hosts: dict[tuple[str, str], str] = {}  # group and topic -> whose share the entry counts for
        self._bloom = Bloom(config.max_error_rate_of_bloom_filter, config.expect_consumer_num_use_filter)
        self._groups: dict[str, dict[str, FilterData]] = {}
        self._living: dict[str, set[str]] = {}  # group -> topics of its entries that are not dead
        self._checked_ms = now_ms
        self._unchecked = _CHECKED_CHARACTERS
        self._swept_ms = now_ms
        self._load(path, now_ms)
        self._unsaved = False
        if config.enable_property_filter:
            compile_selector("TRUE")  # builds the parser, while nobody waits for it

    def get(self, topic: str, group: str) -> FilterData | None:
        return self._groups.get(group, {}).get(topic)

    def selector(self, topic: str, group: str) -> Selector | None:
        """What the group wants of the topic, if that is a known expression that can be understood."""
        data = self.get(topic, group)
        if data is None:
            return None
        try:
            return _compiled(data)
        except BadExpression:
            return None

    def subscribed(self, group: str, subscriptions: Iterable[Subscription], now_ms: int, host: str = "") -> None:
        """Takes in what a member of the group, on `host`, says that the group wants."""
        topics = set()
        refused: list[str] = []
        for subscription in subscriptions:
            topics.add(subscription.topic)
            is_expression = not subscription.is_by_tag and bool(subscription.sub_string)
            if is_expression and not self._register(group, subscription, now_ms, host):
                refused.append(subscription.topic)
        if refused:
            log.error("%d expressions of %s are not taken, first that for %s: %s",
                      len(refused), group, refused[0], self._fullness(host))  # fmt: skip
        self._bury(group, self._living.get(group, set()) - topics, now_ms)

    def left(self, group: str, now_ms: int) -> None:
        """The last member of the group is gone."""
        self._bury(group, self._living.get(group, set()).copy(), now_ms)

    def clean(self, now_ms: int) -> None:
        """Removes what has been dead for long; called every few seconds."""
        keep_ms = self._config.filter_data_clean_time_span
        for group, by_topic in list(self._groups.items()):
            for data in list(by_topic.values()):
                if data.is_dead and now_ms - data.dead_time >= keep_ms:
                    self._drop(data)
            if not by_topic:
                del self._groups[group]

    def lack_of_room(self, group: str, subscription: Subscription, host: str) -> str | None:
        """What to do about a subscription of which the table does not have the latest, if that is for lack of room."""
        expression = subscription.sub_string or ""
        if self._fits(group, subscription.topic, expression, host):
            return None
        return (
            f"there is no room for the expression of {group} for {subscription.topic}, which has {len(expression)} "
            f"characters: {self._fullness(host)}. Filter by shorter expressions or by tags, or from fewer groups"
        )

    def save(self) -> None:
        """Writes the table if it changed since the last time. Raises OSError."""
        if self._unsaved:
            self._unsaved = False
            self.writer.changed()
        else:
            self.writer.save()

    def _capture(self) -> Rendered:
        entries = [replace(data, dead=data.is_dead) for group in self._groups.values() for data in group.values()]

        def table() -> _Table:
            by_topic: dict[str, _TopicFilters] = {}
            for data in entries:
                filters = by_topic.setdefault(data.topic, _TopicFilters({}, data.topic))
                filters.group_filter_data[data.consumer_group] = data
            return _Table(by_topic)

        return table

    def _load(self, path: Path, now_ms: int) -> None:
        table = load(path, _Table, expendable=True)  # consumers bring what is in it with each heartbeat
        for topic, filters in table.filter_data_by_topic.items() if table is not None else ():
            for group, data in filters.group_filter_data.items():
                if data.dead_time == 0:  # whoever it was for is not connected to this broker any more
                    data.dead_time = max(now_ms - 30_000, data.born_time)
                if not self._bloom.made(data.bloom_filter_data):
                    data.bloom_filter_data = self._bloom.of(f"{group}#{topic}")
                data.topic, data.consumer_group = topic, group
                self._keep(data)

    def _keep(self, data: FilterData) -> None:
        self._groups.setdefault(data.consumer_group, {})[data.topic] = data
        self._size_bytes += data.size_bytes
        self._unsaved = True
        if not data.is_dead:
            self._living.setdefault(data.consumer_group, set()).add(data.topic)

    def _own(self, data: FilterData, host: str) -> None:
        """The entry counts for the host's share, unless it does for another's: a restart forgets whose it was."""
        if (data.consumer_group, data.topic) not in self._hosts:
            self._hosts[data.consumer_group, data.topic] = host
            self._shares.add(host, data.size_bytes)

    def _drop(self, data: FilterData) -> None:
        del self._groups[data.consumer_group][data.topic]
        self._size_bytes -= data.size_bytes
        self._shares.add(self._hosts.pop((data.consumer_group, data.topic), ""), -data.size_bytes)
        self._dies(data.consumer_group, data.topic)
        self._unsaved = True

    def _dies(self, group: str, topic: str) -> None:
        living = self._living.get(group, set())
        living.discard(topic)
        if not living:
            self._living.pop(group, None)

    def _register(self, group: str, subscription: Subscription, now_ms: int, host: str) -> bool:
        """Whether there is room for what the group wants of a topic."""
        old = self.get(subscription.topic, group)
        version = subscription.sub_version
        is_same = old is not None and (old.expression, old.expression_type) == (
            subscription.sub_string,
            subscription.expression_type,
        )
        if old is not None and (is_same or version <= old.client_version):
            if version > old.client_version:
                old.client_version = version
                self._unsaved = True
            if old.is_dead and version == old.client_version:
                old.dead_time = 0
                self._living.setdefault(group, set()).add(old.topic)
                self._unsaved = True
            self._own(old, host)
            return True
        data = FilterData(
            topic=subscription.topic,
            consumer_group=group,
            expression=subscription.sub_string or "",
            expression_type=subscription.expression_type or "",
            born_time=now_ms,
            client_version=version,
            bloom_filter_data=self._bloom.of(f"{group}#{subscription.topic}"),
        )
        is_kept = self._may_be_understood(data, now_ms)  # if not, that is the client's to report
        if is_kept and not self._has_room(data, now_ms, host):
            return False
        old = self.get(data.topic, group)  # those that are dead may have made room
        if old is not None:
            self._drop(old)
        if is_kept:
            self._keep(data)
            self._own(data, host)
        return True

    def _may_be_understood(self, data: FilterData, now_ms: int) -> bool:
        """Whether it is worth keeping. Tells what is wrong with it, unless there are too many to look at: one that
        can't be understood does no harm, for a pull finds that out too.
        """
        if now_ms - self._checked_ms >= 1_000 or now_ms < self._checked_ms:
            self._checked_ms, self._unchecked = now_ms, _CHECKED_CHARACTERS
        self._unchecked -= len(data.expression)
        if self._unchecked < 0 and len(data.expression) <= MAX_LENGTH:
            return True
        try:
            selector = _compiled(data)
        except BadExpression as e:
            log.warning("%s wants %s by %.200r: %s", data.consumer_group, data.topic, data.expression, e)
            return False
        if selector.ignored:
            log.warning(
                "%s wants %s by %.200r, of which %.200r does not count: as with Apache's broker, an expression ends "
                "where it can't be understood any more",
                data.consumer_group, data.topic, data.expression, selector.ignored,
            )  # fmt: skip
        return True

    def _has_room(self, data: FilterData, now_ms: int, host: str) -> bool:
        """Whether an entry may be kept; those whose groups are gone make room, looked for at most once a second."""
        group, topic, expression = data.consumer_group, data.topic, data.expression
        fits = self._fits(group, topic, expression, host)
        if fits or 0 <= now_ms - self._swept_ms < 1_000:
            return fits
        self._swept_ms = now_ms
        for each in [each for by_topic in self._groups.values() for each in by_topic.values() if each.is_dead]:
            self._drop(each)
        self._groups = {name: by_topic for name, by_topic in self._groups.items() if by_topic}
        return self._fits(group, topic, expression, host)

    def _fits(self, group: str, topic: str, expression: str, host: str) -> bool:
        """Whether there is room for an entry in the place of the one that is there."""
        old = self.get(topic, group)
        old_bytes = 0 if old is None else old.size_bytes
        own_bytes = old_bytes if self._hosts.get((group, topic), "") == host else 0
        size_bytes = _size_bytes(group, topic, expression)
        left_bytes = MAX_EXPRESSION_BYTES - self._size_bytes + old_bytes - size_bytes
        return self._shares.has_room(host, size_bytes - own_bytes, left_bytes)

    def _fullness(self, host: str) -> str:
        return (
            f"expressions of the clients of {host} take {self._shares.held(host)} of {MAX_EXPRESSION_BYTES} bytes, and "
            f"all {self._size_bytes}"
        )

    def _bury(self, group: str, topics: set[str], now_ms: int) -> None:
        for topic in topics:
            data = self._groups[group][topic]
            data.dead_time = max(now_ms, data.born_time)
            self._dies(group, topic)
        if topics:
            more = f" and {len(topics) - 1} more" if len(topics) > 1 else ""
            log.info("%s does not filter %s%s any more", group, min(topics), more)
            self._unsaved = True


def _size_bytes(group: str, topic: str, expression: str) -> int:
    return _ENTRY_BYTES + len(group) + len(topic) + len(expression)


def _compiled(data: FilterData) -> Selector:
    return selector_of(Subscription(topic=data.topic, sub_string=data.expression, expression_type=data.expression_type))
