"""Java's enums in JSON bodies. They are written by name, and read as Apache's fastjson reads them.

Clients in other languages write the number of a constant instead, as C++ does with an enum, or its name in another
case, as the Go client does. A name that is unknown counts as none given. A number that is unknown makes the body bad.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from skylark.wire.numbers import Int

if TYPE_CHECKING:
    EnumName: TypeAlias = str
else:
    EnumName = str | Int
"""A field that comes as a name or as a number. The `__post_init__` of its struct makes a name of it with `read`."""

_PASSED_OVER: Final = str.maketrans("", "", "_- ")


class JavaEnum:
    """The constants of an enum, in the order that numbers them, and the field that has one of them."""

    def __init__(self, field: str, *names: str) -> None:
        self._field = field
        self._names = names
        self._by_spelling = {_spelled(name): name for name in names}
        self._by_spelling |= {str(number): name for number, name in enumerate(names)}

    def read(self, value: str | int | None) -> str | None:
        """The name of a constant, None for an unknown one. Raises ValueError for a number that none has.

        >>> modes = JavaEnum("mode", "PULL", "POP")
        >>> modes.read(1), modes.read("Pull"), modes.read("push")
        ('POP', 'PULL', None)
        """
        if value is None or value in self._names:
            return value
        if isinstance(value, str):
            return self._by_spelling.get(_spelled(value))
        if not 0 <= value < len(self._names):
            raise ValueError(
                f"{self._field} is {value}: {self._names[0]} is 0, {self._names[-1]} {len(self._names) - 1}"
            )
        return self._names[value]


def _spelled(name: str) -> str:
    return name.lower().translate(_PASSED_OVER)


CONSUME_TYPES: Final = JavaEnum("consumeType", "CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS: Final = JavaEnum("messageModel", "BROADCASTING", "CLUSTERING", "LITE_SELECTIVE")
STARTS: Final = JavaEnum(
    "consumeFromWhere",
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)
TOPIC_FILTER_TYPES: Final = JavaEnum("topicFilterType", "SINGLE_TAG", "MULTI_TAG")
REQUEST_MODES: Final = JavaEnum("mode", "PULL", "POP")
RETRY_POLICIES: Final = JavaEnum("type", "EXPONENTIAL", "CUSTOMIZED")
