"""The two ports of a broker: its own, which it registers, and the VIP port two below.

A Java client can be told to send through the VIP port (`vipChannelEnabled`, `sendMessageWithVIPChannel`; old ones do so
unless told otherwise), and knows it from the other one only. At Apache's broker sends don't wait behind pulls there.
Here nothing waits behind anything, and both ports serve all requests.

A broker does without its VIP port when another program has it: most clients never ask for it.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

from skylark.net.server import Server, bind

log = logging.getLogger(__name__)

_VIP_DISTANCE: Final = 2
_PAIRS_TRIED: Final = 16


def bind_both(host: str, port: int) -> tuple[socket.socket, socket.socket | None]:
    """The bound sockets of a broker's port and of its VIP port; port 0 takes two that are free. Raises OSError."""
    if port:
        bound = bind(host, port)
        return bound, _bind_vip(host, port, unshared=False, say_why=True)
    taken: list[socket.socket] = []
    try:
        for _ in range(_PAIRS_TRIED):
            # Those that have no free port two below stay bound meanwhile, so that the system gives another one.
            taken.append(bind(host, 0))
            # Unshared, since the port two below may be another broker's, which reads its store before it listens.
            vip = _bind_vip(host, _port_of(taken[-1]), unshared=True, say_why=len(taken) == _PAIRS_TRIED)
            if vip is not None:
                break
        return taken.pop(), vip
    finally:
        for each in taken:
            each.close()


async def listen_on_vip(server: Server, vip: socket.socket) -> None:
    """Serves on the VIP port too, unless another program listens there by now."""
    try:
        await server.also_listen(vip)
    except OSError as e:
        _tell(_port_of(vip), e)
        vip.close()


def _bind_vip(host: str, port: int, *, unshared: bool, say_why: bool) -> socket.socket | None:
    vip_port = port - _VIP_DISTANCE
    try:
        if vip_port > 0:
            return bind(host, vip_port, unshared=unshared)
        raise OSError("ports begin at 1")
    except OSError as e:
        if say_why:
            _tell(vip_port, e)
        return None


def _tell(vip_port: int, error: OSError) -> None:
    reason = os.strerror(error.errno) if error.errno else str(error)
    log.warning(
        "the VIP port %d, two below listenPort, is not served: %s; clients that send through it (vipChannelEnabled or "
        "sendMessageWithVIPChannel is true) don't reach this broker: free that port, choose another listenPort, or "
        "switch that off in the clients",
        vip_port, reason,
    )  # fmt: skip


def _port_of(bound: socket.socket) -> int:
    port: int = bound.getsockname()[1]
    return port
