"""`Frame`: one request or response of the remoting protocol. Its bytes are in `framing`.

A frame is answered in the encoding it came in: `Frame.reply` sees to that. Flag bit 0 marks a response, bit 1 a one-way
request.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from skylark.wire import binary_header, json_header

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
MAX_RECORDS_BYTES: Final = MAX_FRAME_BYTES - 65_536
"""What the messages of an answer may have, so that it fits into a frame."""

PROTOCOL_VERSION: Final = 513
"""The ordinal of V5_5_0 in Apache's MQVersion: clients choose what they send by it."""

RESPONSE_FLAG: Final = 1
ONEWAY_FLAG: Final = 2

LANGUAGES: Final = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY",
    "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST", "NODE_JS",
)  # fmt: skip


class BadFrame(Exception):
    """Bytes that are not a frame, after which their connection can't be read any further; or fields that are no map."""


class Encoding(IntEnum):
    JSON = 0
    BINARY = 1


class Frame:
    """One request or response."""

    __slots__ = (
        "_fields", "body", "code", "encoding", "flag", "language", "opaque", "raw_fields", "remark", "version",
        "wire_bytes",
    )  # fmt: skip

    def __init__(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes = b"",
        opaque: int = 0,
        flag: int = 0,
        remark: str | None = None,
        language: str = "PYTHON",
        version: int = PROTOCOL_VERSION,
        encoding: Encoding = Encoding.JSON,
        raw_fields: msgspec.Raw | bytes | None = None,
    ) -> None:
        """`raw_fields` are the fields as they came, in JSON or in bytes."""
        self.code = code
        self._fields = fields
        self.raw_fields = raw_fields  # None once `fields` is in use
        self.body = body
        self.opaque = opaque
        self.flag = flag
        self.remark = remark
        self.language = language
        self.version = version
        self.encoding = encoding
        self.wire_bytes = 0  # what it took on the wire, if it came from there

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and self._parts() == other._parts()

    def __repr__(self) -> str:
        return f"Frame{self._parts()}"

    def _parts(self) -> tuple[object, ...]:
        return (
            self.code, self.fields, self.body, self.opaque, self.flag, self.remark, self.language, self.version,
            self.encoding,
        )  # fmt: skip

    @property
    def fields(self) -> dict[str, str]:
        """Raises BadFrame when those that came are no map."""
        if self._fields is None:
            self._fields = _decode_fields(self.raw_fields)
            self.raw_fields = None
        return self._fields

    @fields.setter
    def fields(self, fields: dict[str, str]) -> None:
        self._fields = fields
        self.raw_fields = None

    @property
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)

    def reply(
        self,
        code: int = 0,
        remark: str | None = None,
        fields: dict[str, str] | None = None,
        body: bytes = b"",
        raw_fields: msgspec.Raw | None = None,
    ) -> Frame:
        """The response to this request, in its encoding."""
        return Frame(
            code, fields, body, self.opaque, RESPONSE_FLAG, remark, encoding=self.encoding, raw_fields=raw_fields
        )


def _decode_fields(raw: msgspec.Raw | bytes | None) -> dict[str, str]:
    if raw is None:
        return {}
    try:
        return json_header.decode_fields(raw) if isinstance(raw, msgspec.Raw) else binary_header.decode_fields(raw)
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError) as e:
        raise BadFrame(f"bad fields of a header: {e}") from None
