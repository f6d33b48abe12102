"""One client as the servers see it: a client id, its connections, its heartbeats and the groups it is a member of.

Producers and consumers that are given the same session share its connections. The session starts with the first that
acquires it and ends with the last that releases it.

- It is idle or running, and goes from one to the other at once: acquiring and releasing change everything that they
  change before they wait for anything. What a life had (connections, tasks) ends with it and is never seen by the
  next, so whoever enters while the last one leaves finds a session that has just begun.
- In one process, two sessions with one client id at the same name servers can't run at a time: the second is refused.
- Every broker of every known route hears of the members at once when they change, every 30 s, and first of all on a
  connection that is new: after a broker's restart it knows its clients before their next request.
- A session belongs to the process and the event loop that started it. After a fork the child gets `ForkedProcess`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, Self

from skylark.client import identity
from skylark.client.addresses import LOOK_UP_INTERVAL_S, NameServers, locate, of_name_server
from skylark.client.calling import is_cancelled
from skylark.client.crew import Worker
from skylark.client.dialogue import Dialogue
from skylark.client.errors import (
    ClientClosed,
    ForkedProcess,
    InvalidMessage,
    NotANameServer,
    NotReachable,
    OtherEventLoop,
    RequestTimeout,
    RocketMQError,
)
from skylark.client.namespace import Namespace
from skylark.client.options import LEAST_S, check_flag, check_hooks, check_seconds, check_texts, several
from skylark.client.questions import ConsumerMember, Questions, TransactionCheck
from skylark.client.routes import Routes
from skylark.client.rpc_hooks import RpcHook, RpcHooks
from skylark.net.connection import Connection
from skylark.net.pool import Pool, abort_if_silent
from skylark.wire.bodies import (
    Heartbeat,
    MessageQueue,
    ProducerData,
    encode_body,
)
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import (
    UnregisterClient,
)
from skylark.wire.routes import MASTER_ID
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S: Final = 30.0
ROUTE_INTERVAL_S: Final = 30.0
SILENCE_S: Final = 1.0  # a shorter time without an answer says nothing about the connection


def session_of(
    session: Session | None, name_servers: NameServers, namespace: str, request_timeout_s: float = 3.0
) -> Session:
    """The session that a client was given, or one of its own. Raises InvalidMessage."""
    if session is None:
        return Session(name_servers, namespace=namespace, request_timeout_s=request_timeout_s)
    if not isinstance(session, Session):
        raise InvalidMessage(f"session is {session!r}; it must be a skylark.Session")
    if namespace and namespace != session.namespace.name:
        raise InvalidMessage("a shared session has its own namespace: give the namespace to the session")
    return session


def running_loop() -> asyncio.AbstractEventLoop:
    """The event loop that this runs on. Raises OtherEventLoop where it is none of asyncio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise OtherEventLoop(
            "no event loop of asyncio runs here, and this client works on no other: start it in a coroutine under "
            "asyncio.run (with anyio, on its backend asyncio), or use skylark.client.sync, whose clients need none"
        ) from None


def drop_if_silent(connection: Connection, began_s: float, now_s: float) -> None:
    """After a request that a broker did not answer. Others share the connection: one that was in a hurry spares it."""
    if now_s - began_s >= SILENCE_S:
        abort_if_silent(connection, began_s)


