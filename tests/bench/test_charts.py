"""The charts are drawn from the results, the same bytes each time."""

from pathlib import Path

from bench.suite.charts import draw_growths, draw_ratios
from bench.suite.report import rows
from bench.suite.running import Grown, Measured, Results

RESULTS = Results(
    workloads={
        "flush-1": Measured({"apache": [{"rate": 10.0}], "skylark": [{"rate": 30.0}]}),
        "start": Measured({"apache": [{"seconds": 4.0}], "skylark": [{"seconds": 1.0}]}),
    },
    growths={"queues": Grown([1, 8], {name: [[{"rate": 1.0}], [{"rate": 2.0}]] for name in ("apache", "skylark")})},
)


def test_a_bar_for_every_row(tmp_path: Path) -> None:
    first, second = tmp_path / "first.svg", tmp_path / "charts" / "second.svg"
    assert draw_ratios(RESULTS, first)
    assert draw_ratios(RESULTS, second)
    assert first.read_bytes() == second.read_bytes()
    for row in rows(RESULTS):
        assert f"<!-- {row.title}: {row.metric} -->" in first.read_text()


def test_a_curve_for_every_growth(tmp_path: Path) -> None:
    assert draw_growths(RESULTS, tmp_path / "growth.svg")
    assert "pipelined send to one topic" in (tmp_path / "growth.svg").read_text()


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert not draw_ratios(Results(), tmp_path / "ratios.svg")
    assert not draw_growths(Results(), tmp_path / "growth.svg")
    assert not list(tmp_path.iterdir())
