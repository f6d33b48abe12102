"""A cache of what texts mean, bounded by their length: a few long ones take as much memory as many short ones."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TextCache(Generic[K, V]):
    """What came first goes first. What is too long for a part of the cache is not kept at all."""

    def __init__(self, most_characters: int) -> None:
        self._most_characters = most_characters
        self._known: dict[K, tuple[int, V]] = {}
        self.characters = 0

    def get(self, key: K) -> V | None:
        known = self._known.get(key)
        return None if known is None else known[1]

    def put(self, key: K, characters: int, value: V) -> None:
        """`characters` is the length of the text."""
        characters += _LEAST
        if characters > self._most_characters // 4 or key in self._known:
            return
        self._known[key] = characters, value
        self.characters += characters
        while self.characters > self._most_characters:
            self.characters -= self._known.pop(next(iter(self._known)))[0]


_LEAST = 64
