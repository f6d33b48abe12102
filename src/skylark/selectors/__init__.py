"""SQL92 expressions over the properties of a message, with the grammar and the rules of Apache RocketMQ.

    selector = compile_selector("price > 10 AND region IN ('eu', 'us')")
    selector.matches({"price": "12", "region": "eu"})

An expression is compiled once, to `nodes` that are evaluated over the properties where they are stored; in one walk
over its parts. Its length and nesting are bounded, so neither takes long. What the rules are, and where they may
surprise, is told in `expressions` (operators and nulls) and `values` (types and conversions).
"""

from __future__ import annotations

from skylark.selectors.expressions import BadSelector
from skylark.selectors.parser import MAX_LENGTH, Selector, compile_selector
from skylark.selectors.values import EvaluationError

__all__ = ["MAX_LENGTH", "BadSelector", "EvaluationError", "Selector", "compile_selector"]
