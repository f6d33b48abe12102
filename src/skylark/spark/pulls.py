"""The pulls of a range: several on their way at once, each as large as the broker's answers turn out to be.

Without a filter the offsets of the next pulls are known in advance. A broker may answer with fewer messages than were
asked for, since it has a limit of bytes (large messages) or of messages (Apache's gives 32 unless it is set
otherwise); then what is missing is asked for before what follows, and none of the answers that follow is thrown away.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from skylark.client.errors import BrokerError, NotReachable, RocketMQError
from skylark.net.blocking import BlockingConnection
from skylark.spark.cluster import READ_GROUP, Cluster, Filter, check_may_read, pull_fields, pull_request, unless_busy
from skylark.spark.options import BadOption, Reading
from skylark.spark.positions import DataLost
from skylark.spark.queues import Range
from skylark.wire.codes import ResponseCode
from skylark.wire.frame import Frame

log = logging.getLogger(__name__)

_AHEAD: Final = 16  # pulls on their way at once
_MOST_PATIENCE: Final = 64
_MOST_RESETS: Final = 3
_FILTER_REFUSED: Final = frozenset((ResponseCode.SYSTEM_ERROR, ResponseCode.SUBSCRIPTION_PARSE_FAILED))
_NOTHING_HERE: Final = frozenset((ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY))
_OUTSIDE: Final = frozenset((*_NOTHING_HERE, ResponseCode.PULL_OFFSET_MOVED))
_GO_ON: Final = "set failOnDataLoss=false to go on without what is missing"


class Pace:
    """How many messages a pull asks for: fewer when answers are cut short, more again when they are not.

    Now and then one pull asks for twice as many; after each that did so in vain, the next one comes later.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._full = 0  # answers since the last change that held all that was asked for
        self._patience = 1
        self._is_trying = False
        self.count = most

    def next(self, room: int) -> int:
        """What the next pull asks for, of so many that are left."""
        if self._is_trying or self._full < self._patience or self.count >= min(self._most, room):
            return min(self.count, room)
        self._is_trying = True
        return min(self._most, 2 * self.count, room)

    def interrupted(self) -> None:
        """What was asked for is not answered."""
        self._is_trying = False

    def took(self, asked: int, got: int) -> None:
        if asked > self.count:
            if got == asked:
                self.count = asked
                self._patience = 1
            elif self._is_trying:
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self._is_trying = False
            self._full = 0
        elif got == asked == self.count:
            self._full += 1
        if got < min(asked, self.count):
            # One message that fills an answer alone says little about those behind it.
            self.count = max(1, got, self.count // 4)
            self._full = 0


class _Asked(NamedTuple):
    """A pull on its way."""

    offset: int
    most: int
    number: int

    @property
    def end(self) -> int:
        return self.offset + self.most


class Pulls:
    """The bodies of the pulls that cover a range, in order.

    `at` is the offset up to which they came, `left_out` how many offsets of those are known not to be there.
    """

    def __init__(self, cluster: Cluster, options: Reading, part: Range, wanted: Filter) -> None:
        self._cluster = cluster
        self._fails = options.fail_on_data_loss
        self._part = part
        self._wanted = wanted
        self.at = part.start
        self.left_out = 0
        self._pace = Pace(options.pull_batch_size)
        self._fields = pull_fields(READ_GROUP, part.queue, wanted)
        self._ahead = _AHEAD if wanted.passes_all else 1
        self._asked: deque[_Asked] = deque()
        self._resets = 0
        self._connection: BlockingConnection | None = None

    def __iter__(self) -> Iterator[bytes]:
        while self.at < self._part.end:
            try:
                asked, reply = self._cluster.retrying(self._next)
            except NotReachable as e:
                self._gone(e)
                return
            if reply.code == ResponseCode.SUCCESS or (
                reply.code in _NOTHING_HERE and int(reply.fields["nextBeginOffset"]) > self.at
            ):
                self._advance(asked, int(reply.fields["nextBeginOffset"]))
                if reply.body:
                    yield reply.body
            elif reply.code in _OUTSIDE:
                self._outside(reply)
            else:
                self._refused(reply)

    def _next(self) -> tuple[_Asked, Frame]:
        """The reply for the current offset. On a new connection everything is asked for again."""
        queue = self._part.queue
        connection = self._cluster.connect(queue.broker, queue.topic)
        if connection is not self._connection:
            self._asked.clear()
            self._pace.interrupted()
            self._connection = connection
        self._ask(connection)
        asked = self._asked.popleft()
        reply = unless_busy(connection.take(asked.number), connection)
        if reply.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NotReachable(f"{connection.address} does not have topic {queue.topic!r}")
        if reply.code in _OUTSIDE and self.at >= _high(reply) and not self._cluster.has_master(queue):
            # What a slave does not have yet may well be there.
            raise NotReachable(
                f"{queue}: offset {self.at} is to be read, but its slave has only those up to {_high(reply)}, and its "
                "master is away"
            )
        return asked, reply

    def _ask(self, connection: BlockingConnection) -> None:
        """Puts pulls on their way, so that the first of them is for the current offset."""
        if self._asked and self._asked[0].offset < self.at:
            # The last answer went beyond what it was asked for: what was asked for in advance does not follow it.
            for asked in self._asked:
                connection.take(asked.number)
            self._asked.clear()
            self._pace.interrupted()
        if self._asked and self._asked[0].offset > self.at:
            self._asked.extendleft(reversed(self._posted(connection, self.at, self._asked[0].offset, self._ahead)))
        elif len(self._asked) <= self._ahead // 2:  # else not until several can be asked for in one write
            first = self._asked[-1].end if self._asked else self.at
            self._asked.extend(self._posted(connection, first, self._part.end, self._ahead - len(self._asked)))

    def _posted(self, connection: BlockingConnection, first: int, end: int, most: int) -> list[_Asked]:
        pieces: list[tuple[int, int]] = []
        while first < end and len(pieces) < most:
            pieces.append((first, self._pace.next(end - first)))
            first += pieces[-1][1]
        numbers = connection.post_all(pull_request(self._fields, *piece) for piece in pieces)
        return [_Asked(offset, count, number) for (offset, count), number in zip(pieces, numbers, strict=True)]

    def _advance(self, asked: _Asked, next_offset: int) -> None:
        if next_offset <= self.at:
            raise DataLost(f"{self._part.queue}: its broker does not get beyond offset {self.at}")
        if self._wanted.passes_all:
            self._pace.took(asked.most, next_offset - asked.offset)
        self.at = next_offset

    def _outside(self, reply: Frame) -> None:
        part, low, high = self._part, int(reply.fields.get("minOffset", 0)), _high(reply)
        if low <= self.at < high and self._resets < _MOST_RESETS:
            self._resets += 1  # an operator reset the offsets of every group, the reader's too: that is for consumers
            return
        if self._fails:
            raise DataLost(
                f"{part.queue}: offset {self.at} is to be read, but the queue holds {low} to {high}; {_GO_ON}"
            )
        self._skip_to(min(low, part.end) if low > self.at else part.end, f"the queue holds {low} to {high}")

    def _gone(self, error: NotReachable) -> None:
        """What can't be reached is lost only if its broker is there and does not have it."""
        queue = self._part.queue
        try:
            is_deleted = bool(self._cluster.once(lambda: self._cluster.deleted([queue])))
        except (OSError, RocketMQError):
            is_deleted = False
        if not is_deleted:
            raise error
        if self._fails:
            raise DataLost(
                f"{queue}: offset {self.at} is to be read, but topic or queue were deleted ({error}); {_GO_ON}"
            ) from None
        self._skip_to(self._part.end, f"topic or queue were deleted ({error})")

    def _skip_to(self, offset: int, why: str) -> None:
        log.warning("%s: offsets %d to %d are left out: %s", self._part.queue, self.at, offset - 1, why)
        self.left_out += offset - self.at
        self.at = offset

    def _refused(self, reply: Frame) -> None:
        queue = self._part.queue
        if reply.code in _FILTER_REFUSED and self._wanted.option is not None:
            raise BadOption(
                f"option {self._wanted.option}={self._wanted.expression!r}: broker {queue.broker} refuses it: "
                f"{reply.remark}{_how_to_allow(reply.remark)}"
            )
        check_may_read(reply, queue.broker)
        if reply.code == ResponseCode.INVALID_PARAMETER:  # the topic has fewer queues than it had
            self._gone(NotReachable(f"{queue.broker} says: {reply.remark}"))
            return
        raise BrokerError(reply.code, reply.remark, queue.broker)


def _how_to_allow(remark: str | None) -> str:
    is_off = "does not support consumer to filter" in (remark or "")
    return "; it takes SQL filters when enablePropertyFilter=true is set at the broker" if is_off else ""


def _high(reply: Frame) -> int:
    return int(reply.fields.get("maxOffset", 0))
