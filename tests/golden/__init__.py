"""Bytes of Apache RocketMQ 5.5.0 as they were on the wire and on the disk; README.md says how they came here."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
STORE = HERE / "store"
ENCODINGS = ("json", "rocketmq")
BLANK_MAGIC = 0xCBD43194


class GoldenFrame(NamedTuple):
    """One recorded frame. `code` is its own: the request code, or the response code of a response."""

    encoding: str
    name: str
    direction: str
    code: int
    data: bytes


class GoldenRecord(NamedTuple):
    """One record of the recorded commit log, and where it lies."""

    log_offset: int
    data: bytes


class StoreLayout(NamedTuple):
    """The sizes that the recording broker was set to, instead of Apache's defaults, to keep its files small."""

    segment_bytes: int
    index_slots: int
    index_entries: int


@cache
def frames(encoding: str) -> tuple[GoldenFrame, ...]:
    """All frames with that header encoding, "json" or "rocketmq", in the order they were recorded."""
    lines = (HERE / f"frames_{encoding}.jsonl").read_text(encoding="ascii").splitlines()
    return tuple(
        GoldenFrame(encoding, line["name"], line["direction"], line["code"], bytes.fromhex(line["hex"]))
        for line in map(json.loads, lines)
    )


def frame(encoding: str, name: str) -> bytes:
    """The bytes of one frame, for example `frame("json", "pull_message.response.success")`."""
    return next(each.data for each in frames(encoding) if each.name == name)


def store_layout() -> StoreLayout:
    return StoreLayout(**json.loads((STORE / "layout.json").read_text(encoding="ascii")))


def log_segments() -> list[Path]:
    """The commit log's files, oldest first. The last is cut after its last record, the others are whole."""
    return sorted((STORE / "commitlog").iterdir())


def log_records() -> Iterator[GoldenRecord]:
    """Every record of the commit log, without the blank ones that fill segments up."""
    for segment in log_segments():
        data, start, position = segment.read_bytes(), int(segment.name), 0
        while position < len(data):
            size, magic = struct.unpack_from(">II", data, position)
            if magic == BLANK_MAGIC:
                break
            yield GoldenRecord(start + position, data[position : position + size])
            position += size
