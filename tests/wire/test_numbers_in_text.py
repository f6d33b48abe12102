"""Numbers in text that others wrote: Java's ranges, and nothing that raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.wire.numbers import INT_MAX, LONG_MAX, java_count, java_int, java_long


@given(st.integers(-(1 << 70), 1 << 70), st.integers(0, 40), st.booleans())
def test_a_number_is_read_if_it_is_in_the_range(number: int, zeros: int, plus: bool) -> None:
    sign = "-" if number < 0 else "+" if plus else ""
    text = f"{sign}{'0' * zeros}{abs(number)}"
    assert java_int(text) == (number if -INT_MAX - 1 <= number <= INT_MAX else None)
    assert java_long(text) == (number if -LONG_MAX - 1 <= number <= LONG_MAX else None)
    assert java_count(text) == (number if 0 <= number <= INT_MAX else None)


@given(st.text(max_size=30))
def test_any_text_is_a_number_or_none(text: str) -> None:
    number = java_long(text)
    assert number is None or int(text) == number


@pytest.mark.parametrize(
    "text", ["", "+", "-", "--1", " 1", "1 ", "1_0", "\uff11", "1\n", "1.0", "9" * 5_000, "-" + "9" * 5_000]
)
def test_what_is_no_number(text: str) -> None:
    assert java_long(text) is None


def test_zeros_in_front_do_not_count() -> None:
    assert java_long("0" * 5_000 + "7") == 7
    assert java_long("-" + "0" * 5_000) == 0
