"""`Appended`: the store's answer to an append."""

from __future__ import annotations

from skylark.wire.message import message_ids


class Appended:
    """Where messages were stored: side by side in the log and in their queue."""

    __slots__ = ("log_offsets", "queue_offset", "size_bytes", "store_host", "store_timestamp_ms")

    def __init__(
        self, log_offsets: list[int], size_bytes: int, queue_offset: int, store_timestamp_ms: int, store_host: bytes
    ) -> None:
        self.log_offsets = log_offsets
        self.size_bytes = size_bytes  # of all of them
        self.queue_offset = queue_offset  # of the first
        self.store_timestamp_ms = store_timestamp_ms
        self.store_host = store_host

    @property
    def log_offset(self) -> int:
        """Of the first."""
        return self.log_offsets[0]

    @property
    def message_id(self) -> str:
        """That of the message, or those of all, with commas between them."""
        return message_ids(self.store_host, self.log_offsets)

    @property
    def log_end_offset(self) -> int:
        """What `Store.when_flushed` takes."""
        return self.log_offsets[0] + self.size_bytes
