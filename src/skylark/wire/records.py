"""The stored layout of a message, its properties, its ids and the batch layout of a send.

A record in the commit log, and in the body of a pull reply, is (big endian):

    size i32 | magic u32 | body crc i32 | queue id i32 | flag i32 | queue offset i64 | log offset i64 | sys flag i32
    | born time i64 | born host | store time i64 | store host | reconsume times i32 | prepared transaction offset i64
    | body length i32 | body | topic length u8 (V1) or u16 (V2) | topic | properties length i16 | properties

A host is 4 bytes of IPv4 (16 of IPv6 when its bit in the sys flag is set) and a 4-byte port. The checksum is CRC-32 of
the body without its top bit. Magic V2 only differs in the width of the topic's length and is used for topics longer
than 127. Properties are `name \\x01 value \\x02` in UTF-8, one after the other.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final
from zlib import crc32

from librt.strings import BytesWriter, read_i16_be, read_i32_be, write_i16_be, write_i32_be, write_i64_be
from mypy_extensions import i16, i32, i64

from skylark.wire.lookup import PropertyScan, scan_properties
from skylark.wire.message import (
    MAGIC_V1,
    MAGIC_V2,
    PROPERTIES_MAX_BYTES,
    SYS_BORN_HOST_V6,
    SYS_FLAG_POSITION,
    SYS_STORE_HOST_V6,
    TOPIC_V1_MAX_LENGTH,
    BadRecord,
    Buffer,
    Message,
    StoredMessage,
)

# Four headers, chosen by the two IPv6 bits of the sys flag: (sys_flag >> 4) & 3.
RECORD_HEADERS = tuple(
    struct.Struct(f">iIiiiqqiq{born}sq{store}siqi") for born, store in ((8, 8), (20, 8), (8, 20), (20, 20))
)
_I16 = struct.Struct(">h")
_U16 = struct.Struct(">H")
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_BATCH_HEADER = struct.Struct(">iIiii")
_BATCH_HEADER_BYTES: Final = 20
BATCH_PART_BYTES: Final = _BATCH_HEADER_BYTES + 2  # what a message takes in a batch besides body and properties
_PROPERTY_END: Final = b"\x02"
_FIXED_BYTES: Final = RECORD_HEADERS[0].size - 16 + 2


# --- properties -------------------------------------------------------------------------------------------------------
def encode_properties(properties: dict[str, str]) -> bytes:
    """The stored form of a property map.

    >>> encode_properties({"TAGS": "a"})
    b'TAGS\\x01a\\x02'
    """
    return "".join([f"{name}\x01{value}\x02" for name, value in properties.items()]).encode("utf-8", "replace")


def decode_properties(data: Buffer | str) -> dict[str, str]:
    """The map behind stored properties; as in Apache's reader, a name or a value that is empty drops the pair.

    >>> decode_properties("TAGS\\x01a\\x02KEYS\\x01\\x02")
    {'TAGS': 'a'}
    """
    text = data if isinstance(data, str) else str(data, "utf-8", "replace")
    properties = {}
    for item in text.split("\x02"):
        name, _, value = item.partition("\x01")
        if name and value:
            properties[name] = value
    return properties


class BatchPart:
    """What the messages of a batch do not have in common: flag, body, and properties as they are stored."""

    __slots__ = ("body", "flag", "properties", "scan")

    def __init__(self, flag: int, body: bytes, properties: bytes, scan: PropertyScan | None = None) -> None:
        """`scan` may be of what the properties begin with, if it holds all that a scan looks for."""
        self.flag = flag
        self.body = body
        # Zeros at the end of a record are how recovery knows a torn one; the separator does not change what is read.
        self.properties = properties if not properties or properties[-1] else properties + _PROPERTY_END
        self.scan = scan_properties(properties) if scan is None else scan


# --- Java's String.hashCode -------------------------------------------------------------------------------------------
def java_hash(text: str, seed: int = 0) -> int:
    """`String.hashCode` as a signed 32-bit number; `seed` is the hash of what stands before `text`.

    >>> java_hash("TagA"), java_hash("gA", java_hash("Ta"))
    (2598919, 2598919)
    """
    if text.isascii():
        data = text.encode()
        return int(java_hash_of(data, 0, len(data), seed))
    value: i64 = seed
    for (unit,) in _U16.iter_unpack(text.encode("utf-16-be", "surrogatepass")):
        value = (value * 31 + i64(unit)) & 0xFFFF_FFFF
    return int(_signed(value))


def java_hash_of(data: bytes, at: i64, end: i64, seed: i64) -> i64:
    """The same of a part of some UTF-8."""
    value = seed
    for i in range(at, end):
        byte = i64(data[i])
        if byte >= 0x80:
            return java_hash(data[at:end].decode("utf-8", "replace"), seed)
        value = (value * 31 + byte) & 0xFFFF_FFFF
    return _signed(value)


def _signed(value: i64) -> i64:
    return ((value + 0x8000_0000) & 0xFFFF_FFFF) - 0x8000_0000


@lru_cache(maxsize=4096)
def tag_code(tags: str | None) -> int:
    """What a consume queue entry keeps of a message's tag: its Java hash, 0 when there is none."""
    return java_hash(tags) if tags else 0


