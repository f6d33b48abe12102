"""Checks before anything is sent: what a broker would refuse is refused here, with what is wrong and what is allowed.

Names may hold letters, digits and `%|_-`; a topic has up to 127 characters, a group up to 120.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final

from skylark.client.errors import InvalidMessage
from skylark.wire.frame import MAX_RECORDS_BYTES

log = logging.getLogger(__name__)

MAX_TOPIC_LENGTH: Final = 127
MAX_GROUP_LENGTH: Final = 120
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""What brokers take unless they are told otherwise."""

MOST_MESSAGE_BYTES: Final = MAX_RECORDS_BYTES
"""What a request can carry, whatever a broker takes."""

MAX_PROPERTIES_BYTES: Final = 0x7FFF
USUAL_DELAY_LEVELS: Final = 18

_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_FORBIDDEN_TOPICS: Final = frozenset(
    {
        "SCHEDULE_TOPIC_XXXX",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
        "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
        "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
    }
)

# What the system puts into the properties itself; Apache's client refuses the same names.
_OWN_ARGUMENT: Final = {
    "KEYS": "key",
    "TAGS": "tag",
    "DELAY": "delay_level",
    "WAIT": "wait_stored",
    "_SYS_MSG_PRIORITY_": "priority",
    "TIMER_DELAY_SEC": "delay_s",
    "TIMER_DELAY_MS": "delay_s",
    "TIMER_DELIVER_MS": "deliver_at",
}
_RESERVED: Final = frozenset(
    """
    TRACE_ON MSG_REGION RETRY_TOPIC ORIGIN_GROUP REAL_TOPIC REAL_QID TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET BUYER_ID
    ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG RECONSUME_TIME UNIQ_KEY MAX_RECONSUME_TIMES
    CONSUME_START_TIME POP_CK POP_CK_OFFSET 1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET DUP_INFO EXTEND_UNIQ_INFO
    INSTANCE_ID CLUSTER MSG_TYPE INNER_MULTI_QUEUE_OFFSET __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC
    DLQ_ORIGIN_MESSAGE_ID __CRC32# TIMER_OUT_MS TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_DEL_UNIQKEY
    TIMER_DELAY_LEVEL
    """.split()
)


def is_reserved(name: str) -> bool:
    """Whether a property of this name is set by the system, or by an argument of its own."""
    return name in _RESERVED or name in _OWN_ARGUMENT


