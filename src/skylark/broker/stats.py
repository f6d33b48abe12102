"""How much went through the broker: counters that the hot path adds to, and rates taken from samples of them.

`put` and `got` cost one dict lookup and a few additions for a whole batch of messages. Everything else happens in
`tick`, which the app calls every 10 seconds: it samples each counter, and the rates are differences of samples. As in
Apache's broker, a minute has a sample every 10 seconds, an hour one every 10 minutes and a day one every hour; a
counter is taken to have been zero one period before its first sample.

The number of counters is bounded. What comes when the tables are full is counted in the broker's totals only; a counter
that saw nothing for a day makes room, and in a full table one that saw nothing for a minute: who fills it has to go on
doing so. Totals never lose what such a counter had counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from datetime import datetime
from typing import Final, Generic, TypeVar

import msgspec

from skylark.broker.tally import Tally, add_to

MAX_COUNTERS: Final = 10_000

_TEN_SECONDS_MS: Final = 10_000
_TEN_MINUTES_MS: Final = 600_000
_HOUR_MS: Final = 3_600_000

# The samples of the totals reach back 10 minutes, the longest window that the runtime info shows.
_TOTAL_SAMPLES: Final = 61

_TOOK_BELOW_MS: Final = (1, 10, 50, 100, 200, 500, 1_000, 2_000, 3_000, 4_000, 5_000, 10_000)
_TOOK_NAMES: Final = (
    "[<=0ms]", "[0~10ms]", "[10~50ms]", "[50~100ms]", "[100~200ms]", "[200~500ms]", "[500ms~1s]",
    "[1~2s]", "[2~3s]", "[3~4s]", "[4~5s]", "[5~10s]", "[10s~]",
)  # fmt: skip
# Finer steps for the percentiles: 1 ms up to 20 ms, then 2, 5, 10, 50, 100 and 1,000 ms.
_STEPS_MS: Final = (
    *range(1, 21), *range(22, 51, 2), *range(55, 101, 5), *range(110, 201, 10), *range(250, 501, 50),
    *range(600, 1_001, 100), *range(2_000, 10_001, 1_000),
)  # fmt: skip


class Rate(msgspec.Struct, frozen=True):
    """What a window saw: the sum, the sum a second, and the sum of an average call."""

    sum: int = 0
    tps: float = 0.0
    average: float = 0.0


class Rates(msgspec.Struct, frozen=True):
    minute: Rate
    hour: Rate
    day: Rate


class _Sample(msgspec.Struct, frozen=True, gc=False):
    at_ms: int
    times: int
    count: int
    size_bytes: int


class Window:
    """The last samples of one counter, a period apart."""

    __slots__ = ("_period_ms", "_samples")

    def __init__(self, period_ms: int, samples: int) -> None:
        self._period_ms = period_ms
        self._samples: deque[_Sample] = deque(maxlen=samples)

    def add(self, sample: _Sample) -> None:
        if not self._samples:
            self._samples.append(_Sample(sample.at_ms - self._period_ms, 0, 0, 0))
        self._samples.append(sample)

    @property
    def idle(self) -> bool:
        """Whether the window is full and saw nothing."""
        samples = self._samples
        return len(samples) == samples.maxlen and samples[0].times == samples[-1].times

    def counted(self) -> Rate:
        return self._rate(lambda sample: sample.count)

    def sized(self) -> Rate:
        return self._rate(lambda sample: sample.size_bytes)

    def _rate(self, value: Callable[[_Sample], int]) -> Rate:
        if not self._samples:
            return Rate()
        first, last = self._samples[0], self._samples[-1]
        total, times, span_ms = value(last) - value(first), last.times - first.times, last.at_ms - first.at_ms
        # A clock that was set back leaves no span to divide by.
        tps = total * 1000 / span_ms if span_ms > 0 else 0.0
        return Rate(total, tps, total / times if times else 0.0)


class Counter(Tally):
    """Calls, messages and bytes of one topic, or of one group and topic."""

    def __init__(self, is_system: bool = False) -> None:
        super().__init__()
        self.is_system = is_system
        self.minute = Window(_TEN_SECONDS_MS, 7)
        self.hour = Window(_TEN_MINUTES_MS, 7)
        self.day = Window(_HOUR_MS, 25)

    def sample(self, now_ms: int) -> _Sample:
        return _Sample(now_ms, self.times, self.count, self.size_bytes)

    def counted(self) -> Rates:
        return Rates(self.minute.counted(), self.hour.counted(), self.day.counted())

    def sized(self) -> Rates:
        return Rates(self.minute.sized(), self.hour.sized(), self.day.sized())


_Key = TypeVar("_Key", bound=Hashable)


class Counters(Generic[_Key]):
    """A bounded table of counters, and what was counted outside it."""

    def __init__(self, is_system: Callable[[_Key], bool], max_counters: int) -> None:
        self.table: dict[_Key, Counter] = {}
        self._is_system = is_system
        self._max_counters = max_counters
        self._others = Counter()
        self._system_others = Counter(is_system=True)

    def new(self, key: _Key) -> Counter:
        """The counter for a key that the table does not have."""
        is_system = self._is_system(key)
        if len(self.table) >= self._max_counters:
            return self._system_others if is_system else self._others
        counter = self.table[key] = Counter(is_system)
        return counter

    def forget(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            counter = self.table.pop(key, None)
            if counter is not None:
                rest = self._system_others if counter.is_system else self._others
                rest.times += counter.times
                rest.count += counter.count
                rest.size_bytes += counter.size_bytes

    def forget_idle(self) -> None:
        self.forget([key for key, counter in self.table.items() if counter.day.idle])

    def make_room(self) -> None:
        """When the table is full, what saw nothing for a minute leaves it to others."""
        if len(self.table) >= self._max_counters:
            self.forget([key for key, counter in self.table.items() if counter.minute.idle])

    def all(self) -> list[Counter]:
        return [*self.table.values(), self._others, self._system_others]


class _Took:
    """How long calls took, in one minute."""

    def __init__(self) -> None:
        self.calls = 0
        self.coarse = [0] * len(_TOOK_NAMES)
        self.fine = [0] * (len(_STEPS_MS) + 1)

    def add(self, elapsed_ms: int) -> None:
        self.coarse[bisect_right(_TOOK_BELOW_MS, elapsed_ms)] += 1
        self.fine[bisect_left(_STEPS_MS, elapsed_ms)] += 1

    def close(self, calls: int) -> None:
        """Only calls of a millisecond or more are recorded one by one; the others are what is left of `calls`."""
        quick = max(0, calls - sum(self.coarse))
        self.calls = calls
        self.coarse[0] += quick
        self.fine[0] += quick

    def percentile_ms(self, share: float) -> float:
        rank, passed = int(self.calls * share), 0
        for step, count in enumerate(self.fine):
            if count and rank <= passed + count:
                low = _STEPS_MS[step - 1] if step else 0
                high = _STEPS_MS[step] if step < len(_STEPS_MS) else low
                return low + (high - low) * (rank - passed) / count
            passed += count
        return 0.0

    def __str__(self) -> str:
        return "".join(f"{name}:{count} " for name, count in zip(_TOOK_NAMES, self.coarse, strict=True))


class Totals(msgspec.Struct, frozen=True, gc=False):
    """The whole broker's counts since it started."""

    at_ms: int
    put_times: int = 0
    put_count: int = 0
    put_bytes: int = 0
    got_times: int = 0
    got_count: int = 0
    missed: int = 0
    user_put_count: int = 0
    user_got_count: int = 0


