"""The addresses of servers, as users write them. This is the one place that reads those of name servers."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from typing import Final

from skylark.net.pool import split_address

_SCHEME: Final = "http://"


def parse_name_servers(name_servers: str | Sequence[str]) -> list[str]:
    """Addresses from `host:port;host:port` or a sequence; commas and blanks separate as well. Raises ValueError.

    >>> parse_name_servers("a:9876; http://b:9876/;")
    ['a:9876', 'b:9876']
    """
    items = re.split(r"[;,\s]+", name_servers) if isinstance(name_servers, str) else map(str.strip, name_servers)
    addresses = [_bare(item) for item in items if item]
    if not addresses:
        raise ValueError("no name server is given; it takes host:port, or several joined by ';'")
    return addresses


def unknown_host(host: str, error: Exception) -> socket.gaierror:
    """The error that also says which host it is that is unknown; Python has others for what can't be a name at all."""
    reason = error.strerror if isinstance(error, socket.gaierror) else "this is no name of a host"
    return socket.gaierror(socket.EAI_NONAME, f"{host!r}: {reason}")


def _bare(item: str) -> str:
    if not item.startswith(_SCHEME):
        split_address(item)
        return item
    address = item.removeprefix(_SCHEME).removesuffix("/")
    try:
        split_address(address)
    except ValueError as error:
        raise ValueError(f"{item!r}: {error}") from None
    return address
