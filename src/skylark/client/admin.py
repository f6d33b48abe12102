"""What an operator asks of a cluster: which brokers there are, and topics of one's own making.

    async with AdminClient("localhost:9876") as admin:
        await admin.create_topic("orders", queues=16, brokers=["broker-a", "broker-b"])

A topic that exists gets the number of queues, the permission and the attributes that are given; its messages stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, Self

import msgspec

from skylark.client.addresses import NameServers
from skylark.client.errors import BrokerError, InvalidMessage, NotReachable, RocketMQError
from skylark.client.options import check_count, check_seconds, check_texts, choice_among
from skylark.client.session import Session, session_of
from skylark.client.validation import check_send_topic
from skylark.wire.bodies import BadBody, decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic
from skylark.wire.routes import MASTER_ID, ClusterInfo
from skylark.wire.typed import encode_header

MAX_QUEUES: Final = 65_536
DEFAULT_QUEUES: Final = 8
_PERMISSIONS: Final[dict[str, int]] = {"rw": 6, "r": 4, "w": 2}
_MODEL: Final = "TBW102"


class BrokerAddresses(msgspec.Struct, frozen=True):
    """A broker as the name servers know it."""

    name: str
    cluster: str
    addresses: dict[int, str]
    """broker id -> address; 0 is the master"""


class AdminClient:
    """Looks at a cluster and changes it. See the module for an example."""

    def __init__(
        self,
        name_servers: NameServers = None,
        *,
        session: Session | None = None,
        request_timeout_s: float = 5.0,
        namespace: str = "",
    ) -> None:
        """
        - `name_servers`: `host:port`, several joined by `;` or in a list, or an address server's URL; None leaves it
          to the environment.
        - `session`: shares the connections of a session; without one, the client has its own.
        - `request_timeout_s`: of each request.
        - `namespace`: stands before the names of topics on the wire.
        """
        check_texts(namespace=namespace)
        check_seconds("request_timeout_s", request_timeout_s, 0.001)
        self._session = session_of(session, name_servers, namespace, request_timeout_s)
        self._timeout_s = request_timeout_s
        self._is_started = False

    async def start(self) -> None:
        """Connects; `async with` does it."""
        if not self._is_started:
            await self._session.acquire()
            self._is_started = True

    async def close(self) -> None:
        """Leaves the session."""
        if self._is_started:
            self._is_started = False
            await self._session.release()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def brokers(self) -> list[BrokerAddresses]:
        """The brokers that are registered, by name."""
        answer = await self._session.ask_name_server(Frame(RequestCode.GET_BROKER_CLUSTER_INFO), self._timeout_s)
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark, "the name server")
        try:
            table = decode_body(ClusterInfo, answer.body).broker_addr_table
        except BadBody as e:
            raise BrokerError(answer.code, f"the list of brokers can't be read: {e}", "the name server") from e
        return [
            BrokerAddresses(name, table[name].cluster, dict(sorted(table[name].broker_addrs.items())))
            for name in sorted(table)
        ]

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int = DEFAULT_QUEUES,
        brokers: Sequence[str] | None = None,
        cluster: str | None = None,
        permission: Literal["rw", "r", "w"] = "rw",
        attributes: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Creates a topic, or changes it, and returns the names of the brokers that have it now.

        - `queues`: on each broker.
        - `brokers`: on these, by name; or on all of a `cluster`; or, with neither, on all that there are.
        - `permission`: whether it can be read, written or both.
        - `attributes`: Apache's, such as `{"message.type": "FIFO"}`.

        Raises InvalidMessage for what no broker takes, NotReachable when one of the brokers is not there, both before
        anything is changed; and BrokerError when one refuses, with those that have the topic by then in the text.
        """
        name = self._session.namespace.wrap(topic)
        check_send_topic(name)
        check_count("queues", queues, 1, MAX_QUEUES)
        header = CreateTopic(
            name,
            _MODEL,
            queues,
            queues,
            _PERMISSIONS[choice_among("permission", permission, ("rw", "r", "w"))],
            "SINGLE_TAG",
            0,
            attributes=_as_text(attributes or {}),
        )
        masters = _masters(await self.brokers(), brokers, cluster)
        done: list[str] = []
        for broker, address in masters.items():
            request = Frame(RequestCode.UPDATE_AND_CREATE_TOPIC, encode_header(header))
            so_far = f"the topic is created at {', '.join(done)}" if done else ""
            try:
                answer = await self._session.ask_address(address, request, self._timeout_s)
            except RocketMQError as e:
                if so_far:
                    e.add_note(so_far)
                raise
            if answer.code != ResponseCode.SUCCESS:
                raise BrokerError(answer.code, answer.remark, broker, so_far)
            done.append(broker)
        return done


def _masters(known: Sequence[BrokerAddresses], names: Sequence[str] | None, cluster: str | None) -> dict[str, str]:
    """name -> address of the master, of the brokers that are meant."""
    if names is not None and cluster is not None:
        raise InvalidMessage("brokers and cluster exclude each other")
    if isinstance(names, str) or (names is not None and not names):
        raise InvalidMessage(f"brokers is {names!r}; it takes a list of names")
    wanted = [each for each in known if cluster is None or each.cluster == cluster]
    there = f"there are {', '.join(f'{each.name} of {each.cluster}' for each in known) or 'none'}"
    if names is not None:
        by_name = {each.name: each for each in known}
        if missing := [name for name in names if name not in by_name]:
            raise NotReachable(f"no broker {' or '.join(missing)} is registered; {there}")
        wanted = [by_name[name] for name in dict.fromkeys(names)]
    if not wanted:
        raise NotReachable(f"no broker {f'of cluster {cluster} ' if cluster else ''}is registered; {there}")
    if headless := [each.name for each in wanted if MASTER_ID not in each.addresses]:
        raise NotReachable(f"broker {' and '.join(headless)} has no master at the moment")
    return {each.name: each.addresses[MASTER_ID] for each in wanted}


def _as_text(attributes: Mapping[str, str]) -> str | None:
    """As they travel: each is set, `+name=value`."""
    for name, value in attributes.items():
        check_texts(attribute=name, **{f"attribute {name}": value})
        if not name or any(character in name + value for character in ",=+"):
            raise InvalidMessage(f"attribute {name!r} with value {value!r}: both hold none of , = +")
    return ",".join(f"+{name}={value}" for name, value in attributes.items()) or None
