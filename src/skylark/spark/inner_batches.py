"""Batches that a broker stored as one record (inner batches): the records of the messages in them."""

from __future__ import annotations

from skylark.client.compression import inflate
from skylark.client.errors import MissingCodec
from skylark.wire.frame import MAX_FRAME_BYTES
from skylark.wire.message import SYS_COMPRESSED, SYS_INNER_BATCH, SYS_NEED_UNWRAP, BadRecord, Message
from skylark.wire.records import decode_batch, decode_record, encode_record


def inner_records(data: bytes) -> list[bytes]:
    """A record each, at offsets that follow each other. Raises BadRecord, or MissingCodec."""
    try:
        record = decode_record(memoryview(data), check_crc=False)
        # No request is larger than a frame, so neither was the batch before its broker put it into one record.
        batch = decode_batch(inflate(record.body, record.sys_flag, MAX_FRAME_BYTES))
        if not batch:
            raise BadRecord("it holds no message")
        return [
            encode_record(
                Message(
                    record.topic,
                    record.queue_id,
                    body,
                    properties,
                    flag=flag,
                    sys_flag=record.sys_flag & ~(SYS_INNER_BATCH | SYS_NEED_UNWRAP | SYS_COMPRESSED),
                    born_timestamp_ms=record.born_timestamp_ms,
                    born_host=record.born_host,
                    reconsume_times=record.reconsume_times,
                ),
                queue_offset=record.queue_offset + number,
                log_offset=record.log_offset,
                store_timestamp_ms=record.store_timestamp_ms,
                store_host=record.store_host,
            )
            for number, (flag, body, properties) in enumerate(batch)
        ]
    except MissingCodec:
        raise
    except (ValueError, OverflowError) as e:  # texts that are longer as UTF-8 than they were, offsets beyond the last
        raise BadRecord(str(e)) from None
