"""What can be told of an SQL statement before Spark has started: the tables that it reads, and the names in it.

This is no parser of SQL. It knows where a query names its tables and where it does not, and passes over what it does
not know: a table that it misses is told of by Spark, a little later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<text>[rR]?'(?:[^'\\]|\\.|'')*'|[rR]?"(?:[^"\\]|\\.|"")*")
    |(?P<name>`(?:[^`]|``)+`|[^\W\d]\w*)
    |(?P<other>\d\w*|\|>|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUERIES: Final = frozenset("select with from explain (".split())
_NO_TABLES: Final = frozenset("lateral table values unnest select from with stream identifier".split())
_ENDS_ALIAS: Final = frozenset(
    """
    where group having order sort cluster distribute limit offset union except intersect minus join inner left right
    full outer cross semi anti natural on using lateral pivot unpivot tablesample window qualify select version
    timestamp for system_version system_time watermark as from
    """.split()
)


class Statement(msgspec.Struct, frozen=True):
    """`tables` are read by one plain name, which no part of the statement itself gives; `names` are all that it has."""

    tables: tuple[str, ...]
    names: frozenset[str]


class _Token(msgspec.Struct, frozen=True):
    text: str
    is_name: bool

    @property
    def word(self) -> str:
        """As a keyword; a name in backticks is none."""
        return self.text.lower()

    @property
    def name(self) -> str:
        return self.text[1:-1].replace("``", "`") if self.text.startswith("`") else self.text


_END: Final = _Token("", False)


def read(statement: str) -> Statement:
    tokens = list(_tokens(statement))
    names = frozenset(token.name for token in tokens if token.is_name)
    if not tokens or tokens[0].word not in _QUERIES:
        return Statement((), names)
    given = _given(tokens)
    tables = dict.fromkeys(name for name in _tables(tokens) if name.lower() not in given)
    return Statement(tuple(tables), names)


def _tokens(statement: str) -> Iterator[_Token]:
    for found in _TOKEN.finditer(statement):
        if found.lastgroup != "space":
            yield _Token(found[0], found.lastgroup == "name")


def _given(tokens: Sequence[_Token]) -> set[str]:
    """Names that the statement gives to queries of its own: `name AS (`, `name (columns) AS (`."""
    found = set()
    for index, token in enumerate(tokens):
        if token.word == "as" and _at(tokens, index + 1).text == "(":
            before = index - 1
            if _at(tokens, before).text == ")":
                before = _opening(tokens, before) - 1
            found.add(_at(tokens, before).name.lower())
    return found


def _tables(tokens: Sequence[_Token]) -> Iterator[str]:
    is_query = [True]  # for each open parenthesis, whether it holds a query and not the arguments of a function
    for index, token in enumerate(tokens):
        if token.text == "(":
            is_query.append(_at(tokens, index + 1).word in _QUERIES)
        elif token.text == ")" and len(is_query) > 1:
            is_query.pop()
        elif token.word == "join" or (
            token.word == "from" and is_query[-1] and _at(tokens, index - 1).word != "distinct"
        ):
            yield from _relations(tokens, index + 1)


def _relations(tokens: Sequence[_Token], index: int) -> Iterator[str]:
    """`a`, `a AS b, c`: up to what is not so plain."""
    while True:
        token, after = _at(tokens, index), _at(tokens, index + 1)
        if not token.is_name or token.word in _NO_TABLES or after.text in (".", "("):
            return
        yield token.name
        index += 1
        if after.word == "as":
            index += 1
        if _at(tokens, index).is_name and _at(tokens, index).word not in _ENDS_ALIAS:
            index += 1
        if _at(tokens, index).text != ",":
            return
        index += 1


def _opening(tokens: Sequence[_Token], closing: int) -> int:
    depth = 0
    for index in range(closing, -1, -1):
        depth += {")": 1, "(": -1}.get(tokens[index].text, 0)
        if depth == 0:
            return index
    return 0


def _at(tokens: Sequence[_Token], index: int) -> _Token:
    return tokens[index] if 0 <= index < len(tokens) else _END
