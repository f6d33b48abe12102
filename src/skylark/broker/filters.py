"""Which messages a subscription wants.

A subscription by tags is decided from the 8-byte tag code of a queue entry. Different tags may share a code: the client
compares the tags themselves again. One by SQL92 is decided from the properties in the message's record.

In a retry topic (`filterSupportRetry`) the messages of several topics meet, and each is filtered by what its group
wants of the topic that it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from skylark.broker.arrivals import RecordFilter, TagCodes
from skylark.selectors import BadSelector, Selector, compile_selector
from skylark.selectors.cache import TextCache
from skylark.wire.bodies import TAG, Subscription
from skylark.wire.lookup import find_text, properties_position, property_key
from skylark.wire.message import PROPERTY_RETRY_TOPIC
from skylark.wire.records import java_hash

ALL: Final = "*"
SQL92: Final = "SQL92"
_RETRY_TOPIC: Final = property_key(PROPERTY_RETRY_TOPIC)

SelectorOf = Callable[[str], Selector | None]
"""What a group wants of a topic, if that is an expression."""


_CACHED_CHARACTERS: Final = 1 << 18  # what a list of tags means takes some thirty times its text


class BadExpression(Exception):
    """A subscription that can't be understood."""


class Filter:
    """What a read asks of a queue's messages; None asks nothing."""

    __slots__ = ("accepts", "text", "wants")

    def __init__(self, wants: TagCodes | None = None, accepts: RecordFilter | None = None, text: str = "") -> None:
        self.wants = wants  # by the tag code of the queue entry
        self.accepts = accepts  # by the record in the log
        self.text = text  # the expression that `accepts` keeps compiled, if it keeps one


_requested: Final[TextCache[tuple[str | None, str | None], Filter]] = TextCache(_CACHED_CHARACTERS)
_sql_filters: Final[TextCache[str, Filter]] = TextCache(_CACHED_CHARACTERS)


def is_by_tag(expression_type: str | None) -> bool:
    return expression_type in (None, "", TAG)


def parse_subscription(topic: str, expression: str | None, expression_type: str | None) -> Subscription:
    """`a || b`, `*` or nothing (everything), as a subscription."""
    if not is_by_tag(expression_type):
        if not expression:
            raise BadExpression(f"a filter by {expression_type} needs an expression")
        return Subscription(topic=topic, sub_string=expression, expression_type=expression_type)
    if not expression or expression == ALL:
        return Subscription(topic=topic, sub_string=ALL)
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    return Subscription(topic=topic, sub_string=expression, tags_set=tags, code_set=[java_hash(tag) for tag in tags])


def requested_filter(expression: str | None, expression_type: str | None) -> Filter:
    """What a request brings itself, which it does again and again. Raises BadExpression."""
    key = (expression, expression_type)
    known = _requested.get(key)
    if known is None:
        known = message_filter(parse_subscription("", expression, expression_type))
        _requested.put(key, len(expression or "") + len(expression_type or ""), known)
    return known


def selector_of(subscription: Subscription) -> Selector:
    """The compiled expression of a subscription that is not by tags. Raises BadExpression."""
    if subscription.expression_type != SQL92:
        raise BadExpression(f"{subscription.expression_type} is not a type of expressions; TAG and SQL92 are")
    try:
        return compile_selector(subscription.sub_string or "")
    except BadSelector as e:
        raise BadExpression(f"the SQL92 expression can't be understood: {e}") from None


def complaint(expression_type: str, expression: str) -> str | None:
    """What is wrong with an expression, or None."""
    try:
        selector_of(Subscription(topic="", sub_string=expression, expression_type=expression_type))
    except BadExpression as e:
        return str(e)
    return None


def message_filter(subscription: Subscription, selector: Selector | None = None) -> Filter:
    """The filter of a subscription; `selector` if its expression is compiled already. Raises BadExpression."""
    if subscription.class_filter_mode:
        return Filter()
    if not subscription.is_by_tag:
        return _sql_filter(selector or selector_of(subscription))
    if subscription.sub_string == ALL:
        return Filter()
    return Filter(wants=frozenset(subscription.code_set))


def _sql_filter(selector: Selector) -> Filter:
    """The same for the same expression, so that it is evaluated once for all who wait by it."""
    known = _sql_filters.get(selector.text)
    if known is None:
        known = _record_filter(selector.root.matches, selector.text)
        _sql_filters.put(selector.text, len(selector.text), known)
    return known


def _record_filter(matches: Callable[[bytes, i64], bool], text: str = "") -> Filter:
    """A filter by a record's properties, which begin at a position of it."""

    def accepts(record: bytes) -> bool:
        try:
            start = properties_position(record)
        except IndexError:
            return True  # damaged: the consumer finds out, as it does without a filter, and nothing is passed over
        return matches(record, start)

    return Filter(accepts=accepts, text=text)


def retry_filter(wanted: SelectorOf) -> Filter:
    """The filter of a retry topic: what the group wants of the topic that a message came from."""

    def matches(record: bytes, start: i64) -> bool:
        selector = wanted(find_text(record, start, _RETRY_TOPIC) or "")
        return selector is None or selector.root.matches(record, start)

    return _record_filter(matches)
