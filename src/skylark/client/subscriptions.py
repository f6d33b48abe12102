"""What a group wants of a topic, as heartbeats and pulls say it.

A tag expression is `*`, one tag, or several joined by `||`. Brokers compare only the hash codes of tags, so clients
compare the tags themselves once more (`wants`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skylark.client.errors import BrokerError, InvalidMessage
from skylark.client.message import Message
from skylark.wire.bodies import TAG, CheckClient, Subscription, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_RETRY_TOPIC
from skylark.wire.records import java_hash

if TYPE_CHECKING:
    from skylark.client.session import Session

ALL: Final = "*"
SQL92: Final = "SQL92"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"


def retry_topic(group: str) -> str:
    """Where the group's messages wait that are to be consumed again."""
    return RETRY_PREFIX + group


def build_subscription(topic: str, *, tag: str = ALL, sql: str | None = None, version: int) -> Subscription:
    """`version` is a time in milliseconds: brokers keep the subscription with the highest.

    >>> build_subscription("t", tag="a || b", version=1).tags_set
    ['a', 'b']
    """
    if sql is not None:
        if tag != ALL:
            raise InvalidMessage(f"topic {topic!r}: subscribe by tag or by sql, not by both")
        if not sql.strip():
            raise InvalidMessage(f"topic {topic!r}: the SQL expression is empty")
        return Subscription(topic=topic, sub_string=sql, expression_type=SQL92, sub_version=version)
    expression = tag.strip()
    if expression in ("", ALL):
        return Subscription(topic=topic, sub_string=ALL, expression_type=TAG, sub_version=version)
    tags = [each for part in expression.split("||") if (each := part.strip())]
    if not tags:
        raise InvalidMessage(f"topic {topic!r}: {tag!r} names no tag; write them as 'a || b', or '*' for all")
    return Subscription(
        topic=topic,
        sub_string=expression,
        expression_type=TAG,
        tags_set=tags,
        code_set=[java_hash(each) for each in tags],
        sub_version=version,
    )


def wants(subscription: Subscription, tag: str | None) -> bool:
    """Whether a message with that tag is one of those asked for, and not only one with the same hash code."""
    return not subscription.tags_set or tag in subscription.tags_set


async def check_filter(session: Session, group: str, subscription: Subscription) -> None:
    """Asks a broker whether it understands what is not a tag expression. Raises BrokerError."""
    route = session.routes.known(subscription.topic)
    if subscription.is_by_tag or route is None:
        return
    check = CheckClient(client_id=session.client_id, group=group, subscription_data=subscription)
    broker = next(iter(route.brokers))
    request = Frame(RequestCode.CHECK_CLIENT_CONFIG, {}, encode_body(check))
    answer = await session.ask_broker(broker, request, broker_id=None)
    if answer.code != ResponseCode.SUCCESS:
        raise BrokerError(answer.code, answer.remark, broker)


def restore_topic(message: Message, group: str) -> None:
    """Gives a message that comes from the group's retry topic the name of the topic it was sent to."""
    if message.topic == RETRY_PREFIX + group:
        message.topic = message.properties.get(PROPERTY_RETRY_TOPIC, message.topic)
