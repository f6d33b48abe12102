"""Bodies that are compressed, damaged, or larger than they say."""

from __future__ import annotations

import builtins
import random
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylark.client.compression import SYS_FLAGS, Codec, deflate, inflate, require
from skylark.client.errors import InvalidMessage, MissingCodec, UnreadableMessage

CODECS = list(Codec)

# What the compressors of Apache RocketMQ 5.5.0 make of the same text.
TEXT = b"All work and no play. " * 8
APACHES = {
    Codec.LZ4: "04224d1860707321000000ff07416c6c20776f726b20616e64206e6f20706c61792e20160082506c61792e2000000000",
    Codec.ZSTD: "28b52ffd0058ec0000b0416c6c20776f726b20616e64206e6f20706c61792e2001002e49cd26010000",
    Codec.ZLIB: "785e73ccc95128cf2fca5648cc4b51c8cb5728c849acd453701cb4a200a86c3b81",
}


@given(st.binary(max_size=4096), st.sampled_from(CODECS))
def test_what_is_compressed_comes_back(body: bytes, codec: Codec) -> None:
    assert inflate(deflate(body, codec), SYS_FLAGS[codec]) == body


@pytest.mark.parametrize("codec", CODECS)
def test_what_apache_compressed_is_read(codec: Codec) -> None:
    assert inflate(bytes.fromhex(APACHES[codec]), SYS_FLAGS[codec]) == TEXT


def test_the_flags_are_apaches() -> None:
    assert SYS_FLAGS == {Codec.LZ4: 0x101, Codec.ZSTD: 0x201, Codec.ZLIB: 0x301}


def test_older_clients_name_no_codec() -> None:
    assert inflate(zlib.compress(b"hello"), 1) == b"hello"


def test_a_plain_body_stays() -> None:
    assert inflate(b"hello", 0x300) == b"hello"


@pytest.mark.parametrize("codec", CODECS)
def test_inflating_stops_at_the_limit(codec: Codec) -> None:
    packed = deflate(bytes(1_000_000), codec)
    assert len(inflate(packed, SYS_FLAGS[codec], 1_000_000)) == 1_000_000
    with pytest.raises(UnreadableMessage, match="999999"):
        inflate(packed, SYS_FLAGS[codec], 999_999)


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_bodies(codec: Codec) -> None:
    packed = deflate(random.Random(3).randbytes(1000), codec)
    for damaged in (b"", b"not compressed at all", packed[:-10], packed[: len(packed) // 2]):
        with pytest.raises(UnreadableMessage):
            inflate(damaged, SYS_FLAGS[codec])


def test_an_unknown_codec() -> None:
    with pytest.raises(UnreadableMessage, match="not known"):
        inflate(b"x", 0x701)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_a_codec_that_is_not_installed_says_how_to_get_it(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in {"lz4", "backports", "compression"}:
            raise ImportError(name)
        return original(name, *rest)

    packed = deflate(b"hello", codec)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingCodec, match=r"pip install '\.\[compression\]'"):
        inflate(packed, SYS_FLAGS[codec])
    with pytest.raises(InvalidMessage, match=r"pip install '\.\[compression\]'"):
        require(codec)
    require(Codec.ZLIB)
