"""JSON bodies of requests, which servers read on their event loop: what takes long to read is refused before it is.

Bodies in standard JSON, which clients send, are read at some 100 MB per second; with numbers for keys, like the mapping
of a static topic, or with nulls, at a tenth of that. What else fastjson takes for JSON takes a hundred times as long.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from skylark.net.connection import RequestFailed
from skylark.wire import fastjson
from skylark.wire.bodies import decode_body
from skylark.wire.codes import ResponseCode
from skylark.wire.fastjson import MAX_LENIENT_BYTES

MAX_BODY_BYTES: Final = 4 << 20
MAX_UNUSUAL_BYTES: Final = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


def request_body(kind: type[T], body: bytes, max_bytes: int = MAX_BODY_BYTES) -> T:
    """The body of a request as `kind`, which never has more than `max_bytes`. Raises RequestFailed if it is too long,
    or BadBody.
    """
    if len(body) > MAX_LENIENT_BYTES:
        most = max_bytes if len(body) > max_bytes else _most_bytes(body)
        if len(body) > most:
            raise RequestFailed(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the body of the request has {len(body)} bytes, and may have up to {most}",
            )
    return decode_body(kind, body)


def _most_bytes(body: bytes) -> int:
    """How long a body like this may be."""
    if _is_standard(body):
        return MAX_UNUSUAL_BYTES if b"null" in body else MAX_BODY_BYTES
    if len(body) > MAX_UNUSUAL_BYTES or not _is_standard(fastjson.quote_number_keys(body)):
        return MAX_LENIENT_BYTES
    return MAX_LENIENT_BYTES if b"null" in body else MAX_UNUSUAL_BYTES


def _is_standard(body: bytes) -> bool:
    """Whether it is JSON as others know it; nothing is made of it."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