# --- hosts and message ids --------------------------------------------------------------------------------------------
def encode_host(ip: str, port: int) -> bytes:
    """An address as records and message ids hold it.

    >>> encode_host("127.0.0.1", 10911).hex()
    '7f00000100002a9f'
    """
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    return socket.inet_pton(family, ip) + port.to_bytes(4, "big")


def decode_host(host: Buffer) -> tuple[str, int]:
    """The IP address and port of a stored host of 8 or 20 bytes."""
    data = bytes(host)
    if len(data) not in (8, 20):
        raise BadRecord(f"a host of {len(data)} bytes")
    family = socket.AF_INET if len(data) == 8 else socket.AF_INET6
    return socket.inet_ntop(family, data[:-4]), int.from_bytes(data[-4:], "big")


def parse_message_id(text: str) -> tuple[bytes, int]:
    """Store host and log offset of a message id; `ValueError` when it is not one."""
    data = bytes.fromhex(text)
    if len(data) not in (16, 28) or len(text) != 2 * len(data):
        raise ValueError(f"not a message id: {text!r}")
    return data[:-8], int.from_bytes(data[-8:], "big")


# --- records ----------------------------------------------------------------------------------------------------------
def body_crc(body: Buffer) -> int:
    return crc32(body) & 0x7FFFFFFF


def topic_field(topic: str) -> tuple[int, bytes]:
    """The magic that a topic asks for, and its length and name as stored."""
    name = topic.encode()
    if len(topic) > TOPIC_V1_MAX_LENGTH:
        return MAGIC_V2, _U16.pack(len(name)) + name
    if len(name) > TOPIC_V1_MAX_LENGTH:
        raise ValueError(f"topic of {len(name)} bytes in {len(topic)} characters cannot be stored")
    return MAGIC_V1, bytes((len(name),)) + name


def host_bits(born_host: bytes, store_host: bytes) -> int:
    """The sys flag bits that say which of the two hosts are IPv6."""
    return (SYS_BORN_HOST_V6 if len(born_host) == 20 else 0) | (SYS_STORE_HOST_V6 if len(store_host) == 20 else 0)


def encode_record(
    message: Message, *, queue_offset: int, log_offset: int, store_timestamp_ms: int, store_host: bytes
) -> bytes:
    """One whole record."""
    magic, topic = topic_field(message.topic)
    properties = encode_properties(message.properties)
    if len(properties) > PROPERTIES_MAX_BYTES:
        raise ValueError(f"properties of {len(properties)} bytes")
    hosts = host_bits(message.born_host, store_host)
    size = record_size(message.born_host, store_host, topic) + len(message.body) + len(properties)
    sys_flag = message.sys_flag & ~(SYS_BORN_HOST_V6 | SYS_STORE_HOST_V6) | hosts
    out = BytesWriter()
    part = BatchPart(message.flag, message.body, properties)
    write_record(
        out, message, part, size, magic, sys_flag, queue_offset, log_offset, store_timestamp_ms, store_host, topic
    )
    return out.getvalue()


def record_size(born_host: bytes, store_host: bytes, topic_field: bytes) -> int:
    """Of a record without body and properties."""
    return _FIXED_BYTES + len(born_host) + len(store_host) + len(topic_field)


def write_record(
    out: BytesWriter,
    message: Message,
    part: BatchPart,
    size: i64,
    magic: int,
    sys_flag: int,
    queue_offset: i64,
    log_offset: i64,
    store_timestamp_ms: int,
    store_host: bytes,
    topic: bytes,
) -> None:
    """A record whose size, sys flag and topic field were worked out before. Of `message` it has what it shares with the
    rest of its batch."""
    body = part.body
    properties = part.properties
    write_i32_be(out, i32(size))
    write_i32_be(out, i32(magic - 0x1_0000_0000))  # both magics have the sign bit set
    write_i32_be(out, i32(crc32(body) & 0x7FFFFFFF))
    write_i32_be(out, i32(message.queue_id))
    write_i32_be(out, i32(part.flag))
    write_i64_be(out, queue_offset)
    write_i64_be(out, log_offset)
    write_i32_be(out, i32(sys_flag))
    write_i64_be(out, i64(message.born_timestamp_ms))
    out.write(message.born_host)
    write_i64_be(out, i64(store_timestamp_ms))
    out.write(store_host)
    write_i32_be(out, i32(message.reconsume_times))
    write_i64_be(out, i64(message.prepared_transaction_offset))
    write_i32_be(out, i32(len(body)))
    out.write(body)
    out.write(topic)
    write_i16_be(out, i16(len(properties)))
    out.write(properties)


