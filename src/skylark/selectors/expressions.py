"""What the parts of an expression mean: one function a construct of the grammar.

Each takes the nodes below it, refuses what Apache refuses, and gives a node. Evaluation knows three outcomes, true,
false and unknown (None), and an error. What to know of the rules:

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

from collections.abc import Callable, Sequence
from typing import Final

from skylark.selectors.nodes import (
    ABOVE,
    BELOW,
    SAME,
    Constant,
    Equal,
    Inverted,
    IsNull,
    Negated,
    Node,
    OneOf,
    Presence,
    Property,
    PropertyIs,
    Related,
    RelatedToDouble,
    RelatedToWhole,
    Row,
    TextTest,
)
from skylark.selectors.values import (
    INTEGER_MAX,
    LONG_MAX,
    EvaluationError,
    Long,
    Value,
    order,
    parse_double,
    parse_whole,
)

MAX_DEPTH: Final = 200  # nested parts; longer rows of AND and OR are one part


class BadSelector(Exception):
    """An expression that Apache would refuse too, or one beyond the limits. `position` counts from 0."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(f"{reason} (at character {position + 1})")
        self.reason = reason
        self.position = position


def _placed(node: Node, at: int, *below: Node, is_boolean: bool = True) -> Node:
    """A node on top of others."""
    node.at, node.depth, node.is_boolean = at, _depth(below), is_boolean
    return node


def _depth(below: Sequence[Node]) -> int:
    depth = 1 + max((node.depth for node in below), default=0)
    if depth > MAX_DEPTH:
        raise BadSelector(f"the expression is nested more than {MAX_DEPTH} deep", below[0].at)
    return depth


def constant(value: Value, at: int) -> Node:
    return _placed(Constant(value), at, is_boolean=value is None or isinstance(value, bool))


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
    return _placed(Property(name), at, is_boolean=False)


def as_boolean(node: Node) -> Node:
    if node.is_boolean:
        return node
    if not isinstance(node, Property):
        raise BadSelector("this is not a boolean", node.at)
    return _placed(Presence(node.key), node.at)


def negate(node: Node, at: int) -> Node:
    return _placed(Negated(node), at, node, is_boolean=False)


def invert(node: Node, at: int) -> Node:
    return _placed(Inverted(as_boolean(node)), at, node)


def all_of(left: Node, right: Node) -> Node:
    return _join(left, right, decisive=False)


def any_of(left: Node, right: Node) -> Node:
    return _join(left, right, decisive=True)


def _join(left: Node, right: Node, *, decisive: bool) -> Node:
    """A row of ANDs or ORs; as one flat part, however long it is."""
    left, right = as_boolean(left), as_boolean(right)
    if isinstance(left, Row) and left.decisive is decisive:
        left.depth = max(left.depth, _depth([left, right]) - 1)
        left.parts.append(right)  # the row goes on; nobody else has it
        return left
    return _placed(Row([left, right], decisive), left.at, left, right)


def is_null(node: Node) -> Node:
    return _placed(IsNull(node), node.at, node)


def equal(left: Node, right: Node) -> Node:
    for side in (left, right):
        if isinstance(side, Constant) and side.value is None:
            raise BadSelector("NULL can't be compared; write IS NULL or IS NOT NULL", side.at)
    if isinstance(left, Constant) and isinstance(right, Constant) and left.is_boolean and not right.is_boolean:
        raise BadSelector("a boolean can't be compared with this", right.at)
    node: Node | None = None
    if isinstance(left, Property) and isinstance(right, Constant):
        if isinstance(right.value, str):
            node = PropertyIs(left.key, right.value) if right.value.isascii() else None
        else:
            node = _property_relates(left, SAME, right)
    return _placed(node or Equal(left, right), left.at, left, right)


def relation(left: Node, sign: str, right: Node) -> Node:
    """`left < right` and its kin, for numbers and for properties that hold numbers."""
    for side in (left, right):
        if side.is_boolean or (isinstance(side, Constant) and isinstance(side.value, str)):
            raise BadSelector("only numbers and properties can be compared by <, <=, >, >= and BETWEEN", side.at)
    outcomes = _OUTCOMES[sign]
    node: Node | None = None
    if isinstance(left, Property) and isinstance(right, Constant):
        node = _property_relates(left, outcomes, right)
    return _placed(node or Related(left, outcomes, right), left.at, left, right)


_OUTCOMES: Final = {"<": BELOW, "<=": BELOW | SAME, ">": ABOVE, ">=": ABOVE | SAME}


def _property_relates(left: Property, outcomes: int, right: Constant) -> Node | None:
    """The most frequent comparisons: of a property with a number."""
    number = right.value
    if isinstance(number, float):
        return RelatedToDouble(left.key, outcomes, number)
    if isinstance(number, int) and not isinstance(number, bool):
        return RelatedToWhole(left.key, outcomes, number, LONG_MAX if isinstance(number, Long) else INTEGER_MAX)
    return None


def between(value: Node, low: Node, high: Node) -> Node:
    if isinstance(low, Constant) and isinstance(high, Constant):
        if low.value is None or high.value is None:
            raise BadSelector("the limits of BETWEEN can't be NULL", low.at)
        if (
            isinstance(low.value, (int, float))
            and isinstance(high.value, (int, float))
            and not low.is_boolean
            and not high.is_boolean
            and order(high.value, low.value) < 0
        ):
            raise BadSelector("the lower limit of BETWEEN must come first", low.at)
    return all_of(relation(value, ">=", low), relation(value, "<=", high))


def not_between(value: Node, low: Node, high: Node) -> Node:
    return any_of(relation(value, "<", low), relation(value, ">", high))


def one_of(node: Node, choices: Sequence[str], *, inverted: bool) -> Node:
    if not isinstance(node, Property):
        raise BadSelector("IN needs a property on its left", node.at)
    return _placed(OneOf(node.key, frozenset(choices), inverted), node.at, node)


def text_test(node: Node, holds: Callable[[str, str], bool], search: str, *, inverted: bool) -> Node:
    """CONTAINS, STARTSWITH and ENDSWITH."""
    return _placed(TextTest(node, holds, search, inverted), node.at, node)
