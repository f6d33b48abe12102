"""The expressions that consumer groups filter by: the table in consumerFilter.json.

A pull of a group that filters by an expression names the version of its subscription; the table knows what the
members' heartbeats said last. It outlives them: when the last member goes its entry is marked dead, and comes alive
with the next one. Entries that have been dead for a day are removed.

Apache may sort messages by these expressions when they arrive, with a Bloom filter in which each entry owns some bits.
Skylark does not, but it writes the bits, without which Apache would not take the table over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from skylark.broker.config import BrokerConfig
from skylark.broker.filters import BadExpression, selector_of
from skylark.broker.table_writer import Rendered, TableWriter
from skylark.selectors import MAX_LENGTH, Selector, compile_selector
from skylark.store.tables import load
from skylark.wire.bodies import Subscription
from skylark.wire.numbers import Int, Long

log = logging.getLogger(__name__)

MAX_ENTRIES: Final = 65_536
MAX_EXPRESSION_BYTES: Final = 8 << 20
"""Of all entries, with the names that they are under; a character may take four."""
_CHECKED_CHARACTERS: Final = 8_192  # of expressions, per second: to understand one takes a microsecond for each
_MASK: Final = 2**64 - 1


class BloomBits(msgspec.Struct, rename="camel"):
    bit_num: Int = 0
    bit_pos: list[Int] = []


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
        return len(self.expression) + len(self.topic) + len(self.consumer_group)


class _TopicFilters(msgspec.Struct, rename="camel"):
    group_filter_data: dict[str, FilterData] = {}
    topic: str = ""


class _Table(msgspec.Struct, rename="camel"):
    filter_data_by_topic: dict[str, _TopicFilters] = {}


class Bloom:
    """Which bits belong to a name: as many as keep errors below a rate when so many names are in use."""

    def __init__(self, error_percent: int, names: int) -> None:
        rate = error_percent / 100
        self.hashes = math.ceil(math.log(rate) / math.log(0.5))
        bits = math.ceil(names * (math.log(1 / rate) / math.log(2)) * (math.log(math.e) / math.log(2)))
        self.bits = -(-bits // 8) * 8

    def of(self, name: str) -> BloomBits:
        hashed = murmur3_64(name.encode())
        low, high = hashed & 0xFFFFFFFF, hashed >> 32
        positions = []
        for number in range(1, self.hashes + 1):
            combined = (low + number * high) & 0xFFFFFFFF
            if combined & 0x80000000:
                combined ^= 0xFFFFFFFF
            positions.append(combined % self.bits)
        return BloomBits(self.bits, positions)

    def made(self, bits: BloomBits | None) -> bool:
        return bits is not None and bits.bit_num == self.bits and len(bits.bit_pos) == self.hashes


class FilterTable:
    """The expressions by group and topic."""

    def __init__(self, config_dir: Path, config: BrokerConfig, now_ms: int) -> None:
        path = config_dir / "consumerFilter.json"
        self._config = config
        self.writer = TableWriter(path, self._capture)
        self._entries = 0
        self._size_bytes = 0
        self._bloom = Bloom(config.max_error_rate_of_bloom_filter, config.expect_consumer_num_use_filter)
        self._groups: dict[str, dict[str, FilterData]] = {}
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

    def subscribed(self, group: str, subscriptions: Iterable[Subscription], now_ms: int) -> None:
        """Takes in what a member of the group says that the group wants."""
        topics = set()
        for subscription in subscriptions:
            topics.add(subscription.topic)
            if not subscription.is_by_tag and subscription.sub_string:
                self._register(group, subscription, now_ms)
        self._bury(group, (each for topic, each in self._groups.get(group, {}).items() if topic not in topics), now_ms)

    def left(self, group: str, now_ms: int) -> None:
        """The last member of the group is gone."""
        self._bury(group, self._groups.get(group, {}).values(), now_ms)

    def clean(self, now_ms: int) -> None:
        """Removes what has been dead for long; called every few seconds."""
        keep_ms = self._config.filter_data_clean_time_span
        for group, by_topic in list(self._groups.items()):
            for topic, data in list(by_topic.items()):
                if data.is_dead and now_ms - data.dead_time >= keep_ms:
                    self._drop(by_topic, topic)
            if not by_topic:
                del self._groups[group]

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
                self._keep(self._groups.setdefault(group, {}), data)

    def _keep(self, by_topic: dict[str, FilterData], data: FilterData) -> None:
        by_topic[data.topic] = data
        self._entries += 1
        self._size_bytes += data.size_bytes
        self._unsaved = True

    def _drop(self, by_topic: dict[str, FilterData], topic: str) -> None:
        data = by_topic.pop(topic, None)
        if data is not None:
            self._entries -= 1
            self._size_bytes -= data.size_bytes
            self._unsaved = True

    def _register(self, group: str, subscription: Subscription, now_ms: int) -> None:
        by_topic = self._groups.get(group, {})
        old = by_topic.get(subscription.topic)
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
                self._unsaved = True
            return
        self._drop(by_topic, subscription.topic)  # one that can't be understood is the client's to report
        data = FilterData(
            topic=subscription.topic,
            consumer_group=group,
            expression=subscription.sub_string or "",
            expression_type=subscription.expression_type or "",
            born_time=now_ms,
            client_version=version,
            bloom_filter_data=self._bloom.of(f"{group}#{subscription.topic}"),
        )
        if not self._may_be_understood(data, now_ms):
            return
        if not self._has_room(data, now_ms):
            log.error("%d expressions are known: that of %s for %s is not taken", self._entries, group, data.topic)
            return
        self._keep(self._groups.setdefault(group, {}), data)

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

    def _has_room(self, data: FilterData, now_ms: int) -> bool:
        """Whether one more may be kept; those whose groups are gone make room, looked for at most once a second."""
        if self._fits(data) or 0 <= now_ms - self._swept_ms < 1_000:
            return self._fits(data)
        self._swept_ms = now_ms
        for by_topic in self._groups.values():
            for topic in [topic for topic, each in by_topic.items() if each.is_dead]:
                self._drop(by_topic, topic)
        self._groups = {group: by_topic for group, by_topic in self._groups.items() if by_topic}
        return self._fits(data)

    def _fits(self, data: FilterData) -> bool:
        return self._entries < MAX_ENTRIES and self._size_bytes + data.size_bytes <= MAX_EXPRESSION_BYTES

    def _bury(self, group: str, entries: Iterable[FilterData], now_ms: int) -> None:
        for data in entries:
            if not data.is_dead:
                log.info("%s does not filter %s any more", group, data.topic)
                data.dead_time = now_ms
                self._unsaved = True


def _compiled(data: FilterData) -> Selector:
    return selector_of(Subscription(topic=data.topic, sub_string=data.expression, expression_type=data.expression_type))


def murmur3_64(data: bytes) -> int:
    """The first half of MurmurHash3 x64 128 with seed 0.

    >>> hex(murmur3_64(b"group#topic"))
    '0xa546c40b70da5124'
    """
    first = second = 0
    whole = len(data) & ~15
    for at in range(0, whole, 16):
        first ^= _mix_first(int.from_bytes(data[at : at + 8], "little"))
        first = (_rotate(first, 27) + second) * 5 + 0x52DCE729 & _MASK
        second ^= _mix_second(int.from_bytes(data[at + 8 : at + 16], "little"))
        second = (_rotate(second, 31) + first) * 5 + 0x38495AB5 & _MASK
    second ^= _mix_second(int.from_bytes(data[whole + 8 :], "little"))
    first ^= _mix_first(int.from_bytes(data[whole : whole + 8], "little"))
    first ^= len(data)
    second ^= len(data)
    first = first + second & _MASK
    second = first + second & _MASK
    return _finish(first) + _finish(second) & _MASK


def _rotate(number: int, count: int) -> int:
    return (number << count | number >> 64 - count) & _MASK


def _mix_first(number: int) -> int:
    return _rotate(number * 0x87C37B91114253D5 & _MASK, 31) * 0x4CF5AD432745937F & _MASK


def _mix_second(number: int) -> int:
    return _rotate(number * 0x4CF5AD432745937F & _MASK, 33) * 0x87C37B91114253D5 & _MASK


def _finish(number: int) -> int:
    number = (number ^ number >> 33) * 0xFF51AFD7ED558CCD & _MASK
    number = (number ^ number >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return number ^ number >> 33
