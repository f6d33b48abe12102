"""The fields of a binary header: one after the other, a key of 2 + n bytes and a value of 4 + n."""

from __future__ import annotations

from librt.strings import read_i16_be, read_i32_be
from mypy_extensions import i64


def decode_fields(data: bytes) -> dict[str, str]:
    """Raises ValueError or IndexError when they do not end where the data does, or are not UTF-8."""
    # Cutting pieces out of one text is quicker than decoding each piece: Latin-1 gives a character for every byte, and
    # only where one of them is not ASCII they have to be decoded again.
    text = data.decode("latin-1")
    fields: dict[str, str] = {}
    end = i64(len(data))
    at: i64 = 0
    while at < end:
        key_end = at + 2 + (i64(read_i16_be(data, at)) & 0xFFFF)
        value_at = key_end + 4
        value_end = value_at + i64(read_i32_be(data, key_end))
        if value_end < value_at:
            raise ValueError("a field of the binary header has a negative length")
        fields[text[at + 2 : key_end]] = text[value_at:value_end]
        at = value_end
    if at != end:
        raise ValueError("the fields of the binary header end beyond their length")
    return fields if text.isascii() else {_utf8(key): _utf8(value) for key, value in fields.items()}


def _utf8(latin: str) -> str:
    return latin.encode("latin-1").decode()
