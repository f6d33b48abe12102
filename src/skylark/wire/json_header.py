"""The two forms of a frame's JSON header: what is read, and what is written."""

from __future__ import annotations

import msgspec


class JsonHeader(msgspec.Struct, rename="camel", omit_defaults=True):
    """A header as it is read."""

    code: int
    ext_fields: dict[str, str] | None = None
    flag: int = 0
    language: str = "JAVA"
    opaque: int = 0
    remark: str | None = None
    version: int = 0


class JsonReply(msgspec.Struct, rename="camel"):
    """The header as it is written: Apache's field names in Apache's (alphabetical) order."""

    code: int
    ext_fields: dict[str, str] | msgspec.UnsetType
    flag: int
    language: str
    opaque: int
    remark: str | msgspec.UnsetType
    serialize_type_current_rpc: str = msgspec.field(name="serializeTypeCurrentRPC")
    version: int = 0
