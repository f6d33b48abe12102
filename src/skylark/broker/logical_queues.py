"""Requests about the queues of static topics, put in terms of the queues that brokers really have, and back.

`translated` stands before the handlers of such requests and passes on at once what is not about a static topic. For the
rest it looks up which item of the logical queue is meant, rewrites queue and offset, has the request answered here or,
if the item is another broker's, there (marked `lo=false`: physical already), and rewrites the answer.

Only the leader of a logical queue answers for it, so that there is one order of its messages; who asks another broker
is told NOT_LEADER_FOR_QUEUE, and looks for a new route.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from typing import Final

import msgspec

from skylark.broker.neighbours import Neighbours
from skylark.broker.static_topics import StaticTopics
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.suspended import Suspended
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.mapping import END, MappingDetail, MappingItem, item_after, item_at
from skylark.wire.numbers import java_long

_COMMIT_OFFSET: Final = 1
_MAY_SUSPEND: Final = 2
_PHYSICAL: Final = "false"
_OFFSETS: Final = range(-1, 2**62)
_STORED: Final = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    )
)


class _Asked(msgspec.Struct):
    """A request about a logical queue that this broker leads."""

    request: Frame
    connection: Connection
    number: int
    items: list[MappingItem]

    @property
    def leader(self) -> MappingItem:
        return self.items[-1]

    def number_in(self, field: str) -> int:
        text = self.request.fields.get(field, "")
        number = java_long(text)
        if number is None:
            remark = f"the field {field} is {text[:100]!r}: not a number of Java's"
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, remark)
        return number

    def at(self, logical: int) -> MappingItem:
        item = item_at(self.items, logical)
        if item is None:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, f"it is not decided yet where the logical queue {self.number} begins"
            )
        return item


_Answer = Frame | Awaitable[Frame | None] | None
Translate = Callable[[_Asked], _Answer]


class LogicalQueues:
    """Translates requests about static topics."""

    def __init__(self, topics: StaticTopics, neighbours: Neighbours) -> None:
        self._topics = topics
        self._neighbours = neighbours
        self._handlers: Mapping[int, Handler] = {}
        self._translations: dict[int, Translate] = {
            RequestCode.SEND_MESSAGE: self._send,
            RequestCode.SEND_MESSAGE_V2: self._send,
            RequestCode.SEND_BATCH_MESSAGE: self._send,
            RequestCode.PULL_MESSAGE: self._pull,
            RequestCode.LITE_PULL_MESSAGE: self._pull,
            RequestCode.QUERY_CONSUMER_OFFSET: self._query_offset,
            RequestCode.UPDATE_CONSUMER_OFFSET: self._update_offset,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self._search_offset,
            RequestCode.GET_MAX_OFFSET: self._max_offset,
            RequestCode.GET_MIN_OFFSET: self._min_offset,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self._earliest_store_time,
        }

    def translated(self, handlers: Mapping[int, Handler]) -> dict[int, Handler]:
        """The same handlers, those of requests about queues with a translation before them."""
        self._handlers = handlers
        return {
            code: self._before(handler, self._translations[code]) if code in self._translations else handler
            for code, handler in handlers.items()
        }

    def _before(self, handler: Handler, translate: Translate) -> Handler:
        mapped = self._topics.all()

        def handle(request: Frame, connection: Connection) -> _Answer:
            if not mapped or request.fields.get("lo") == _PHYSICAL:
                return handler(request, connection)
            is_short = request.code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
            detail = self._topics.get(request.fields.get("b" if is_short else "topic", ""))
            if detail is None:
                return handler(request, connection)
            return translate(self._ask(detail, request, connection, "e" if is_short else "queueId"))

        return handle

    def _ask(self, detail: MappingDetail, request: Frame, connection: Connection, field: str) -> _Asked:
        asked = _Asked(request, connection, -1, [])
        asked.number = asked.number_in(field)
        if asked.number < 0 and detail.hosted_queues:
            asked.number = next(iter(detail.hosted_queues))  # the sender leaves it to the broker
        asked.items = detail.hosted_queues.get(asked.number, [])
        if not asked.items or asked.leader.bname != self._topics.broker_name:
            raise RequestFailed(
                ResponseCode.NOT_LEADER_FOR_QUEUE,
                f"{detail.topic}-{asked.number} does not exit in request process of current broker {detail.bname}",
            )
        return asked

    # Sending.

    async def _send(self, asked: _Asked) -> Frame:
        is_short = asked.request.code != RequestCode.SEND_MESSAGE
        answer = await self._here(asked, {"e" if is_short else "queueId": str(asked.leader.queue_id)})
        if answer.code in _STORED:
            answer.fields["queueId"] = str(asked.number)
            # While the leader's place is not decided, the message is stored and its offset is told as -1.
            answer.fields["queueOffset"] = str(asked.leader.to_logical_within(_number(answer, "queueOffset")))
        return answer

    # Pulling.

    def _pull(self, asked: _Asked) -> _Answer:
        logical = asked.number_in("queueOffset")
        item = asked.at(logical)
        requested = item.to_physical(logical)
        changes = {"queueId": str(item.queue_id), "queueOffset": str(requested)}
        if item.is_ended:
            most = min(item.end_offset - item.start_offset, asked.number_in("maxMsgNums"))
            changes["maxMsgNums"] = str(most)
        sys_flag = asked.number_in("sysFlag")
        if item is not asked.leader:
            sys_flag &= ~_MAY_SUSPEND  # nothing more will come there
        committed = asked.number_in("commitOffset")
        if sys_flag & _COMMIT_OFFSET and asked.at(committed) is item and item.bname == self._topics.broker_name:
            changes["commitOffset"] = str(item.to_physical(committed))
        else:
            sys_flag &= ~_COMMIT_OFFSET
        changes["sysFlag"] = str(sys_flag)
        if item.bname != self._topics.broker_name:
            return self._pull_there(asked, item, changes, requested)
        asked.request.fields = asked.request.fields | changes
        answer = self._handlers[asked.request.code](asked.request, asked.connection)
        if isinstance(answer, Suspended):
            return _translated(answer, lambda found: _pulled(asked, item, requested, found))
        return _pulled(asked, item, requested, answer) if isinstance(answer, Frame) else answer

    async def _pull_there(self, asked: _Asked, item: MappingItem, changes: dict[str, str], requested: int) -> Frame:
        return _pulled(asked, item, requested, await self._at(asked, item, changes))

    # Offsets of groups.

    async def _query_offset(self, asked: _Asked) -> Frame:
        """The group's offset, where it committed last: in the leader, or before the queue moved there."""
        if len(asked.items) == 1 and asked.leader.logic_offset == 0:
            return await self._here(asked, {"queueId": str(asked.leader.queue_id)})
        for item in reversed(asked.items):
            if item.logic_offset < 0:
                continue
            answer = await self._at(asked, item, {"queueId": str(item.queue_id), "setZeroIfNotFound": "false"})
            if answer.code == ResponseCode.SUCCESS:
                answer.fields["offset"] = str(item.to_logical(_number(answer, "offset")))
                return answer
            if answer.code != ResponseCode.QUERY_NOT_FOUND:
                return answer
        return asked.request.reply(ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first")

    async def _update_offset(self, asked: _Asked) -> Frame:
        logical = asked.number_in("commitOffset")
        item = asked.at(logical)
        changes = {"queueId": str(item.queue_id), "commitOffset": str(item.to_physical(logical))}
        return await self._at(asked, item, changes)

    # Offsets of queues.

    async def _max_offset(self, asked: _Asked) -> Frame:
        item = asked.at(END)
        return _moved(await self._at(asked, item, {"queueId": str(item.queue_id)}), item.to_logical)

    async def _min_offset(self, asked: _Asked) -> Frame:
        item = asked.at(0)
        return _moved(await self._at(asked, item, {"queueId": str(item.queue_id)}), item.to_logical_within)

    async def _search_offset(self, asked: _Asked) -> Frame:
        """From the oldest item on, the first that has a message of that time or later."""
        decided = [item for item in asked.items if item.logic_offset >= 0]
        for item in decided:
            there = {"queueId": str(item.queue_id)}
            answer = await self._at(asked, item, there)
            if answer.code != ResponseCode.SUCCESS or item is decided[-1]:
                return _moved(answer, item.to_logical)
            end = await self._at(asked, item, there, RequestCode.GET_MAX_OFFSET)
            if end.code == ResponseCode.SUCCESS and _number(answer, "offset") < _number(end, "offset"):
                return _moved(answer, item.to_logical)
        return asked.request.reply(fields={"offset": "-1"})

    async def _earliest_store_time(self, asked: _Asked) -> Frame:
        item = asked.at(0)
        return await self._at(asked, item, {"queueId": str(item.queue_id)})

    async def _at(self, asked: _Asked, item: MappingItem, changes: dict[str, str], code: int | None = None) -> Frame:
        """The answer of the broker that has the item, to the request or to another one with the same fields."""
        if item.bname == self._topics.broker_name:
            return await self._here(asked, changes, code)
        fields = asked.request.fields | changes | {"lo": _PHYSICAL, "bname": item.bname}
        forwarded = Frame(asked.request.code if code is None else code, fields, asked.request.body)
        answer = await self._neighbours.ask(item.bname, forwarded)
        return asked.request.reply(answer.code, answer.remark, answer.fields, answer.body)

    async def _here(self, asked: _Asked, changes: dict[str, str], code: int | None = None) -> Frame:
        asked.request.fields = asked.request.fields | changes
        try:
            answer = self._handlers[asked.request.code if code is None else code](asked.request, asked.connection)
            if isawaitable(answer):
                answer = await answer
        except RequestFailed as e:  # what another broker would have answered
            return asked.request.reply(e.code, e.remark)
        if answer is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "the request has no answer")
        return answer


