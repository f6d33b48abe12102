"""Queues that a push consumer pops from: who gives them out, and the loop of pops at each.

The broker says what each member of a group is to consume, and how (Apache's QUERY_ASSIGNMENT): a queue to pull from, or
one to pop from, where -1 stands for all queues of a broker. Members that pop may well share a queue, so nothing has to
be handed over when they come and go.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import msgspec

from skylark.client import popping
from skylark.client.crew import Crew, wait_for_end
from skylark.client.errors import BrokerError, NotReachable, RequestTimeout, RocketMQError
from skylark.client.message import Message, MessageQueue
from skylark.client.pop_consuming import PopConsumption
from skylark.client.popping import ANY_QUEUE, Popped
from skylark.client.routes import TopicRoute
from skylark.client.session import Session
from skylark.wire.bodies import CLUSTERING, BadBody, Subscription, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.pop import POP, QueryAssignment, QueryAssignmentResponse, QueueAssignment

log = logging.getLogger(__name__)

WAIT_MS: Final = 15_000
MAX_HELD: Final = 96
"""So many messages of one loop may be unsettled, as in Apache's client."""
_STRATEGY: Final = "AVG"
_FIRST_ERROR_WAIT_S: Final = 0.1
_ERROR_WAIT_S: Final = 3.0


async def ask_for_share(session: Session, group: str, route: TopicRoute) -> list[QueueAssignment] | None:
    """What a broker wants this member to consume of a topic; None when it can't tell. Raises RocketMQError."""
    query = QueryAssignment(session.client_id, group, CLUSTERING, _STRATEGY, route.topic)
    request = Frame(RequestCode.QUERY_ASSIGNMENT, {}, encode_body(query))
    failure: RocketMQError = NotReachable(f"no broker serves topic {route.topic}")
    for broker in random.sample(list(route.brokers), len(route.brokers)):
        try:
            answer = await session.ask_broker(broker, request, broker_id=None)
            if answer.code == ResponseCode.SUCCESS:
                return decode_body(QueryAssignmentResponse, answer.body).message_queue_assignments
            failure = BrokerError(answer.code, answer.remark, broker)
        except BadBody as e:
            failure = BrokerError(ResponseCode.SUCCESS, f"its assignment can't be read: {e}", broker)
        except RocketMQError as e:
            failure = e
    raise failure


class PopQueue:
    """One queue, or all of a broker, that is popped from: what is unsettled of it, and its loop."""

    def __init__(self, queue: MessageQueue, now_ms: int) -> None:
        self.queue = queue
        self.held = 0
        self.last_pop_ms = now_ms
        self.room = asyncio.Event()
        self.is_dropped = False
        self.task: asyncio.Task[None] | None = None

    def finished(self) -> None:
        self.held -= 1
        self.room.set()


