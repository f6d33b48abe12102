"""Every class, method and property that users meet says what it is for: `help(Producer)` is the reference."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

import pytest

import skylark
from skylark import sync, testing
from skylark.client.errors import RocketMQError
from skylark.client.questions import ConsumerMember

# What consumers offer to their session and to each other, and nobody calls by hand.
INNER = {name for name in vars(ConsumerMember) if not name.startswith("_")} - {"group"}

CLASSES = [
    *(getattr(skylark, name) for name in skylark.__all__ if name != "sync"),
    *(getattr(sync, name) for name in sync.__all__),
    *(getattr(testing, name) for name in testing.__all__),
]


def members(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_")
        and name not in INNER
        and (isinstance(value, property) or inspect.isroutine(value) or isinstance(value, sync._Method))
    }


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_they_say_what_they_are_for(kind: type) -> None:
    assert kind.__doc__
    if not issubclass(kind, Enum | RocketMQError):
        assert [name for name, value in members(kind).items() if not value.__doc__] == []


@pytest.mark.parametrize(
    "kind",
    [kind for kind in CLASSES if "name_servers" in getattr(kind.__init__, "__annotations__", {})],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_they_explain_all_their_options(kind: Any) -> None:
    explained = kind.__init__.__doc__ or ""
    options = inspect.signature(kind).parameters.values()
    unnamed = [each.name for each in options if each.kind is not each.VAR_KEYWORD and f"`{each.name}`" not in explained]
    assert unnamed == []