def _translated(answer: Suspended, translate: Callable[[Frame], Frame]) -> Suspended:
    def translated() -> _Answer:
        made = answer.answer()
        return translate(made) if isinstance(made, Frame) else made

    return Suspended(answer.ready, translated)


def _pulled(asked: _Asked, item: MappingItem, requested: int, answer: Frame) -> Frame:
    """The answer to a pull from a queue, in terms of the logical queue."""
    if "nextBeginOffset" not in answer.fields:
        return answer
    place = _Place(
        answer.code,
        item,
        *(_number(answer, name) for name in ("nextBeginOffset", "minOffset", "maxOffset")),
    )
    if answer.code != ResponseCode.SUCCESS:
        place = _go_on(place, asked.items, requested)
    answer.code = place.code
    answer.fields |= place.fields(asked.leader)
    return answer


def _moved(answer: Frame, to_logical: Callable[[int], int]) -> Frame:
    if answer.code == ResponseCode.SUCCESS:
        answer.fields["offset"] = str(to_logical(_number(answer, "offset")))
    return answer


def _number(answer: Frame, field: str) -> int:
    """An offset in an answer, which may be that of anybody who said that he was the broker."""
    text = answer.fields.get(field, "")
    number = java_long(text)
    if number is None or number not in _OFFSETS:
        remark = f"{field} is {text[:100]!r} at the broker that has the queue: that is no offset"
        raise RequestFailed(ResponseCode.SYSTEM_ERROR, remark)
    return number