def user_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Those that a user gave, without what the system put there: what may be sent again."""
    return {name: value for name, value in properties.items() if not is_reserved(name)}


@lru_cache(maxsize=4096)
def check_topic(topic: str) -> None:
    """Raises InvalidMessage for a name that no topic can have."""
    if not isinstance(topic, str):
        raise InvalidMessage(f"the topic is {topic!r} and must be a str")
    if not topic.strip():
        raise InvalidMessage("the topic is empty; it takes letters, digits and %|_-")
    if len(topic) > MAX_TOPIC_LENGTH:
        raise InvalidMessage(f"the topic has {len(topic)} characters; {MAX_TOPIC_LENGTH} are allowed")
    if _LEGAL.fullmatch(topic) is None:
        raise InvalidMessage(f"topic {topic!r} has illegal characters; letters, digits and %|_- are allowed")


@lru_cache(maxsize=4096)
def check_send_topic(topic: str) -> None:
    """The same, and not one of those that only brokers write to."""
    check_topic(topic)
    if topic in _FORBIDDEN_TOPICS:
        raise InvalidMessage(f"topic {topic!r} belongs to the broker; clients can't send to it")


def check_group(group: str) -> None:
    """Raises InvalidMessage for a name that no group can have."""
    if not isinstance(group, str):
        raise InvalidMessage(f"the group is {group!r} and must be a str")
    if not group.strip():
        raise InvalidMessage("the group is empty; it takes letters, digits and %|_-")
    if len(group) > MAX_GROUP_LENGTH:
        raise InvalidMessage(f"the group has {len(group)} characters; {MAX_GROUP_LENGTH} are allowed")
    if _LEGAL.fullmatch(group) is None:
        raise InvalidMessage(f"group {group!r} has illegal characters; letters, digits and %|_- are allowed")


def check_body(body: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
    if not isinstance(body, bytes):
        hint = "; encode it, as in text.encode()" if isinstance(body, str) else ""
        raise InvalidMessage(f"the body is a {type(body).__name__} and must be bytes{hint}")
    if not body:
        raise InvalidMessage("the body is empty; it must have at least one byte")
    if len(body) > max_bytes:
        raise InvalidMessage(f"the body has {len(body)} bytes; {max_bytes} are allowed")


def check_labels(
    tag: str | None, key: str | Sequence[str] | None, properties: Mapping[str, str] | None, delay_level: int = 0
) -> None:
    """What a message carries besides its body."""
    if tag is not None:
        _check_tag(tag)
    if key is not None:
        if not isinstance(key, Collection):
            raise InvalidMessage(f"key is {key!r}; it must be a str, or several of them in a list")
        for each in (key,) if isinstance(key, str) else key:
            _check_text("a key", each)
            if " " in each:
                raise InvalidMessage(f"key {each!r} holds a blank, which would split it; give several keys as a list")
    if properties:
        if not isinstance(properties, Mapping):
            raise InvalidMessage(f"properties is {properties!r} and must be a dict of names and values")
        _check_properties(properties)
    if not isinstance(delay_level, int) or isinstance(delay_level, bool) or delay_level < 0:
        raise InvalidMessage(f"delay level {delay_level!r} is not 0 (at once) or a level from 1 (1 s) to 18 (2 h)")
    if delay_level > USUAL_DELAY_LEVELS:
        _warn_of_level(delay_level)


def check_priority(priority: int) -> None:
    if not isinstance(priority, int) or not 0 <= priority <= 0x7FFFFFFF:
        raise InvalidMessage(f"priority {priority!r} is not a whole number from 0 on")


def check_encoded_properties(data: bytes | str) -> None:
    size = len(data) if isinstance(data, bytes) or data.isascii() else len(data.encode("utf-8", "replace"))
    if size > MAX_PROPERTIES_BYTES:
        raise InvalidMessage(f"tag, keys and properties have {size} bytes; {MAX_PROPERTIES_BYTES} are allowed")


def check_hooks_properties(properties: object, given: dict[str, str]) -> None:
    """After a hook that may have changed those that it was given."""
    if properties is not given:
        raise InvalidMessage("it gave the message other properties: it may only change those that are there")
    for item in given.items():
        for text in item:
            if not isinstance(text, str) or "\x01" in text or "\x02" in text:
                raise InvalidMessage(f"it set the property {item!r}; both must be a str without characters 1 and 2")


def _check_tag(tag: str) -> None:
    _check_text("the tag", tag)
    if "||" in tag:
        raise InvalidMessage(f"tag {tag!r} holds ||, which separates the tags of a subscription; a message has one tag")
    if tag != tag.strip():
        raise InvalidMessage(f"tag {tag!r} begins or ends with a blank, and no subscription can name it")


@lru_cache(maxsize=64)
def _warn_of_level(level: int) -> None:
    """Once for each: only the broker knows how many levels it has."""
    log.warning(
        "delay level %d is beyond the %d that a broker has unless its messageDelayLevel names more; the message waits "
        "as long as the last level says",
        level,
        USUAL_DELAY_LEVELS,
    )


def _check_properties(properties: Mapping[str, str]) -> None:
    for name, value in properties.items():
        _check_text("the name of a property", name)
        _check_text(f"property {name!r}", value)
        if name in _OWN_ARGUMENT:
            raise InvalidMessage(f"property {name!r} is set with the argument {_OWN_ARGUMENT[name]!r}")
        if name in _RESERVED:
            raise InvalidMessage(f"property {name!r} belongs to the system; choose another name")


def _check_text(what: str, text: str) -> None:
    if not isinstance(text, str):
        raise InvalidMessage(f"{what} is a {type(text).__name__} and must be a str")
    if not text.strip():
        raise InvalidMessage(f"{what} is blank; leave it out instead")
    if "\x01" in text or "\x02" in text:
        raise InvalidMessage(f"{what} holds character 1 or 2, which separate properties on the wire")
