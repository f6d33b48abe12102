"""The values of expressions, and how two of them compare.

A property is always a string. A literal is a string, a boolean, or a number of one of three types: Integer (`int`),
Long (`Long`, beyond 32 bits) and Double (`float`). A string is converted to the type of the number that it is compared
with, by Java's rules, which are stricter than one may think: "5.0" is no Integer, "3000000000" neither. What can't be
converted is an error, and a message whose evaluation ends in an error does not match.
"""

from __future__ import annotations

import re
from typing import Final

from mypy_extensions import mypyc_attr

INTEGER_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1

_DOUBLE: Final = re.compile(
    r"""([+-]?)(?:
        (NaN|Infinity)
      | ((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?
      | (0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?
    )""",
    re.VERBOSE,
)
_TRIMMED: Final = "".join(map(chr, range(33)))


class EvaluationError(Exception):
    """An expression that can't be evaluated for these properties."""


@mypyc_attr(native_class=False)
class Long(int):
    """A whole number beyond 32 bits."""


Value = str | bool | int | float | None


def parse_whole(text: str, highest: int) -> int:
    """`Integer.valueOf` or `Long.valueOf`, told apart by the highest number of the type."""
    if text.isdigit() and text.isascii() and len(text) < 10:
        return int(text)
    sign, digits = (text[:1], text[1:]) if text[:1] in ("+", "-") else ("", text)
    if not digits.isdecimal() or (not digits.isascii() and max(digits) > "\uffff"):
        raise EvaluationError(f"{text!r} is not a whole number")
    digits = digits.lstrip("0") or "0"
    if len(digits) <= 19:
        number = -int(digits) if sign == "-" else int(digits)
        if -highest - 1 <= number <= highest:
            return number
    raise EvaluationError(f"{text!r} is out of range")


def parse_double(text: str) -> float:
    """`Double.valueOf`: as a literal, or NaN, Infinity, with a type's letter, or in hexadecimal; blanks around it."""
    found = _DOUBLE.fullmatch(text.strip(_TRIMMED))
    if found is None:
        raise EvaluationError(f"{text!r} is not a number")
    sign, special, decimal, hexadecimal = found.groups()
    if hexadecimal is None:
        number = float(special or decimal)
    else:
        try:
            number = float.fromhex(hexadecimal)
        except OverflowError:
            number = float("inf")
    return -number if sign == "-" else number


def parse_boolean(text: str) -> bool:
    return text.lower() == "true"


def convert(text: str, like: int | float) -> int | float:
    """The number behind a string, in the type of the number that it is compared with."""
    if isinstance(like, float):
        return parse_double(text)
    return parse_whole(text, LONG_MAX if isinstance(like, Long) else INTEGER_MAX)


def compare(left: str | bool | int | float, right: str | bool | int | float) -> int:
    """Below, at or above zero, as `left` is below, equal to or above `right`; types that don't compare are below."""
    if isinstance(left, bool):
        if isinstance(right, str):
            raise EvaluationError(f"a boolean on the left can't be compared with {right!r}")
        return left - right if isinstance(right, bool) else -1
    if isinstance(right, bool):
        return parse_boolean(left) - right if isinstance(left, str) else -1
    if isinstance(left, str):
        if isinstance(right, str):
            return 0 if left == right else -1 if left < right else 1
        return order(convert(left, right), right)
    return order(left, convert(right, left) if isinstance(right, str) else right)


def order(left: int | float, right: int | float) -> int:
    """How two numbers compare; as doubles if one is, where -0.0 is below 0.0 and NaN above everything."""
    if isinstance(left, float) or isinstance(right, float):
        left, right = float(left), float(right)
        if left == right == 0.0 or left != left or right != right:
            return _double_rank(left) - _double_rank(right)
    return (left > right) - (left < right)


def _double_rank(number: float) -> int:
    """For what `<` can't order: NaN above all numbers, -0.0 just below 0.0."""
    if number != number:
        return 3
    if number == 0.0:
        return -1 if str(number).startswith("-") else 0
    return 1 if number > 0 else -2
