"""What a consumer can't do at the moment: said when it begins, when it is over, and to whoever asks meanwhile."""

from __future__ import annotations

import logging


class _Failing:
    """Something that fails at the moment, and in which of its parts: a broker that is away fails in all its queues."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.parts: set[str] = set()


class Failures:
    """What fails, by name."""

    def __init__(self, group: str, log: logging.Logger) -> None:
        self._group = group
        self._log = log
        self._failing: dict[str, _Failing] = {}

    def texts(self) -> list[str]:
        """What fails now, a sentence each."""
        return [failing.text for failing in self._failing.values()]

    def part_count(self) -> int:
        """In how many parts something fails."""
        return sum(len(failing.parts) for failing in self._failing.values())

    def note(self, what: str, text: str, part: str = "", error: BaseException | None = None) -> None:
        """Logs a failure when it begins, not each time, and once for all its parts; a defect with its traceback."""
        failing = self._failing.get(what)
        if failing is None:
            failing = self._failing[what] = _Failing(text)
            self._log.warning("%s", text, exc_info=error)
        failing.parts.add(part)

    def works(self, what: str, part: str = "") -> None:
        """It works, perhaps again."""
        failing = self._failing.get(what)
        if failing is None:
            return
        failing.parts.discard(part)
        if not failing.parts:
            del self._failing[what]
            self._log.info("group %s: %s works again", self._group, what)
