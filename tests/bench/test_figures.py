"""Medians, ratios, aims and the tables that are made of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.suite.figures import Sample, Summary, at_least, at_most, ratio, summary
from bench.suite.report import BEGIN, END, OFFICIAL, OURS, detail_lines, markdown, replace_figures, rows
from bench.suite.running import Grown, Measured, Results, in_turn, read_results, write_results
from bench.suite.workloads import GROWTHS, WORKLOADS


def samples(*rates: float) -> list[Sample]:
    return [{"rate": rate, "cpu": 100 / rate} for rate in rates]


def results() -> Results:
    return Results(
        machine="a machine",
        workloads={
            "send-32x128": Measured(
                {"apache": samples(10, 30, 20), "skylark": samples(50, 60, 70)}, "2030-01-02 03:04"
            ),
            "start": Measured({"apache": [{"seconds": 4.0}], "skylark": [{"seconds": 1.0}]}, "2030-01-02 03:04"),
        },
        clients={"send": Measured({OFFICIAL: samples(10), OURS: samples(40)}, "2030-01-02 03:04")},
        brokers={"send": Measured({"one broker": samples(20), "two brokers": samples(30)}, "2030-01-02 03:04")},
        growths={
            "queues": Grown(
                [1, 8], {"apache": [samples(10), samples(9)], "skylark": [samples(20), samples(19)]}, "2030-01-02 03:04"
            )
        },
    )


def test_the_median_is_the_figure_and_the_spread_is_told() -> None:
    assert summary(samples(10, 1000, 20), "rate") == Summary(20, 10, 1000)
    assert Summary(20, 10, 1000).text(0) == "20 (10 - 1,000)"
    assert summary(samples(10), "p99_ms") is None


def test_a_round_without_the_metric_does_not_count() -> None:
    assert summary([{}, {"rate": 7.0}], "rate") == Summary(7, 7, 7)


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_a_median_lies_within_its_spread(values: list[float]) -> None:
    found = summary([{"rate": value} for value in values], "rate")
    assert found is not None
    assert found.lowest <= found.median <= found.highest


def test_a_ratio_is_ours_to_theirs() -> None:
    assert ratio(Summary(4, 4, 4), Summary(1, 1, 1)) == 0.25
    assert ratio(Summary(0, 0, 0), Summary(1, 1, 1)) == float("inf")


@pytest.mark.parametrize(("value", "more", "less"), [(1.99, False, True), (2.0, True, True), (2.01, True, False)])
def test_an_aim_is_reached_at_its_bound(value: float, more: bool, less: bool) -> None:
    assert at_least("rate", 2).reached(value) is more
    assert at_most("cpu", 2).reached(value) is less


def test_every_aim_has_a_row_of_its_own() -> None:
    found = {(row.title, row.metric): (f"{row.ratio:.2f}", row.aim, row.reached) for row in rows(results())}
    assert found == {
        ("send, 32 in flight, 128 B", "messages/s"): ("3.00", "at least 2", "yes"),
        ("send, 32 in flight, 128 B", "server CPU s per 100,000 messages"): ("0.33", "at most 0.4", "yes"),
        ("start to the first acknowledged message", "seconds"): ("0.25", "at most 0.2", "no"),
    }


def test_markdown_has_a_line_for_everything_measured() -> None:
    text = markdown(results(), "ratios.svg", None)
    assert "| send, 32 in flight, 128 B | messages/s | 20 (10 - 30) | 60 (50 - 70) | 3.00 | at least 2 | yes |" in text
    assert "| 8 | 9 (9 - 9) | 19 (19 - 19) |" in text
    assert "| send | messages/s | 10 (10 - 10) | 40 (40 - 40) | 4.00 |" in text
    assert "| send | messages/s | 20 (20 - 20) | 30 (30 - 30) | 1.50 |" in text
    assert "2030-01-02" in text
    assert len(detail_lines(results())) == 4


def test_figures_replace_what_was_between_the_marks() -> None:
    before = f"above\n{BEGIN}\nold\n{END}\nbelow\n"
    assert replace_figures(before, "new\n") == f"above\n{BEGIN}\nnew\n{END}\nbelow\n"
    with pytest.raises(ValueError, match="lacks"):
        replace_figures("no marks", "new\n")


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    write_results(path, results())
    assert read_results(path) == results()
    assert [each.name for each in path.parent.iterdir()] == ["results.json"]


def test_the_order_changes_from_round_to_round() -> None:
    assert in_turn("ab", 0) == in_turn("ab", 2) == ["a", "b"]
    assert in_turn("ab", 1) == ["b", "a"]


def test_every_name_is_there_once() -> None:
    names = [each.name for each in (*WORKLOADS, *GROWTHS)]
    assert len(set(names)) == len(names)
