"""What the parts of an expression mean: one function a construct of the grammar.

Each takes the nodes below it, refuses what Apache refuses, and gives a node whose `evaluate` is a function of the
properties. Evaluation knows three outcomes, true, false and unknown (None), and an error. What to know of the rules:

- A property that the message does not have is null, and a comparison with null is unknown. Yet `a = b` is true when
  both are null, and false when only the right one is.
- `AND`, `OR` and `NOT` follow the three-valued logic of SQL; only true matches.
- A property alone is never true: it is unknown without it, false with it. `NOT a` says that it is there.
- `NOT` binds tighter than comparisons: `NOT a = 1` is `(NOT a) = 1`. Write `NOT (a = 1)`.
- `<`, `<=`, `>`, `>=` and `BETWEEN` are for numbers; two properties are compared as doubles.
- `IN`, `CONTAINS`, `STARTSWITH` and `ENDSWITH` are for strings; the last three are never unknown, and never true for
  an empty search.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from skylark.selectors.values import (
    INTEGER_MAX,
    LONG_MAX,
    EvaluationError,
    Long,
    Value,
    compare,
    convert,
    order,
    parse_double,
    parse_whole,
)

MAX_DEPTH: Final = 200  # nested parts; longer rows of AND and OR are one part


class Properties(Protocol):
    """Where a name leads to a value, or to nothing; such as a dict."""

    def get(self, name: str, /) -> str | None: ...


Evaluate = Callable[[Properties], Value]
Test = Callable[[int, int], bool]


class BadSelector(Exception):
    """An expression that Apache would refuse too, or one beyond the limits. `position` counts from 0."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"{reason} (at character {position + 1})")
        self.reason = reason
        self.position = position


class Node(msgspec.Struct, frozen=True, eq=False):
    """A part of an expression."""

    evaluate: Evaluate
    at: int
    depth: int = 1
    is_boolean: bool = False
    is_constant: bool = False
    value: Value = None
    """Of a constant."""
    name: str | None = None
    """Of a property."""
    joined_by: str = ""
    """AND or OR, of a row of them."""
    joined: Sequence[Evaluate] = ()


def _node(evaluate: Evaluate, below: Sequence[Node]) -> Node:
    """A boolean node on top of others."""
    return Node(evaluate, below[0].at, _depth(below), is_boolean=True)


def _depth(below: Sequence[Node]) -> int:
    depth = 1 + max(node.depth for node in below)
    if depth > MAX_DEPTH:
        raise BadSelector(f"the expression is nested more than {MAX_DEPTH} deep", below[0].at)
    return depth


def constant(value: Value, at: int) -> Node:
    return Node(lambda _: value, at, is_boolean=value is None or isinstance(value, bool), is_constant=True, value=value)


def whole_number(text: str, at: int) -> Node:
    try:
        number = parse_whole(text.rstrip("lL"), LONG_MAX)
    except EvaluationError:
        raise BadSelector(f"{text} is beyond 64 bits", at) from None
    return constant(number if number <= INTEGER_MAX else Long(number), at)


def floating_number(text: str, at: int) -> Node:
    number = parse_double(text)
    if number == float("inf"):
        raise BadSelector(f"{text} is too large for a double", at)
    if number == 0.0:  # by Apache's rule, which takes the smallest double above 0 for the smallest double
        raise BadSelector(f"{text} is below the smallest double above 0; write 0", at)
    return constant(number, at)


def string(text: str) -> str:
    """What a quoted literal stands for."""
    return text[1:-1].replace("''", "'")


def variable(name: str, at: int) -> Node:
    return Node(lambda properties: properties.get(name), at, name=name)


def as_boolean(node: Node) -> Node:
    if node.is_boolean:
        return node
    if node.name is None:
        raise BadSelector("this is not a boolean", node.at)
    name = node.name
    return Node(
        lambda properties: None if properties.get(name) is None else False, node.at, node.depth, is_boolean=True
    )


def negate(node: Node, at: int) -> Node:
    inner = node.evaluate

    def evaluate(properties: Properties) -> Value:
        value = inner(properties)
        if isinstance(value, (bool, str)) or value is None:
            return None
        return Long(-value) if isinstance(value, Long) else -value

    return Node(evaluate, at, _depth([node]))


def invert(node: Node, at: int) -> Node:
    inner = as_boolean(node).evaluate

    def evaluate(properties: Properties) -> Value:
        value = inner(properties)
        return None if value is None else not value

    return Node(evaluate, at, _depth([node]), is_boolean=True)


def all_of(left: Node, right: Node) -> Node:
    return _join(left, right, "AND", decisive=False)


def any_of(left: Node, right: Node) -> Node:
    return _join(left, right, "OR", decisive=True)


