"""Java's whole numbers: what every number of a header, a body, a table and a property is.

Python's have no limits, and what is stored once must be read again by Apache's servers, and by this one. The annotated
types are checked wherever msgspec decodes or converts, and the complaint names the field. The functions read text that
somebody else wrote: whatever is no number of Java's is None, and nothing raises. Python's `int` takes more (spaces,
underscores, other scripts) and raises for thousands of digits, so that a follower of a queue that called it would stand
still at one such property.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

INT_MAX: Final = 2**31 - 1
INT_MIN: Final = -(2**31)
LONG_MAX: Final = 2**63 - 1
LONG_MIN: Final = -(2**63)

Byte: TypeAlias = Annotated[int, Meta(ge=-(2**7), le=2**7 - 1)]
Int: TypeAlias = Annotated[int, Meta(ge=INT_MIN, le=INT_MAX)]
Long: TypeAlias = Annotated[int, Meta(ge=LONG_MIN, le=LONG_MAX)]
Summand: TypeAlias = Annotated[int, Meta(ge=-(2**62), le=2**62 - 1)]
"""A long that another one is added to: the sum is still a long."""

_SURE_DIGITS: Final = 18  # that fit into a long, whichever they are
_NUMBER: Final = re.compile(r"[+-]?0*[0-9]{1,19}", re.ASCII)


def java_int(text: str | None) -> int | None:
    """The number that `Integer.parseInt` reads, None where it would throw.

    >>> java_int("+18"), java_int("2147483648"), java_int("9" * 5000), java_int(" 1"), java_int(None)
    (18, None, None, None, None)
    """
    number = java_long(text)
    return number if number is not None and INT_MIN <= number <= INT_MAX else None


def java_long(text: str | None) -> int | None:
    """The number that `Long.parseLong` reads, None where it would throw.

    >>> java_long("-9223372036854775808"), java_long("9223372036854775808")
    (-9223372036854775808, None)
    """
    if text is None:
        return None
    if len(text) <= _SURE_DIGITS and text.isdecimal() and text.isascii():
        return int(text)  # as nearly all are, at a tenth of the price
    if _NUMBER.fullmatch(text) is None:
        return None
    size = int(text.lstrip("+-").lstrip("0") or "0")  # zeros in front count for Python's limit, but not for Java's
    number = -size if text[0] == "-" else size
    return number if LONG_MIN <= number <= LONG_MAX else None


def java_count(text: str | None) -> int | None:
    """A number of things: an int that is not negative."""
    number = java_int(text)
    return number if number is not None and number >= 0 else None
