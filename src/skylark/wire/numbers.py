"""Java's whole numbers: what every number of a header, a body and a table is.

Python's have no limits, and what is stored once must be read again by Apache's servers, and by this one. The annotated
types are checked wherever msgspec decodes or converts, and the complaint names the field.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta

LONG_MAX: Final = 2**63 - 1

Byte: TypeAlias = Annotated[int, Meta(ge=-(2**7), le=2**7 - 1)]
Int: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Long: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=LONG_MAX)]
Summand: TypeAlias = Annotated[int, Meta(ge=-(2**62), le=2**62 - 1)]
"""A long that another one is added to: the sum is still a long."""


def parse_long(text: str) -> int:
    """The number that a text is, if Java can read it. Raises ValueError."""
    number = int(text)
    if not -LONG_MAX - 1 <= number <= LONG_MAX:
        raise ValueError(f"{text} is out of range")
    return number
