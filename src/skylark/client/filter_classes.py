"""Filters that are classes of the user's own, which run at filter servers.

The consumer uploads the source of its class to the filter servers that stand by the brokers of its topic, and pulls
through one of them. A filter server may take no classes, or not this one: then the consumer does not start.
"""

from __future__ import annotations

import inspect
import random
import textwrap
from zlib import crc32

import msgspec

from skylark.client.errors import BrokerError, InvalidMessage, NotReachable
from skylark.client.session import Session
from skylark.wire.bodies import MessageQueue
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import RegisterMessageFilterClass
from skylark.wire.typed import encode_header


class FilterClass(msgspec.Struct, frozen=True):
    """A class by its full name and its source."""

    name: str
    source: str

    @classmethod
    def of(cls, given: type | tuple[str, str]) -> FilterClass:
        """Of a class of this program, whose source must stand by itself, or of a name and a source."""
        if isinstance(given, tuple):
            return cls(*given)
        try:
            source = textwrap.dedent(inspect.getsource(given))
        except (OSError, TypeError) as e:
            raise InvalidMessage(f"the source of {given!r} can't be found ({e}); give (name, source)") from None
        return cls(f"{given.__module__.strip('_')}.{given.__name__}", source)


def filter_servers(session: Session, topic: str, broker_name: str | None = None) -> list[str]:
    """The filter servers that the topic's route names: of one broker, or of all."""
    route = session.routes.known(topic)
    if route is None:
        return []
    wanted = route.brokers if broker_name is None else {broker_name: route.brokers.get(broker_name, {})}
    return [
        server
        for addresses in wanted.values()
        for address in addresses.values()
        for server in route.filter_servers.get(address, ())
    ]


async def upload(session: Session, group: str, topic: str, filter_class: FilterClass) -> None:
    """Raises BrokerError if a filter server refuses the class, NotReachable if there is none."""
    servers = filter_servers(session, topic)
    if not servers:
        await session.routes.get(topic, refresh=True)  # one may have come since
        servers = filter_servers(session, topic)
    if not servers:
        raise NotReachable(f"no filter server stands by the brokers of topic {topic}: start one (skylark filtersrv)")
    body = filter_class.source.encode()
    header = RegisterMessageFilterClass(group, topic, filter_class.name, crc32(body) & 0x7FFFFFFF)
    for server in servers:
        request = Frame(RequestCode.REGISTER_MESSAGE_FILTER_CLASS, encode_header(header), body)
        answer = await session.ask_address(server, request, timeout_s=30.0)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark, f"filter server {server}")


def choose_server(session: Session, queue: MessageQueue) -> str:
    """One of the filter servers that a queue can be pulled through. Raises NotReachable."""
    servers = filter_servers(session, queue.topic, session.routes.broker_of(queue))
    if not servers:
        raise NotReachable(f"no filter server stands by broker {queue.broker_name}")
    return random.choice(servers)
