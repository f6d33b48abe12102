"""The codecs against bytes that Apache's client and server wrote."""

from __future__ import annotations

import pytest

import golden
from golden import GoldenFrame, GoldenRecord
from skylark.wire.frame import Encoding, Frame
from skylark.wire.framing import FrameDecoder, encode_frame
from skylark.wire.records import decode_record, encode_record

ALL_FRAMES = [frame for encoding in golden.ENCODINGS for frame in golden.frames(encoding)]
ALL_RECORDS = list(golden.log_records())
every_frame = pytest.mark.parametrize("recorded", ALL_FRAMES, ids=lambda frame: f"{frame.encoding}-{frame.name}")
every_record = pytest.mark.parametrize("recorded", ALL_RECORDS, ids=lambda record: f"at-{record.log_offset}")


def decode(data: bytes) -> Frame:
    [frame] = FrameDecoder().feed(data)
    return frame


@every_frame
def test_a_frame_decodes_to_what_was_recorded(recorded: GoldenFrame) -> None:
    frame = decode(recorded.data)
    assert frame.code == recorded.code
    assert frame.is_response == (recorded.direction == "response")
    assert frame.encoding == (Encoding.JSON if recorded.encoding == "json" else Encoding.BINARY)
    assert recorded.data.endswith(frame.body)


@every_frame
def test_a_frame_decodes_byte_by_byte(recorded: GoldenFrame) -> None:
    decoder = FrameDecoder()
    arrived = [frame for byte in recorded.data for frame in decoder.feed(bytes((byte,)))]
    assert arrived == [decode(recorded.data)]


@every_frame
def test_a_frame_decodes_with_more_behind_it(recorded: GoldenFrame) -> None:
    decoder = FrameDecoder()
    cut = len(recorded.data) // 2
    assert decoder.feed(recorded.data + recorded.data[:cut]) == [decode(recorded.data)]
    assert decoder.feed(recorded.data[cut:]) == [decode(recorded.data)]


@every_frame
def test_a_frame_survives_being_written_again(recorded: GoldenFrame) -> None:
    frame = decode(recorded.data)
    written = encode_frame(frame)
    assert decode(written) == frame
    if frame.encoding == Encoding.BINARY:
        assert written == recorded.data


@pytest.mark.parametrize("encoding", golden.ENCODINGS)
def test_all_recorded_frames_pass_in_one_stream(encoding: str) -> None:
    recorded = golden.frames(encoding)
    frames = FrameDecoder().feed(b"".join(frame.data for frame in recorded))
    assert [frame.code for frame in frames] == [frame.code for frame in recorded]


@every_record
def test_a_stored_record_decodes_and_is_written_again_alike(recorded: GoldenRecord) -> None:
    message = decode_record(recorded.data)
    assert (message.log_offset, message.size_bytes) == (recorded.log_offset, len(recorded.data))
    written = encode_record(
        message,
        queue_offset=message.queue_offset,
        log_offset=message.log_offset,
        store_timestamp_ms=message.store_timestamp_ms,
        store_host=message.store_host,
    )
    assert written == recorded.data
