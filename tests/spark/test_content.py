"""A batch is recognised however its rows are spread, and another is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skylark.spark.content import Tally, total
from skylark.spark.rows import Outgoing

TEXT = st.text(st.characters(blacklist_characters="\1\2", blacklist_categories=["Cs"]), max_size=3)
ROW = st.tuples(TEXT, st.binary(max_size=3), st.dictionaries(TEXT, TEXT, max_size=2))
Row = tuple[str, bytes, dict[str, str]]


def content_of(rows: list[Row], attempt: str) -> Tally:
    tally = Tally("t")
    for number, (topic, body, properties) in enumerate(rows):
        tally.add(Outgoing(topic, body, {**properties, "UNIQ_KEY": f"{attempt}{number}"}, None, False, 0))
    return tally


@given(st.lists(ROW, max_size=8), st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 4))
def test_neither_order_nor_tasks_count(rows: list[Row], random: object, tasks: int, others: int) -> None:
    first = total("t", (content_of(rows[task::tasks], "a").content for task in range(tasks)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    second = total("t", (content_of(rows[task::others], "b").content for task in range(others)))
    assert first == second


@given(st.lists(ROW, max_size=4), st.lists(ROW, max_size=4))
def test_other_rows_are_told(rows: list[Row], others: list[Row]) -> None:
    def bag(of: list[Row]) -> list[str]:
        return sorted(repr((topic, body, sorted(properties.items()))) for topic, body, properties in of)

    assert (content_of(rows, "a").content == content_of(others, "b").content) == (bag(rows) == bag(others))
