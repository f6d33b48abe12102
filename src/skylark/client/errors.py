"""What can go wrong in the client: one small family, all of them `RocketMQError`.

`InvalidMessage` is also a ValueError, `RequestTimeout` a TimeoutError and `NotReachable` a ConnectionError: code which
knows nothing of RocketMQ can still tell a mistake of its own from a network that is down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skylark.client.message import Receipt


class RocketMQError(Exception):
    """The base of every error that the client raises."""


class InvalidMessage(RocketMQError, ValueError):
    """The message, or a name in the call, is not one that a broker takes; nothing was sent."""


class UnreadableMessage(RocketMQError, ValueError):
    """A message whose body can't be inflated: damaged, larger than the limit, or of a codec that is not installed."""


class BrokerError(RocketMQError):
    """A server answered that it did not do what was asked, with a response code and a remark."""

    def __init__(self, code: int, remark: str | None, broker: str) -> None:
        super().__init__(f"{broker} answered with code {code}: {remark or 'no remark'}")
        self.code = code
        self.remark = remark or ""
        self.broker = broker

    def __reduce__(self) -> tuple[type[BrokerError], tuple[int, str, str]]:
        return type(self), (self.code, self.remark, self.broker)


class RouteNotFound(RocketMQError):
    """The name servers know no broker that serves the topic."""


class MessageNotFound(RocketMQError, LookupError):
    """No message is where it was looked for."""


class NotANameServer(RocketMQError):
    """What answers at the address of a name server is another server."""


class RequestTimeout(RocketMQError, TimeoutError):
    """No answer in time. What was asked may still have happened."""


class NotReachable(RocketMQError, ConnectionError):
    """No connection to the server, or it broke before the answer came."""


class BatchInterrupted(RocketMQError):
    """A batch took several requests, and not all of them went well. `receipts` has the messages that are stored."""

    def __init__(self, receipts: list[Receipt], total: int, cause: RocketMQError) -> None:
        super().__init__(f"{len(receipts)} of {total} messages are stored, then: {cause}")
        self.receipts = receipts
        self.total = total


class ClientClosed(RocketMQError):
    """The producer, consumer or session was closed, or not started yet."""


class ForkedProcess(RocketMQError):
    """A client that was started in a parent process is used in its child, where its connections can't work."""
