"""Check-back: transactions that nobody ended are asked for at a producer of their group (CHECK_TRANSACTION_STATE).

Every `transactionCheckInterval` a pass goes over the halves from where the last one stopped, in the order of their
arrival, up to the first that is too young to ask for. What has ended is passed over without being read. For the others:

- asked for `transactionCheckMax` times, or older than the log is kept: moved to TRANS_CHECK_MAX_TIME_TOPIC
- still immune, by its own CHECK_IMMUNITY_TIME_IN_SECONDS: stored again at the end of the queue, to be looked at later,
  unless it was born more than an hour after now
- else stored again, counted, and asked for; whether a producer is there to answer or not, as at Apache

Groups that nobody is there to answer for are told of once, after the pass in which that was first seen.

One that has no room for what a copy says is moved like the first kind and asked for this once. A record that can't be
read is passed over.

So a pass costs what is undecided, not what there is. Apache also counts the copies of immune halves as questions, and
discards those that are immune for long without ever asking; here only questions count.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Final

from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig
from skylark.broker.following import UNREADABLE, pass_over
from skylark.broker.halves import QUEUE, Fate, Halves, store_again
from skylark.broker.put import Put
from skylark.broker.topics import HALF_TOPIC, TRANSACTION_CHECK_TOPIC, Topics
from skylark.net.connection import RequestFailed
from skylark.store import Appended, Store
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Frame
from skylark.wire.headers import CheckTransactionState
from skylark.wire.message import (
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    Message,
    StoredMessage,
)
from skylark.wire.numbers import java_count
from skylark.wire.records import encode_record
from skylark.wire.tables import PERM_READ, PERM_WRITE
from skylark.wire.typed import encode_header

log = logging.getLogger(__name__)

_MOST_A_TURN: Final = 100
_MOST_BYTES_A_TURN: Final = 1 << 20
_MOST_GROUPS_COUNTED: Final = 1_000
_MOST_GROUPS_TOLD: Final = 10
_HOUR_MS: Final = 3_600_000


class CheckBack:
    """Asks producers what became of their transactions."""

    def __init__(
        self,
        halves: Halves,
        store: Store,
        put: Put,
        topics: Topics,
        clients: Clients,
        config: BrokerConfig,
        now_ms: int,
    ) -> None:
        self._halves = halves
        self._store = store
        self._put = put
        self._topics = topics
        self._clients = clients
        self._config = config
        self._last_ms = now_ms
        self._until: int | None = None  # the end of the pass that is under way
        self._turns = itertools.count()
        self._unasked: Counter[str] = Counter()  # transactions of this pass, by group, that nobody could be asked for
        self._told: set[str] = set()  # the groups that this was said of
        halves.renew_doubtful(now_ms)

    def run(self, now_ms: int) -> float:
        """Does what is due, a bounded part of it; after how many seconds it wants to be called again."""
        interval_ms = self._config.transaction_check_interval
        if self._until is None:
            wait_ms = self._last_ms + interval_ms - now_ms
            if 0 < wait_ms <= interval_ms:
                return wait_ms / 1000
            self._last_ms = now_ms
            self._until = self._halves.end_offset
            if self._until:
                self._topics.create_for_send_back(HALF_TOPIC, 1, PERM_READ | PERM_WRITE, 0)
        size_bytes = 0
        for _ in range(_MOST_A_TURN):
            half = self._next(self._until)
            if half is None or not self._decide(half, now_ms):
                self._until = None
                self._tell_of_unasked()
                return interval_ms / 1000
            size_bytes += half.size_bytes
            if size_bytes > _MOST_BYTES_A_TURN:
                break
        return 0

    def _tell_of_unasked(self) -> None:
        """Warns of groups without a producer, of each once until it has one again."""
        fresh = [f"{group} ({count})" for group, count in self._unasked.items() if group not in self._told]
        if fresh:
            more = f" and of {len(fresh) - _MOST_GROUPS_TOLD} more groups" if len(fresh) > _MOST_GROUPS_TOLD else ""
            log.warning("no producer is there to end transactions of %s%s", ", ".join(fresh[:_MOST_GROUPS_TOLD]), more)
        self._told = set(self._unasked)
        self._unasked.clear()

    def _next(self, until: int) -> StoredMessage | None:
        """The next half that has not ended; None at the end of the pass."""
        halves = self._halves
        while True:
            halves.pass_ended(until)
            if halves.offset >= until:
                return None
            half = halves.at(halves.offset)
            if half is not None:
                return half
            low = self._store.min_offset(HALF_TOPIC, QUEUE)
            pass_over(HALF_TOPIC, QUEUE, halves.offset, "no whole half is there")
            halves.pass_to(max(low, halves.offset + 1))

    def _decide(self, half: StoredMessage, now_ms: int) -> bool:
        """Handles one half, whatever it says."""
        try:
            return self._handle(half, now_ms)
        except (RequestFailed, *UNREADABLE) as e:
            pass_over(HALF_TOPIC, QUEUE, half.queue_offset, e)
        self._halves.pass_to(half.queue_offset + 1)
        return True

    def _handle(self, half: StoredMessage, now_ms: int) -> bool:
        """Decides about one half. False ends the pass: it is too young, or the store takes nothing now."""
        if self._halves.is_former(half):
            offset, fate = self._halves.current(half)
            if fate is not Fate.UNDECIDED or offset != half.queue_offset:
                self._halves.pass_to(half.queue_offset + 1)
                return True
        age_ms = now_ms - half.born_timestamp_ms
        times = java_count(half.properties.get(PROPERTY_TRANSACTION_CHECK_TIMES)) or 0
        if times >= self._config.transaction_check_max or age_ms > self._config.file_reserved_time * _HOUR_MS:
            return self._discard(half, now_ms)
        if self._last_ms <= half.store_timestamp_ms <= now_ms:  # later than now: the clock was set back meanwhile
            return False
        immunity_s = java_count(half.properties.get(PROPERTY_CHECK_IMMUNITY_SECONDS))
        if immunity_s is not None:
            # Its birth is by its producer's clock: one far ahead would have it put off for years, in copy after copy.
            if -_HOUR_MS <= age_ms <= immunity_s * 1000:
                return self._put_off(half, now_ms)
        elif 0 <= age_ms <= self._config.transaction_time_out:
            return False
        return self._ask(half, times + 1, now_ms)

    def _discard(self, half: StoredMessage, now_ms: int) -> bool:
        self._topics.create_for_send_back(TRANSACTION_CHECK_TOPIC, 1, PERM_READ | PERM_WRITE, 0)
        appended = store_again(self._put, half, half.properties, TRANSACTION_CHECK_TOPIC, now_ms)
        if appended is not None:
            log.error("nobody ended the transaction %s: it is moved to %s", half.unique_key, TRANSACTION_CHECK_TOPIC)
        return self._is_passed(half, appended)

    def _put_off(self, half: StoredMessage, now_ms: int) -> bool:
        properties = dict(half.properties)
        properties.setdefault(PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET, str(half.queue_offset))
        try:
            return self._is_passed(half, store_again(self._put, half, properties, HALF_TOPIC, now_ms))
        except RequestFailed:
            return self._ask_once(half, now_ms)

    def _ask(self, half: StoredMessage, times: int, now_ms: int) -> bool:
        properties = half.properties | {PROPERTY_TRANSACTION_CHECK_TIMES: str(times)}
        try:
            appended = store_again(self._put, half, properties, HALF_TOPIC, now_ms)
        except RequestFailed:
            return self._ask_once(half, now_ms)
        if appended is not None:
            self._send(half, properties, appended)
        return self._is_passed(half, appended)

    def _ask_once(self, half: StoredMessage, now_ms: int) -> bool:
        """A half that can't be stored again in its queue: its producer can commit it by the place that it has."""
        if not self._discard(half, now_ms):
            return False
        self._send(half, half.properties, half)
        return True

    def _is_passed(self, half: StoredMessage, appended: Appended | None) -> bool:
        if appended is None:
            return False
        self._halves.pass_to(half.queue_offset + 1)
        return True

    def _send(self, half: StoredMessage, properties: dict[str, str], copy: Appended | StoredMessage) -> None:
        """Asks one producer of the group, each in turn; who does not read what was written is not asked."""
        group = properties.get(PROPERTY_PRODUCER_GROUP, "")
        members = [member for member in self._clients.producers(group) if member.connection.is_writable]
        if not members:
            if group in self._unasked or len(self._unasked) < _MOST_GROUPS_COUNTED:
                self._unasked[group] += 1
            return
        header = CheckTransactionState(
            tran_state_table_offset=copy.queue_offset,
            commit_log_offset=copy.log_offset,
            topic=HALF_TOPIC,
            msg_id=half.unique_key,
            transaction_id=half.unique_key,
            offset_msg_id=copy.message_id,
            broker_name=self._config.broker_name,
        )
        message = Message(
            properties.get(PROPERTY_REAL_TOPIC, HALF_TOPIC),
            java_count(properties.get(PROPERTY_REAL_QUEUE_ID)) or 0,
            half.body,
            properties,
            half.flag,
            half.sys_flag,
            half.born_timestamp_ms,
            half.born_host,
            half.reconsume_times,
        )
        body = encode_record(
            message,
            queue_offset=copy.queue_offset,
            log_offset=copy.log_offset,
            store_timestamp_ms=half.store_timestamp_ms,
            store_host=copy.store_host,
        )
        member = members[next(self._turns) % len(members)]
        member.connection.notify(Frame(RequestCode.CHECK_TRANSACTION_STATE, encode_header(header), body))
