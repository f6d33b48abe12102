"""From the text of an expression to its nodes: the grammar, driven token by token.

As in Apache's parser, which does not ask for the end of its input, an expression ends where the grammar can't go on:
of `a = 1 b = 2` only `a = 1` counts. What was left out is in `Selector.ignored`, for a warning.

The parser is LALR(1) and builds the nodes while it reads: no recursion, no backtracking, no tree. It is built at the
first use, so that who never filters by SQL does not wait for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from skylark.selectors import expressions as build
from skylark.selectors.cache import TextCache
from skylark.selectors.expressions import BadSelector
from skylark.selectors.nodes import Node
from skylark.selectors.values import Value
from skylark.wire.lookup import StoredProperties
from skylark.wire.records import encode_properties

if TYPE_CHECKING:
    from lark import Lark, Token

MAX_LENGTH: Final = 16_384
_CACHED_CHARACTERS: Final = 1 << 17  # a compiled expression takes some thirty times its text

_GRAMMAR: Final = r"""
?start: any
?any: all | any OR all -> any_of
?all: equality | all AND equality -> all_of
?equality: comparison
    | equality "=" comparison -> equal
    | equality "<>" comparison -> not_equal
    | equality IS NULL -> is_null
    | equality IS NOT NULL -> is_not_null
?comparison: unary
    | comparison RELATION unary -> relation
    | comparison TEXT_TEST STRING -> text_test
    | comparison NOT TEXT_TEST STRING -> not_text_test
    | comparison BETWEEN unary AND unary -> between
    | comparison NOT BETWEEN unary AND unary -> not_between
    | comparison IN "(" strings ")" -> one_of
    | comparison NOT IN "(" strings ")" -> not_one_of
strings: STRING ("," STRING)*
?unary: primary
    | "+" unary -> plus
    | MINUS unary -> negate
    | NOT unary -> invert
?primary: STRING -> string
    | WHOLE -> whole
    | FLOATING -> floating
    | TRUE -> true
    | FALSE -> false
    | NULL -> null
    | NAME -> variable
    | "(" any ")"

NOT.3: /not(?![a-z0-9_$])/
AND.3: /and(?![a-z0-9_$])/
OR.3: /or(?![a-z0-9_$])/
BETWEEN.3: /between(?![a-z0-9_$])/
IN.3: /in(?![a-z0-9_$])/
TRUE.3: /true(?![a-z0-9_$])/
FALSE.3: /false(?![a-z0-9_$])/
NULL.3: /null(?![a-z0-9_$])/
IS.3: /is(?![a-z0-9_$])/
TEXT_TEST.3: /(?:contains|startswith|endswith)(?![a-z0-9_$])/
NAME.2: /[a-z_$][a-z0-9_$]*/
FLOATING.3: /[0-9]+\.[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|[0-9]+e[+-]?[0-9]+/
WHOLE.2: /0|[1-9][0-9]*l?/
STRING.2: /'(?:''|[^'])*'/
RELATION.2: /<=|>=|<(?!>)|>/
MINUS: "-"

BLANK: /[ \t\n\r\f]+/
LINE_COMMENT.3: /--[^\n\r]*(?:\r\n|\n|\r)/
BLOCK_COMMENT.3: /\/\*[^*]*\*(?:\*|[^*\/][^*]*\*)*\//
%ignore BLANK
%ignore LINE_COMMENT
%ignore BLOCK_COMMENT
"""

_TEXT_TESTS: Final = {"CONTAINS": str.__contains__, "STARTSWITH": str.startswith, "ENDSWITH": str.endswith}


class Selector(msgspec.Struct, frozen=True, eq=False):
    """A compiled expression."""

    text: str
    root: Node
    """What evaluates it, over properties as they are stored."""
    ignored: str = ""
    """What follows the expression in the text, and does not count."""

    def evaluate(self, properties: dict[str, str]) -> Value:
        """True, False or None for unknown; raises EvaluationError."""
        return self.root.evaluate(StoredProperties(encode_properties(properties), 0))

    def matches(self, properties: dict[str, str]) -> bool:
        """Whether the expression is true; it is not when it can't be evaluated."""
        return self.root.matches(encode_properties(properties), 0)


