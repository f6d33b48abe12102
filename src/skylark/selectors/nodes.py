"""The parts of a compiled expression, each of which knows how to evaluate itself.

What they are evaluated over are the properties of a message where they are stored. Evaluation knows three outcomes,
true, false and unknown (None), and an error. The rules are told in `expressions`, which builds the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from skylark.selectors.values import (
    EvaluationError,
    Long,
    Value,
    compare,
    order,
    parse_double,
    parse_whole,
)
from skylark.wire.lookup import StoredProperties, is_at, property_key

# How a comparison may turn out; `<=` is BELOW | SAME.
BELOW: Final = 1
SAME: Final = 2
ABOVE: Final = 4

_FAST_DIGITS: Final = 9  # so many always fit into an Integer


class Node:
    """A part of an expression. Where it stands and how deep it goes is for the builders."""

    def __init__(self) -> None:
        self.at = 0
        self.depth = 1
        self.is_boolean = False

    def evaluate(self, properties: StoredProperties) -> Value:
        """Its value for the properties. Raises EvaluationError."""
        raise NotImplementedError

    def matches(self, stored: bytes, start: i64) -> bool:
        """Whether it is true for the properties at a position; it is not when it can't be evaluated."""
        try:
            return self.evaluate(StoredProperties(stored, start)) is True
        except EvaluationError:
            return False


class Constant(Node):
    def __init__(self, value: Value) -> None:
        super().__init__()
        self.value = value

    def evaluate(self, properties: StoredProperties) -> Value:
        return self.value


class Property(Node):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.key = property_key(name)

    def evaluate(self, properties: StoredProperties) -> Value:
        return properties.text(self.key)


class Presence(Node):
    """A property that stands where a boolean should: never true."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._key = key

    def evaluate(self, properties: StoredProperties) -> Value:
        return False if properties.find(self._key)[1] else None


class Negated(Node):
    def __init__(self, inner: Node) -> None:
        super().__init__()
        self._inner = inner

    def evaluate(self, properties: StoredProperties) -> Value:
        value = self._inner.evaluate(properties)
        if isinstance(value, (bool, str)) or value is None:
            return None
        return Long(-value) if isinstance(value, Long) else -value


class Inverted(Node):
    def __init__(self, inner: Node) -> None:
        super().__init__()
        self._inner = inner

    def evaluate(self, properties: StoredProperties) -> Value:
        value = self._inner.evaluate(properties)
        return None if value is None else not value


class Row(Node):
    """Parts that are joined by AND or OR: the first decisive value ends it, however long it is."""

    def __init__(self, parts: list[Node], decisive: bool) -> None:
        super().__init__()
        self.parts = parts
        self.decisive = decisive

    def evaluate(self, properties: StoredProperties) -> Value:
        decisive = self.decisive
        result: bool | None = not decisive
        for part in self.parts:
            value = part.evaluate(properties)
            if value is None:
                result = None
            elif value is decisive:
                return decisive
        return result


class IsNull(Node):
    def __init__(self, inner: Node) -> None:
        super().__init__()
        self._inner = inner

    def evaluate(self, properties: StoredProperties) -> Value:
        return self._inner.evaluate(properties) is None


class Equal(Node):
    def __init__(self, left: Node, right: Node) -> None:
        super().__init__()
        self._left = left
        self._right = right

    def evaluate(self, properties: StoredProperties) -> Value:
        one, other = self._left.evaluate(properties), self._right.evaluate(properties)
        if one is None:
            return True if other is None else None
        if other is None:
            return False
        return compare(one, other) == 0


class PropertyIs(Node):
    """A property that is equal to a string of ASCII characters, which is decided without decoding it."""

    def __init__(self, key: bytes, wanted: str) -> None:
        super().__init__()
        self._key = key
        self._wanted = wanted.encode("ascii")

    def evaluate(self, properties: StoredProperties) -> Value:
        at, end = properties.find(self._key)
        return is_at(properties.stored, at, end, self._wanted) if end else None


class Related(Node):
    """`left < right` and its kin, of which `outcomes` are true."""

    def __init__(self, left: Node, outcomes: i64, right: Node) -> None:
        super().__init__()
        self._left = left
        self._outcomes = outcomes
        self._right = right

    def evaluate(self, properties: StoredProperties) -> Value:
        one = self._left.evaluate(properties)
        if one is None:
            return None
        other = self._right.evaluate(properties)
        if other is None:
            return None
        if isinstance(one, str) and isinstance(other, str):
            one, other = parse_double(one), parse_double(other)
        return _is_among(self._outcomes, compare(one, other))


class RelatedToWhole(Node):
    """A property compared with a whole number, of the type that goes up to `highest`."""

    def __init__(self, key: bytes, outcomes: i64, number: i64, highest: int) -> None:
        super().__init__()
        self._key = key
        self._outcomes = outcomes
        self._number = number
        self._highest = highest

    def evaluate(self, properties: StoredProperties) -> Value:
        at, end = properties.find(self._key)
        if not end:
            return None
        number = _whole_number(properties.stored, at, end, self._highest)
        return bool(self._outcomes & (BELOW if number < self._number else SAME if number == self._number else ABOVE))


class RelatedToDouble(Node):
    """A property compared with a floating-point number."""

    def __init__(self, key: bytes, outcomes: i64, number: float) -> None:
        super().__init__()
        self._key = key
        self._outcomes = outcomes
        self._number = number

    def evaluate(self, properties: StoredProperties) -> Value:
        value = properties.text(self._key)
        return None if value is None else _is_among(self._outcomes, order(parse_double(value), self._number))


class OneOf(Node):
    def __init__(self, key: bytes, choices: frozenset[str], inverted: bool) -> None:
        super().__init__()
        self._key = key
        self._choices = choices
        self._inverted = inverted

    def evaluate(self, properties: StoredProperties) -> Value:
        value = properties.text(self._key)
        return None if value is None else (value in self._choices) is not self._inverted


class TextTest(Node):
    """CONTAINS, STARTSWITH and ENDSWITH."""

    def __init__(self, inner: Node, holds: Callable[[str, str], bool], search: str, inverted: bool) -> None:
        super().__init__()
        self._inner = inner
        self._holds = holds
        self._search = search
        self._inverted = inverted

    def evaluate(self, properties: StoredProperties) -> Value:
        if not self._search:
            return False
        value = self._inner.evaluate(properties)
        return isinstance(value, str) and self._holds(value, self._search) is not self._inverted


def _is_among(outcomes: i64, order: int) -> bool:
    return bool(outcomes & (BELOW if order < 0 else SAME if order == 0 else ABOVE))


def _whole_number(stored: bytes, at: i64, end: i64, highest: int) -> i64:
    """The number that is stored at a place; without making a string of it if that is easy."""
    if end - at <= _FAST_DIGITS:
        number: i64 = 0
        for place in range(at, end):
            digit = i64(stored[place]) - 48
            if not 0 <= digit <= 9:
                break
            number = number * 10 + digit
        else:
            return number
    return parse_whole(stored[at:end].decode("utf-8", "replace"), highest)
