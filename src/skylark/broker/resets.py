"""Sending consumers to other offsets, and copying a group's offsets to another group.

There are two ways to reset. The broker's own way, which `useServerSideResetOffset` chooses and which is the default:
the new offsets are put into the offset table, for groups online or not, and a consumer is sent there with its next
pull; one that waits for messages is sent there at once. The old way: the members of the group are told, and commit the
new offsets themselves; a group that is offline can't be reset like that, and the tools then move its offsets one by one
(UPDATE_CONSUMER_OFFSET). A member that does not read what it is sent is waited for, shortly; if it then misses the
reset, the answer names it.

Where nothing could be done the answer says so. Apache reports success when it is to copy the offsets of a group or a
topic that is not there, or to reset a queue that the topic does not have. It also moves the offsets of its own groups
(CID_RMQ_SYS_*), and open transactions are lost with them; here that is refused.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Final

from skylark.broker.arrivals import Arrivals
from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.groups import Groups, validate_group
from skylark.broker.offsets import Offsets, refuse_of_broker
from skylark.broker.topics import Topics
from skylark.broker.turns import beside, steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store.store import Store
from skylark.wire import fastjson
from skylark.wire.bodies import MessageQueue, ResetOffsets
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CloneGroupOffset, ResetOffset
from skylark.wire.tables import TopicConfig
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

_UNSET: Final = -1
_QUEUES_PER_TURN: Final = 64  # each may be searched by time, in its file and in the log
_TOPICS_PER_TURN: Final = 16
_UNREAD_S: Final = 3.0  # the tools wait for 5 s
_SHOWN: Final = 5


def handlers(
    config: BrokerConfig,
    store: Store,
    topics: Topics,
    groups: Groups,
    offsets: Offsets,
    clients: Clients,
    arrivals: Arrivals,
) -> dict[int, Handler]:
    resets = Resets(config, store, topics, groups, offsets, clients, arrivals)
    return {
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: resets.reset,
        RequestCode.CLONE_GROUP_OFFSET: resets.clone,
    }


class Resets:
    """Moves the offsets of groups."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        clients: Clients,
        arrivals: Arrivals,
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._clients = clients
        self._arrivals = arrivals

    async def reset(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(ResetOffset, request)
        log.info(
            "%r resets %s of %s: time %d, queue %d, offset %s, force %s",
            connection, header.group, header.topic, header.timestamp, header.queue_id, header.offset, header.force,
        )  # fmt: skip
        refuse_of_broker(header.group)
        reset = self._reset_here if self._config.use_server_side_reset_offset else self._reset_clients
        moved = await reset(header)
        body = await beside(lambda: fastjson.dumps(ResetOffsets(offset_table=self._by_queue(header.topic, moved))))
        return request.reply(body=body)

    async def clone(self, request: Frame, connection: Connection) -> Frame:
        """Copies offsets of one topic, or of all; topics that an online group has left are passed over."""
        header = decode_header(CloneGroupOffset, request)
        source, target = header.src_group, header.dest_group
        refuse_of_broker(target)
        remark = None if target in self._groups else validate_group(target)
        if remark is not None:
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, remark)
        if source not in self._groups and not self._offsets.topics_of(source):
            raise RequestFailed(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {source} does not exist")
        if header.topic and header.topic not in self._topics:
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} does not exist")
        online = None if header.offline else self._clients.group(source)
        names = [header.topic] if header.topic else sorted(self._offsets.topics_of(source))
        async for topic in steps(names, _TOPICS_PER_TURN):
            if topic not in self._topics:
                log.warning("the offsets of %s in %s are not copied: no such topic", source, topic)
            elif online is not None and online.subscriptions and topic not in online.subscriptions:
                log.warning("the offsets of %s in %s are not copied: it does not subscribe to it now", source, topic)
            else:
                self._offsets.clone(source, target, topic)
        return request.reply()

    def _by_queue(self, topic: str, moved: dict[int, int]) -> dict[MessageQueue, int]:
        return {MessageQueue(self._config.broker_name, queue, topic): offset for queue, offset in moved.items()}

    # The broker's own way.

    async def _reset_here(self, header: ResetOffset) -> dict[int, int]:
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} does not exist")
        if header.group not in self._groups:
            raise RequestFailed(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group {header.group} does not exist")
        deleted_at = self._store.deleted_offset(header.topic)
        if header.queue_id >= topic.read_queue_nums:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"Topic {header.topic} has no queue {header.queue_id}, only 0 to {topic.read_queue_nums - 1}",
            )
        if header.queue_id < 0:
            queues = steps(range(topic.read_queue_nums), _QUEUES_PER_TURN)
            moved = {queue: self._offset_at(topic, queue, header.timestamp) async for queue in queues}
        elif header.offset is None or header.offset == _UNSET:
            moved = {header.queue_id: self._offset_at(topic, header.queue_id, header.timestamp)}
        else:
            self._check_range(header.topic, header.queue_id, header.offset)
            moved = {header.queue_id: header.offset}
        if not moved:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "No queues to reset.")
        async for queue, offset in steps(moved.items()):
            if header.topic not in self._topics or self._store.deleted_offset(header.topic) != deleted_at:
                # One that is made under its name begins anew, and offsets of this one would pass over its messages.
                raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} was deleted meanwhile")
            self._offsets.reset(header.group, header.topic, queue, offset)
            self._arrivals.wake(header.topic, queue)
        return moved

    def _offset_at(self, topic: TopicConfig, queue_id: int, timestamp_ms: int) -> int:
        if timestamp_ms < 0:
            return max(0, self._store.max_offset(topic.topic_name, queue_id))
        return max(0, self._store.offset_by_time(topic.topic_name, queue_id, timestamp_ms))

    def _check_range(self, topic: str, queue_id: int, offset: int) -> None:
        low, high = self._store.min_offset(topic, queue_id), self._store.max_offset(topic, queue_id)
        if not low <= offset <= high + 1:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, f"Target offset {offset} not in consume queue range [{low}-{high}]"
            )

    # The old way.

    async def _reset_clients(self, header: ResetOffset) -> dict[int, int]:
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestFailed(
                ResponseCode.TOPIC_NOT_EXIST,
                f"[reset-offset] reset offset failed, no topic in this broker. topic={header.topic}",
            )
        await self._until_members_read(header.group)  # before the offsets are gathered: many resets may wait
        moved: dict[int, int] = {}
        async for queue in steps(range(topic.write_queue_nums), _QUEUES_PER_TURN):
            consumed = self._offsets.query(header.group, header.topic, queue)
            if consumed == _UNSET:
                raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"THe consumer group <{header.group}> not exist")
            wanted = self._offset_at(topic, queue, header.timestamp)
            moved[queue] = wanted if header.force else min(wanted, consumed)
        table = self._by_queue(header.topic, moved)
        missed = self._clients.push_reset(header.group, header.topic, header.timestamp, table)
        if missed:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR,
                f"{len(missed)} members of {header.group} do not read what they are sent, and miss the reset: "
                f"{', '.join(missed[:_SHOWN])}; the others are told. Reset again when these read, or are gone",
            )
        return moved

    async def _until_members_read(self, group: str) -> None:
        consumers = self._clients.group(group)
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNREAD_S):
                for connection in () if consumers is None else tuple(consumers.members):
                    await connection.writable()
