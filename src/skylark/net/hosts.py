"""What counts as one host, wherever hosts share something: its address, or in IPv6 the network that it has for itself.

A host of IPv6 can have any of 2^64 addresses, and would otherwise count as that many.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address


@lru_cache(maxsize=4096)
def packed_host(address: str) -> bytes:
    """Stands for the host of a peer with that address."""
    packed = ip_address(address.partition("%")[0]).packed
    return packed if len(packed) == 4 else packed[:8]


def host_key(address: str) -> str:
    """The same as a text; what is no address of IPv6 stands for itself.

    >>> host_key("2001:db8::1:2") == host_key("2001:db8::9"), host_key("10.0.0.1")
    (True, '10.0.0.1')
    """
    return packed_host(address).hex(":") if ":" in address else address
