"""`Frame`: one request or response of the remoting protocol. Its bytes are in `framing`.

A frame is answered in the encoding it came in: `Frame.reply` sees to that. Flag bit 0 marks a response, bit 1 a one-way
request.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

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


class Frame:
    """One request or response."""

    __slots__ = ("body", "code", "encoding", "fields", "flag", "language", "opaque", "remark", "version")

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
    ) -> None:
        self.code = code
        self.fields: dict[str, str] = {} if fields is None else fields
        self.body = body
        self.opaque = opaque
        self.flag = flag
        self.remark = remark
        self.language = language
        self.version = version
        self.encoding = encoding

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
    def is_response(self) -> bool:
        return bool(self.flag & RESPONSE_FLAG)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & ONEWAY_FLAG)

    def reply(
        self, code: int = 0, remark: str | None = None, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> Frame:
        """The response to this request, in its encoding."""
        return Frame(code, fields, body, self.opaque, RESPONSE_FLAG, remark, encoding=self.encoding)
