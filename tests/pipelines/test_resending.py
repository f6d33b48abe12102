"""How fast messages are sent again."""

from skylark.pipelines.resending import Pace


def test_a_pace_is_kept_and_not_made_up_for() -> None:
    pace = Pace(100)
    assert [round(pace.wait_s(10, now_s), 3) for now_s in (5.0, 5.0, 5.15, 60.0, 60.0)] == [0.0, 0.1, 0.05, 0.0, 0.1]


def test_without_a_rate_nothing_waits() -> None:
    assert Pace(None).wait_s(1_000_000, 5.0) == 0.0
