"""Looking messages and offsets up: by id, by key, by queue position, by time.

A message id holds the offset of the message in the log, a key leads there through the index. The index compares hashes
only, so that an answer may hold messages with other keys: clients compare the keys themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.turns import steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.store.store import Store
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import MAX_RECORDS_BYTES, Frame
from skylark.wire.headers import (
    GetEarliestMsgStoretime,
    GetMaxOffset,
    GetMinOffset,
    QueryConsumeQueue,
    QueryMessage,
    SearchOffset,
    ViewMessage,
)
from skylark.wire.stats import ConsumeQueue, ConsumeQueueEntry
from skylark.wire.typed import decode_header

UNIQUE_KEY_FIELD: Final = "_UNIQUE_KEY_QUERY"

_TAG_INDEX: Final = "T"
_MAX_QUEUE_ENTRIES: Final = 4096


def handlers(store: Store, clients: Clients, config: BrokerConfig) -> dict[int, Handler]:
    return Queries(store, clients, config).handlers()


class Queries:
    """Answers questions about what is stored."""

    def __init__(self, store: Store, clients: Clients, config: BrokerConfig) -> None:
        self._store = store
        self._clients = clients
        self._config = config

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.VIEW_MESSAGE_BY_ID: self.by_id,
            RequestCode.QUERY_MESSAGE: self.by_key,
            RequestCode.GET_MAX_OFFSET: self.max_offset,
            RequestCode.GET_MIN_OFFSET: self.min_offset,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self.offset_by_time,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self.earliest_store_time,
            RequestCode.QUERY_CONSUME_QUEUE: self.queue_entries,
        }

    def by_id(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(ViewMessage, request)
        record = self._store.record_at(header.offset)
        if record is None:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {header.offset}")
        return request.reply(body=bytes(record))

    async def by_key(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(QueryMessage, request)
        key, max_count = header.key, header.max_num
        if request.fields.get(UNIQUE_KEY_FIELD, "").lower() == "true":
            max_count = self._config.default_query_max_num
        elif header.index_type == _TAG_INDEX:
            key = f"{_TAG_INDEX}#{key}"
        offsets: list[int] = []
        search = self._store.search(
            header.topic,
            key,
            min(max_count, self._config.max_msgs_num_batch),
            header.begin_timestamp,
            header.end_timestamp,
            offsets,
        )
        async for _ in steps(search, 1):
            pass
        result = self._store.found(offsets)
        fields = {
            "indexLastUpdateTimestamp": str(result.index_last_update_timestamp),
            "indexLastUpdatePhyoffset": str(result.index_last_update_phyoffset),
        }
        if not result.slices:
            return request.reply(
                ResponseCode.QUERY_NOT_FOUND, "can not find message, maybe time range not correct", fields
            )
        return request.reply(fields=fields, body=join_within(result.slices, MAX_RECORDS_BYTES))

    def max_offset(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(GetMaxOffset, request)
        return _offset(request, self._store.max_offset(header.topic, header.queue_id))

    def min_offset(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(GetMinOffset, request)
        return _offset(request, self._store.min_offset(header.topic, header.queue_id))

    def offset_by_time(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(SearchOffset, request)
        upper = (header.boundary_type or "").lower() == "upper"
        offset = self._store.offset_by_time(
            header.topic, header.queue_id, header.timestamp, "upper" if upper else "lower"
        )
        return _offset(request, offset)

    def earliest_store_time(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(GetEarliestMsgStoretime, request)
        timestamp_ms = self._store.earliest_store_time(header.topic, header.queue_id)
        return request.reply(fields={"timestamp": str(timestamp_ms)})

    def queue_entries(self, request: Frame, connection: Connection) -> Frame:
        """The raw entries of a queue, for whoever wants to know why a message is not delivered."""
        header = decode_header(QueryConsumeQueue, request)
        topic, queue_id = header.topic or "", header.queue_id
        if not self._store.has_queue(topic, queue_id):
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"{queue_id}@{topic} is not exist!")
        queue = ConsumeQueue(
            min_queue_index=self._store.min_offset(topic, queue_id),
            max_queue_index=self._store.max_offset(topic, queue_id),
        )
        if header.consumer_group is not None:
            queue.subscription_data = self._clients.subscription(header.consumer_group, topic)
            if queue.subscription_data is None:
                queue.filter_data = f"{header.consumer_group}@{topic} is not online!"
            else:
                queue.filter_data = "null"
        if not queue.min_queue_index <= header.index < queue.max_queue_index:
            return request.reply(remark=f"Index {header.index} of {queue_id}@{topic} is not exist!")
        for offset in range(header.index, header.index + min(header.count, _MAX_QUEUE_ENTRIES)):
            entry = self._store.entry(topic, queue_id, offset)
            if entry is None:
                break
            queue.queue_data.append(
                ConsumeQueueEntry(
                    physic_offset=entry.log_offset, physic_size=entry.size_bytes, tags_code=entry.tag_code
                )
            )
        return request.reply(body=fastjson.dumps(queue))


def join_within(slices: Sequence[memoryview], max_bytes: int) -> bytes:
    """As many of the records, from the first on, as an answer can carry; always the first."""
    size_bytes, end = 0, 0
    for record in slices:
        size_bytes += len(record)
        if end and size_bytes > max_bytes:
            break
        end += 1
    return b"".join(slices[:end])


def _offset(request: Frame, offset: int) -> Frame:
    return request.reply(fields={"offset": str(offset)})
