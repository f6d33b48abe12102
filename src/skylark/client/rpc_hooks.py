"""Hooks around every request of a session, as Apache's RPCHook: to sign it, to count it, to write it down.

    class Signing(RpcHook):
        def before_request(self, address: str, request: Frame) -> None:
            request.fields["AccessKey"] = "…"

    session = Session("localhost:9876", rpc_hooks=[Signing()])
    producer = Producer(session=session)

They see what goes to name servers and brokers: sends, pulls, heartbeats, commits. They are called on the event loop and
must not block. What one of them raises is logged, and the request goes on as if that one had not been called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from skylark.client.calling import call
from skylark.client.errors import CallbackFailed
from skylark.net.connection import Connection, Settle
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)


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
        for hook in self._hooks:
            given = request.fields
            request.fields = dict(given)  # a request may share them with others
            if not _went_well(hook, "before", hook.before_request, repr(connection), request):
                request.fields = given

    def after(self, request: Frame, settle: Settle, connection: Connection) -> Settle:
        def answered(answer: Frame | ConnectionError) -> None:
            if isinstance(answer, Frame):
                for hook in self._hooks:
                    _went_well(hook, "after", hook.after_response, repr(connection), request, answer)
            settle(answer)

        return answered


def _went_well(hook: RpcHook, when: str, method: Callable[..., None], address: str, request: Frame, *more: Any) -> bool:
    try:
        call(method, address, request, *more)
        wrong = [item for item in request.fields.items() if not all(isinstance(each, str) for each in item)]
        if wrong:
            raise CallbackFailed(f"it set the field {wrong[0]!r}; both must be a str")
    except Exception:
        log.exception("%r failed %s a request", hook, when)
        return False
    return True
