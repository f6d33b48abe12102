"""Checks of options before anything starts, as checkConfig of Apache's client does: each is taken, or refused by name.

What means something in RocketMQ's world means the same here: -1 tries, "BROADCASTING", CONSUME_FROM_FIRST_OFFSET. What
is refused is an InvalidMessage, which is a ValueError, with the value and what is allowed. Ranges are Apache's where it
has any.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from skylark.client.compression import Codec
from skylark.client.errors import InvalidMessage
from skylark.client.validation import check_group, check_topic

MAX_COUNT: Final = 0x7FFFFFFF
_RESERVED_GROUP: Final = "DEFAULT_CONSUMER"
LEAST_S: Final = 0.001
"""of what must take some time"""

_Choice = TypeVar("_Choice", bound=str)


def check_count(name: str, value: object, low: int, high: int = MAX_COUNT) -> None:
    allowed = f"between {low} and {high}" if high < MAX_COUNT else f"{low} or more"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidMessage(f"{name} is {value!r}; it must be a whole number {allowed}")
    if not low <= value <= high:
        raise InvalidMessage(f"{name} is {value}; it must be {allowed}")


def check_seconds(name: str, value: object, low: float = 0.0, high: float = math.inf) -> None:
    """A time that ends, and no NaN. One that must not be zero has a `low` of its own."""
    allowed = f"between {low:g} and {high:g}" if math.isfinite(high) else f"{low:g} or more"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidMessage(f"{name} is {value!r}; it must be a number of seconds {allowed}")
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidMessage(f"{name} is {value:g}; it must be {allowed} seconds")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidMessage(f"{name} is {value!r}; it must be True or False")


def check_texts(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, str):
            raise InvalidMessage(f"{name} is {value!r}; it must be a str")


def choice_among(name: str, value: object, allowed: Sequence[_Choice]) -> _Choice:
    """The one of those that is meant, in whatever case: RocketMQ writes them in capitals."""
    for each in allowed:
        if isinstance(value, str) and value.lower() == each:
            return each
    *first, last = map(repr, allowed)
    raise InvalidMessage(f"{name} is {value!r}; it takes {', '.join(first)} or {last}")


def codec_among(value: object) -> Codec | None:
    """How bodies are compressed."""
    if value is None or isinstance(value, Codec):
        return value
    return Codec(choice_among("compression", value, [str(each) for each in Codec]))


def reconsume_times(value: object) -> int | None:
    """How often a message is tried again, None as the group is set at the broker: RocketMQ says -1."""
    if value is None or (value == -1 and not isinstance(value, bool)):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise InvalidMessage(
            f"max_reconsume_times is {value!r}; it takes a whole number from 0 on, or None or -1 for the group's "
            f"setting at the broker (16 unless it was changed; no limit for orderly listeners)"
        )
    return value


def check_consumer_group(group: str) -> None:
    """A group that members share on purpose. The default's name would join programs that know nothing of each other."""
    check_group(group)
    if group == _RESERVED_GROUP:
        raise InvalidMessage(f"group {group!r} is nobody's own, and its members share messages: give the group a name")


def check_trace(trace: object) -> None:
    """True, False, or a topic to write traces to."""
    if not isinstance(trace, bool | str):
        raise InvalidMessage(f"trace is {trace!r}; it takes True, False or the name of a topic")
    if isinstance(trace, str):
        check_topic(trace)


def check_directory(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Path):
        raise InvalidMessage(f"{name} is {value!r}; it must be a pathlib.Path")


def check_hooks(name: str, hooks: Sequence[object], *methods: str) -> None:
    """Objects with these methods: a class in place of its object is a usual mistake."""
    for hook in hooks:
        lacking = [method for method in methods if not callable(getattr(hook, method, None))]
        if isinstance(hook, type) or lacking:
            need = "an object" if isinstance(hook, type) else f"an object with {' and '.join(methods)}"
            raise InvalidMessage(f"{name} has {hook!r}, which must be {need}")


def check_callback(name: str, function: object, *given: str) -> None:
    """What will be called with these arguments once a message is there, which a mistake would cost."""
    if not callable(function):
        raise InvalidMessage(f"{name} is {function!r}; it must be a function of {_listed(given)}")
    body = function if inspect.isroutine(function) or isinstance(function, type) else type(function).__call__
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise InvalidMessage(f"{name} {_called(function)} has a yield: calling it would run nothing of it")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # of a function in C nothing may be known
    try:
        signature.bind(*given)
    except TypeError as error:
        raise InvalidMessage(
            f"{name} {_called(function)}{signature} is called with {_listed(given)}, which it does not take: {error}"
        ) from None


def check_optional_callback(name: str, function: object, *given: str) -> None:
    if function is not None:
        check_callback(name, function, *given)


def check_plain_callback(name: str, function: object, *given: str) -> None:
    """The same for what is called on the event loop, which waits for no coroutine."""
    check_callback(name, function, *given)
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise InvalidMessage(f"{name} {_called(function)} is a coroutine function, and nobody would wait for it")


def _called(function: object) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _listed(given: Sequence[str]) -> str:
    return "one argument" if len(given) == 1 else f"{len(given)} arguments"
