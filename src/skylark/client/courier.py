"""Carries a producer's messages to brokers: chooses queues, retries elsewhere, and sees that every call ends in time.

On the way of a message there is no task and no timer of its own: answers are settled by the connection's reader, and
one timer stands for the earliest deadline of all. Only a message that needs a route, a connection or another attempt
goes the long way, by a coroutine.

A refusal costs one of the message's attempts. A broker that is away costs none: a message that is patient is tried
again until its time is over, at every other broker at once, and after a pause when all were tried.

A message takes a slot when it departs and gives it back when its future is done, once.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Final

from skylark.client.calling import call
from skylark.client.crew import Worker
from skylark.client.errors import BrokerError, ClientClosed, NotReachable, RequestTimeout, RocketMQError, RouteNotFound
from skylark.client.faults import Faults
from skylark.client.message import MessageQueue, Receipt, SendStatus
from skylark.client.routes import MAX_TOPICS, TopicRoute
from skylark.client.sending import SendContext, SendHook, Sending, Slots, Unseen, now_ms
from skylark.client.session import Session, drop_if_silent
from skylark.client.validation import check_hooks_properties
from skylark.net.connection import Connection
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import PROPERTY_MSG_REGION, PROPERTY_TRACE_SWITCH
from skylark.wire.records import encode_properties
from skylark.wire.routes import MASTER_ID

log = logging.getLogger(__name__)

_STATUSES: Final = {
    int(ResponseCode.SUCCESS): SendStatus.OK,
    int(ResponseCode.FLUSH_DISK_TIMEOUT): SendStatus.FLUSH_DISK_TIMEOUT,
    int(ResponseCode.FLUSH_SLAVE_TIMEOUT): SendStatus.FLUSH_SLAVE_TIMEOUT,
    int(ResponseCode.SLAVE_NOT_AVAILABLE): SendStatus.SLAVE_NOT_AVAILABLE,
}
# Where there is no other broker, a little time may help: a broker restarts, or gets out of breath. The pauses double.
_FIRST_PAUSE_S: Final = 0.1
_MAX_PAUSE_S: Final = 1.0
_LAST_ATTEMPT_S: Final = 0.2  # what is kept of the time for the last attempt
_AWAY_CODES: Final = frozenset({ResponseCode.SERVICE_NOT_AVAILABLE, ResponseCode.GO_AWAY})
_MAX_MOVES: Final = 3


class Courier:
    """What a producer sends with. Its parameters are those of the producer."""

    def __init__(
        self,
        session: Session,
        group: str,
        *,
        retry_codes: frozenset[int],
        retry_not_stored: bool,
        attempt_timeout_s: float | None,
        faults: Faults | None,
        slots: Slots,
        unseen: Unseen,
        default_topic: str,
        default_topic_queues: int,
        hooks: Sequence[SendHook],
    ) -> None:
        self._session = session
        self._group = group
        self._retry_codes = retry_codes
        self._retry_not_stored = retry_not_stored
        self._attempt_timeout_s = attempt_timeout_s
        self._faults = faults
        self._slots = slots
        self._unseen = unseen
        self._default_topic = default_topic
        self._default_topic_queues = default_topic_queues
        self._default_topic_queues_text = str(default_topic_queues)
        self._unit_mode = "true" if session.unit_mode else "false"
        self._hooks = hooks
        self._turns: dict[str, int] = {}  # topic -> the turn of the next queue
        self._flying: set[Sending] = set()  # requests that wait for their answer
        self._tasks: set[asyncio.Task[None]] = set()  # retries and refreshes
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """After the last message has ended. If nobody waits for that, the others end now."""
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for sending in list(self._flying):
            self._flying.discard(sending)
            assert sending.connection is not None
            sending.connection.forget(sending.opaque)
            self._failed(sending, _closed_under(sending), can_retry=False)

    async def depart(self, sending: Sending) -> None:
        """Takes a slot and puts the message on its way; from here on, the future tells how it ends."""
        route = self._session.routes.known_for_send(sending.topic)
        connection = None
        if route is not None and route.write_queues:
            queue = sending.queue
            if queue is None:
                queue = sending.queue = self._choose(route, None)
            sending.broker = route.broker_of(queue) if route.leaders else queue.broker_name
            addresses = route.brokers.get(sending.broker)
            if addresses and MASTER_ID in addresses:
                connection = self._session.ready_connection(addresses[MASTER_ID])
        sending.future = self._loop.create_future()
        sending.crowd = self._slots.take(sending.size_bytes)
        if connection is None:
            await self._travel(sending)
            return
        try:
            self._fly(sending, connection)
        except Exception:
            self._slots.give_back(sending.size_bytes, sending.crowd)
            raise

    async def _travel(self, sending: Sending, error: RocketMQError | None = None) -> None:
        """The long way: with a route to ask for, a connection to make, or an attempt that failed before."""
        while True:
            try:
                async with asyncio.timeout_at(sending.deadline_s):
                    if error is not None:
                        await self._recover(sending, error)
                    connection = await self.find_way(sending)
                self._fly(sending, connection)
                return
            except (TimeoutError, ConnectionError, RouteNotFound) as e:
                # A pause, or a dial, that the deadline ended says less than the failure before it.
                if error is None or not isinstance(e, TimeoutError):
                    error = self._as_ours(e, sending)
                if self._faults is not None and sending.queue is not None:
                    self._faults.failed(sending.broker, self._loop.time() * 1000)
                self.after(sending, None, error)
                if not self._may_retry(sending, error):
                    self._finish(sending, None, error)
                    return
            except asyncio.CancelledError:
                self._finish(sending, None, _closed_under(sending) if self._is_closed else None)
                raise
            except Exception as e:
                self._finish(sending, None, e)
                return

    async def find_way(self, sending: Sending) -> Connection:
        """Settles the queue of the next attempt, and brings the connection to its broker."""
        route = await self.route(sending.topic)
        queue = sending.queue
        if queue is None or (sending.tried and not sending.is_bound):
            queue = sending.queue = self._choose(route, sending.tried[-1] if sending.tried else None)
        sending.broker = route.broker_of(queue)
        sending.tried.append(sending.broker)
        address = self._session.broker_address(sending.broker)
        connection = self._session.ready_connection(address)
        if connection is None:
            patience_s = sending.deadline_s - self._loop.time()
            if sending.attempts_left:
                # A machine that is gone does not even refuse: that must leave time for another broker.
                patience_s /= 2
                if self._attempt_timeout_s is not None:
                    patience_s = min(patience_s, self._attempt_timeout_s)
            connection = await self._session.connect(address, patience_s)
        return connection

    def _fly(self, sending: Sending, connection: Connection) -> None:
        now_s = self._loop.time()
        sending.started_s = now_s
        until_s = sending.deadline_s
        if self._attempt_timeout_s is not None and sending.attempts_left:
            until_s = min(until_s, now_s + self._attempt_timeout_s)
        sending.until_s = until_s
        sending.connection = connection
        sending.opaque = connection.begin(self.request(sending), partial(self._settled, sending))
        self._flying.add(sending)
        if self._timer is None or until_s < self._timer.when():
            self._set_timer(until_s)

    def request(self, sending: Sending) -> Frame:
        """What goes over the wire, after the hooks have seen it."""
        queue = sending.queue
        assert queue is not None
        properties = sending.encoded
        if self._hooks:
            self._before(sending, queue)
            properties = encode_properties(sending.properties).decode()
        fields = {
            "a": self._group,
            "b": sending.topic,
            "c": self._default_topic,
            "d": self._default_topic_queues_text,
            "e": str(queue.queue_id),
            "f": str(sending.sys_flag),
            "g": str(now_ms()),
            "h": str(sending.flag),
            "i": properties,
            "j": "0",
            "k": self._unit_mode,
        }
        if sending.batch_ids is None:
            return Frame(sending.code, fields, sending.body)
        fields["m"] = "true"
        return Frame(RequestCode.SEND_BATCH_MESSAGE, fields, sending.body)

    def _settled(self, sending: Sending, answer: Frame | ConnectionError) -> None:
        """The answer to an attempt is there, or the connection is gone."""
        self._flying.discard(sending)
        queue = sending.queue
        assert queue is not None
        if type(answer) is Frame:
            status = _STATUSES.get(answer.code)
            if self._faults is not None:
                now_s = self._loop.time()
                self._faults.answered(sending.broker, (now_s - sending.started_s) * 1000, now_s * 1000)
            if status is not None:
                try:
                    receipt = _read_receipt(answer, status, sending, self._session.namespace.unwrap_queue(queue))
                except (KeyError, ValueError) as e:
                    error = BrokerError(answer.code, f"the answer to a send can't be read: {e!r}", sending.broker)
                    self._failed(sending, error, can_retry=False)
                    return
                self.after(sending, receipt, None)
                if status is not SendStatus.OK and self._retry_not_stored and self._may_retry(sending, None):
                    self._retry(sending, NotReachable(f"{sending.broker} did not store it safely: {status}"))
                else:
                    self._finish(sending, receipt, None)
                return
            has_moved = answer.code == ResponseCode.NOT_LEADER_FOR_QUEUE and len(sending.tried) < _MAX_MOVES
            if has_moved:
                sending.attempts_left += 1  # nothing was stored, and the queue that it is bound to is elsewhere now
            self._failed(
                sending,
                BrokerError(answer.code, answer.remark, sending.broker),
                can_retry=has_moved or answer.code in self._retry_codes,
            )
        else:
            self._failed(sending, NotReachable(str(answer)), can_retry=True)

    def _failed(self, sending: Sending, error: RocketMQError, *, can_retry: bool) -> None:
        if self._faults is not None:
            self._faults.failed(sending.broker, self._loop.time() * 1000)
        self.after(sending, None, error)
        if can_retry and self._may_retry(sending, error):
            self._retry(sending, error)
        else:
            self._finish(sending, None, error)

    def _may_retry(self, sending: Sending, error: RocketMQError | None) -> bool:
        left_s = sending.deadline_s - self._loop.time()
        if sending.future.done() or left_s <= 0:
            return False
        is_known = sending.broker or isinstance(error, NotReachable)  # else the topic may well not exist
        if sending.is_patient and is_known and left_s > _LAST_ATTEMPT_S and _is_away(error):
            return True
        if sending.attempts_left <= 0 or isinstance(error, RouteNotFound):
            return False
        sending.attempts_left -= 1
        return True

    def _retry(self, sending: Sending, error: RocketMQError) -> None:
        if not sending.tried:
            sending.tried.append(sending.broker)
        self._spawn(self._travel(sending, error))

    async def _recover(self, sending: Sending, error: RocketMQError) -> None:
        """Before another attempt: asks for the route anew. When every broker was tried, there is a pause first."""
        route = self._session.routes.known_for_send(sending.topic)
        refresh = Worker(self._refresh(sending.topic), loop=self._loop, name=f"route of {sending.topic}")
        self._keep(refresh)
        if isinstance(error, BrokerError) and error.code == ResponseCode.NOT_LEADER_FOR_QUEUE:
            await asyncio.shield(refresh)
        brokers = set() if route is None or sending.is_bound else {route.broker_of(each) for each in route.write_queues}
        rounds, others = divmod(len(sending.tried), max(len(brokers), 1))
        if not others:
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(rounds - 1, 10), _MAX_PAUSE_S) if rounds else _FIRST_PAUSE_S
            left_s = sending.deadline_s - self._loop.time() - _LAST_ATTEMPT_S
            await asyncio.sleep(min(pause_s, max(left_s, 0)))
        log.debug("message %s is sent again: %s", sending.msg_id, error)

    async def _refresh(self, topic: str) -> None:
        try:
            await self.route(topic, refresh=True)
        except RocketMQError as e:
            log.debug("the route of topic %s can't be refreshed: %s", topic, e)

    async def route(self, topic: str, *, refresh: bool = False) -> TopicRoute:
        """A route with at least one queue to write to. Raises RouteNotFound."""
        route = await self._session.routes.get_for_send(
            topic,
            refresh=refresh,
            default_topic=self._default_topic,
            default_queues=self._default_topic_queues,
        )
        if not route.write_queues:
            raise RouteNotFound(f"topic {topic!r} has no queue that can be written to; see its permission")
        return route

    def _choose(self, route: TopicRoute, failed: str | None) -> MessageQueue:
        """The next queue in turn, at a broker that did not just fail and is not known to be slow, if there is one."""
        queues = route.write_queues
        count = len(queues)
        turn = self._turns.get(route.topic, -1)
        if turn < 0:
            if len(self._turns) >= MAX_TOPICS:
                self._turns.clear()
            turn = random.randrange(1 << 16)
        self._turns[route.topic] = turn + 1
        chosen = queues[turn % count]
        if self._faults is None and route.broker_of(chosen) != failed:
            return chosen
        in_turn = [queues[(turn + step) % count] for step in range(count)]
        others = [queue for queue in in_turn if route.broker_of(queue) != failed]
        if self._faults is not None:
            now_ms = self._loop.time() * 1000
            quick = [queue for queue in others if self._faults.is_available(route.broker_of(queue), now_ms)]
            others = quick or others
        return others[0] if others else chosen

    # How it ends.

    def as_timeout(self, sending: Sending) -> RequestTimeout:
        if sending.tried:
            return RequestTimeout(
                f"message {sending.msg_id} was not sent at {sending.tried[-1]} before its time was over"
            )
        asked = ", ".join(sorted(self._session.places))
        return RequestTimeout(
            f"no name server ({asked}) told in time where topic {sending.topic!r} is; nothing was sent"
        )

    def _as_ours(self, error: OSError | RouteNotFound, sending: Sending) -> RocketMQError:
        if isinstance(error, RocketMQError):
            return error
        return self.as_timeout(sending) if isinstance(error, TimeoutError) else NotReachable(str(error))

    def _finish(self, sending: Sending, receipt: Receipt | list[Receipt] | None, error: Exception | None) -> None:
        self._slots.give_back(sending.size_bytes, sending.crowd)
        if sending.future.done():
            return  # whoever waited has given up
        if error is not None:
            if len(sending.tried) > 1:
                error.add_note(f"tried {len(sending.tried)} times, at {', '.join(dict.fromkeys(sending.tried))}")
            has_waiter = bool(sending.future._callbacks)
            sending.future.set_exception(error)
            if sending.is_left_alone and not has_waiter:
                self._unseen.add(sending.future)
        elif receipt is None:
            sending.future.cancel()
        else:
            sending.future.set_result(receipt)

    def _set_timer(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._expire)

    def _expire(self) -> None:
        """Ends the attempts whose time is over, and looks when the next one's is."""
        self._timer = None
        now_s = self._loop.time()
        for sending in [sending for sending in self._flying if sending.until_s <= now_s]:
            self._flying.discard(sending)
            assert sending.connection is not None
            assert sending.queue is not None
            sending.connection.forget(sending.opaque)
            drop_if_silent(sending.connection, sending.started_s, now_s)
            waited_s = now_s - sending.started_s
            error = RequestTimeout(f"no answer from {sending.broker} within {waited_s:.3g} s")
            self._failed(sending, error, can_retry=True)
        if self._flying and self._timer is None:
            self._set_timer(min(sending.until_s for sending in self._flying))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep(Worker(work, loop=self._loop, name=f"retry of {self._group}"))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Hooks.

    def _before(self, sending: Sending, queue: MessageQueue) -> None:
        context = sending.context = SendContext(
            group=self._group,
            topic=sending.topic,
            body=sending.body,
            properties=sending.properties,
            msg_id=sending.msg_id,
            queue=queue,
            attempt=max(len(sending.tried), 1),
            started_ms=now_ms(),
        )
        for hook in self._hooks:
            given = dict(sending.properties)
            try:
                call(hook.before_send, context)
                check_hooks_properties(context.properties, sending.properties)
            except Exception:
                log.exception("%r failed before a send", hook)
                context.properties = sending.properties = given

    def after(self, sending: Sending, receipt: Receipt | list[Receipt] | None, error: RocketMQError | None) -> None:
        context, sending.context = sending.context, None
        if context is None:
            return
        context.receipts = receipt if isinstance(receipt, list) else [receipt] if receipt is not None else []
        context.error = error
        for hook in self._hooks:
            try:
                call(hook.after_send, context)
            except Exception:
                log.exception("%r failed after a send", hook)


