"""Which queues of a topic are this member's: every member asks a broker who is in the group and computes its share.

All members come to the same result, because all sort queues and members alike and use the same strategy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from skylark.client.allocate import Strategy, java_order
from skylark.client.calling import call
from skylark.client.errors import BrokerError, CallbackFailed, NotReachable, RocketMQError
from skylark.client.routes import TopicRoute
from skylark.client.session import Session
from skylark.wire.bodies import BadBody, ConsumerIds, MessageQueue, decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import GetConsumerListByGroup
from skylark.wire.typed import encode_header

_NO_MEMBER: Final = (
    "it has heard of no member; with autoCreateSubscriptionGroup=false a broker takes in none before the group is "
    "created, as with mqadmin updateSubGroup, or unless autoCreateSubscriptionGroup=true"
)


async def share_of(session: Session, group: str, route: TopicRoute, strategy: Strategy) -> list[MessageQueue] | None:
    """This member's queues, None as long as no broker counts it in.

    Raises RocketMQError when no broker can be asked, and when the strategy fails.
    """
    members = await _members(session, group, route)
    if session.client_id not in members:
        # Not heard of yet, or forgotten: nothing is ours until the broker knows us.
        await session.heartbeat()
        members = await _members(session, group, route)
    if session.client_id not in members:
        return None
    return _apply(strategy, session.client_id, route.read_queues, members) if route.read_queues else []


def _apply(
    strategy: Strategy, member: str, queues: Sequence[MessageQueue], members: Sequence[str]
) -> list[MessageQueue]:
    try:
        share = call(lambda: list(call(strategy, member, list(queues), list(members))))
    except Exception as e:
        raise CallbackFailed(f"the strategy {strategy!r} failed: {type(e).__name__}: {e}") from e
    strange = [each for each in share if each not in queues]
    if strange:
        raise CallbackFailed(f"the strategy {strategy!r} gave {strange[0]!r}, which is no queue of the topic")
    return share


async def _members(session: Session, group: str, route: TopicRoute) -> list[str]:
    """The group's client ids, from any broker of the topic."""
    fields = encode_header(GetConsumerListByGroup(group))
    failure: RocketMQError = NotReachable(f"no broker serves topic {route.topic}")
    names = list(route.brokers)
    for broker in random.sample(names, len(names)):
        try:
            request = Frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, dict(fields))
            answer = await session.ask_broker(broker, request, broker_id=None)
            if answer.code == ResponseCode.SUCCESS:
                return sorted(decode_body(ConsumerIds, answer.body).consumer_id_list, key=java_order)
            failure = BrokerError(answer.code, answer.remark, broker, _NO_MEMBER)
        except RocketMQError as e:
            failure = e
        except BadBody as e:
            failure = BrokerError(ResponseCode.SYSTEM_ERROR, str(e), broker)
    raise failure
