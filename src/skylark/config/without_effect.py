"""Apache's settings that make no difference here, and that an operator may set all the same while a server runs.

Scripts that tune Apache's servers set them, and should go on working. What is set is shown with the other settings and
goes into the server's file, where Apache's server finds it one day: so only switches and numbers are taken, and no key
that names a place or a party. Nobody can plant a path, an address or the name of a class in that file.
"""

import re
from collections.abc import Collection, Mapping

from skylark.config.properties import ConfigError

_VALUE = re.compile(r"true|false|-?\d{1,19}(?:\.\d{1,19})?", re.ASCII | re.IGNORECASE)
_NO_TUNING = re.compile(r"Path|Addr|Port|IP\d|Home|Name$|Id$|TLS")


def harmless(apache_keys: Collection[str]) -> frozenset[str]:
    """Those of Apache's keys that may be set for nothing, if no field has them."""
    return frozenset(key for key in apache_keys if not _NO_TUNING.search(key))


def remark_on(keys: Collection[str]) -> str | None:
    """What whoever set these is told."""
    return f"without effect in Skylark: {', '.join(keys)}" if keys else None


class WithoutEffect:
    """The settings that were made for nothing."""

    def __init__(self, keys: Collection[str]) -> None:
        self.keys = keys
        self._values: dict[str, str] = {}

    def check(self, wanted: Mapping[str, str]) -> None:
        """Raises ConfigError for a value that is neither a switch nor a number."""
        for key, value in wanted.items():
            if _VALUE.fullmatch(value) is None:
                raise ConfigError(f"{key}={value[:100]!r} is not allowed: expected true, false or a number")

    def set(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Keeps what was checked; gives what is another value than before."""
        changed = {key: value for key, value in wanted.items() if self._values.get(key) != value}
        self._values |= changed
        return changed

    def render(self) -> str:
        return "".join(f"{key}={value}\n" for key, value in self._values.items())
