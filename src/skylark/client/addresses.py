"""The name servers of a client: their addresses, who else may know them, and whether it is one that answers.

Apache's client asks in this order, and so does this one: what it was given; `NAMESRV_ADDR` in the environment; an
address server, whose HTTP answer is a line of addresses. Apache's names that server with the properties
`rocketmq.namesrv.domain` and `rocketmq.namesrv.domain.subgroup`; here they are variables of the environment, or the URL
is given in place of the addresses. Without any of these it is localhost:9876.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from skylark.client.errors import InvalidMessage, NotANameServer, NotReachable
from skylark.net.addresses import parse_name_servers
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame

__all__ = ["AddressServer", "NameServers", "locate", "of_name_server", "parse_name_servers"]

NameServers = str | Sequence[str] | None
"""`host:port`, several joined by `;` or as a sequence, or the URL of an address server. None leaves it to the
environment."""

VARIABLE: Final = "NAMESRV_ADDR"
DOMAIN_VARIABLE: Final = "ROCKETMQ_NAMESRV_DOMAIN"
SUBGROUP_VARIABLE: Final = "ROCKETMQ_NAMESRV_DOMAIN_SUBGROUP"
DEFAULT: Final = "localhost:9876"
LOOK_UP_INTERVAL_S: Final = 120.0
_SCHEMES: Final = ("http://", "https://")
_MAX_ANSWER_BYTES: Final = 64 * 1024


class AddressServer:
    """Who tells the addresses of the name servers, over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    @classmethod
    def of_domain(cls, domain: str, subgroup: str = "nsaddr", unit: str | None = None) -> AddressServer:
        """The URL that Apache's client makes of its properties.

        >>> AddressServer.of_domain("jmenv.tbsite.net", unit="eu").url
        'http://jmenv.tbsite.net:8080/rocketmq/nsaddr-eu?nofix=1'
        """
        host = domain if ":" in domain else f"{domain}:8080"
        return cls(f"http://{host}/rocketmq/{subgroup}" + (f"-{unit}?nofix=1" if unit else ""))

    async def ask(self, timeout_s: float) -> list[str]:
        """The addresses. Raises NotReachable."""
        try:
            async with asyncio.timeout(timeout_s):
                text = await asyncio.to_thread(_first_line, self.url, timeout_s)
            return parse_name_servers(text)
        except TimeoutError:
            raise NotReachable(f"address server {self.url} does not answer within {timeout_s:.3g} s") from None
        except OSError as e:
            raise NotReachable(f"address server {self.url} can't be asked: {e}") from e
        except ValueError as e:
            raise NotReachable(f"address server {self.url} does not tell name servers: {e}") from e


def locate(
    name_servers: NameServers, unit: str | None = None, environment: Mapping[str, str] | None = None
) -> tuple[list[str], AddressServer | None]:
    """The addresses, or who is to be asked for them. Raises InvalidMessage."""
    environment = os.environ if environment is None else environment
    if name_servers is None:
        name_servers = environment.get(VARIABLE, "").strip() or None
    if name_servers is None:
        if domain := environment.get(DOMAIN_VARIABLE, "").strip():
            return [], AddressServer.of_domain(domain, environment.get(SUBGROUP_VARIABLE) or "nsaddr", unit)
        name_servers = DEFAULT
    if isinstance(name_servers, str):
        url = name_servers.strip()
        if url.startswith(_SCHEMES) and urlsplit(url).path.strip("/"):
            return [], AddressServer(url)
    elif not isinstance(name_servers, Sequence) or not all(isinstance(each, str) for each in name_servers):
        raise InvalidMessage(f"name_servers is {name_servers!r}; it takes 'host:port', several of them, or a URL")
    try:
        return parse_name_servers(name_servers), None
    except ValueError as error:
        raise InvalidMessage(str(error)) from None


def of_name_server(answer: Frame, address: str) -> Frame:
    """The answer, whatever its code. Raises NotANameServer if only a broker would answer so.

    A broker's address in place of a name server's is the usual mistake, and a broker does not know the request.
    """
    if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
        raise NotANameServer(
            f"{address} is a broker, not a name server; give the name server's address (port 9876 by default)"
        )
    return answer


def _first_line(url: str, timeout_s: float) -> str:
    import urllib.request  # which costs as much as all the rest of the client
    from http.client import HTTPException

    # As Apache's client, directly: the proxies of the environment are for the world outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            lines = answer.read(_MAX_ANSWER_BYTES).decode("utf-8", "replace").split()
    except HTTPException as e:
        raise OSError(f"{type(e).__name__}: {e}") from e
    return lines[0] if lines else ""