# Apache's names for the counts of the whole broker, whose key is the name of its cluster.
_BROKER_COUNTS: Final[dict[str, Callable[[Totals], int]]] = {
    "BROKER_PUT_NUMS": lambda totals: totals.put_count,
    "BROKER_GET_NUMS": lambda totals: totals.got_count,
    "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC": lambda totals: totals.user_put_count,
    "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC": lambda totals: totals.user_got_count,
}


class Stats:
    """All counters of a broker. `is_system` tells the topics whose messages are not its users'."""

    def __init__(
        self,
        cluster_name: str,
        now_ms: int,
        is_system: Callable[[str], bool] = lambda topic: False,
        max_counters: int = MAX_COUNTERS,
    ) -> None:
        self.started_ms = now_ms
        self._cluster_name = cluster_name
        self._broker = {name: Counter() for name in _BROKER_COUNTS}
        self.failed_puts = 0
        self.slowest_put_ms = 0
        self._missed = 0
        self._puts: Counters[str] = Counters(is_system, max_counters)
        self._gets: Counters[tuple[str, str]] = Counters(lambda key: is_system(key[0]), max_counters)
        self._send_backs: Counters[tuple[str, str]] = Counters(lambda key: is_system(key[0]), max_counters)
        self._dead_letters: Counters[tuple[str, str]] = Counters(lambda key: is_system(key[0]), max_counters)
        self._by_group = (self._gets, self._send_backs, self._dead_letters)
        # Bound once: the hot path should not look attributes up twice.
        self.find_put: Callable[[str], Tally | None] = self._puts.table.get
        """The counter that `put` adds to, if there is one."""
        self._get_counter = self._gets.table.get
        self._samples: deque[Totals] = deque([Totals(now_ms)], maxlen=_TOTAL_SAMPLES)
        self._minutes_at_ms = self._hours_at_ms = now_ms
        self._took_from = Totals(now_ms)
        self._took, self.took = _Took(), _Took()
        self._today = _day(now_ms)
        self.yesterday_morning = self.this_morning = Totals(now_ms)

    # The hot path.

    def put(self, topic: str, count: int, size_bytes: int) -> None:
        """One call stored `count` messages."""
        add_to(self.find_put(topic) or self._puts.new(topic), count, size_bytes)

    def got(self, group: str, topic: str, count: int, size_bytes: int) -> None:
        """One pull gave `count` messages to the group."""
        key = (topic, group)
        add_to(self._get_counter(key) or self._gets.new(key), count, size_bytes)

    def missed(self) -> None:
        """One pull found nothing."""
        self._missed += 1

    def put_took(self, elapsed_ms: int) -> None:
        """A put waited, for the disk. Those of which nothing is said count as quicker than a millisecond."""
        if elapsed_ms > 0:
            self._took.add(elapsed_ms)
            self.slowest_put_ms = max(self.slowest_put_ms, elapsed_ms)

    def put_failed(self) -> None:
        self.failed_puts += 1

    def sent_back(self, group: str, topic: str) -> None:
        """The group gave one message of the topic back to be retried."""
        _add_one(self._send_backs, (topic, group))

    def dead_letter(self, group: str, topic: str) -> None:
        """One message of the topic became a dead letter of the group."""
        _add_one(self._dead_letters, (topic, group))

    # Sampling.

    def tick(self, now_ms: int) -> None:
        """Samples every counter; call it every 10 seconds."""
        totals = self.totals(now_ms)
        for name, counter in self._broker.items():
            counter.count = _BROKER_COUNTS[name](totals)
        counters = [*self._puts.all(), *self._broker.values()]
        for by_group in self._by_group:
            counters += by_group.all()
        minutes, hours = _due(now_ms, self._minutes_at_ms), _due(now_ms, self._hours_at_ms)
        for counter in counters:
            sample = counter.sample(now_ms)
            counter.minute.add(sample)
            if minutes:
                counter.hour.add(sample)
            if hours:
                counter.day.add(sample)
        if minutes:
            self._minutes_at_ms = now_ms + _TEN_MINUTES_MS
        if hours:
            self._hours_at_ms = now_ms + _HOUR_MS
            for table in (self._puts, *self._by_group):
                table.forget_idle()
        for table in (self._puts, *self._by_group):
            table.make_room()
        self._samples.append(totals)
        self._close_minute(totals)
        self._close_day(totals)

    def _close_minute(self, totals: Totals) -> None:
        if 0 <= totals.at_ms - self._took_from.at_ms < 6 * _TEN_SECONDS_MS:
            return
        self._took.close(totals.put_times - self._took_from.put_times)
        self._took, self.took = _Took(), self._took
        self._took_from = totals

    def _close_day(self, totals: Totals) -> None:
        today = _day(totals.at_ms)
        if today != self._today:
            self._today = today
            self.yesterday_morning, self.this_morning = self.this_morning, totals

    # Reading.

    def totals(self, now_ms: int) -> Totals:
        puts, gets = self._puts.all(), self._gets.all()
        return Totals(
            at_ms=now_ms,
            put_times=sum(counter.times for counter in puts),
            put_count=sum(counter.count for counter in puts),
            put_bytes=sum(counter.size_bytes for counter in puts),
            got_times=sum(counter.times for counter in gets),
            got_count=sum(counter.count for counter in gets),
            missed=self._missed,
            user_put_count=sum(counter.count for counter in puts if not counter.is_system),
            user_got_count=sum(counter.count for counter in gets if not counter.is_system),
        )

    def recent_tps(self, value: Callable[[Totals], int]) -> tuple[float, float, float]:
        """The rate of `value` over the last 10 seconds, minute and 10 minutes, or over what there is of them."""
        last = self._samples[-1]

        def tps(samples_back: int) -> float:
            first = self._samples[max(0, len(self._samples) - 1 - samples_back)]
            span_ms = last.at_ms - first.at_ms
            return (value(last) - value(first)) * 1000 / span_ms if span_ms > 0 else 0.0

        return tps(1), tps(6), tps(60)

    def put_tps(self, topic: str) -> float:
        counter = self._puts.table.get(topic)
        return counter.minute.counted().tps if counter else 0.0

    def get_tps(self, group: str, topic: str) -> float:
        counter = self._gets.table.get((topic, group))
        return counter.minute.counted().tps if counter else 0.0

    def view(self, name: str, key: str) -> Rates | None:
        """A counter by Apache's name (`TOPIC_PUT_NUMS`) and key (`topic`, `topic@group` or the cluster's name; that of
        dead letters is `owner@topic@group@SEND_BACK_TO_DLQ`, and its owner is nobody's here)."""
        topic, _, group = key.partition("@")
        match name:
            case "TOPIC_PUT_NUMS" | "TOPIC_PUT_SIZE":
                counter = self._puts.table.get(key)
            case "GROUP_GET_NUMS" | "GROUP_GET_SIZE":
                counter = self._gets.table.get((topic, group))
            case "SNDBCK_PUT_NUMS":
                counter = self._send_backs.table.get((topic, group))
            case "SNDBCK2DLQ_TIMES":
                _, topic, group, _ = [*key.split("@", 3), "", "", ""][:4]
                counter = self._dead_letters.table.get((topic, group))
            case _:
                counter = self._broker.get(name) if key == self._cluster_name else None
        if counter is None:
            return None
        return counter.sized() if name.endswith("SIZE") else counter.counted()

    def forget_topics(self, topics: Collection[str]) -> None:
        """The topics were deleted."""
        self._puts.forget(topics)
        for table in self._by_group:
            table.forget([key for key in table.table if key[0] in topics])

    def forget_group(self, group: str) -> None:
        """The group was deleted."""
        for table in self._by_group:
            table.forget([key for key in table.table if key[1] == group])


def _add_one(counters: Counters[tuple[str, str]], key: tuple[str, str]) -> None:
    counter = counters.table.get(key) or counters.new(key)
    counter.times += 1
    counter.count += 1


def _due(now_ms: int, at_ms: int) -> bool:
    # Also when the clock was set back by more than any period: waiting for it to catch up could take days.
    return now_ms >= at_ms or now_ms < at_ms - _HOUR_MS


def _day(now_ms: int) -> int:
    return datetime.fromtimestamp(now_ms / 1000).toordinal()
