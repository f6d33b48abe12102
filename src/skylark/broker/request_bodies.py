"""JSON bodies of requests, which are read on the event loop: what takes long to read is refused before it is read.

Bodies in standard JSON, which clients send, are read at some 100 MB per second. What only fastjson takes for JSON, like
the numbers that are keys in the mapping of a static topic, takes a hundred times as long.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from skylark.net.connection import RequestFailed
from skylark.wire.bodies import decode_body
from skylark.wire.codes import ResponseCode

MAX_BODY_BYTES: Final = 4 << 20
MAX_LENIENT_BYTES: Final = 1 << 16

T = TypeVar("T", bound=msgspec.Struct)


def request_body(kind: type[T], body: bytes, max_lenient_bytes: int = MAX_LENIENT_BYTES) -> T:
    """The body of a request as `kind`. Raises RequestFailed if it is too long, or BadBody."""
    if len(body) > MAX_BODY_BYTES:
        raise _too_long(body, MAX_BODY_BYTES)
    if len(body) > max_lenient_bytes and not _is_standard(body):
        raise _too_long(body, max_lenient_bytes)
    return decode_body(kind, body)


def _is_standard(body: bytes) -> bool:
    """Whether it is JSON as others know it; nothing is made of it."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def _too_long(body: bytes, most: int) -> RequestFailed:
    return RequestFailed(
        ResponseCode.MESSAGE_ILLEGAL, f"the body of the request has {len(body)} bytes, and may have up to {most}"
    )
