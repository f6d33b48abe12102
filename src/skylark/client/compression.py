"""Compressed message bodies: zlib always, lz4 and zstd when the extra `compression` is installed.

A message says in its sys flag that it is compressed, and in three more bits by what (1 lz4, 2 zstd, 3 zlib; 0, from
clients before 5.0, is zlib too). Inflating stops at a limit: a small body can't fill the memory.
"""

from __future__ import annotations

import sys
import zlib
from enum import StrEnum
from typing import Any, Final

from skylark.client.errors import InvalidMessage, MissingCodec, UnreadableMessage
from skylark.extras import how_to_install
from skylark.wire.message import (
    SYS_COMPRESSED,
    SYS_COMPRESSION_LZ4,
    SYS_COMPRESSION_MASK,
    SYS_COMPRESSION_ZLIB,
    SYS_COMPRESSION_ZSTD,
)

MAX_INFLATED_BYTES: Final = 64 * 1024 * 1024
DEFAULT_LEVEL: Final = 5
MAX_LEVEL: Final = 9


class Codec(StrEnum):
    """How a body is compressed."""

    ZLIB = "zlib"
    LZ4 = "lz4"
    ZSTD = "zstd"


SYS_FLAGS: Final = {
    Codec.ZLIB: SYS_COMPRESSED | SYS_COMPRESSION_ZLIB,
    Codec.LZ4: SYS_COMPRESSED | SYS_COMPRESSION_LZ4,
    Codec.ZSTD: SYS_COMPRESSED | SYS_COMPRESSION_ZSTD,
}
"""The bits that a message compressed so has in its sys flag."""

_CODECS: Final = {
    0: Codec.ZLIB,
    SYS_COMPRESSION_ZLIB: Codec.ZLIB,
    SYS_COMPRESSION_LZ4: Codec.LZ4,
    SYS_COMPRESSION_ZSTD: Codec.ZSTD,
}


def require(codec: Codec) -> None:
    """Raises InvalidMessage when the codec is not installed: a producer should fail at its start, not at a send."""
    try:
        _module(codec)
    except ImportError:
        raise InvalidMessage(f"{codec} is not installed; {how_to_install('compression')} brings it") from None


def is_missing(sys_flag: int) -> bool:
    """Whether a body with this sys flag can't be inflated because its codec is not installed here, or not known."""
    codec = _CODECS.get(sys_flag & SYS_COMPRESSION_MASK)
    if codec is None:
        return True
    try:
        _module(codec)
    except ImportError:
        return True
    return False


def deflate(body: bytes, codec: Codec, level: int = DEFAULT_LEVEL) -> bytes:
    """The compressed body."""
    if codec is Codec.ZLIB:
        return zlib.compress(body, level)
    module = _module(codec)
    # Apache's producers use lz4 in its fast mode, whatever the level.
    packed: bytes = module.compress(body) if codec is Codec.LZ4 else module.compress(body, level)
    return packed


def inflate(body: bytes, sys_flag: int, max_bytes: int = MAX_INFLATED_BYTES) -> bytes:
    """The body as it was before it was compressed as the sys flag says. Raises UnreadableMessage, or MissingCodec."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    codec = _CODECS.get(sys_flag & SYS_COMPRESSION_MASK)
    if codec is None:
        raise UnreadableMessage(f"the body is compressed in a way that is not known (sys flag {sys_flag:#x})")
    try:
        inflater = zlib.decompressobj() if codec is Codec.ZLIB else _inflater(codec)
    except ImportError:
        raise MissingCodec(f"the body is compressed with {codec}; {how_to_install('compression')} brings it") from None
    try:
        inflated: bytes = inflater.decompress(body, max_bytes)
    except (zlib.error, RuntimeError, ValueError, EOFError, _zstd_error()) as e:
        raise UnreadableMessage(f"the body can't be inflated with {codec}: {e}") from None
    if not inflater.eof:
        raise UnreadableMessage(f"the {codec} body is cut off, or larger than {max_bytes} bytes when inflated")
    return inflated


def _inflater(codec: Codec) -> Any:
    module = _module(codec)
    return module.LZ4FrameDecompressor() if codec is Codec.LZ4 else module.ZstdDecompressor()


def _module(codec: Codec) -> Any:
    """The library behind a codec, imported when it is first used. Raises ImportError."""
    if codec is Codec.ZLIB:
        return zlib
    if codec is Codec.LZ4:
        import lz4.frame  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return lz4.frame
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd  # type: ignore[import-not-found, import-untyped, unused-ignore]
    return zstd


def _zstd_error() -> type[Exception]:
    try:
        error: type[Exception] = _module(Codec.ZSTD).ZstdError
    except ImportError:
        return zlib.error
    return error
