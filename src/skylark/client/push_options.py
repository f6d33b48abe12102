"""What a push consumer may be told: its options with Apache's ranges, and the shape of its listener."""

from __future__ import annotations

from typing import Final

from skylark.client.errors import InvalidMessage
from skylark.client.listening import Listener
from skylark.client.membership import Options
from skylark.client.options import (
    LEAST_S,
    check_callback,
    check_count,
    check_directory,
    check_flag,
    check_hooks,
    check_plain_callback,
    check_seconds,
)
from skylark.client.popping import MAX_INVISIBLE_S, MIN_INVISIBLE_S
from skylark.client.pulling import check_limits

MAX_BATCH: Final = 1024
MAX_CONCURRENCY: Final = 1000
_MAX_PULL_INTERVAL_S: Final = 65.535


def check_push_options(options: Options) -> None:
    """Raises InvalidMessage for the first that can't be meant."""
    check_flag("orderly", options.is_orderly)
    check_flag("auto_commit", options.auto_commit)
    check_count("concurrency", options.concurrency, 1, MAX_CONCURRENCY)
    check_count("pull_batch_size", options.pull_batch_size, 1, MAX_BATCH)
    check_count("batch_size", 1 if options.batch_size is None else options.batch_size, 1, MAX_BATCH)
    check_seconds("consume_timeout_s", options.consume_timeout_s, LEAST_S)
    check_seconds("suspend_s", options.suspend_s)
    check_seconds("pull_interval_s", options.pull_interval_s, 0, _MAX_PULL_INTERVAL_S)
    check_seconds("commit_interval_s", options.commit_interval_s, LEAST_S)
    check_seconds("rebalance_interval_s", options.rebalance_interval_s, LEAST_S)
    check_seconds("shutdown_timeout_s", options.shutdown_timeout_s)
    check_seconds("invisible_s", options.invisible_s, MIN_INVISIBLE_S, MAX_INVISIBLE_S)
    check_limits(options.limits)
    check_plain_callback("strategy", options.strategy, "client", "queues", "members")
    check_hooks("hooks", options.hooks, "before", "after")
    if options.queues_changed is not None:
        check_plain_callback("queues_changed", options.queues_changed, "topic", "queues")
    check_directory("offsets_directory", options.offsets_directory)
    if not options.auto_commit and not (options.is_orderly and options.mode == "pull"):
        raise InvalidMessage("auto_commit can be off for orderly consumers that pull; give orderly=True")
    if options.mode != "pull" and options.is_broadcasting:
        raise InvalidMessage(f"a broadcasting consumer pulls by itself; its mode can't be {options.mode!r}")


def check_listener(listener: Listener, *, takes_batches: bool) -> None:
    """A listener that does not take what it will be given is refused now, and not with the first message."""
    check_callback("the listener", listener, "messages" if takes_batches else "message")
