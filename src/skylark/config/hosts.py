"""The host in a setting or an option: a name or an address. A port has a setting of its own.

An address with a port in it would travel through the name server, and no client could reach it.
"""

import re
from typing import Annotated, Final

from msgspec import Meta

# A colon by itself is before a port; an IPv6 address has two or more.
_PATTERN: Final = r"^(?:[^\s:/]*|[^\s/\[\]]*:[^\s/\[\]]*:[^\s/\[\]]*)$"
A_HOST: Final = "a host name or an address, without a port"

Host = Annotated[str, Meta(pattern=_PATTERN, description=A_HOST)]


def is_host(text: str) -> bool:
    """
    >>> [is_host(text) for text in ("10.0.0.1", "::1", "10.0.0.1:10911", "http://a")]
    [True, True, False, False]
    """
    return re.match(_PATTERN, text) is not None
