"""What is refused before it is sent, and what the error says."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.client.errors import InvalidMessage, RocketMQError
from skylark.client.validation import (
    check_body,
    check_encoded_properties,
    check_group,
    check_labels,
    check_send_topic,
    check_topic,
)

LEGAL = string.ascii_letters + string.digits + "%|_-"


@given(st.text(LEGAL, min_size=1, max_size=127))
def test_legal_topics(topic: str) -> None:
    check_topic(topic)


@given(st.text(LEGAL, max_size=60), st.characters(exclude_characters=LEGAL), st.text(LEGAL, max_size=60))
def test_one_wrong_character_is_enough(before: str, wrong: str, after: str) -> None:
    with pytest.raises(InvalidMessage, match="letters, digits"):
        check_topic(before + wrong + after)


@pytest.mark.parametrize(
    ("topic", "says"),
    [("", "empty"), ("  ", "empty"), ("t" * 128, "128 characters; 127"), ("a/b", "illegal"), (5, "is 5 and must be")],
)
def test_wrong_topics(topic: Any, says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        check_topic(topic)


def test_topics_of_the_broker_are_not_sent_to() -> None:
    check_topic("SCHEDULE_TOPIC_XXXX")
    with pytest.raises(InvalidMessage, match="belongs to the broker"):
        check_send_topic("SCHEDULE_TOPIC_XXXX")


@pytest.mark.parametrize(
    ("group", "says"),
    [("", "empty"), ("g" * 121, "120 are allowed"), ("a b", "illegal"), (None, "is None and must be a str")],
)
def test_wrong_groups(group: Any, says: str) -> None:
    check_group("g" * 120)
    with pytest.raises(InvalidMessage, match=says):
        check_group(group)


@pytest.mark.parametrize(
    ("body", "says"),
    [(b"", "empty"), (None, "NoneType"), ("text", "encode"), (bytearray(b"x"), "bytearray"), (b"12345", "5 bytes; 4")],
)
def test_wrong_bodies(body: Any, says: str) -> None:
    check_body(b"1234", 4)
    with pytest.raises(InvalidMessage, match=says):
        check_body(body, 4)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"tag": ""}, "tag is blank"),
        ({"tag": 3}, "must be a str"),
        ({"tag": "a\x01b"}, "character 1"),
        ({"key": ["a", "b c"]}, "blank"),
        ({"key": ["a", ""]}, "blank"),
        ({"key": 42}, "key is 42; it must be a str"),
        ({"properties": ["a=b"]}, "must be a dict"),
        ({"properties": {"a": ""}}, "blank"),
        ({"properties": {"a": "\x02"}}, "separate"),
        ({"properties": {"TAGS": "x"}}, "argument 'tag'"),
        ({"properties": {"UNIQ_KEY": "x"}}, "belongs to the system"),
        ({"delay_level": -1}, "delay level"),
        ({"delay_level": "3"}, "delay level"),
    ],
)
def test_wrong_labels(labels: Mapping[str, Any], says: str) -> None:
    right: dict[str, Any] = {"tag": "t", "key": ["a", "b"], "properties": {"p": "v"}, "delay_level": 3}
    check_labels(**right)
    with pytest.raises(InvalidMessage, match=says):
        check_labels(**(right | labels))


def test_properties_have_a_limit() -> None:
    check_encoded_properties(b"x" * 32_767)
    with pytest.raises(InvalidMessage, match="32768 bytes; 32767"):
        check_encoded_properties(b"x" * 32_768)
    with pytest.raises(InvalidMessage, match="40000 bytes"):
        check_encoded_properties("ü" * 20_000)


def test_the_error_is_ours_and_a_value_error() -> None:
    assert issubclass(InvalidMessage, RocketMQError)
    assert issubclass(InvalidMessage, ValueError)
