"""Dead letters: messages that can't be given as a row, sent to the topic of the option `dlqTopic`.

- A letter is the message as it was: the stored bytes of its body with what they are compressed with, its tag, its keys,
  its id and its user's properties. A body that can't be inflated goes without the flag, so that somebody can look at
  it; the flags it had are in a property.
- Nothing that a message may hold stands in its way. No client checks it here, a body without a byte travels in a batch
  of one (a request without a body is none to Apache's broker), properties that have no room beside those of the letter
  are left out and counted, and a letter that the broker still finds too large goes without its body.
- A letter has the id of its message, so one that is sent twice can be told.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from skylark.client.compression import inflate
from skylark.client.errors import (
    BrokerError,
    MissingCodec,
    NotReachable,
    RocketMQError,
    RouteNotFound,
    UnreadableMessage,
)
from skylark.client.message import MessageQueue
from skylark.client.routes import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES
from skylark.client.sending import RETRY_CODES
from skylark.spark.cluster import Cluster
from skylark.spark.options import Reading
from skylark.spark.queues import Queue
from skylark.spark.records import WRAPPED, Records
from skylark.spark.rows import is_own
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.message import (
    PROPERTIES_MAX_BYTES,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    SYS_COMPRESSED,
    SYS_COMPRESSION_MASK,
)
from skylark.wire.records import encode_batch, encode_properties

REASON: Final = "badRecordReason"
"""The property that tells why. It goes with `badRecordTopic`, `-Broker`, `-Queue`, `-Offset` and `-Id`, which tell
where it was, and if there is need with `-SysFlag`, `-PropertiesLeftOut` and `-BodyLeftOut`."""

_PREFIX: Final = "badRecord"  # what a letter says of itself; what an earlier one said is gone, should it be bad again
_CONTROLS: Final = re.compile(r"[\x00-\x1f]+")
_MOST_REASON: Final = 500  # characters
_MOST_ID: Final = 500  # usual ones have 32 characters, but a producer may write what it likes
_GROUP: Final = "skylark-spark-dlq"
_PACK_LETTERS: Final = 64
_PACK_BYTES: Final = 4 << 20
_PAUSE_S: Final = 0.2
_OF_THE_BROKER_BYTES: Final = 1024
"""Left free among the properties: brokers add a few of their own."""
_STORED: Final = frozenset(
    (
        ResponseCode.SUCCESS,
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
    )
)
_BODY_LEFT_OUT: Final = "badRecordBodyLeftOut"
_ORIGIN: Final = frozenset(
    (
        REASON, "badRecordTopic", "badRecordBroker", "badRecordQueue", "badRecordOffset", "badRecordId",
        PROPERTY_UNIQUE_KEY,
    )
)  # fmt: skip


class Undeliverable(RocketMQError):
    """Letters that can't be sent to the topic that the options name."""


class Letter(msgspec.Struct, frozen=True):
    body: bytes
    sys_flag: int
    properties: dict[str, str]

    @property
    def is_bare(self) -> bool:
        return _BODY_LEFT_OUT in self.properties

    def bare(self) -> Letter:
        """What is left of a letter that is too large: why, and where the message is."""
        kept = {name: value for name, value in self.properties.items() if name in _ORIGIN}
        return Letter(b"", 0, {**kept, _BODY_LEFT_OUT: str(len(self.body))})


def letters_of(records: Records, queue: Queue, reasons: Mapping[int, str]) -> Iterator[Letter]:
    """The letters for rows of a queue."""
    offsets, ids, bodies = records.queue_offsets(), records.message_ids(), records.stored_bodies()
    all_properties, sys_flags = records.properties(), records.sys_flags()
    for row, reason in reasons.items():
        body: bytes = bodies[row].as_py()
        id = ids[row].as_py()[:_MOST_ID]
        origin = {
            REASON: _CONTROLS.sub(" ", reason)[:_MOST_REASON],
            "badRecordTopic": queue.topic,
            "badRecordBroker": queue.broker,
            "badRecordQueue": str(queue.queue_id),
            "badRecordOffset": str(offsets[row].as_py()),
            "badRecordId": id,
        }
        sys_flag = int(sys_flags[row])
        sent_flag = sys_flag & (SYS_COMPRESSED | SYS_COMPRESSION_MASK) if sys_flag & SYS_COMPRESSED else 0
        if sys_flag & WRAPPED == WRAPPED or (sent_flag and not _can_be_inflated(body, sys_flag)):
            origin["badRecordSysFlag"], sent_flag = str(sys_flag), 0
        origin[PROPERTY_UNIQUE_KEY] = id
        yield Letter(body, sent_flag, _with_room(origin, all_properties[row].as_py()))