class PopLoops:
    """All queues that one member pops from."""

    def __init__(
        self,
        session: Session,
        group: str,
        subscriptions: Mapping[str, Subscription],
        consumption: PopConsumption,
        wants: Callable[[Message], bool],
        crew: Crew,
        *,
        always: bool,
        init_mode: int,
        in_order: bool,
        max_messages: int,
        invisible_ms: int,
        running: asyncio.Event,
        now_ms: Callable[[], int],
    ) -> None:
        """With `always`, topics are popped from although the brokers would have them pulled."""
        self._session = session
        self._group = group
        self._subscriptions = subscriptions
        self._consumption = consumption
        self._wants = wants
        self._crew = crew
        self._always = always
        self._init_mode = init_mode
        self._in_order = in_order
        self._max_messages = max_messages
        self._invisible_ms = invisible_ms
        self._running = running
        self._now_ms = now_ms
        self._queues: dict[MessageQueue, PopQueue] = {}

    @property
    def queues(self) -> list[MessageQueue]:
        return list(self._queues)

    @property
    def topics(self) -> set[str]:
        return {queue.topic for queue in self._queues}

    def table(self) -> dict[MessageQueue, dict[str, object]]:
        """Apache's PopProcessQueueInfo of each queue."""
        return {
            queue: {"droped": False, "lastPopTimestamp": each.last_pop_ms, "waitAckCount": each.held}
            for queue, each in self._queues.items()
        }

    async def share(self, route: TopicRoute) -> list[MessageQueue] | None:
        """Pops from what the broker says, and gives the queues to pull from; None when it can't tell now."""
        try:
            assigned = await ask_for_share(self._session, self._group, route)
        except BrokerError as e:
            if not self._always or e.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                raise
            assigned = []
        if assigned is None:
            return None
        pops = [each.message_queue for each in assigned if each.mode == POP]
        pulls = [each.message_queue for each in assigned if each.mode != POP]
        if self._always and not pops:
            pops = [MessageQueue(queue.broker_name, ANY_QUEUE, route.topic) for queue in route.read_queues]
            pulls = []
        self.set_queues(route.topic, pops)
        return pulls

    def set_queues(self, topic: str, queues: Iterable[MessageQueue]) -> None:
        wanted = set(queues)
        for queue in [each for each in self._queues if each.topic == topic and each not in wanted]:
            self._end(self._queues.pop(queue))
        for queue in wanted - self._queues.keys():
            each = self._queues[queue] = PopQueue(queue, self._now_ms())
            each.task = self._crew.hire(
                partial(self._run, each),
                f"popping of {queue.topic} at {queue.broker_name}",
                until=partial(getattr, each, "is_dropped"),
            )

    def _end(self, each: PopQueue) -> None:
        each.is_dropped = True
        if each.task is not None:
            each.task.cancel()

    async def close(self) -> None:
        tasks = [each.task for each in self._queues.values() if each.task is not None]
        for each in self._queues.values():
            self._end(each)
        await wait_for_end(tasks)

    async def _run(self, each: PopQueue) -> None:
        failures = 0
        attempt_id = popping.new_attempt()
        while True:
            await self._running.wait()
            while each.held >= MAX_HELD:
                each.room.clear()
                await each.room.wait()
            try:
                popped = await self._pop(each, attempt_id)
            except RocketMQError as e:
                failures += 1
                if failures == 1:
                    log.warning("%s can't pop from %s and goes on trying: %s", self._group, each.queue, e)
                await self._back_off(each, failures, e)
                continue
            except Exception as e:
                failures += 1
                log.exception("%s: something went wrong while %s was popped, which goes on", self._group, each.queue)
                await self._back_off(each, failures, e)
                continue
            if failures:
                failures = 0
                log.info("%s pops from %s again", self._group, each.queue)
            attempt_id = popping.new_attempt()
            if popped.is_refused:
                await asyncio.sleep(_ERROR_WAIT_S)
            each.held += popped.count
            self._consumption.take(self._filtered(popped), each.finished)

    async def _back_off(self, each: PopQueue, failures: int, error: Exception) -> None:
        if isinstance(error, NotReachable | RequestTimeout):
            try:
                await self._session.routes.get(each.queue.topic, refresh=True)  # the broker may have moved
            except RocketMQError as e:
                log.debug("the route of %s is not known: %s", each.queue.topic, e)
        await asyncio.sleep(min(_FIRST_ERROR_WAIT_S * 2 ** min(failures - 1, 10), _ERROR_WAIT_S))

    async def _pop(self, each: PopQueue, attempt_id: str) -> Popped:
        subscription = self._subscriptions.get(each.queue.topic)
        if subscription is None:
            raise NotReachable(f"topic {each.queue.topic} is not subscribed to")
        each.last_pop_ms = self._now_ms()
        return await popping.pop(
            self._session,
            self._group,
            each.queue,
            subscription,
            max_messages=self._max_messages,
            invisible_ms=self._invisible_ms,
            wait_ms=WAIT_MS,
            init_mode=self._init_mode,
            in_order=self._in_order,
            attempt_id=attempt_id if self._in_order else None,
        )

    def _filtered(self, popped: Popped) -> Popped:
        """What the user's own filter does not want is only acknowledged."""
        unwanted = [message for message in popped.messages if not self._wants(message)]
        if not unwanted:
            return popped
        gone = {id(message) for message in unwanted}
        wanted = [message for message in popped.messages if id(message) not in gone]
        return msgspec.structs.replace(popped, messages=wanted, unwanted=popped.unwanted + unwanted)
