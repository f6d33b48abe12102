"""One client as the servers see it: a client id, its connections, its heartbeats and the groups it is a member of.

Producers and consumers that are given the same session share its connections. The session starts with the first that
acquires it and ends with the last that releases it.

- Every broker of every known route hears of the members at once when they change, every 30 s, and first of all on a
  connection that is new: after a broker's restart it knows its clients before their next request.
- A session belongs to the process and the event loop that started it. After a fork the child gets `ForkedProcess`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol, Self

from skylark.client import stacks
from skylark.client.addresses import of_name_server, parse_name_servers
from skylark.client.dialogue import Dialogue
from skylark.client.errors import (
    ClientClosed,
    ForkedProcess,
    NotANameServer,
    NotReachable,
    RequestTimeout,
    RocketMQError,
)
from skylark.client.message import Message
from skylark.client.namespace import Namespace
from skylark.client.routes import Routes
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.pool import Pool, abort_if_silent
from skylark.wire import fastjson
from skylark.wire.bodies import (
    ConsumerData,
    ConsumerStatus,
    Heartbeat,
    MessageQueue,
    ProducerData,
    ResetOffsets,
    decode_body,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import (
    ConsumeMessageDirectlyResult,
    GetConsumerRunningInfo,
    GetConsumerStatus,
    NotifyConsumerIdsChanged,
    ResetOffset,
    UnregisterClient,
)
from skylark.wire.message import PROPERTY_PRODUCER_GROUP, StoredMessage
from skylark.wire.records import decode_record
from skylark.wire.routes import MASTER_ID
from skylark.wire.typed import decode_header, encode_header

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S: Final = 30.0
ROUTE_INTERVAL_S: Final = 30.0
SILENCE_S: Final = 1.0  # a shorter time without an answer says nothing about the connection


TransactionCheck = Callable[[Frame, StoredMessage, Connection], None]
"""Takes a broker's question about a transaction, with the half message, and the connection to answer on."""


class ConsumerMember(Protocol):
    """What a session wants from a consumer that joins a group. The plain methods must not block."""

    @property
    def group(self) -> str: ...

    def data(self) -> ConsumerData:
        """What heartbeats say about the group."""

    def rebalance_soon(self) -> None:
        """The group's members changed."""

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """An operator moves the group; go on from these offsets."""

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        """The offsets up to which the member has consumed its queues of the topic."""

    def running_info(self) -> Mapping[str, object]:
        """Apache's ConsumerRunningInfo, for operators."""

    def consume_directly(self, message: Message) -> Awaitable[Mapping[str, object]]:
        """An operator has one message consumed here; Apache's ConsumeMessageDirectlyResult."""