def compile_selector(text: str) -> Selector:
    """What an expression means. Raises BadSelector.

    >>> compile_selector("a BETWEEN 1 AND 3").matches({"a": "2"})
    True
    """
    selector = _compiled.get(text)
    if selector is None:
        selector = _compile(text)
        _compiled.put(text, len(text), selector)
    return selector


def _compile(text: str) -> Selector:
    from lark import UnexpectedCharacters, UnexpectedToken

    if len(text) > MAX_LENGTH:
        raise BadSelector(f"the expression has {len(text)} characters; {MAX_LENGTH} are allowed", MAX_LENGTH)
    parsing: Any = _parser().parse_interactive(text)  # its parts are not typed
    try:
        for token in parsing.lexer_thread.lex(parsing.parser_state):
            try:
                parsing.feed_token(token)
            except UnexpectedToken:
                try:
                    return _selector(text, parsing.feed_eof(), _at(token))
                except UnexpectedToken:
                    raise BadSelector(f"{str(token)[:40]!r} is not expected", _at(token)) from None
        return _selector(text, parsing.feed_eof(), len(text))
    except UnexpectedCharacters as e:
        at = int(e.pos_in_stream or 0)
        raise BadSelector(f"{text[at : at + 10]!r} can't be read", at) from None
    except UnexpectedToken:
        raise BadSelector("the expression ends too early", len(text)) from None


_compiled: Final[TextCache[str, Selector]] = TextCache(_CACHED_CHARACTERS)


def _selector(text: str, node: Node, end: int) -> Selector:
    return Selector(text, build.as_boolean(node), text[end:])


@cache
def _parser() -> Lark:
    import lark

    return lark.Lark(
        _GRAMMAR,
        parser="lalr",
        lexer="basic",  # the same words everywhere, whether they can be understood there or not
        g_regex_flags=re.IGNORECASE | re.ASCII,
        maybe_placeholders=False,
        transformer=SimpleNamespace(**{rule: partial(_spread, action) for rule, action in _ACTIONS.items()}),
    )


def _spread(action: Callable[..., Any], parts: list[Any]) -> Any:
    return action(*parts)


def _at(token: Token) -> int:
    return token.start_pos or 0


def _text_test(node: Node, word: Token, search: Token, *, inverted: bool = False) -> Node:
    return build.text_test(node, _TEXT_TESTS[word.upper()], build.string(search), inverted=inverted)


# What a rule of the grammar means. It is given the nodes and the tokens with a name, in the order of the text.
_ACTIONS: Final[dict[str, Callable[..., Any]]] = {
    "any_of": lambda left, _, right: build.any_of(left, right),
    "all_of": lambda left, _, right: build.all_of(left, right),
    "equal": build.equal,
    "not_equal": lambda left, right: build.invert(build.equal(left, right), left.at),
    "is_null": lambda node, *_: build.is_null(node),
    "is_not_null": lambda node, *_: build.invert(build.is_null(node), node.at),
    "relation": lambda left, sign, right: build.relation(left, str(sign), right),
    "text_test": _text_test,
    "not_text_test": lambda node, _, word, search: _text_test(node, word, search, inverted=True),
    "between": lambda node, _, low, _and, high: build.between(node, low, high),
    "not_between": lambda node, _not, _, low, _and, high: build.not_between(node, low, high),
    "one_of": lambda node, _, choices: build.one_of(node, choices, inverted=False),
    "not_one_of": lambda node, _not, _, choices: build.one_of(node, choices, inverted=True),
    "strings": lambda *literals: [build.string(each) for each in literals],
    "plus": lambda node: node,
    "negate": lambda sign, node: build.negate(node, _at(sign)),
    "invert": lambda word, node: build.invert(node, _at(word)),
    "string": lambda literal: build.constant(build.string(literal), _at(literal)),
    "whole": lambda literal: build.whole_number(literal, _at(literal)),
    "floating": lambda literal: build.floating_number(literal, _at(literal)),
    "true": lambda literal: build.constant(True, _at(literal)),
    "false": lambda literal: build.constant(False, _at(literal)),
    "null": lambda literal: build.constant(None, _at(literal)),
    "variable": lambda name: build.variable(str(name), _at(name)),
}