class _Place(msgspec.Struct, frozen=True):
    """Where a pull ended: the code of its answer, and offsets in the queue of an item."""

    code: int
    item: MappingItem
    next_offset: int
    min_offset: int
    max_offset: int

    def fields(self, leader: MappingItem) -> dict[str, str]:
        item = self.item
        next_offset = min(self.next_offset, item.end_offset) if item.is_ended else self.next_offset
        return {
            "nextBeginOffset": str(item.to_logical(next_offset)),
            "minOffset": str(item.to_logical(max(item.start_offset, self.min_offset))),
            "maxOffset": str(max(item.to_logical(self.max_offset), leader.max_logical)),
            "offsetDelta": str(item.delta),
        }


def _go_on(place: _Place, items: list[MappingItem], requested: int) -> _Place:
    """Where a consumer goes on that found nothing: at the end of an item, in the next one."""
    item = place.item
    is_earliest = item_at(items, 0) is item
    if requested < place.min_offset:
        # Before the first item there is nothing for ever; before another one, files of the queue were deleted.
        code = ResponseCode.PULL_OFFSET_MOVED if is_earliest else ResponseCode.PULL_RETRY_IMMEDIATELY
        return msgspec.structs.replace(place, code=code, next_offset=place.min_offset)
    if item is items[-1] and requested > place.max_offset and place.code == ResponseCode.PULL_OFFSET_MOVED:
        return msgspec.structs.replace(place, next_offset=place.max_offset)
    if item is items[-1] or requested < place.max_offset:
        return place
    following = item_after(items, item)
    if following is None:  # the next one is being decided on
        return msgspec.structs.replace(place, code=ResponseCode.PULL_NOT_FOUND)
    start = following.start_offset
    return _Place(ResponseCode.PULL_RETRY_IMMEDIATELY, following, start, start, start)
