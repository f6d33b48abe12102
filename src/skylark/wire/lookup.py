"""Properties of a message where they are stored: each is found when it is asked for, and nothing is copied before.

For filters, which look at one or two properties of a great many records, and for sends, of which the broker needs the
keys and tags. Properties are `name \\x01 value \\x02`, one after the other, up to the end of the bytes; the layout of a
record is told in `records`. Of several properties with a name the last counts, and one without a value does not, as in
Apache's reader.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i16_be, read_i32_be, read_i64_be
from mypy_extensions import i64

from skylark.wire.message import MAGIC_V1, SYS_BORN_HOST_V6, SYS_FLAG_POSITION, SYS_STORE_HOST_V6

_BODY_POSITION: Final = 88  # with two IPv4 hosts
_IPV6_MORE_BYTES: Final = 12
_MAGIC_POSITION: Final = 4
_END: Final = 2  # of a property
_MANY: Final = 8  # properties to look for, one after the other
_TAGS: Final = int.from_bytes(b"TAGS", "big")
_KEYS: Final = int.from_bytes(b"KEYS", "big")
_UNIQ_KEY: Final = int.from_bytes(b"UNIQ_KEY", "big")


def properties_position(record: bytes) -> i64:
    """Where the properties of one whole record begin. Raises IndexError if it is damaged."""
    sys_flag = i64(read_i32_be(record, SYS_FLAG_POSITION))
    at: i64 = _BODY_POSITION
    if sys_flag & SYS_BORN_HOST_V6:
        at += _IPV6_MORE_BYTES
    if sys_flag & SYS_STORE_HOST_V6:
        at += _IPV6_MORE_BYTES
    body_size = i64(read_i32_be(record, at - 4))
    if body_size < 0:
        raise IndexError("a body of less than no bytes")
    at += body_size
    if i64(read_i32_be(record, _MAGIC_POSITION)) == MAGIC_V1 - 0x1_0000_0000:
        at += 3 + i64(record[at])
    else:
        at += 4 + (i64(read_i16_be(record, at)) & 0xFFFF)
    if at > len(record):
        raise IndexError("a topic beyond the end of the record")
    return at


def property_key(name: str) -> bytes:
    """What a property with a name begins with."""
    return name.encode("utf-8", "replace") + b"\x01"


def find_property(stored: bytes, start: i64, key: bytes) -> tuple[i64, i64]:
    """Where a property's value begins and ends, among the properties from `start` on; 0 and 0 if there is none."""
    key_size: i64 = len(key)
    end: i64 = len(stored)
    while end > start:
        at = end
        while at > start and stored[at - 1] != _END:
            at -= 1
        if end - at > key_size and _holds(stored, at, key, key_size):
            return at + key_size, end
        end = at - 1
    return 0, 0


def find_text(stored: bytes, start: i64, key: bytes) -> str | None:
    """A property's value, among the properties from `start` on.

    >>> find_text(b"TAGS\\x01a\\x02KEYS\\x01k\\x02", 0, property_key("TAGS"))
    'a'
    """
    at, end = find_property(stored, start, key)
    return stored[at:end].decode("utf-8", "replace") if end else None


class StoredProperties:
    """The properties from a position on, for who asks for some of them: one by one at first, and from a map of them all
    when it is many.

    >>> StoredProperties(b"TAGS\\x01a\\x02KEYS\\x01k\\x02", 0).text(property_key("KEYS"))
    'k'
    """

    __slots__ = ("_asked", "_places", "_start", "stored")

    def __init__(self, stored: bytes, start: i64) -> None:
        self.stored = stored
        self._start = start
        self._asked: i64 = 0
        self._places: dict[bytes, tuple[int, int]] | None = None

    def find(self, key: bytes) -> tuple[i64, i64]:
        """Where a property's value begins and ends; 0 and 0 if there is none."""
        places = self._places
        if places is None:
            self._asked += 1
            if self._asked <= _MANY:
                return find_property(self.stored, self._start, key)
            places = self._places = _places(self.stored, self._start)
        found = places.get(key)
        return (0, 0) if found is None else found

    def text(self, key: bytes) -> str | None:
        """A property's value."""
        at, end = self.find(key)
        return self.stored[at:end].decode("utf-8", "replace") if end else None


def _places(stored: bytes, start: i64) -> dict[bytes, tuple[int, int]]:
    """Where the value of each property begins and ends, by what the property begins with."""
    places: dict[bytes, tuple[int, int]] = {}
    at = int(start)
    for part in stored[start:].split(b"\x02"):
        key_size = part.find(b"\x01") + 1
        if 0 < key_size < len(part):
            places[part[:key_size]] = at + key_size, at + len(part)
        at += len(part) + 1
    return places


def _holds(stored: bytes, at: i64, part: bytes, size: i64) -> bool:
    same: i64 = 0
    while same < size and stored[at + same] == part[same]:
        same += 1
    return same == size


def is_at(stored: bytes, at: i64, end: i64, wanted: bytes) -> bool:
    """Whether the bytes from `at` to `end` are these."""
    size: i64 = len(wanted)
    return end - at == size and _holds(stored, at, wanted, size)


class PropertyScan:
    """Where stored properties hold the values that a message is found by, from each `at` to its `end`."""

    __slots__ = ("is_special", "keys_at", "keys_end", "tags_at", "tags_end", "unique_at", "unique_end")

    def __init__(self) -> None:
        self.unique_at: i64 = 0
        self.unique_end: i64 = 0
        self.keys_at: i64 = 0
        self.keys_end: i64 = 0
        self.tags_at: i64 = 0
        self.tags_end: i64 = 0
        self.is_special = False


def scan_properties(stored: bytes, special: frozenset[bytes] = frozenset()) -> PropertyScan:
    """Looks through stored properties once, without making a map of them.

    They are special if one of them has such a name, or if the map would not be the same as what is stored: a pair with
    an empty name or value is left out of it.
    """
    found = PropertyScan()
    start: i64 = 0  # of a property, whose value is at `value_at` once its name has ended
    value_at: i64 = 0
    size: i64 = len(stored)
    for at in range(size + 1):
        byte: i64 = 2
        if at < size:
            byte = i64(stored[at])
        if byte == 1 and not value_at:
            value_at = at + 1
        elif byte == 2:
            name_size = value_at - 1 - start
            if name_size <= 0 or value_at >= at:
                found.is_special = found.is_special or start < at or at < size
            elif name_size == 8 and read_i64_be(stored, start) == _UNIQ_KEY:
                found.unique_at = value_at
                found.unique_end = at
            elif name_size == 4 and read_i32_be(stored, start) == _TAGS:
                found.tags_at = value_at
                found.tags_end = at
            elif name_size == 4 and read_i32_be(stored, start) == _KEYS:
                found.keys_at = value_at
                found.keys_end = at
            elif special and stored[start : value_at - 1] in special:
                found.is_special = True
            start = at + 1
            value_at = 0
    return found