def _join(left: Node, right: Node, word: str, *, decisive: bool) -> Node:
    """A row of ANDs or ORs, which the first decisive value ends; as one flat part, however long it is."""
    left, right = as_boolean(left), as_boolean(right)
    functions: list[Evaluate] = [left.evaluate]
    depth = _depth([left, right])
    if left.joined_by == word and isinstance(left.joined, list):
        functions, depth = left.joined, max(left.depth, depth - 1)  # the row goes on; nobody else has it
    functions.append(right.evaluate)

    def evaluate(properties: Properties) -> Value:
        result: bool | None = not decisive
        for function in functions:
            value = function(properties)
            if value is decisive:
                return decisive
            if value is None:
                result = None
        return result

    return Node(evaluate, left.at, depth, is_boolean=True, joined_by=word, joined=functions)


def is_null(node: Node) -> Node:
    inner = node.evaluate
    return _node(lambda properties: inner(properties) is None, [node])


def equal(left: Node, right: Node) -> Node:
    for side in (left, right):
        if side.is_constant and side.value is None:
            raise BadSelector("NULL can't be compared; write IS NULL or IS NOT NULL", side.at)
    if left.is_constant and right.is_constant and left.is_boolean and not right.is_boolean:
        raise BadSelector("a boolean can't be compared with this", right.at)
    if left.name is not None and isinstance(right.value, str):
        return _node(_property_is(left.name, right.value), [left, right])
    left_value, right_value = left.evaluate, right.evaluate

    def evaluate(properties: Properties) -> Value:
        one, other = left_value(properties), right_value(properties)
        if one is None:
            return True if other is None else None
        if other is None:
            return False
        return compare(one, other) == 0

    return _node(evaluate, [left, right])


def _property_is(name: str, wanted: str) -> Evaluate:
    """The most frequent of all comparisons."""

    def evaluate(properties: Properties) -> Value:
        value = properties.get(name)
        return None if value is None else value == wanted

    return evaluate


def relation(left: Node, test: Test, right: Node) -> Node:
    """`left < right` and its kin, for numbers and for properties that hold numbers."""
    for side in (left, right):
        if side.is_boolean or (side.is_constant and isinstance(side.value, str)):
            raise BadSelector("only numbers and properties can be compared by <, <=, >, >= and BETWEEN", side.at)
    if left.name is not None and right.is_constant and isinstance(right.value, (int, float)):
        return _node(_property_relates(left.name, test, right.value), [left, right])
    left_value, right_value = left.evaluate, right.evaluate

    def evaluate(properties: Properties) -> Value:
        one = left_value(properties)
        if one is None:
            return None
        other = right_value(properties)
        if other is None:
            return None
        if isinstance(one, str) and isinstance(other, str):
            one, other = parse_double(one), parse_double(other)
        return test(compare(one, other), 0)

    return _node(evaluate, [left, right])


def _property_relates(name: str, test: Test, number: int | float) -> Evaluate:
    if isinstance(number, int):
        highest = LONG_MAX if isinstance(number, Long) else INTEGER_MAX

        def evaluate_whole(properties: Properties) -> Value:
            value = properties.get(name)
            return None if value is None else test(parse_whole(value, highest), number)

        return evaluate_whole

    def evaluate(properties: Properties) -> Value:
        value = properties.get(name)
        return None if value is None else test(order(convert(value, number), number), 0)

    return evaluate


def between(value: Node, low: Node, high: Node) -> Node:
    both = (low, high)
    if all(side.is_constant for side in both):
        if any(side.value is None for side in both):
            raise BadSelector("the limits of BETWEEN can't be NULL", low.at)
        if all(isinstance(side.value, (int, float)) and not side.is_boolean for side in both) and (
            order(high.value, low.value) < 0  # type: ignore[arg-type]  # numbers, as the line above says
        ):
            raise BadSelector("the lower limit of BETWEEN must come first", low.at)
    return all_of(relation(value, operator.ge, low), relation(value, operator.le, high))


def not_between(value: Node, low: Node, high: Node) -> Node:
    return any_of(relation(value, operator.lt, low), relation(value, operator.gt, high))


def one_of(node: Node, choices: Sequence[str], *, inverted: bool) -> Node:
    if node.name is None:
        raise BadSelector("IN needs a property on its left", node.at)
    name, wanted = node.name, frozenset(choices)

    def evaluate(properties: Properties) -> Value:
        value = properties.get(name)
        return None if value is None else (value in wanted) is not inverted

    return _node(evaluate, [node])


def text_test(node: Node, holds: Callable[[str, str], bool], search: str, *, inverted: bool) -> Node:
    """CONTAINS, STARTSWITH and ENDSWITH."""
    if not search:
        return _node(lambda _: False, [node])
    inner = node.evaluate

    def evaluate(properties: Properties) -> Value:
        value = inner(properties)
        return isinstance(value, str) and holds(value, search) is not inverted

    return _node(evaluate, [node])
