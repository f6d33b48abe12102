"""The name servers of a client: their addresses, and whether it is one that answers."""

from __future__ import annotations

from skylark.client.errors import NotANameServer
from skylark.net.addresses import parse_name_servers
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame

__all__ = ["of_name_server", "parse_name_servers"]


def of_name_server(answer: Frame, address: str) -> Frame:
    """The answer, whatever its code. Raises NotANameServer if only a broker would answer so.

    A broker's address in place of a name server's is the usual mistake, and a broker does not know the request.
    """
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise NotANameServer(
            f"{address} is a broker, not a name server; give the name server's address (port 9876 by default)"
        )
    return answer
