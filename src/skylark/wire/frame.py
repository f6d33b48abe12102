"""`Frame`: one request or response of the remoting protocol. Its bytes are in `framing`.

A frame is answered in the encoding it came in: `Frame.reply` sees to that. Flag bit 0 marks a response, bit 1 a one-way
request.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
PROTOCOL_VERSION: Final = 513
"""The ordinal of V5_5_0 in Apache's MQVersion: clients choose what they send by it."""

RESPONSE_FLAG: Final = 1
ONEWAY_FLAG: Final = 2

LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY",
    "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS",
)  # fmt: skip


class BadFrame(Exception):
    """Bytes that are not a frame; the connection they came on can't be read any further."""


class Encoding(IntEnum):
    JSON = 0
    BINARY = 1


class Frame(msgspec.Struct):
    """One request or response."""

    code: int
    fields: dict[str, str] = {}
    body: bytes = b""
    opaque: int = 0
    flag: int = 0
    remark: str | None = None
    language: str = "PYTHON"
    version: int = PROTOCOL_VERSION
    encoding: Encoding = Encoding.JSON

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)

    def reply(
        self, code: int = 0, remark: str | None = None, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> Frame:
        """The response to this request, in its encoding."""
        return Frame(
            code, {} if fields is None else fields, body, self.opaque, RESPONSE_FLAG, remark, encoding=self.encoding
        )


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
