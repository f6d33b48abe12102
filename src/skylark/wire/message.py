"""Messages as records: one to be stored, one that was read from a log, and the names and flags that both use.

Their layout in bytes is in `records`.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, write_i64_be
from mypy_extensions import i64

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGIC_BLANK: Final = 0xCBD43194  # fills the rest of a log segment that a record did not fit into

SYS_COMPRESSED: Final = 0x1
SYS_MULTI_TAGS: Final = 0x2
SYS_TRANSACTION_MASK: Final = 0xC
SYS_TRANSACTION_NONE: Final = 0x0
SYS_TRANSACTION_PREPARED: Final = 0x4
SYS_TRANSACTION_COMMIT: Final = 0x8
SYS_TRANSACTION_ROLLBACK: Final = 0xC
SYS_BORN_HOST_V6: Final = 0x10
SYS_STORE_HOST_V6: Final = 0x20
SYS_NEED_UNWRAP: Final = 0x40
SYS_INNER_BATCH: Final = 0x80
SYS_COMPRESSION_LZ4: Final = 0x100
SYS_COMPRESSION_ZSTD: Final = 0x200
SYS_COMPRESSION_ZLIB: Final = 0x300
SYS_COMPRESSION_MASK: Final = 0x700

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_WAIT_STORE_OK: Final = "WAIT"
PROPERTY_DELAY_LEVEL: Final = "DELAY"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_TRANSACTION_PREPARED: Final = "TRAN_MSG"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_MIN_OFFSET: Final = "MIN_OFFSET"
PROPERTY_MAX_OFFSET: Final = "MAX_OFFSET"
PROPERTY_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_RECONSUME_TIME: Final = "RECONSUME_TIME"
PROPERTY_MSG_REGION: Final = "MSG_REGION"
PROPERTY_TRACE_SWITCH: Final = "TRACE_ON"
PROPERTY_UNIQUE_KEY: Final = "UNIQ_KEY"
PROPERTY_MAX_RECONSUME_TIMES: Final = "MAX_RECONSUME_TIMES"
PROPERTY_CONSUME_START_TIME: Final = "CONSUME_START_TIME"
PROPERTY_INNER_NUM: Final = "INNER_NUM"
PROPERTY_TRANSACTION_ID: Final = "__transactionId__"
PROPERTY_TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
PROPERTY_CHECK_IMMUNITY_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
PROPERTY_INSTANCE_ID: Final = "INSTANCE_ID"
PROPERTY_CORRELATION_ID: Final = "CORRELATION_ID"
PROPERTY_REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PROPERTY_TTL: Final = "TTL"
PROPERTY_REPLY_ARRIVE_TIME: Final = "ARRIVE_TIME"
PROPERTY_PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"
PROPERTY_CLUSTER: Final = "CLUSTER"
PROPERTY_MESSAGE_TYPE: Final = "MSG_TYPE"
PROPERTY_POP_CK: Final = "POP_CK"
PROPERTY_FIRST_POP_TIME: Final = "1ST_POP_TIME"
PROPERTY_SHARDING_KEY: Final = "__SHARDINGKEY"
PROPERTY_PRIORITY: Final = "_SYS_MSG_PRIORITY_"
PROPERTY_LITE_TOPIC: Final = "__LITE_TOPIC"
PROPERTY_TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
PROPERTY_TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
PROPERTY_TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
PROPERTY_TIMER_OUT_MS: Final = "TIMER_OUT_MS"
PROPERTY_TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
PROPERTY_TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
PROPERTY_TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"
PROPERTY_TIMER_DELETE_KEY: Final = "TIMER_DEL_UNIQKEY"
PROPERTY_BORN_HOST: Final = "__BORNHOST"
PROPERTY_BORN_TIMESTAMP: Final = "BORN_TIMESTAMP"
PROPERTY_DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
PROPERTY_CRC32: Final = "__CRC32#"
REPLY_MESSAGE_TYPE: Final = "reply"
KEY_SEPARATOR: Final = " "

TOPIC_V1_MAX_LENGTH: Final = 127
PROPERTIES_MAX_BYTES: Final = 0x7FFF
SYS_FLAG_POSITION: Final = 36
QUEUE_ID_POSITION: Final = 12
QUEUE_OFFSET_POSITION: Final = 20
LOG_OFFSET_POSITION: Final = 28

Buffer = bytes | bytearray | memoryview
_NO_HOST: Final = bytes(8)


class BadRecord(ValueError):
    """The bytes are not one whole, intact record."""


def message_id(store_host: bytes, log_offset: int) -> str:
    """The id that leads back to the broker and the place in its log."""
    return (store_host + log_offset.to_bytes(8, "big")).hex().upper()


def message_ids(store_host: bytes, log_offsets: list[int]) -> str:
    """The ids of messages at some places in the log, as the answer to a batch names them."""
    ids = BytesWriter()
    for log_offset in log_offsets:
        ids.write(store_host)
        write_i64_be(ids, i64(log_offset))
    return ids.getvalue().hex(",", len(store_host) + 8).upper()


class Message:
    """A message to be stored."""

    __slots__ = (
        "body", "born_host", "born_timestamp_ms", "flag", "prepared_transaction_offset", "properties", "queue_id",
        "reconsume_times", "sys_flag", "topic",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        properties: dict[str, str],
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp_ms: int = 0,
        born_host: bytes = _NO_HOST,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.body = body
        self.properties = properties
        self.flag = flag
        self.sys_flag = sys_flag
        self.born_timestamp_ms = born_timestamp_ms
        self.born_host = born_host
        self.reconsume_times = reconsume_times
        self.prepared_transaction_offset = prepared_transaction_offset

    @property
    def tags(self) -> str | None:
        return self.properties.get(PROPERTY_TAGS)

    @property
    def unique_key(self) -> str | None:
        return self.properties.get(PROPERTY_UNIQUE_KEY)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._parts() == other._parts()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._parts()}"

    def _parts(self) -> tuple[object, ...]:
        return (
            self.topic, self.queue_id, self.body, self.properties, self.flag, self.sys_flag, self.born_timestamp_ms,
            self.born_host, self.reconsume_times, self.prepared_transaction_offset,
        )  # fmt: skip


class StoredMessage(Message):
    """A message as it was read from the log: what was sent, and where it lies."""

    __slots__ = ("body_crc", "log_offset", "queue_offset", "size_bytes", "store_host", "store_timestamp_ms")

    def __init__(
        self,
        topic: str,
        queue_id: int,
        body: bytes,
        properties: dict[str, str],
        flag: int = 0,
        sys_flag: int = 0,
        born_timestamp_ms: int = 0,
        born_host: bytes = _NO_HOST,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        *,
        queue_offset: int,
        log_offset: int,
        store_timestamp_ms: int,
        store_host: bytes,
        body_crc: int,
        size_bytes: int,
    ) -> None:
        super().__init__(
            topic, queue_id, body, properties, flag, sys_flag, born_timestamp_ms, born_host, reconsume_times,
            prepared_transaction_offset,
        )  # fmt: skip
        self.queue_offset = queue_offset
        self.log_offset = log_offset
        self.store_timestamp_ms = store_timestamp_ms
        self.store_host = store_host
        self.body_crc = body_crc
        self.size_bytes = size_bytes

    @property
    def message_id(self) -> str:
        return message_id(self.store_host, self.log_offset)

    def _parts(self) -> tuple[object, ...]:
        return (
            *super()._parts(), self.queue_offset, self.log_offset, self.store_timestamp_ms, self.store_host,
            self.body_crc, self.size_bytes,
        )  # fmt: skip
