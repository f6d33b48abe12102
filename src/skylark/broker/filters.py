"""Which messages a subscription wants, decided from the 8-byte tag code of a queue entry.

Different tags may share a code: the client compares the tags themselves again.
"""

from __future__ import annotations

from skylark.broker.arrivals import TagFilter
from skylark.wire.bodies import TAG, Subscription
from skylark.wire.message import java_hash

ALL = "*"


class BadExpression(Exception):
    """A subscription that can't be understood."""


def parse_subscription(topic: str, expression: str | None, expression_type: str | None) -> Subscription:
    """`a || b`, `*` or nothing (everything), as a subscription."""
    if expression_type not in (None, "", TAG):
        if not expression:
            raise BadExpression(f"a filter by {expression_type} needs an expression")
        return Subscription(topic=topic, sub_string=expression, expression_type=expression_type)
    if not expression or expression == ALL:
        return Subscription(topic=topic, sub_string=ALL)
    tags = [tag for part in expression.split("||") if (tag := part.strip())]
    return Subscription(topic=topic, sub_string=expression, tags_set=tags, code_set=[java_hash(tag) for tag in tags])


def tag_filter(subscription: Subscription) -> TagFilter | None:
    """A predicate on tag codes, or None for everything."""
    if subscription.sub_string == ALL or subscription.class_filter_mode:
        return None
    return frozenset(subscription.code_set).__contains__
