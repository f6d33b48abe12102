"""A JSON object of any size, walked through entry by entry, so that nothing in one step takes long.

A parser in C reads megabytes in one call, and no other thread of the process runs meanwhile. Here every call has an end
in sight: of an object that may be large only the names are read, or it is cut into smaller ones, and of the values,
which come as bytes, none may be larger than `MAX_VALUE_BYTES`. Whether one is right shows when it is decoded.

    walk = Walk(b'{"version":7,"table":{"a":{"n":1},"b":{"n":2}},"other":[]}')
    for name in walk.entries():
        if name == "version":
            version = json.loads(walk.value())
        elif name == "table":
            for piece in walk.pieces():
                table |= json.loads(piece)
        else:
            walk.skip()
    walk.end()
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from skylark.wire import fastjson

MAX_VALUE_BYTES: Final = 256 << 10

_STRING: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_SPACE: Final = re.compile(rb"[ \t\n\r]*+")
_COLON: Final = rb"[ \t\n\r]*+:[ \t\n\r]*+"
_COMMA: Final = rb"[ \t\n\r]*+,[ \t\n\r]*+"
_NAME: Final = re.compile(rb"(" + _STRING + rb"|-?[0-9]++)" + _COLON, re.DOTALL)
_SCALAR: Final = re.compile(_STRING + rb"|[-+.0-9a-zA-Z]++", re.DOTALL)
_UP_TO_BRACKET: Final = re.compile(rb'[^"{}\[\]]*+(?:' + _STRING + rb'[^"{}\[\]]*+)*+[{}\[\]]', re.DOTALL)
# Entries one after the other, with a comma behind each, whose values are objects with no more than objects in them.
_FLAT: Final = rb'\{[^"{}\[\]]*+(?:' + _STRING + rb'[^"{}\[\]]*+)*+\}'
_LOW: Final = rb'\{[^"{}\[\]]*+(?:(?:' + _STRING + rb"|" + _FLAT + rb')[^"{}\[\]]*+)*+\}'
_RUN: Final = re.compile(rb"(?:" + _STRING + _COLON + _LOW + _COMMA + rb")++", re.DOTALL)
_RUN_BYTES: Final = 32 << 10
_OPENING: Final = frozenset(b"{[")


class Walk:
    """A place in a JSON text, which moves on with every call. Raises BadJson."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._skip_space()

    def entries(self) -> Iterator[str]:
        """The names in the object that begins here; of each, the value has to be taken before the next one is asked
        for: with `value`, `skip`, or `entries` if it is an object. What is null counts as not there, as with fastjson.
        """
        self._expect(b"{")
        if self._is_next(b"}"):
            return
        while True:
            name = self._take(_NAME, "a name")
            if not self._is_next(b"null"):
                yield _text(name[1])
            if self._is_next(b"}"):
                return
            self._expect(b",")

    def pieces(self) -> Iterator[bytes]:
        """The object that begins here, in objects that each have some of its entries."""
        self._expect(b"{")
        if self._is_next(b"}"):
            return
        while True:
            begin = self._at
            run = _RUN.match(self._data, begin, begin + _RUN_BYTES)
            if run is not None:
                self._at = run.end()
                yield b"{" + run[0].rstrip(b", \t\n\r") + b"}"
                continue
            self._take(_NAME, "a name")
            self._pass(begin + MAX_VALUE_BYTES)
            yield b"{" + self._data[begin : self._at] + b"}"
            self._skip_space()
            if self._is_next(b"}"):
                return
            self._expect(b",")

    def value(self) -> bytes:
        """The value that begins here."""
        begin = self._at
        self._pass(begin + MAX_VALUE_BYTES)
        value = self._data[begin : self._at]
        self._skip_space()
        return value

    def skip(self) -> None:
        """Passes over the value that begins here, however large it is."""
        self._pass(len(self._data))
        self._skip_space()

    def end(self) -> None:
        """Nothing may follow."""
        if self._at < len(self._data):
            raise fastjson.BadJson("something follows the value", self._at)

    def _pass(self, end: int) -> None:
        """Moves behind the value that begins here, and has to end before `end`."""
        if self._data[self._at : self._at + 1] not in (b"{", b"["):
            self._take(_SCALAR, "a value")
            return
        depth = 0
        while True:
            self._take(_UP_TO_BRACKET, "the end of a value", end)
            depth += 1 if self._data[self._at - 1] in _OPENING else -1
            if not depth:
                return

    def _take(self, pattern: re.Pattern[bytes], what: str, end: int | None = None) -> re.Match[bytes]:
        """Moves behind what matches here, within some bytes."""
        most = self._at + MAX_VALUE_BYTES
        match = pattern.match(self._data, self._at, most if end is None else min(most, end))
        if match is None:
            raise fastjson.BadJson(f"{what} is missing, or ends after more than {MAX_VALUE_BYTES} bytes", self._at)
        self._at = match.end()
        return match

    def _is_next(self, word: bytes) -> bool:
        """Whether the word comes next; then it is passed."""
        if not self._data.startswith(word, self._at):
            return False
        self._at += len(word)
        self._skip_space()
        return True

    def _expect(self, character: bytes) -> None:
        if not self._is_next(character):
            raise fastjson.BadJson(f"expected {character.decode()!r}", self._at)

    def _skip_space(self) -> None:
        if self._data[self._at : self._at + 1] in (b" ", b"\t", b"\n", b"\r"):
            space = _SPACE.match(self._data, self._at)
            assert space is not None
            self._at = space.end()


def _text(name: bytes) -> str:
    if name[:1] != b'"':
        return name.decode()
    if b"\\" not in name:
        try:
            return name[1:-1].decode()
        except UnicodeDecodeError:
            raise fastjson.BadJson("not UTF-8") from None
    return str(fastjson.loads(name))
