"""Hooks around every request of a session, as Apache's RPCHook: to sign it, to count it, to write it down.

    class Signing(RpcHook):
        def before_request(self, address: str, request: Frame) -> None:
            request.fields["AccessKey"] = "…"

    session = Session("localhost:9876", rpc_hooks=[Signing()])
    producer = Producer(session=session)

They see what goes to name servers and brokers: sends, pulls, heartbeats, commits. They are called on the event loop and
must not block. What one of them raises is logged, and the request goes on without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from skylark.net.connection import Connection, Settle
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)

# What is no Exception would end the connection, or the loop, in which a hook is called.
_ANYTHING: Final = (Exception, asyncio.CancelledError, SystemExit, GeneratorExit)


class RpcHook:
    """Called around every request. Either method may be left out."""

    def before_request(self, address: str, request: Frame) -> None:
        """Just before a request leaves for the server at that address. It may change `request.fields`."""

    def after_response(self, address: str, request: Frame, response: Frame) -> None:
        """When the response is there, whatever its code. A one-way request has none, nor has one that timed out."""


class RpcHooks:
    """The hooks of a session, as its connections call them."""

    def __init__(self, hooks: Sequence[RpcHook]) -> None:
        self._hooks = hooks

    def before(self, request: Frame, connection: Connection) -> None:
        request.fields = dict(request.fields)  # a request may share them with others
        for hook in self._hooks:
            try:
                hook.before_request(repr(connection), request)
            except _ANYTHING:
                log.exception("%r failed before a request", hook)

    def after(self, request: Frame, settle: Settle, connection: Connection) -> Settle:
        def answered(answer: Frame | ConnectionError) -> None:
            if isinstance(answer, Frame):
                for hook in self._hooks:
                    try:
                        hook.after_response(repr(connection), request, answer)
                    except _ANYTHING:
                        log.exception("%r failed after a request", hook)
            settle(answer)

        return answered