def decode_record(view: Buffer, *, check_crc: bool = True) -> StoredMessage:
    """The record that `view` begins with; `BadRecord` when it is not whole, or its body fails the checksum."""
    try:
        (sys_flag,) = _I32.unpack_from(view, SYS_FLAG_POSITION)
        header = RECORD_HEADERS[sys_flag >> 4 & 3]
        (
            size, magic, crc, queue_id, flag, queue_offset, log_offset, _, born_ms, born_host, store_ms, store_host,
            reconsume_times, prepared_offset, body_size,
        ) = header.unpack_from(view)  # fmt: skip
        if magic not in (MAGIC_V1, MAGIC_V2):
            raise BadRecord(f"magic {magic:#x}")
        body_at = header.size
        topic_at = body_at + body_size
        if body_size < 0 or not topic_at < size <= len(view):
            raise BadRecord(f"a record of {size} bytes with a body of {body_size}")
        if magic == MAGIC_V1:
            topic_size = view[topic_at]
            topic_at += 1
        else:
            (topic_size,) = _U16.unpack_from(view, topic_at)
            topic_at += 2
        properties_at = topic_at + topic_size + 2
        (properties_size,) = _I16.unpack_from(view, properties_at - 2)
        if properties_size < 0 or properties_at + properties_size != size:
            raise BadRecord(f"a record of {size} bytes whose parts add up to {properties_at + properties_size}")
    except struct.error as error:
        raise BadRecord("cut short") from error
    body = bytes(view[body_at : body_at + body_size])
    if check_crc and body and crc32(body) & 0x7FFFFFFF != crc:
        raise BadRecord(f"the body at log offset {log_offset} fails its checksum")
    return StoredMessage(
        topic=str(view[topic_at : topic_at + topic_size], "utf-8", "replace"),
        queue_id=queue_id,
        body=body,
        properties=decode_properties(view[properties_at:size]),
        flag=flag,
        sys_flag=sys_flag,
        born_timestamp_ms=born_ms,
        born_host=born_host,
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        queue_offset=queue_offset,
        log_offset=log_offset,
        store_timestamp_ms=store_ms,
        store_host=store_host,
        body_crc=crc,
        size_bytes=size,
    )


def decode_records(data: Buffer, *, check_crc: bool = True) -> Iterator[StoredMessage]:
    """The records of a pull reply's body, one after the other."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        record = decode_record(view[position:], check_crc=check_crc)
        yield record
        position += record.size_bytes


# --- batches ----------------------------------------------------------------------------------------------------------
def encode_batch(messages: Iterable[tuple[int, bytes, dict[str, str]]]) -> bytes:
    """The body of a batch send: (flag, body, properties) of each message.

    Each is: size i32 | magic 0 | crc 0 | flag i32 | body length i32 | body | properties length i16 | properties.
    """
    parts: list[bytes] = []
    for flag, body, properties in messages:
        data = encode_properties(properties)
        if len(data) > PROPERTIES_MAX_BYTES:
            raise ValueError(f"properties of {len(data)} bytes")
        size = _BATCH_HEADER.size + len(body) + 2 + len(data)
        parts += (_BATCH_HEADER.pack(size, 0, 0, flag, len(body)), body, _I16.pack(len(data)), data)
    return b"".join(parts)


def split_batch(body: bytes) -> list[BatchPart]:
    """The messages in a batch send; `BadRecord` when they don't fill it exactly."""
    parts: list[BatchPart] = []
    at: i64 = 0
    total: i64 = len(body)
    while at < total:
        body_at = at + _BATCH_HEADER_BYTES
        if body_at > total:
            raise BadRecord("a batch that is cut short")
        flag = read_i32_be(body, at + 12)
        properties_at = body_at + i64(read_i32_be(body, at + 16)) + 2
        if properties_at < body_at + 2 or properties_at > total:
            raise BadRecord("a batch whose last message is cut short")
        at = properties_at + i64(read_i16_be(body, properties_at - 2))
        if at < properties_at or at > total:
            raise BadRecord("a batch whose last properties are cut short")
        parts.append(BatchPart(int(flag), body[body_at : properties_at - 2], body[properties_at:at]))
    return parts


def decode_batch(body: bytes) -> list[tuple[int, bytes, dict[str, str]]]:
    """The (flag, body, properties) of the messages in a batch send; `BadRecord` when they don't fill it exactly."""
    return [(part.flag, part.body, decode_properties(part.properties)) for part in split_batch(body)]