def _read_receipt(answer: Frame, status: SendStatus, sending: Sending, queue: MessageQueue) -> Receipt | list[Receipt]:
    fields = answer.fields
    queue_id = int(fields["queueId"])
    if queue_id != queue.queue_id:
        queue = MessageQueue(queue.broker_name, queue_id, queue.topic)
    offset = int(fields["queueOffset"])
    transaction_id = fields.get("transactionId")
    region = fields.get(PROPERTY_MSG_REGION)
    is_traced = fields.get(PROPERTY_TRACE_SWITCH) != "false"
    if sending.batch_ids is None:
        return Receipt(
            status=status,
            msg_id=sending.msg_id,
            offset_msg_id=fields.get("msgId", ""),
            queue=queue,
            queue_offset=offset,
            transaction_id=transaction_id,
            region=region,
            is_traced=is_traced,
            recall_handle=fields.get("recallHandle"),
        )
    offset_ids = fields.get("msgId", "").split(",")
    return [
        Receipt(
            status=status,
            msg_id=msg_id,
            offset_msg_id=offset_ids[index] if index < len(offset_ids) else "",
            queue=queue,
            queue_offset=offset + index,
            transaction_id=transaction_id,
            region=region,
            is_traced=is_traced,
        )
        for index, msg_id in enumerate(sending.batch_ids)
    ]


def _closed_under(sending: Sending) -> ClientClosed:
    return ClientClosed(f"the producer was closed before message {sending.msg_id} was acknowledged; it may be stored")


def _is_away(error: RocketMQError | None) -> bool:
    """Whether it says no more than that the broker is not there now: it ends, begins, or has no route meanwhile."""
    if isinstance(error, BrokerError):
        return error.code in _AWAY_CODES
    return isinstance(error, NotReachable | RouteNotFound)
