"""The two forms of a frame's JSON header: what is read, and what is written.

The fields of a request stay as they came until somebody asks for them: most handlers have them decoded straight to the
struct of their header.
"""

from __future__ import annotations

from typing import Any

import msgspec

from skylark.wire.numbers import Int

_decode_texts = msgspec.json.Decoder(dict[str, str] | None).decode
_decode_values = msgspec.json.Decoder(dict[str, Any]).decode


class JsonHeader(msgspec.Struct, rename="camel", omit_defaults=True):
    """A header as it is read. Its numbers are Java's ints, which `framing` checks for a fraction of msgspec's price."""

    code: int
    ext_fields: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    flag: int = 0
    language: str = "JAVA"
    opaque: int = 0
    remark: str | None = None
    version: int = 0


class JsonReply(msgspec.Struct, rename="camel"):
    """The header as it is written: Apache's field names in Apache's (alphabetical) order."""

    code: Int
    ext_fields: dict[str, str] | msgspec.Raw | msgspec.UnsetType
    flag: Int
    language: str
    opaque: Int
    remark: str | msgspec.UnsetType
    serialize_type_current_rpc: str = msgspec.field(name="serializeTypeCurrentRPC")
    version: Int = 0


def decode_fields(data: msgspec.Raw) -> dict[str, str]:
    """The fields of a header. Some clients write values as numbers or null: those become strings, null is left out.

    Raises `msgspec.MsgspecError`.
    """
    try:
        return _decode_texts(data) or {}
    except msgspec.ValidationError:
        return {k: v if isinstance(v, str) else _as_text(v) for k, v in _decode_values(data).items() if v is not None}


def _as_text(value: object) -> str:
    return msgspec.json.encode(value).decode()
