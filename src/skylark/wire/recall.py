"""The handle by which a producer recalls a timer: `v1 TOPIC BROKER TIME KEY` in URL-safe base64.

TIME is a millisecond after the moment of the timer's slot, and KEY the unique key of the message.
"""

from __future__ import annotations

import base64
import binascii

import msgspec

_VERSION = "v1"
_PARTS = 5


class BadHandle(ValueError):
    """The text is no recall handle."""


class Recall(msgspec.Struct, rename="camel"):
    """The header of RECALL_MESSAGE."""

    topic: str
    recall_handle: str
    producer_group: str | None = None


class RecallHandle(msgspec.Struct, frozen=True):
    """What a handle says.

    >>> handle = RecallHandle("orders", "broker-a", "1700000000001", "AB12")
    >>> handle.encode()
    'djEgb3JkZXJzIGJyb2tlci1hIDE3MDAwMDAwMDAwMDEgQUIxMg=='
    >>> RecallHandle.decode(handle.encode()) == handle
    True
    """

    topic: str
    broker: str
    time: str  # as it is written: whoever recalls does not make it up
    unique_key: str

    def encode(self) -> str:
        text = " ".join((_VERSION, self.topic, self.broker, self.time, self.unique_key))
        return base64.urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def decode(cls, handle: str) -> RecallHandle:
        """Raises BadHandle."""
        try:
            # Java's decoder takes a handle whose padding was lost on the way.
            data = base64.b64decode(handle.rstrip("=") + "=" * (-len(handle.rstrip("=")) % 4), b"-_", validate=True)
            parts = data.decode("utf-8", "replace").split(" ")
        except (binascii.Error, ValueError) as error:
            raise BadHandle("recall handle is invalid") from error
        if parts[0] != _VERSION or len(parts) < _PARTS:
            raise BadHandle("recall handle is invalid")
        return cls(*parts[1:_PARTS])
