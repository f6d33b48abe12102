"""What can go wrong in the client: one small family, all of them `RocketMQError`.

`InvalidMessage` is also a ValueError, `RequestTimeout` a TimeoutError and `NotReachable` a ConnectionError: code which
knows nothing of RocketMQ can still tell a mistake of its own from a network that is down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skylark.wire.codes import ResponseCode

if TYPE_CHECKING:
    from skylark.client.message import Receipt


_HINTS: Final[dict[int, str]] = {
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: (
        "the broker knows no such group and makes none by itself: create it, as with mqadmin updateSubGroup, or set "
        "autoCreateSubscriptionGroup=true at the broker"
    ),
}


class RocketMQError(Exception):
    """The base of every error that the client raises."""


class InvalidMessage(RocketMQError, ValueError):
    """A message, a name or an option is not one that is taken; nothing was sent."""


class UnreadableMessage(RocketMQError, ValueError):
    """A message whose body can't be inflated: damaged, larger than the limit, or of a codec that is not installed."""


class MissingCodec(UnreadableMessage):
    """A message is whole, and what would inflate its body is not installed here: the text says what to install."""


class BrokerError(RocketMQError):
    """A server answered that it did not do what was asked, with a response code and a remark.

    The text also has a `hint` where the cause is known and the remark does not say what to do.
    """

    def __init__(self, code: int, remark: str | None, broker: str, hint: str = "") -> None:
        hint = hint or _HINTS.get(code, "")
        super().__init__(f"{broker} answered with code {code}: {remark or 'no remark'}{hint and f' ({hint})'}")
        self.code = code
        self.remark = remark or ""
        self.broker = broker
        self.hint = hint

    def __reduce__(self) -> tuple[type[BrokerError], tuple[int, str, str, str]]:
        return type(self), (self.code, self.remark, self.broker, self.hint)


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


class SendsFailed(RocketMQError):
    """Messages of `send_soon` failed that nobody asks about: `count` of them, `first` is the error of the first."""

    def __init__(self, count: int, first: BaseException) -> None:
        super().__init__(f"{count} of the messages failed; the first: {first}")
        self.count = count
        self.first = first


class OtherEventLoop(RocketMQError, RuntimeError):
    """A client is used on another event loop than the one that started it, where its connections can't work."""


class ClientClosed(RocketMQError):
    """The producer, consumer or session was closed, or not started yet."""


class CallbackFailed(RocketMQError):
    """A function of yours that the client calls raised what is no Exception, or returned what it must not return."""


class ForkedProcess(RocketMQError):
    """A client that was started in a parent process is used in its child, where its connections can't work."""