def local_ip() -> str:
    """The address that other machines would see; found without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 9))
            ip: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return ip


def session_of(
    session: Session | None, name_servers: str | Sequence[str], namespace: str, request_timeout_s: float = 3.0
) -> Session:
    """The session that a client was given, or one of its own. Raises ValueError."""
    if session is None:
        return Session(name_servers, namespace=namespace, request_timeout_s=request_timeout_s)
    if namespace and namespace != session.namespace.name:
        raise ValueError("a shared session has its own namespace: give the namespace to the session")
    return session


def drop_if_silent(connection: Connection, began_s: float, now_s: float) -> None:
    """After a request that a broker did not answer. Others share the connection: one that was in a hurry spares it."""
    if now_s - began_s >= SILENCE_S:
        abort_if_silent(connection, began_s)


class Session:
    """The shared part of the producers and consumers of one client id."""

    def __init__(
        self,
        name_servers: str | Sequence[str] = "localhost:9876",
        *,
        instance: str | None = None,
        unit: str | None = None,
        unit_mode: bool = False,
        namespace: str = "",
        namespace_v2: str = "",
        client_ip: str | None = None,
        request_timeout_s: float = 3.0,
    ) -> None:
        """
        - `unit`: the part of a larger deployment that this client belongs to; `unit_mode` tells the brokers to mark the
          topics that it creates and the groups that it joins.
        - `namespace`: stands before all names of topics and groups on the wire; see `skylark.client.namespace`.
        - `namespace_v2`: goes with every request as a field of its own, for a proxy that adds it to the names.
        """
        self.name_servers = parse_name_servers(name_servers)
        self.request_timeout_s = request_timeout_s
        # Two clients of one process are two members of a group, so the process id alone does not do.
        name = instance or f"{os.getpid()}#{time.monotonic_ns()}"
        self.client_id = f"{client_ip or local_ip()}@{name}" + (f"@{unit}" if unit else "")
        self.unit_mode = unit_mode
        self.namespace = Namespace(namespace)
        self._stamp = {"nsd": "true", "ns": namespace_v2} if namespace_v2 else None
        self.routes = Routes(self.ask_name_server, request_timeout_s)
        self.dialogue = Dialogue()
        self.handlers: dict[int, Handler] = {
            RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: self._members_changed,
            RequestCode.RESET_CONSUMER_CLIENT_OFFSET: self._reset_offsets,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: self._tell_positions,
            RequestCode.GET_CONSUMER_RUNNING_INFO: self._tell_running_info,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: self._consume_directly,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: self.dialogue.receive,
            RequestCode.CHECK_TRANSACTION_STATE: self._check_transaction,
        }
        self._producers: dict[str, int] = {}
        self._checkers: dict[str, TransactionCheck] = {}
        self._consumers: dict[str, ConsumerMember] = {}
        self._name_server = random.randrange(len(self.name_servers))
        self._companion: Session | None = None
        self._users = 0
        self._pid = 0
        self._pool: Pool | None = None
        self._open: dict[str, Connection] = {}  # brokers' connections that have been greeted
        self._dials: dict[str, asyncio.Task[Connection]] = {}
        self._unheard: set[str] = set()  # brokers whose heartbeat failed, so that it is said once
        self._tasks: list[asyncio.Task[None]] = []

    # Life.

    async def acquire(self) -> None:
        """Starts the session with its first user."""
        self.check_process()
        self._users += 1
        if self._users > 1:
            return
        self._pid = os.getpid()
        self._pool = Pool(self.handlers, self.request_timeout_s, self._stamp)
        self._tasks = [
            asyncio.create_task(_every(HEARTBEAT_INTERVAL_S, self.heartbeat)),
            asyncio.create_task(_every(ROUTE_INTERVAL_S, self._refresh_routes)),
        ]

    async def release(self) -> None:
        """Ends the session with its last user."""
        self.check_process()
        if self._users == 0:
            return
        self._users -= 1
        if self._users == 0:
            await self._stop()

    start = acquire
    close = release

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def _stop(self) -> None:
        tasks = [*self._tasks, *self._dials.values()]
        self._tasks = []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.dialogue.close()
        self._open.clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @property
    def is_running(self) -> bool:
        return self._pool is not None

    def _running_pool(self) -> Pool:
        if self._pool is None:
            raise ClientClosed("the client is not started, or closed already; use it within `async with`")
        self.check_process()
        return self._pool

    def check_process(self) -> None:
        """Raises ForkedProcess in a child of the process that started the session."""
        if self._pid and self._pid != os.getpid():
            raise ForkedProcess(
                f"this client was started by process {self._pid} and is used by {os.getpid()}, forked from it; "
                f"make a client of its own in the child, after the fork"
            )

    @property
    def companion(self) -> Session:
        """A session at the same servers for what goes beside: its own connections, and no namespace."""
        if self._companion is None:
            self._companion = Session(self.name_servers, request_timeout_s=self.request_timeout_s)
        return self._companion

    # Requests.

    async def ask_name_server(self, request: Frame, timeout_s: float | None = None) -> Frame:
        """The answer of the first name server that gives one, beginning with the last good one.

        Raises NotReachable or RequestTimeout when none does within the time, NotANameServer if
        the only address is a broker's.
        """
        pool = self._running_pool()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.request_timeout_s if timeout_s is None else timeout_s)
        count = len(self.name_servers)
        failures: list[str] = []
        timed_out = False
        for turn in range(count):
            index = (self._name_server + turn) % count
            address = self.name_servers[index]
            try:
                # One that does not answer leaves time for the others.
                answer = await pool.request(address, request, (deadline - loop.time()) / (count - turn))
                answer = of_name_server(answer, address)
            except TimeoutError as e:
                timed_out = True
                failures.append(str(e))
            except NotANameServer as e:
                if count == 1:
                    raise
                failures.append(str(e))
            except OSError as e:
                failures.append(str(e))
            else:
                self._name_server = index
                return answer
        text = "no name server answers: " + "; ".join(failures)
        raise RequestTimeout(text) if timed_out else NotReachable(text)

    async def ask_broker(
        self, broker_name: str, request: Frame, timeout_s: float | None = None, *, broker_id: int | None = MASTER_ID
    ) -> Frame:
        """The broker's answer, whatever its code. Raises NotReachable or RequestTimeout.

        Without a `broker_id`, the master answers, or a slave where there is none.
        """
        address = self.broker_address(broker_name, broker_id)
        return await self.ask_address(address, request, self.request_timeout_s if timeout_s is None else timeout_s)

    async def ask_queue(
        self, queue: MessageQueue, request: Frame, timeout_s: float | None = None, *, broker_id: int | None = MASTER_ID
    ) -> Frame:
        """The answer of the broker that has the queue; of its new one, if it has just moved."""
        broker = self.routes.broker_of(queue)
        answer = await self.ask_broker(broker, request, timeout_s, broker_id=broker_id)
        if answer.code == ResponseCode.NOT_LEADER_FOR_QUEUE:
            await self.routes.get(queue.topic, refresh=True)
            leader = self.routes.broker_of(queue)
            if leader != broker:
                answer = await self.ask_broker(leader, request, timeout_s, broker_id=broker_id)
        return answer

    async def notify_broker(
        self, broker_name: str, request: Frame, timeout_s: float | None = None, *, broker_id: int | None = MASTER_ID
    ) -> None:
        """Sends a one-way request; only the connection is waited for."""
        address = self.broker_address(broker_name, broker_id)
        connection = self.ready_connection(address)
        if connection is None:
            connection = await self.connect(address, self.request_timeout_s if timeout_s is None else timeout_s)
        connection.notify(request)

    async def ask_address(self, address: str, request: Frame, timeout_s: float) -> Frame:
        clock_s = asyncio.get_running_loop().time
        deadline_s = clock_s() + timeout_s
        connection = self.ready_connection(address)
        if connection is None:
            connection = await self.connect(address, timeout_s)
        began_s = clock_s()
        try:
            return await connection.request(request, deadline_s - began_s)
        except TimeoutError:
            drop_if_silent(connection, began_s, clock_s())
            raise RequestTimeout(f"no answer from broker {address} within {timeout_s:.3g} s") from None
        except ConnectionError as e:
            raise NotReachable(str(e)) from e

    def broker_address(self, broker_name: str, broker_id: int | None = MASTER_ID) -> str:
        """Raises NotReachable when no route names such a broker."""
        addresses = self.routes.brokers.get(broker_name)
        if not addresses:
            raise NotReachable(f"no route leads to broker {broker_name}")
        address = addresses.get(MASTER_ID if broker_id is None else broker_id)
        if address is not None:
            return address
        if broker_id == MASTER_ID:
            raise NotReachable(f"broker {broker_name} has no master at the moment")
        return next(iter(addresses.values()))

    def ready_connection(self, address: str) -> Connection | None:
        """The broker's connection if it is open and usable at once."""
        connection = self._open.get(address)
        if connection is not None and connection.is_open:
            self._running_pool()
            return connection
        return None

    async def connect(self, address: str, timeout_s: float) -> Connection:
        """The broker's connection, dialled if need be. Raises NotReachable or RequestTimeout."""
        self._running_pool()
        dial = self._dials.get(address)
        if dial is None:
            dial = self._dials[address] = asyncio.create_task(self._dial(address))
            dial.add_done_callback(lambda done: self._dialled(address, done))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dial)
        except TimeoutError as e:
            raise RequestTimeout(str(e) or f"no connection to broker {address} within {timeout_s:.3g} s") from None
        except OSError as e:
            raise NotReachable(str(e)) from e

    async def _dial(self, address: str) -> Connection:
        connection = await self._running_pool().get(address)
        if (self._producers or self._consumers) and address in self._member_addresses():
            await self._beat(address, connection)
        self._open[address] = connection
        return connection

    def _dialled(self, address: str, dial: asyncio.Task[Connection]) -> None:
        self._dials.pop(address, None)
        if not dial.cancelled():
            dial.exception()  # looked at, so that nobody complains when all who waited have given up

    # Members and heartbeats.

    async def add_producer(self, group: str) -> None:
        self._producers[group] = self._producers.get(group, 0) + 1
        await self.heartbeat()

    async def remove_producer(self, group: str) -> None:
        """Several producers may have one group; the brokers hear of it when the last one leaves."""
        count = self._producers.pop(group, 0) - 1
        if count > 0:
            self._producers[group] = count
        elif count == 0:
            await self._unregister(UnregisterClient(self.client_id, producer_group=group))

    def add_checker(self, group: str, check: TransactionCheck) -> None:
        """Who answers when a broker asks how a transaction of the group ended."""
        if group in self._checkers:
            raise RocketMQError(
                f"this session has a transaction producer of group {group!r} already; give the second a session of "
                "its own"
            )
        self._checkers[group] = check

    def remove_checker(self, group: str) -> None:
        self._checkers.pop(group, None)

    async def add_consumer(self, member: ConsumerMember) -> None:
        """Joins the group. Ask for the routes of its topics before: only their brokers hear of it."""
        if member.group in self._consumers:
            raise RocketMQError(
                f"this session has a consumer of group {member.group!r} already; give the second a session of its own"
            )
        self._consumers[member.group] = member
        await self.heartbeat()

    async def remove_consumer(self, group: str) -> None:
        if self._consumers.pop(group, None) is not None:
            await self._unregister(UnregisterClient(self.client_id, consumer_group=group))

    async def heartbeat(self) -> None:
        """Tells every known broker which groups this client is in. Call it when a subscription changes."""
        if self._producers or self._consumers:
            await asyncio.gather(*(self._reach(address) for address in self._member_addresses()))

    def _member_addresses(self) -> list[str]:
        """Consumers may read from slaves; a client that only produces talks to masters."""
        return [
            address
            for brokers in self.routes.brokers.values()
            for broker_id, address in brokers.items()
            if self._consumers or broker_id == MASTER_ID
        ]

    async def _reach(self, address: str) -> None:
        connection = self.ready_connection(address)
        try:
            if connection is None:
                await self.connect(address, self.request_timeout_s)  # which begins with a heartbeat
            else:
                await self._beat(address, connection)
        except RocketMQError as e:
            self._note_beat(address, str(e))

    async def _beat(self, address: str, connection: Connection) -> None:
        beat = Heartbeat(
            client_id=self.client_id,
            consumer_data_set=[member.data() for member in self._consumers.values()],
            producer_data_set=[ProducerData(group_name=group) for group in self._producers],
        )
        clock_s = asyncio.get_running_loop().time
        began_s = clock_s()
        try:
            answer = await connection.request(
                Frame(RequestCode.HEART_BEAT, {}, encode_body(beat)), self.request_timeout_s
            )
        except TimeoutError:
            drop_if_silent(connection, began_s, clock_s())
            self._note_beat(address, "it does not answer")
        except ConnectionError as e:
            self._note_beat(address, str(e))
        else:
            self._note_beat(address, "" if answer.code == ResponseCode.SUCCESS else f"{answer.code} {answer.remark}")

    def _note_beat(self, address: str, failure: str) -> None:
        if failure and address not in self._unheard:
            self._unheard.add(address)
            log.warning("broker %s does not hear this client: %s", address, failure)
        elif not failure and address in self._unheard:
            self._unheard.discard(address)
            log.info("broker %s hears this client again", address)

    async def _unregister(self, header: UnregisterClient) -> None:
        fields = encode_header(header)

        async def tell(connection: Connection) -> None:
            try:
                await connection.request(Frame(RequestCode.UNREGISTER_CLIENT, dict(fields)), self.request_timeout_s)
            except OSError as e:
                log.debug("%r was not told that a group was left: %s", connection, e)

        await asyncio.gather(*(tell(connection) for connection in list(self._open.values()) if connection.is_open))

    async def _refresh_routes(self) -> None:
        await self.routes.refresh()
        known = {address for brokers in self.routes.brokers.values() for address in brokers.values()}
        for address, connection in list(self._open.items()):
            if address not in known and not connection.is_open:  # gone for good; a broker closes what is silent
                del self._open[address]
                self._running_pool().drop(address)
        self._unheard &= known

    # What brokers ask of this client.

    def _members_changed(self, request: Frame, _: Connection) -> None:
        member = self._consumers.get(decode_header(NotifyConsumerIdsChanged, request).consumer_group)
        if member is not None:
            member.rebalance_soon()

    def _reset_offsets(self, request: Frame, _: Connection) -> None:
        header = decode_header(ResetOffset, request)
        member = self._consumers.get(header.group)
        if member is not None and request.body:
            member.reset_offsets(header.topic, decode_body(ResetOffsets, request.body).offset_table)

    def _tell_positions(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(GetConsumerStatus, request)
        table = self._member(header.group).positions(header.topic)
        return request.reply(body=encode_body(ConsumerStatus(message_queue_table=table)))

    def _tell_running_info(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(GetConsumerRunningInfo, request)
        info = dict(self._member(header.consumer_group).running_info())
        if header.jstack_enable:
            info["jstack"] = stacks.dump()
        return request.reply(body=fastjson.dumps(info))

    async def _consume_directly(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(ConsumeMessageDirectlyResult, request)
        member = self._member(header.consumer_group)
        message = Message.from_record(decode_record(request.body), header.broker_name or "")
        return request.reply(body=fastjson.dumps(await member.consume_directly(message)))

    def _check_transaction(self, request: Frame, connection: Connection) -> None:
        record = decode_record(request.body)
        group = record.properties.get(PROPERTY_PRODUCER_GROUP, "")
        check = self._checkers.get(group)
        if check is None:
            log.info("nobody here knows how transactions of group %r ended", group)
        else:
            check(request, record, connection)

    def _member(self, group: str) -> ConsumerMember:
        member = self._consumers.get(group)
        if member is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"The Consumer Group <{group}> not exist in this consumer")
        return member


async def _every(interval_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `action` again and again; what it raises is logged and does not end the series."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await action()
        except Exception:
            log.exception("a task that runs every %g s failed", interval_s)
