"""Our SQL92 expressions against Apache's own parser and evaluation: the same outcome for whatever is thrown at them."""

from __future__ import annotations

from base64 import b64encode

import pytest
from drivers import Driver
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from skylark.selectors import BadSelector, EvaluationError, compile_selector

Case = tuple[str, dict[str, str]]

NAMES = ["a", "b", "_c$1", "Price"]
NUMBERS = """0 1 5 -3 +7 007 2147483647 2147483648 -2147483648 -2147483649 9223372036854775807 9223372036854775808
    5.0 0.0 -0.0 1e3 1E-400 .5 5. 1e400 NaN Infinity -Infinity 0x1p3 0x.8p1 12f 12D 12L 1_0 ٣ 0x10 1e 1.5.2 --1 +-1
    9007199254740993 9007199254740992.0""".split()
VALUES = [*NUMBERS, "\uff13", " 5", "5 ", "\t5.5\n", "true", "TRUE", "false", "x", "xyz", "it's", "日本", "😀"]

name = st.sampled_from(NAMES)
text = st.sampled_from([*VALUES, "y", "z", "it''s"]).map(lambda value: f"'{value}'")
number = st.sampled_from(
    """0 1 5 10 3000000000 2147483647 2147483648 9223372036854775807 9223372036854775808 5L 3l 0L 1.5 .5 5. 1e3 2E+2
    1.e-3 0.0 1e-400 1e400 007 00.5 5e 9007199254740993""".split()
)
constant = st.sampled_from(["TRUE", "false", "NULL", "null"])


def joined(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(" ".join)


def _wider(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    strings = st.lists(text, min_size=1, max_size=6).map(", ".join)
    negation = st.sampled_from(["", "NOT"])
    return st.one_of(
        joined(inner, st.sampled_from("= <> < <= > >= AND OR and oR".split()), inner),
        joined(inner, st.sampled_from(["IS NULL", "IS NOT NULL", "is not null", "IS"])),
        joined(inner, negation, st.just("BETWEEN"), inner, st.just("AND"), inner),
        joined(inner, negation, st.just("IN ("), strings, st.just(")")),
        joined(inner, negation, st.sampled_from(["CONTAINS", "startsWith", "ENDSWITH"]), text),
        joined(st.sampled_from(["NOT", "-", "+", "- -"]), inner),
        inner.map("({})".format),
    )


def _typical() -> st.SearchStrategy[str]:
    """Expressions that mostly compile, so that evaluation is tried and not only refusal."""
    value = st.one_of(name, number, number.map("-{}".format))
    comparison = st.one_of(
        joined(name, st.sampled_from("= <> < <= > >=".split()), value),
        joined(name, st.sampled_from("= <>".split()), text),
        joined(value, st.sampled_from("= <> < <= > >=".split()), name),
        joined(name, st.sampled_from(["IS NULL", "IS NOT NULL"])),
        joined(name, st.sampled_from(["BETWEEN 1 AND", "NOT BETWEEN b AND"]), number),
        joined(name, st.sampled_from(["", "NOT"]), text.map("IN ({}, 'x')".format)),
        joined(name, st.sampled_from(["", "NOT"]), st.sampled_from(["CONTAINS", "STARTSWITH", "ENDSWITH"]), text),
    )
    return st.recursive(
        comparison,
        lambda inner: st.one_of(
            joined(inner, st.sampled_from(["AND", "OR"]), inner), inner.map("NOT ({})".format), inner.map("({})".format)
        ),
        max_leaves=5,
    )


noise = st.lists(
    st.sampled_from(
        [*"()=<>+-,';/*\n$#", "--", "/*", "*/", "<>", ">=", "NOT", "AND", "IS", "NULL", "IN", "LIKE", "a", "'x'", "5"]
    ),
    max_size=8,
).map(" ".join)
anything = st.recursive(st.one_of(name, number, text, constant), _wider, max_leaves=6)
spoilt = st.tuples(anything, st.integers(0, 60), st.sampled_from(["", "'", "\n", "#", "-- x\n", "/*y*/", " b "])).map(
    lambda drawn: drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] :]
)
expressions = st.one_of(
    _typical(), _typical(), anything, spoilt, noise, joined(_typical(), noise), st.text(max_size=12)
)
# Java can't be sent what is not Unicode, and a property that is empty does not exist.
cases = st.tuples(expressions, st.dictionaries(name, st.sampled_from(VALUES), max_size=4))


def ours(case: Case) -> str:
    try:
        selector = compile_selector(case[0])
    except BadSelector:
        return "refused"
    try:
        return {True: "true", False: "false", None: "null"}[selector.evaluate(case[1])]  # type: ignore[index]
    except EvaluationError:
        return "failed"


def theirs(java: Driver, batch: list[Case]) -> list[str]:
    lines = []
    for expression, properties in batch:
        fields = [expression, *(each for pair in properties.items() for each in pair)]
        lines.append(",".join(b64encode(field.encode()).decode() for field in fields))
    outcomes: list[str] = java.call("selectors", cases="\n".join(lines))["outcomes"]
    return outcomes


def test_every_outcome_is_apaches(java_latest: Driver) -> None:
    batch: list[Case] = []

    @settings(max_examples=1500, phases=[Phase.generate], database=None, derandomize=True)
    @given(cases)
    def collect(case: Case) -> None:
        batch.append(case)

    collect()
    expected = theirs(java_latest, batch)
    assert set(expected) == {"true", "false", "null", "refused", "failed"}
    differing = [
        (case, one, other) for case, one, other in zip(batch, map(ours, batch), expected, strict=True) if one != other
    ]
    assert not differing, "\n".join(f"{case}: {one}, Apache {other}" for case, one, other in differing[:10])


@pytest.mark.parametrize(
    "expression",
    ["a = 5", "5 = a", "a > b", "a = 3000000000", "a < 1.5", "a = TRUE", "TRUE = a", "a = b", "a", "NOT a", "- a = 1"],
)
def test_every_kind_of_value_is_converted_as_by_apache(java_latest: Driver, expression: str) -> None:
    batch = [(expression, {"a": value, "b": "5"}) for value in VALUES] + [(expression, {"b": "5"}), (expression, {})]
    assert list(map(ours, batch)) == theirs(java_latest, batch)
