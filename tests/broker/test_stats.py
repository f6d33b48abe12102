"""The counters: what the windows show, what stays in the totals, and that the tables do not grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.broker.stats import Rate, Stats, Totals

START_MS = 1_700_000_000_000
TEN_SECONDS_MS = 10_000


def ticks(stats: Stats, start_ms: int, count: int) -> int:
    for n in range(count):
        stats.tick(start_ms + n * TEN_SECONDS_MS)
    return start_ms + (count - 1) * TEN_SECONDS_MS


def test_a_topic_shows_its_first_rate_after_one_sample() -> None:
    stats = Stats("C1", START_MS)
    stats.put("T", 50, 5_000)
    stats.put("T", 50, 5_000)
    assert stats.put_tps("T") == 0.0
    stats.tick(START_MS)
    assert stats.put_tps("T") == 10.0
    counted, sized = stats.view("TOPIC_PUT_NUMS", "T"), stats.view("TOPIC_PUT_SIZE", "T")
    assert counted is not None
    assert sized is not None
    assert counted.minute == Rate(100, 10.0, 50.0)
    assert sized.minute == Rate(10_000, 1_000.0, 5_000.0)


def test_the_minute_forgets_and_the_hour_and_day_remember() -> None:
    stats = Stats("C1", START_MS)
    stats.put("T", 600, 1)
    last = ticks(stats, START_MS, 8)
    rates = stats.view("TOPIC_PUT_NUMS", "T")
    assert rates is not None
    assert rates.minute == Rate(0, 0.0, 0.0)
    assert rates.hour == Rate(600, 1.0, 600.0)
    assert rates.day.sum == 600
    ticks(stats, last + TEN_SECONDS_MS, 8 * 60)
    rates = stats.view("TOPIC_PUT_NUMS", "T")
    assert rates is not None
    assert rates.hour.sum == 0
    assert rates.day.sum == 600


def test_groups_are_counted_by_topic_and_group() -> None:
    stats = Stats("C1", START_MS)
    stats.got("G", "T", 32, 3_200)
    stats.got("G2", "T", 1, 1)
    stats.sent_back("G", "T")
    stats.dead_letter("G", "T")
    stats.dead_letter("G", "T")
    stats.tick(START_MS)
    assert stats.get_tps("G", "T") == 3.2
    assert stats.get_tps("G", "U") == 0.0
    counted, sized = stats.view("GROUP_GET_NUMS", "T@G"), stats.view("GROUP_GET_SIZE", "T@G")
    back = stats.view("SNDBCK_PUT_NUMS", "T@G")
    assert counted is not None
    assert sized is not None
    assert back is not None
    assert (counted.minute.sum, sized.minute.sum, back.minute.sum) == (32, 3_200, 1)
    dead = stats.view("SNDBCK2DLQ_TIMES", "null@T@G@SEND_BACK_TO_DLQ")
    assert dead is not None
    assert dead.minute.sum == 2
    assert stats.view("SNDBCK2DLQ_TIMES", "T@G") is None


def test_the_whole_broker_under_its_cluster_name() -> None:
    stats = Stats("C1", START_MS, lambda topic: topic.startswith("SYS"))
    stats.put("T", 10, 1)
    stats.put("SYS_T", 5, 1)
    stats.got("G", "SYS_T", 3, 1)
    stats.tick(START_MS)
    sums = {
        name: rates.minute.sum
        for name in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS", "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC")
        if (rates := stats.view(name, "C1")) is not None
    }
    assert sums == {"BROKER_PUT_NUMS": 15, "BROKER_GET_NUMS": 3, "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC": 10}
    assert stats.view("BROKER_PUT_NUMS", "C2") is None


@pytest.mark.parametrize(("name", "key"), [("TOPIC_PUT_NUMS", "no"), ("GROUP_GET_NUMS", "T"), ("NO_SUCH", "T")])
def test_what_was_never_counted_is_not_there(name: str, key: str) -> None:
    stats = Stats("C1", START_MS)
    stats.put("T", 1, 1)
    stats.tick(START_MS)
    assert stats.view(name, key) is None


def test_recent_rates_use_what_there_is_of_their_window() -> None:
    stats = Stats("C1", START_MS)
    assert stats.recent_tps(lambda totals: totals.put_count) == (0.0, 0.0, 0.0)
    stats.put("T", 100, 1)
    stats.tick(START_MS + TEN_SECONDS_MS)
    assert stats.recent_tps(lambda totals: totals.put_count) == (10.0, 10.0, 10.0)
    ticks(stats, START_MS + 2 * TEN_SECONDS_MS, 9)
    assert stats.recent_tps(lambda totals: totals.put_count) == (0.0, 0.0, 1.0)


def test_a_full_table_counts_the_rest_in_the_totals_only() -> None:
    stats = Stats("C1", START_MS, max_counters=2)
    for topic in ("A", "B", "C", "D"):
        stats.put(topic, 1, 10)
    stats.tick(START_MS)
    assert stats.put_tps("B") == 0.1
    assert stats.put_tps("C") == 0.0
    assert stats.totals(START_MS) == Totals(START_MS, put_times=4, put_count=4, put_bytes=40, user_put_count=4)


def test_an_idle_counter_makes_room_and_stays_in_the_totals() -> None:
    stats = Stats("C1", START_MS, max_counters=1)
    stats.put("A", 7, 70)
    for hour in range(27):
        stats.tick(START_MS + hour * 3_600_000)
    assert stats.view("TOPIC_PUT_NUMS", "A") is None
    stats.put("B", 1, 1)
    assert stats.view("TOPIC_PUT_NUMS", "B") is not None
    assert stats.totals(START_MS).put_count == 8


def test_idle_counters_make_room_in_a_full_table() -> None:
    stats = Stats("C1", START_MS, max_counters=2)
    for topic in "ABC":
        stats.put(topic, 1, 1)
    assert stats.view("TOPIC_PUT_NUMS", "C") is None
    for tick in range(9):
        stats.put("A", 1, 1)
        stats.tick(START_MS + tick * 10_000)
    assert [stats.view("TOPIC_PUT_NUMS", topic) is not None for topic in "ABC"] == [True, False, False]
    stats.put("C", 1, 1)
    assert stats.view("TOPIC_PUT_NUMS", "C") is not None
    assert stats.totals(START_MS).put_count == 13


def test_deleted_topics_and_groups_are_forgotten() -> None:
    stats = Stats("C1", START_MS)
    stats.put("T", 1, 1)
    stats.got("G", "T", 1, 1)
    stats.got("G", "U", 1, 1)
    stats.got("H", "U", 1, 1)
    stats.sent_back("G", "U")
    stats.dead_letter("G", "U")
    stats.forget_topics(["T"])
    stats.forget_group("G")
    assert stats.view("TOPIC_PUT_NUMS", "T") is None
    assert stats.view("GROUP_GET_NUMS", "T@G") is None
    assert stats.view("SNDBCK_PUT_NUMS", "U@G") is None
    assert stats.view("SNDBCK2DLQ_TIMES", "null@U@G@SEND_BACK_TO_DLQ") is None
    assert stats.view("GROUP_GET_NUMS", "U@H") is not None
    assert stats.totals(START_MS).got_count == 3


def test_how_long_puts_took_is_shown_for_the_last_whole_minute() -> None:
    stats = Stats("C1", START_MS)
    for _ in range(98):
        stats.put("T", 1, 1)
    for elapsed_ms in (7, 450):
        stats.put("T", 1, 1)
        stats.put_took(elapsed_ms)
    assert str(stats.took).startswith("[<=0ms]:0 [0~10ms]:0 ")
    ticks(stats, START_MS + TEN_SECONDS_MS, 6)
    assert str(stats.took) == (
        "[<=0ms]:98 [0~10ms]:1 [10~50ms]:0 [50~100ms]:0 [100~200ms]:0 [200~500ms]:1 [500ms~1s]:0 "
        "[1~2s]:0 [2~3s]:0 [3~4s]:0 [4~5s]:0 [5~10s]:0 [10s~]:0 "
    )
    assert stats.slowest_put_ms == 450
    assert stats.took.percentile_ms(0.5) < 1
    assert stats.took.percentile_ms(0.99) == 7.0
    assert stats.took.percentile_ms(1.0) == 450.0


@given(st.lists(st.integers(0, 60_000), max_size=200), st.sampled_from((0.5, 0.99, 0.999, 1.0)))
def test_percentiles_lie_between_the_fastest_and_the_slowest(elapsed: list[int], share: float) -> None:
    stats = Stats("C1", START_MS)
    for elapsed_ms in elapsed:
        stats.put("T", 1, 1)
        stats.put_took(elapsed_ms)
    stats.tick(START_MS + 60_000)
    assert 0 <= stats.took.percentile_ms(share) <= 10_000


def test_mornings_remember_the_totals_of_the_day_before() -> None:
    day_ms = 86_400_000
    stats = Stats("C1", START_MS)
    stats.put("T", 5, 1)
    stats.tick(START_MS + day_ms)
    stats.put("T", 2, 1)
    stats.tick(START_MS + 2 * day_ms)
    stats.put("T", 1, 1)
    assert stats.yesterday_morning.put_count == 5
    assert stats.this_morning.put_count == 7
    assert stats.totals(START_MS + 2 * day_ms).put_count == 8


def test_a_clock_set_back_neither_divides_by_zero_nor_stops_the_samples() -> None:
    stats = Stats("C1", START_MS)
    stats.put("T", 1, 1)
    stats.tick(START_MS)
    stats.tick(START_MS - 3 * 3_600_000)
    assert stats.put_tps("T") == 0.0
    stats.put("T", 6, 1)
    stats.tick(START_MS - 3 * 3_600_000)
    rates = stats.view("TOPIC_PUT_NUMS", "T")
    assert rates is not None
    assert rates.hour.sum == 1
    stats.tick(START_MS - 3 * 3_600_000 + 600_000)
    rates = stats.view("TOPIC_PUT_NUMS", "T")
    assert rates is not None
    assert rates.hour.sum == 7