class Session:
    """The shared part of the producers and consumers of one client id."""

    def __init__(
        self,
        name_servers: NameServers = None,
        *,
        instance: str | None = None,
        unit: str | None = None,
        unit_mode: bool = False,
        namespace: str = "",
        namespace_v2: str = "",
        client_ip: str | None = None,
        request_timeout_s: float = 3.0,
        rpc_hooks: Sequence[RpcHook] = (),
    ) -> None:
        """
        - `name_servers`: addresses, or the URL of an address server; None leaves it to the environment (`addresses`).
        - `instance`: the second half of the client id; without it, each session has one of its own.
        - `client_ip`: the first half, in place of this machine's address. `request_timeout_s`: of each request.
        - `unit`: the part of a larger deployment that this client belongs to; `unit_mode` tells the brokers to mark the
          topics that it creates and the groups that it joins.
        - `namespace`: stands before all names of topics and groups on the wire; see `skylark.client.namespace`.
        - `namespace_v2`: goes with every request as a field of its own, for a proxy that adds it to the names.
        - `rpc_hooks`: called before every request and after every response; see `skylark.client.rpc_hooks`.
        """
        check_texts(namespace=namespace, namespace_v2=namespace_v2)
        check_flag("unit_mode", unit_mode)
        check_seconds("request_timeout_s", request_timeout_s, LEAST_S)
        rpc_hooks = several("rpc_hooks", rpc_hooks)
        check_texts(instance=instance or "", unit=unit or "", client_ip=client_ip or "")
        check_hooks("rpc_hooks", rpc_hooks, "before_request", "after_response")
        # Empty until the address server was asked, if there is one.
        self.name_servers, self._address_server = locate(name_servers, unit)
        self.request_timeout_s = request_timeout_s
        ip = client_ip or identity.local_ip()
        self.client_id = identity.make_id(ip, instance or identity.own_instance(), unit)
        self.lasting_id = identity.make_id(ip, instance or identity.DEFAULT_INSTANCE, unit)
        """the same at every start, though not only this client's"""
        self.unit_mode = unit_mode
        self.namespace = Namespace(namespace)
        self._stamp = {"nsd": "true", "ns": namespace_v2} if namespace_v2 else None
        self._rpc_hooks = rpc_hooks
        self.routes = Routes(self.ask_name_server, request_timeout_s)
        self.dialogue = Dialogue()
        self._producers: dict[str, int] = {}
        self._checkers: dict[str, TransactionCheck] = {}
        self._consumers: dict[str, ConsumerMember] = {}
        self.handlers = Questions(self._consumers, self._checkers, self.dialogue).handlers
        self._name_server = random.randrange(1 << 16)
        self._companion: Session | None = None
        self._users = 0
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: Pool | None = None
        self._open: dict[str, Connection] = {}  # brokers' connections that have been greeted
        self._dials: dict[str, asyncio.Task[Connection]] = {}
        self._remarks: dict[str, str] = {}  # what brokers said last when they heard this client
        self._unheard: set[str] = set()  # brokers whose heartbeat failed, so that it is said once
        self._tasks: set[asyncio.Task[None]] = set()

    # Life.

    async def acquire(self) -> None:
        """Starts the session with its first user. Raises RocketMQError if another one has its client id, and
        OtherEventLoop where no event loop of asyncio runs."""
        self.check_home()
        if self._users:
            self._users += 1
            return
        loop = running_loop()
        identity.register(self)
        self._users = 1
        self._pid = os.getpid()
        self._loop = loop
        watch = RpcHooks(self._rpc_hooks) if self._rpc_hooks else None
        self._pool = Pool(self.handlers, self.request_timeout_s, self._stamp, watch)
        self._spawn(every(HEARTBEAT_INTERVAL_S, self.heartbeat))
        self._spawn(every(ROUTE_INTERVAL_S, self._refresh_routes))
        if self._address_server is not None:
            self._spawn(every(LOOK_UP_INTERVAL_S, self.look_up_name_servers))

    async def release(self) -> None:
        """Ends the session with its last user."""
        self.check_home()
        if self._users == 0:
            return
        self._users -= 1
        if self._users == 0:
            tasks = self._detach()
            await asyncio.gather(*tasks, return_exceptions=True)

    start = acquire
    close = release

    async def __aenter__(self) -> Self:
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    def _detach(self) -> list[asyncio.Task[Any]]:
        """Ends this life: from here on the session is idle. The tasks, which are cancelled, can be waited for."""
        identity.unregister(self)
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *self._dials.values()]
        pool, self._pool = self._pool, None
        self._tasks, self._dials, self._open = set(), {}, {}
        for task in tasks:
            task.cancel()
        self.dialogue.close()
        self.routes.begin_anew()
        if pool is not None:
            pool.close()
        return tasks

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work of this life, which ends with it."""
        task = Worker(work, loop=asyncio.get_running_loop(), name=f"work of {self.client_id}")
        tasks = self._tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    @property
    def is_running(self) -> bool:
        """Whether somebody uses it."""
        return self._pool is not None

    @property
    def places(self) -> set[str]:
        """Where its name servers are, or who tells that: two sessions that share one are at the same servers."""
        return {*self.name_servers, *([self._address_server.url] if self._address_server is not None else [])}

    @property
    def is_alive(self) -> bool:
        """Whether it runs here: in this process, on an event loop that is still open."""
        is_over = self._loop is None or self._loop.is_closed()
        return self.is_running and self._pid == os.getpid() and not is_over

    def _running_pool(self) -> Pool:
        if self._pool is None:
            raise ClientClosed("the client is not started, or closed already; use it within `with` or `async with`")
        self.check_home()
        return self._pool

    def check_process(self) -> None:
        """Raises ForkedProcess in a child of the process that started the session."""
        if self._pid and self._pid != os.getpid():
            raise ForkedProcess(
                f"this client was started by process {self._pid} and is used by {os.getpid()}, forked from it; "
                f"make a client of its own in the child, after the fork"
            )

    def check_home(self) -> None:
        """Raises ForkedProcess, or OtherEventLoop on another loop than the one that the session was started on."""
        self.check_process()
        if self._users and self._loop is not running_loop():
            is_over = self._loop is None or self._loop.is_closed()
            raise OtherEventLoop(
                "this client was started on another event loop, "
                + ("which is closed, and the client with it" if is_over else "and works only there")
                + ": make a client for each event loop, or use skylark.client.sync, whose clients serve all threads"
            )

    @property
    def companion(self) -> Session:
        """A session at the same servers for what goes beside: its own connections, and no namespace."""
        if self._companion is None:
            given = self.name_servers if self._address_server is None else self._address_server.url
            self._companion = Session(given, request_timeout_s=self.request_timeout_s, rpc_hooks=self._rpc_hooks)
        return self._companion

    # Requests.

    async def ask_name_server(self, request: Frame, timeout_s: float | None = None) -> Frame:
        """The answer of the first name server that gives one, beginning with the last good one.

        Raises NotReachable or RequestTimeout when none does within the time, NotANameServer if
        the only address is a broker's.
        """
        pool = self._running_pool()
        loop = asyncio.get_running_loop()
        patience_s = self.request_timeout_s if timeout_s is None else timeout_s
        deadline = loop.time() + patience_s
        if not self.name_servers:
            await self._ask_address_server(patience_s)
        servers = self.name_servers  # there may be others while these are asked
        count = len(servers)
        failures: list[str] = []
        timed_out = False
        for turn in range(count):
            index = (self._name_server + turn) % count
            address = servers[index]
            try:
                # One that does not answer leaves time for the others.
                answer = await pool.ask(address, request, (deadline - loop.time()) / (count - turn))
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

    async def look_up_name_servers(self) -> None:
        """Asks the address server anew. When it does not answer, the addresses stay as they are."""
        try:
            await self._ask_address_server(self.request_timeout_s)
        except NotReachable as e:
            log.warning("the name servers stay as they are: %s", e)

    async def _ask_address_server(self, timeout_s: float) -> None:
        assert self._address_server is not None
        found = await self._address_server.ask(timeout_s)
        if found != self.name_servers:
            log.info("the name servers are %s, says %s", ";".join(found), self._address_server.url)
            self.name_servers = found

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

    async def readable_id(
        self, queue: MessageQueue, broker_id: int = MASTER_ID, *, may_be_outdated: bool = True
    ) -> int:
        """Which of the queue's brokers to read from: the one named, the slave after it, or any that there is.

        As RocketMQ's client does: without a master, a slave has what can be had. If there is none, or if it must not be
        by an outdated route that the one named is missing, the route is asked for. Raises RocketMQError.
        """
        found = self._readable_id(queue, broker_id)
        if found is None or (found != broker_id and not may_be_outdated):
            try:
                await self.routes.get(queue.topic, refresh=True)
            except RocketMQError as e:
                if found is None:
                    raise NotReachable(f"no route leads to broker {queue.broker_name}: {e}") from e
            found = self._readable_id(queue, broker_id)
        if found is None:
            raise NotReachable(f"no route leads to broker {queue.broker_name}")
        return found

    def _readable_id(self, queue: MessageQueue, broker_id: int) -> int | None:
        addresses = self.routes.brokers.get(self.routes.broker_of(queue))
        if not addresses or broker_id in addresses:
            return broker_id if addresses else None
        if broker_id != MASTER_ID and broker_id + 1 in addresses:
            return broker_id + 1
        return min(addresses)

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
        """The answer of the broker at that address, whatever its code. Raises NotReachable or RequestTimeout."""
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
        pool = self._running_pool()
        dial = self._dials.get(address)
        if dial is None:
            dial = self._dials[address] = Worker(
                self._dial(address, pool), loop=asyncio.get_running_loop(), name=f"dial of {address}"
            )
            dial.add_done_callback(partial(_dialled, self._dials, address))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dial)
        except asyncio.CancelledError:
            if self._pool is not pool and dial.cancelled():
                raise ClientClosed("the session was closed while a connection was dialled") from None
            raise
        except TimeoutError as e:
            raise RequestTimeout(str(e) or f"no connection to broker {address} within {timeout_s:.3g} s") from None
        except OSError as e:
            raise NotReachable(str(e)) from e

    async def _dial(self, address: str, pool: Pool) -> Connection:
        opened = self._open  # of this life, as the pool
        connection = await pool.get(address)
        if (self._producers or self._consumers) and address in self._member_addresses():
            producers, consumers = set(self._producers), set(self._consumers)
            await self._beat(address, connection)
            # Who left meanwhile did not know of this connection.
            for group in producers - self._producers.keys():
                await self._tell(connection, UnregisterClient(self.client_id, producer_group=group))
            for group in consumers - self._consumers.keys():
                await self._tell(connection, UnregisterClient(self.client_id, consumer_group=group))
        opened[address] = connection
        return connection

    # Members and heartbeats.

    async def add_producer(self, group: str) -> None:
        """Whoever raises or is cancelled here has not joined."""
        self._producers[group] = self._producers.get(group, 0) + 1
        try:
            await self.heartbeat()
        except BaseException:
            await self.remove_producer(group)
            raise

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

    def remove_checker(self, group: str, check: TransactionCheck) -> None:
        """Does nothing if another one answers for the group."""
        if self._checkers.get(group) == check:
            del self._checkers[group]

    async def add_consumer(self, member: ConsumerMember) -> None:
        """Joins the group, or, if it raises or is cancelled, does not.

        Ask for the routes of its topics before: only their brokers hear of it.
        """
        if member.group in self._consumers:
            raise RocketMQError(
                f"this session has a consumer of group {member.group!r} already; give the second a session of its own"
            )
        self._consumers[member.group] = member
        try:
            await self.heartbeat()
        except BaseException:
            await self.remove_consumer(member)
            raise

    async def remove_consumer(self, member: ConsumerMember) -> None:
        """Leaves the group, unless another is the group's member here by now.

        It is left at once, and the brokers hear of it even if the wait for them is cancelled.
        """
        if self._consumers.get(member.group) is member:
            del self._consumers[member.group]
            await self._unregister(UnregisterClient(self.client_id, consumer_group=member.group))

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
            remark = answer.remark if answer.code == ResponseCode.SUCCESS else None
            if remark and remark not in self._remarks.values():
                log.warning("broker %s says: %s", address, remark)
            self._remarks[address] = remark or ""

    def _note_beat(self, address: str, failure: str) -> None:
        if failure and address not in self._unheard:
            self._unheard.add(address)
            log.warning("broker %s does not hear this client: %s", address, failure)
        elif not failure and address in self._unheard:
            self._unheard.discard(address)
            log.info("broker %s hears this client again", address)

    async def _unregister(self, header: UnregisterClient) -> None:
        told = [self._spawn(self._tell(connection, header)) for connection in self._open.values() if connection.is_open]
        if told:
            await asyncio.wait(told)

    async def _tell(self, connection: Connection, header: UnregisterClient) -> None:
        try:
            await connection.request(
                Frame(RequestCode.UNREGISTER_CLIENT, encode_header(header)), self.request_timeout_s
            )
        except OSError as e:
            log.debug("%r was not told that a group was left: %s", connection, e)

    async def _refresh_routes(self) -> None:
        await self.routes.refresh()
        known = {address for brokers in self.routes.brokers.values() for address in brokers.values()}
        for address, connection in list(self._open.items()):
            if address not in known and not connection.is_open:  # gone for good; a broker closes what is silent
                del self._open[address]
                self._running_pool().drop(address)
        self._unheard &= known
        self._remarks = {address: remark for address, remark in self._remarks.items() if address in known}


def _dialled(dials: dict[str, asyncio.Task[Connection]], address: str, dial: asyncio.Task[Connection]) -> None:
    dials.pop(address, None)
    if not dial.cancelled():
        dial.exception()  # looked at, so that nobody complains when all who waited have given up


async def every(interval_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `action` again and again; what it raises is logged and does not end the series."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            await action()
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            log.exception("a task that runs every %g s was ended by what it called", interval_s)
        except Exception:
            log.exception("a task that runs every %g s failed", interval_s)
