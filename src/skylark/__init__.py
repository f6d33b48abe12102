"""Skylark: Apache RocketMQ's messaging system in Python. These are the names of its client.

    from skylark import Producer

    async with Producer("localhost:9876", group="orders") as producer:
        receipt = await producer.send("orders", b"hello", tag="new", key="42")

`skylark.sync` has the same without asyncio. A name is imported when it is first used, so that `import skylark` costs
nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING

# A process that began with the sources goes on with them, also when compiled modules appear beside them. What these
# share appears last: see tools/compile.py.
_COMPILED = f"{os.path.dirname(os.path.dirname(__file__))}/skylark__mypyc{EXTENSION_SUFFIXES[0]}"  # noqa: PTH120
if os.environ.get("SKYLARK_PURE") or not os.path.exists(_COMPILED):  # noqa: PTH110 (pathlib costs 5 ms to import)
    from skylark import pure as pure

if TYPE_CHECKING:
    from skylark.client import sync as sync
    from skylark.client.admin import AdminClient as AdminClient
    from skylark.client.app import App as App
    from skylark.client.compression import Codec as Codec
    from skylark.client.errors import BatchInterrupted as BatchInterrupted
    from skylark.client.errors import BrokerError as BrokerError
    from skylark.client.errors import CallbackFailed as CallbackFailed
    from skylark.client.errors import ClientClosed as ClientClosed
    from skylark.client.errors import ForkedProcess as ForkedProcess
    from skylark.client.errors import InvalidMessage as InvalidMessage
    from skylark.client.errors import MessageNotFound as MessageNotFound
    from skylark.client.errors import NotReachable as NotReachable
    from skylark.client.errors import OtherEventLoop as OtherEventLoop
    from skylark.client.errors import RequestTimeout as RequestTimeout
    from skylark.client.errors import RocketMQError as RocketMQError
    from skylark.client.errors import RouteNotFound as RouteNotFound
    from skylark.client.errors import SendsFailed as SendsFailed
    from skylark.client.errors import UnreadableMessage as UnreadableMessage
    from skylark.client.listening import Acked as Acked
    from skylark.client.listening import Commit as Commit
    from skylark.client.listening import ConsumeContext as ConsumeContext
    from skylark.client.listening import ConsumeHook as ConsumeHook
    from skylark.client.listening import ConsumeResult as ConsumeResult
    from skylark.client.listening import ConsumeStatus as ConsumeStatus
    from skylark.client.listening import RetryLater as RetryLater
    from skylark.client.listening import RollBack as RollBack
    from skylark.client.listening import Suspend as Suspend
    from skylark.client.lite_pull_consumer import LitePullConsumer as LitePullConsumer
    from skylark.client.message import Message as Message
    from skylark.client.message import MessageQueue as MessageQueue
    from skylark.client.message import OutgoingMessage as OutgoingMessage
    from skylark.client.message import Receipt as Receipt
    from skylark.client.message import SendStatus as SendStatus
    from skylark.client.producer import Producer as Producer
    from skylark.client.pull_consumer import PullConsumer as PullConsumer
    from skylark.client.push_consumer import PushConsumer as PushConsumer
    from skylark.client.query import QueryClient as QueryClient
    from skylark.client.rpc_hooks import RpcHook as RpcHook
    from skylark.client.sending import SendContext as SendContext
    from skylark.client.sending import SendHook as SendHook
    from skylark.client.session import Session as Session
    from skylark.client.simple_consumer import SimpleConsumer as SimpleConsumer
    from skylark.client.traces import TraceEvent as TraceEvent
    from skylark.client.transactions import HalfMessage as HalfMessage
    from skylark.client.transactions import Transaction as Transaction
    from skylark.client.transactions import TransactionProducer as TransactionProducer
else:
    _NAMES = {
        "admin": "AdminClient",
        "app": "App",
        "compression": "Codec",
        "errors": (
            "BatchInterrupted BrokerError CallbackFailed ClientClosed ForkedProcess InvalidMessage MessageNotFound "
            "NotReachable OtherEventLoop RequestTimeout RocketMQError RouteNotFound SendsFailed UnreadableMessage"
        ),
        "listening": "Acked Commit ConsumeContext ConsumeHook ConsumeResult ConsumeStatus RetryLater RollBack Suspend",
        "lite_pull_consumer": "LitePullConsumer",
        "message": "Message MessageQueue OutgoingMessage Receipt SendStatus",
        "producer": "Producer",
        "pull_consumer": "PullConsumer",
        "push_consumer": "PushConsumer",
        "query": "QueryClient",
        "rpc_hooks": "RpcHook",
        "sending": "SendContext SendHook",
        "session": "Session",
        "transactions": "HalfMessage Transaction TransactionProducer",
        "simple_consumer": "SimpleConsumer",
        "traces": "TraceEvent",
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

    __all__ = ["sync", *sorted(_MODULES)]

    def __getattr__(name):
        if name == "sync":
            value = import_module("skylark.client.sync")
        elif name in _MODULES:
            value = getattr(import_module(f"skylark.client.{_MODULES[name]}"), name)
        else:
            raise AttributeError(f"module 'skylark' has no attribute {name!r}")
        globals()[name] = value  # asked for once only
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
