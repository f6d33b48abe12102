"""Whatever a client sends, in any form of send: what is acknowledged is recovered, byte for byte, after any kill."""

from __future__ import annotations

import asyncio
import shutil
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from broker.live import live_broker
from skylark.store import Store, StoreConfig
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding
from skylark.wire.headers import SendMessage, SendMessageV2
from skylark.wire.records import decode_record
from skylark.wire.typed import encode_header
from store.small_store import MEMORY

SEGMENT_BYTES = 1 << 17
QUEUE_ENTRIES = 100
SETTINGS = {
    "flushDiskType": "SYNC_FLUSH",
    "mappedFileSizeCommitLog": SEGMENT_BYTES,
    "mappedFileSizeConsumeQueue": 20 * QUEUE_ENTRIES,
}
LOG_FILE = f"commitlog/{0:020d}"

names = st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "DELAY", "CLUSTER", "x", ""]) | st.text(max_size=4)
values = st.sampled_from(["a", "a b", "1", "\0", "a\0", "\0" * 9, "9" * 5000]) | st.text(max_size=8)
texts = st.one_of(
    st.text(max_size=20),
    st.lists(st.tuples(names, values), max_size=4).map(lambda pairs: "".join(f"{n}\x01{v}\x02" for n, v in pairs)),
    st.lists(st.tuples(names, values), max_size=4).map(lambda pairs: "\x02".join(f"{n}\x01{v}" for n, v in pairs)),
)
payloads = st.binary(max_size=60) | st.integers(0, 2000).map(bytes)
properties = st.binary(max_size=20) | texts.map(str.encode) | st.integers(0, 600).map(bytes)
parts = st.tuples(st.integers(-(2**31), 2**31 - 1), payloads, properties)
plain_sends = st.tuples(st.sampled_from([10, 310]), texts, payloads)
batch_sends = st.tuples(st.just(320), texts, st.lists(parts, min_size=1, max_size=4))
Sent = tuple[int, str, bytes | list[tuple[int, bytes, bytes]]]


def pack_batch(messages: list[tuple[int, bytes, bytes]]) -> bytes:
    """As a client does that says nothing about its properties."""
    packed = []
    for flag, body, stored in messages:
        size = 22 + len(body) + len(stored)
        packed += [struct.pack(">iIiii", size, 0, 0, flag, len(body)), body, struct.pack(">h", len(stored)), stored]
    return b"".join(packed)


def header_of(code: int, text: str) -> dict[str, str]:
    kind = SendMessage if code == RequestCode.SEND_MESSAGE else SendMessageV2
    header = kind("producers", "t", "TBW102", 1, 0, 0, 1_700_000_000_000, 0)
    header.properties = text
    header.batch = code == RequestCode.SEND_BATCH_MESSAGE
    return encode_header(header)


async def send_and_kill(root: Path, copy: Path, sends: list[tuple[Sent, Encoding]]) -> int:
    """Sends, and copies what a kill would leave; the number of acknowledged messages."""
    acknowledged = 0
    async with live_broker(root, **SETTINGS) as broker:
        for (code, text, content), encoding in sends:
            body = content if isinstance(content, bytes) else pack_batch(content)
            answer = await broker.ask(code, body, encoding=encoding, **header_of(code, text))
            if answer.code == ResponseCode.SUCCESS:
                acknowledged += 1 if isinstance(content, bytes) else len(content)
        shutil.copytree(root, copy)
    return acknowledged


def stored_records(log: bytes) -> list[bytes]:
    """By their sizes alone."""
    records, at = [], 0
    while size := int.from_bytes(log[at : at + 4], "big"):
        records.append(log[at : at + size])
        at += size
    return records


def check(root: Path, records: list[bytes]) -> None:
    """A store that is opened there has just these records, each in its queue."""
    config = StoreConfig(
        root=root,
        segment_bytes=SEGMENT_BYTES,
        queue_entries_per_file=QUEUE_ENTRIES,
        index_slots=1000,
        index_entries=4000,
    )
    store = Store.open(config)
    try:
        assert store.log_max_offset == sum(map(len, records))
        found = []
        for topic, queue_id in store.queues():
            offset = 0
            while offset < store.max_offset(topic, queue_id):
                result = store.read(topic, queue_id, offset, 32)
                for record in result.records:
                    message = decode_record(record)
                    assert (message.topic, message.queue_id, message.queue_offset) == (topic, queue_id, offset)
                    found.append((message.log_offset, record))
                    offset += 1
                assert result.next_offset == offset
        assert [record for _, record in sorted(found)] == records
    finally:
        store.close()


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    sends=st.lists(st.tuples(plain_sends | batch_sends, st.sampled_from(list(Encoding))), min_size=1, max_size=6),
    cut=st.floats(0, 1),
    lost_checkpoint=st.booleans(),
)
@example([((320, "", [(0, b"a", b"k\x01v\0"), (0, b"", b"\0")]), Encoding.JSON)] * 3, 0.9, True)
@example([((320, "", [(0, b"", b"TAGS\x01a\x02"), (0, b"b", bytes(600))]), Encoding.BINARY)] * 2, 1.0, False)
def test_what_is_acknowledged_is_recovered(
    sends: list[tuple[Sent, Encoding]], cut: float, lost_checkpoint: bool
) -> None:
    with TemporaryDirectory(dir=MEMORY) as directory:
        copy = Path(directory) / "copy"
        acknowledged = asyncio.run(send_and_kill(Path(directory) / "broker", copy, sends))
        log = (copy / LOG_FILE).read_bytes() if acknowledged else b""
        records = stored_records(log)
        assert len(records) >= acknowledged
        if not records:
            return
        if lost_checkpoint:
            (copy / "checkpoint").unlink(missing_ok=True)
        torn = Path(directory) / "torn"
        shutil.copytree(copy, torn)
        check(copy, records)
        check(copy, records)  # after the clean stop

        end = sum(map(len, records))
        left = log[: round(end * cut)].ljust(len(log), b"\0")
        (torn / LOG_FILE).write_bytes(left)
        whole, at = [], 0
        while len(whole) < len(records) and left[at : at + len(records[len(whole)])] == records[len(whole)]:
            at += len(records[len(whole)])
            whole.append(records[len(whole)])
        check(torn, whole)
