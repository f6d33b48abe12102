"""SQL92 expressions: outcomes, refusals with their place, limits. That they are Apache's is shown in tests/interop."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.selectors import MAX_LENGTH, BadSelector, EvaluationError, compile_selector
from skylark.selectors.expressions import MAX_DEPTH
from skylark.selectors.values import Long, compare

MESSAGE = {"price": "12", "color": "red", "note": "it's", "flag": "true", "word": "abc"}


@pytest.mark.parametrize(
    ("expression", "outcome"),
    [
        ("price > 10 AND color = 'red'", True),
        ("price > 10 and color <> 'red'", False),
        ("price BETWEEN 10 AND 12", True),
        ("price NOT BETWEEN 10 AND 12", False),
        ("color IN ('blue', 'red')", True),
        ("color NOT IN ('blue', 'red')", False),
        ("note = 'it''s'", True),
        ("flag = TRUE", True),
        ("word CONTAINS 'b' AND word STARTSWITH 'a' AND word ENDSWITH 'c'", True),
        ("word NOT CONTAINS 'b' OR word NOT STARTSWITH 'a' OR word NOT ENDSWITH 'c'", False),
        ("word CONTAINS ''", False),
        ("- price IS NULL", True),
        ("price > -1 AND +price = 12", True),
        ("price >= 12.0", True),
        ("NULL", None),
        ("nothing = 1", None),
        ("nothing IS NULL", True),
        ("nothing IS NOT NULL", False),
        ("nothing = 1 OR price = 12", True),
        ("nothing = 1 AND price = 12", None),
        ("nothing = 1 AND price = 13", False),
        ("NOT (nothing = 1)", None),
        ("nothing NOT IN ('x')", None),
        ("nothing CONTAINS 'x'", False),
        ("nothing = missing", True),
        ("color = missing", False),
        ("missing = color", None),
        ("color", False),
        ("NOT color", True),
        ("NOT price = 12", False),
        ("/* all */ price -- of it\n = 12", True),
    ],
)
def test_outcomes(expression: str, outcome: bool | None) -> None:
    selector = compile_selector(expression)
    assert selector.evaluate(MESSAGE) is outcome
    assert selector.matches(MESSAGE) is (outcome is True)
    assert selector.ignored == ""


@pytest.mark.parametrize("expression", ["color > 5", "price = 12.0 AND word < 1", "TRUE = color", "word > color"])
def test_what_cant_be_evaluated_does_not_match(expression: str) -> None:
    selector = compile_selector(expression)
    with pytest.raises(EvaluationError):
        selector.evaluate(MESSAGE)
    assert not selector.matches(MESSAGE)


SIGNS = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
LIMITS = [9, 10, 999_999_999, 1_000_000_000, 2**31 - 1, 2**31, 2**63 - 1, 2**63]
whole = st.integers(0, 2**63 - 1) | st.sampled_from(LIMITS[:-1])
numbers = (whole | st.sampled_from(LIMITS) | st.floats()).map(str)
values = st.one_of(
    numbers, numbers.map("-{}".format), numbers.map("00{}".format), st.text("+-.0123456789\u0663 ", min_size=1)
)


literals = whole | st.floats(0.1, 1e300)


@given(values, st.sampled_from([*SIGNS]), literals | literals.map(operator.neg))
def test_a_property_beside_a_number(value: str, sign: str, number: float) -> None:
    """By the rule for all values, whatever is quicker for these two."""
    selector = compile_selector(f"a {sign} {number}")
    try:
        order = compare(value, Long(number) if isinstance(number, int) and abs(number) >= 2**31 else number)
    except EvaluationError:
        with pytest.raises(EvaluationError):
            selector.evaluate({"a": value})
    else:
        assert selector.evaluate({"a": value}) is SIGNS[sign](order, 0)


@given(st.text("ab\u00e9\ufffd", min_size=1, max_size=3), st.text("ab\u00e9\ufffd", max_size=3))
def test_a_property_beside_a_string(value: str, wanted: str) -> None:
    assert compile_selector(f"a = '{wanted}'").evaluate({"a": value}) is (value == wanted)


@pytest.mark.parametrize(
    ("expression", "position"),
    [
        ("", 0),
        ("price >", 7),
        ("price > > 5", 8),
        ("(price = 5", 10),
        ("price = 'x", 8),
        ("price ! 5", 6),
        ("a NOT 5", 6),
        ("a = NULL", 4),
        ("a = 0.0", 4),
        ("a = 1e999", 4),
        ("a = 9223372036854775808", 4),
        ("a BETWEEN 5 AND 3", 10),
        ("a > 'x'", 4),
        ("5 IN ('x')", 0),
        ("'text'", 0),
        ("NOT 5", 4),
    ],
)
def test_refusals_say_where(expression: str, position: int) -> None:
    with pytest.raises(BadSelector) as refused:
        compile_selector(expression)
    assert refused.value.position == position
    assert f"(at character {position + 1})" in str(refused.value)


def test_the_rest_of_a_text_does_not_count() -> None:
    selector = compile_selector("price = 12 AND color LIKE 'r%'")
    assert selector.ignored == "LIKE 'r%'"
    assert selector.evaluate(MESSAGE) is False


def test_length_is_bounded() -> None:
    with pytest.raises(BadSelector, match="characters"):
        compile_selector("a = 1 OR " * MAX_LENGTH)


@pytest.mark.parametrize(
    "expression",
    ["NOT " * (MAX_DEPTH + 1) + "a", "-" * 2000 + "a = 1", "a" + " = 1" * (MAX_DEPTH + 1), "a" + " IS NULL" * 1000],
)
def test_nesting_is_bounded(expression: str) -> None:
    with pytest.raises(BadSelector, match="nested"):
        compile_selector(expression)


def test_long_rows_are_not_nested() -> None:
    row = compile_selector(" AND ".join(["price > 1"] * 1000) + " OR color = 'blue'")
    assert row.matches(MESSAGE)
    deep = compile_selector("(" * 3000 + "price = 12" + ")" * 3000)
    assert deep.matches(MESSAGE)
