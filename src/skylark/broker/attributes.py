"""Attributes of topics and groups: named settings that are added, changed and taken away one by one.

A request names its changes as `+key=value` and `-key`. Which keys exist, which may still change after the creation and
what values they take is fixed per kind of thing. Remarks are Apache's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

_LONG_MAX: Final = 2**63 - 1


class BadAttribute(Exception):
    """A change that can't be made; the text says why."""


class Attribute(msgspec.Struct, frozen=True):
    """What a key allows: one of `choices`, a number from `low` to `high`, or any text if neither is given."""

    changeable: bool = True
    choices: tuple[str, ...] = ()
    low: int | None = None
    high: int = _LONG_MAX
    ignores_case: bool = False

    def check(self, value: str) -> None:
        if self.ignores_case:
            if value.lower() not in self.choices:
                raise BadAttribute("boolean attribute format is wrong.")
        elif self.choices:
            if value not in self.choices:
                raise BadAttribute(f"value is not in set: [{', '.join(self.choices)}]")
        elif self.low is not None:
            try:
                number = int(value)
            except ValueError:
                raise BadAttribute(f'For input string: "{value}"') from None
            if not self.low <= number <= self.high:
                raise BadAttribute(f"value is not in range({self.low}, {self.high})")


QUEUE_TYPE: Final = "queue.type"
CLEANUP_POLICY: Final = "cleanup.policy"
MESSAGE_TYPE: Final = "message.type"
RESERVE_TIME: Final = "reserve.time"
BATCHES: Final = "BatchCQ"
_KEPT_QUEUE_TYPE: Final = "skylark.queue.type"

TOPIC_ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    QUEUE_TYPE: Attribute(changeable=False, choices=("SimpleCQ", BATCHES)),
    CLEANUP_POLICY: Attribute(changeable=False, choices=("DELETE", "COMPACTION")),
    MESSAGE_TYPE: Attribute(
        choices=("UNSPECIFIED", "MIXED", "TRANSACTION", "PRIORITY", "FIFO", "DELAY", "LITE", "NORMAL")
    ),
    RESERVE_TIME: Attribute(low=-1),
    "lite.topic.expiration": Attribute(low=-1, high=30 * 24 * 60),
}

_BOOLEAN: Final = Attribute(choices=("true", "false"), ignores_case=True)

GROUP_ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    "priority.factor": Attribute(low=0, high=100),
    "lite.bind.topic": Attribute(),
    "lite.sub.client.quota": Attribute(low=-1),
    "lite.sub.model": Attribute(choices=("Shared", "Exclusive")),
    "lite.sub.reset.offset.exclusive": _BOOLEAN,
    "lite.sub.reset.offset.unsubscribe": _BOOLEAN,
    "lite.sub.client.max.event.cnt": Attribute(low=10),
    "lite.sub.wildcard": Attribute(),
}


def parse_changes(text: str | None) -> dict[str, str]:
    """`+a=1,-b` as `{"+a": "1", "-b": ""}`. Raises BadAttribute."""
    changes: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, is_set, value = part.partition("=")
        if is_set and "+" not in key:
            raise BadAttribute(f"add/alter attribute format is wrong: {key}")
        if not is_set and "-" not in key:
            raise BadAttribute(f"delete attribute format is wrong: {key}")
        if key in changes:
            raise BadAttribute(f"key duplication: {key}")
        changes[key] = value
    return changes


def alter(
    known: Mapping[str, Attribute], current: Mapping[str, str] | None, changes: Mapping[str, str]
) -> dict[str, str]:
    """The attributes after `changes`; `current` is None for a thing that is just being created. Raises BadAttribute."""
    altered = dict(current or {})
    seen = set()
    for signed, value in changes.items():
        sign, key = signed[:1], signed[1:]
        if not key or "+" in key or "-" in key:
            raise BadAttribute("kv string format wrong.")
        if key in seen:
            raise BadAttribute(f"alter duplication key. key: {key}")
        seen.add(key)
        if current is None and sign != "+":
            raise BadAttribute(f"only add attribute is supported while creating topic. key: {key}")
        if sign not in ("+", "-"):
            raise BadAttribute(f"wrong format key: {key}")
        if sign == "-" and key not in altered:
            raise BadAttribute(f"attempt to delete a nonexistent key: {key}")
        attribute = known.get(key)
        if attribute is None:
            raise BadAttribute(f"unsupported key: {key}")
        if current is not None and not attribute.changeable:
            raise BadAttribute(f"attempt to update an unchangeable attribute. key: {key}")
        if sign == "+":
            attribute.check(value)
            altered[key] = value
        else:
            del altered[key]
    return altered


def kept(attributes: dict[str, str]) -> dict[str, str]:
    """A topic's attributes as its record has them: the queue type BatchCQ stands under a key of our own.

    Apache's broker keeps each batch of such a topic as one message, in queues of another format. Here batches are
    stored message by message, in queues like all others. Apache's broker, if it gets the store back, goes by the queue
    type, and does not start when it finds a topic of that type with these queues: it must take the topic for the simple
    one that it is.
    """
    return _renamed(attributes, QUEUE_TYPE, _KEPT_QUEUE_TYPE) if attributes.get(QUEUE_TYPE) == BATCHES else attributes


def shown(attributes: dict[str, str]) -> dict[str, str]:
    """The attributes that a topic was given, of those that are kept."""
    return _renamed(attributes, _KEPT_QUEUE_TYPE, QUEUE_TYPE) if _KEPT_QUEUE_TYPE in attributes else attributes


def _renamed(attributes: Mapping[str, str], old: str, new: str) -> dict[str, str]:
    return {new if key == old else key: value for key, value in attributes.items()}
