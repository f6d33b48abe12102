"""The `fields` of a frame as a struct of `headers`, and back.

`decode_header(PullMessage, frame)` gives the struct; `encode_header(struct)` gives the fields of a request or response.
All values travel as strings; numbers and booleans are converted and checked here. Fields that a struct does not name
are passed over, as Apache's servers do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import msgspec

from skylark.wire.frame import Frame

_Header = TypeVar("_Header", bound=msgspec.Struct)


class BadHeader(Exception):
    """A request whose fields are missing, of the wrong type or out of range."""


class BadBody(BadHeader):
    """A request whose body is not the JSON that its code asks for.

    It stands here because this module is compiled: of a class that it does not know, compiled code does not believe
    that it is a BadHeader.
    """


def decode_header(kind: type[_Header], frame: Frame) -> _Header:
    """The request's fields as `kind`. Raises BadHeader, which says which field is wrong."""
    raw = frame.raw_fields
    if isinstance(raw, msgspec.Raw):
        try:
            header: _Header = _decoder(kind)(raw)
            return header
        except msgspec.MsgspecError:
            pass  # what is wrong with it, or only unusual, shows in the fields
    fields = frame.fields
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as e:
        # An empty value stands for null in the binary encoding: only worth a second look when the first one failed.
        if "" in fields.values():
            return decode_header(kind, Frame(frame.code, {k: v for k, v in fields.items() if v}))
        raise BadHeader(f"bad header of request {frame.code}: {e}") from None


@cache
def _decoder(kind: type[_Header]) -> Callable[[msgspec.Raw], _Header]:
    return msgspec.json.Decoder(kind, strict=False).decode


def encode_header(header: msgspec.Struct) -> dict[str, str]:
    """The fields of a request or response; what is None is left out."""
    return {key: _text(value) for key, value in msgspec.to_builtins(header).items() if value is not None}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