def _can_be_inflated(body: bytes, sys_flag: int) -> bool:
    try:
        inflate(body, sys_flag)
    except MissingCodec:
        return True  # by others, as far as is known here
    except UnreadableMessage:
        return False
    return True


def _with_room(origin: dict[str, str], given: list[tuple[str, str]]) -> dict[str, str]:
    """The letter's own properties, and as many of the message's as have room beside them; tag and keys come first."""
    wanted = {name: value for name, value in given if name in (PROPERTY_TAGS, PROPERTY_KEYS)}
    wanted |= {name: value for name, value in given if is_own(name) and not name.startswith(_PREFIX)}
    properties, left_out = dict(origin), 0
    room = PROPERTIES_MAX_BYTES - _OF_THE_BROKER_BYTES - len(encode_properties(origin))
    for name, value in wanted.items():
        size = len(encode_properties({name: value}))
        if size > room:
            left_out += 1
            continue
        room -= size
        properties[name] = value
    return {**properties, "badRecordPropertiesLeftOut": str(left_out)} if left_out else properties


class Letters:
    """Sends letters. Nothing is opened before the first: every task would pay for it, and few have bad rows."""

    def __init__(self, options: Reading) -> None:
        assert options.dlq_topic is not None
        self.topic = options.dlq_topic
        self._timeout_s = options.timeout_s
        self._cluster = Cluster(options.name_server, options.timeout_s)
        self._turn = 0
        self._failed_broker: str | None = None

    def close(self) -> None:
        self._cluster.close()

    def send(self, letters: Iterator[Letter]) -> None:
        """Returns when each is stored. A task that runs again sends them again. Raises Undeliverable."""
        pack: list[Letter] = []
        size = 0
        for letter in letters:
            if pack and (len(pack) >= _PACK_LETTERS or size + len(letter.body) > _PACK_BYTES):
                self._deliver(pack)
                pack, size = [], 0
            pack.append(letter)
            size += len(letter.body)
        self._deliver(pack)

    def _deliver(self, waiting: list[Letter]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while waiting:
            try:
                waiting, error = self._exchange(waiting)
            except (OSError, RouteNotFound) as e:
                error = e
            if waiting:
                if time.monotonic() + _PAUSE_S >= deadline_s:
                    raise self._undeliverable(error)
                self._cluster.forget(self.topic)
                time.sleep(_PAUSE_S)

    def _exchange(self, letters: list[Letter]) -> tuple[list[Letter], Exception | None]:
        """Offers the letters to a queue. Gives those that are to be offered again, and why."""
        queue, broker = self._next_place()
        try:
            connection = self._cluster.connect(broker, self.topic)
            numbers = connection.post_all(_request(self.topic, queue, letter) for letter in letters)
            replies = [connection.take(number) for number in numbers]
        except OSError:
            self._failed_broker = broker
            raise
        self._failed_broker = None
        again: list[Letter] = []
        refusal: BrokerError | None = None
        for letter, reply in zip(letters, replies, strict=True):
            if reply.code in _STORED:
                continue
            refusal = BrokerError(reply.code, reply.remark, f"broker {broker}")
            if reply.code == ResponseCode.MESSAGE_ILLEGAL and not letter.is_bare:
                again.append(letter.bare())
            elif reply.code in RETRY_CODES:
                again.append(letter)
                self._failed_broker = broker
            else:
                raise self._undeliverable(refusal)
        return again, refusal

    def _next_place(self) -> tuple[MessageQueue, str]:
        route = self._cluster.route_for_send(self.topic)
        queues = [queue for queue in route.write_queues if route.broker_of(queue) != self._failed_broker]
        queues = queues or route.write_queues
        if not queues:
            raise NotReachable(f"topic {self.topic} has no queue that can be written to now")
        self._turn += 1
        queue = queues[self._turn % len(queues)]
        return queue, route.broker_of(queue)

    def _undeliverable(self, error: Exception | None) -> Undeliverable:
        return Undeliverable(
            f"option dlqTopic={self.topic!r}: bad records can't be sent there: {error}; badRecords=drop goes on without"
        )


def _request(topic: str, queue: MessageQueue, letter: Letter) -> Frame:
    fields = {
        "a": _GROUP,
        "b": topic,
        "c": DEFAULT_TOPIC,
        "d": str(DEFAULT_TOPIC_QUEUES),
        "e": str(queue.queue_id),
        "f": str(letter.sys_flag),
        "g": str(time.time_ns() // 1_000_000),
        "h": "0",
        "j": "0",
        "k": "false",
    }
    if letter.body:
        fields["i"] = encode_properties(letter.properties).decode()
        return Frame(RequestCode.SEND_MESSAGE_V2, fields, letter.body)
    return Frame(RequestCode.SEND_BATCH_MESSAGE, {**fields, "m": "true"}, encode_batch([(0, b"", letter.properties)]))
