"""The ledger of exactly-once writes: what was decided about each batch of a query.

Tasks send half messages, which nobody gets, and hand the driver their places. The driver writes these places to the
ledger topic, and behind them a manifest. **The manifest is the decision**: whatever happens, its half messages are
committed and no others of that batch are.

    part      the places of half messages: how a manifest, or several, find them
    manifest  the attempts of tasks that make up the batch, and the ledger offsets of their parts
    aborted   attempts that must not be decided for any more
    done      every transaction of the batch is committed

- The topic has one queue, so everybody sees the same order. Of several manifests for one batch (a driver that was
  thought dead) the first counts, unless it names an attempt that was aborted before it.
- Entries are found by their key, `QUERY:BATCH`, in the broker's index.
- Skylark commits a half message once, however often it is asked to, also when it has given up asking for its producer
  (`transactionCheckMax`). So a manifest can be carried out again, by anybody, as long as the log is kept
  (`fileReservedTime`); and nobody needs to answer for half messages without a decision: the broker gives them up.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from skylark.client.errors import BrokerError, MessageNotFound, RouteNotFound
from skylark.spark.cluster import Cluster, Filter, pull_fields, pull_request
from skylark.spark.options import BadOption
from skylark.spark.queues import Queue
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import EndTransaction, QueryMessage
from skylark.wire.message import PROPERTY_KEYS, SYS_TRANSACTION_COMMIT, SYS_TRANSACTION_ROLLBACK, StoredMessage
from skylark.wire.records import decode_record, encode_properties
from skylark.wire.routes import KVTable
from skylark.wire.typed import encode_header

_PART_HALVES: Final = 65_536
_ENDS_AT_ONCE: Final = 256
_MOST_ENTRIES: Final = 64
_END_OF_TIME_MS: Final = (1 << 63) - 1


class Places(msgspec.Struct, frozen=True):
    """Where half messages are, at one broker: pairs of offsets, in the queue of halves and in the log."""

    broker: str
    topic: str  # of any of them; by its route the broker is found
    packed: bytes

    @classmethod
    def pack(cls, broker: str, topic: str, pairs: Sequence[tuple[int, int]]) -> Places:
        steps = np.diff(np.array(pairs, dtype=np.int64), axis=0, prepend=np.zeros((1, 2), dtype=np.int64))
        return cls(broker, topic, zlib.compress(steps.astype("<i8").tobytes(), 1))

    def pairs(self) -> list[tuple[int, int]]:
        steps = np.frombuffer(zlib.decompress(self.packed), dtype="<i8").reshape(-1, 2)
        return [(half, log) for half, log in np.cumsum(steps, axis=0).tolist()]


class Manifest(msgspec.Struct, frozen=True, tag="manifest", tag_field="kind"):
    attempts: list[str]
    parts: list[int]


class Aborted(msgspec.Struct, frozen=True, tag="aborted", tag_field="kind"):
    attempts: list[str]


class Done(msgspec.Struct, frozen=True, tag="done", tag_field="kind"):
    pass


Entry = Manifest | Aborted | Done


class Verdict(msgspec.Struct, frozen=True):
    """What the ledger says of a batch."""

    manifest: Manifest | None = None
    is_done: bool = False


def verdict(entries: Iterable[Entry]) -> Verdict:
    """The decision that a batch's entries, in their order, amount to."""
    found: Manifest | None = None
    aborted: set[str] = set()
    is_done = False
    for entry in entries:
        match entry:
            case Aborted(attempts):
                aborted.update(attempts)
            case Manifest(attempts) if found is None and aborted.isdisjoint(attempts):
                found = entry
            case Done():
                is_done = True
    return Verdict(found, is_done and found is not None)


class Ledger:
    """The ledger topic, over the connections of a cluster."""

    def __init__(self, cluster: Cluster, topic: str, group: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._group = group
        self._found: Queue | None = None

    def prepare(self) -> None:
        """Makes the topic if there is none. Raises BadOption for one that can't be a ledger."""
        cluster = self._cluster
        try:
            cluster.route(self._topic)
        except RouteNotFound:
            brokers = cluster.brokers()
            if not brokers:
                raise RouteNotFound(f"no broker is there to make the ledger topic {self._topic!r} at") from None
            name, address = next(iter(brokers.items()))
            require_skylark(
                name,
                decode_body(
                    KVTable, cluster.ask_address(address, Frame(RequestCode.GET_BROKER_RUNTIME_INFO)).body
                ).table,
            )
            cluster.make_topic(self._topic, address)
        queue = self._queue()
        require_skylark(queue.broker, runtime_info(cluster, queue.broker, queue.topic))

    def verdict(self, query: str, batch: int) -> Verdict:
        return verdict(self._entries(_key(query, batch)))

    def decide(self, query: str, batch: int, attempts: Sequence[str], places: Iterable[Places]) -> Verdict:
        """Writes the manifest; what counts may be one that came before it."""
        parts = [self._append(msgspec.msgpack.encode(part)) for part in _parts(places)]
        self._append(msgspec.msgpack.encode(Manifest(list(attempts), parts)), _key(query, batch))
        return self.verdict(query, batch)

    def abort(self, query: str, batch: int, attempts: Sequence[str]) -> Verdict:
        """From here on no manifest with these attempts counts; one from before may."""
        self._append(msgspec.msgpack.encode(Aborted(list(attempts))), _key(query, batch))
        return self.verdict(query, batch)

    def finish(self, query: str, batch: int, manifest: Manifest) -> None:
        """Commits what was decided, and notes that it is done. May be repeated."""
        for offset in manifest.parts:
            self.end(self._part(offset), SYS_TRANSACTION_COMMIT)
        self._append(msgspec.msgpack.encode(Done()), _key(query, batch))

    def roll_back(self, places: Iterable[Places]) -> None:
        for part in places:
            self.end(part, SYS_TRANSACTION_ROLLBACK)

    def end(self, places: Places, decision: int) -> None:
        """Ends the transactions in their order. Raises BrokerError if the broker no longer has one, or refuses."""
        pairs = places.pairs()
        for start in range(0, len(pairs), _ENDS_AT_ONCE):
            some = pairs[start : start + _ENDS_AT_ONCE]
            for reply in self._cluster.retrying(lambda some=some: self._end(places, some, decision)):  # type: ignore[misc]
                if reply.code != ResponseCode.SUCCESS:
                    raise BrokerError(reply.code, reply.remark, places.broker)

    def _end(self, places: Places, pairs: Sequence[tuple[int, int]], decision: int) -> list[Frame]:
        connection = self._cluster.connect(places.broker, places.topic)
        requests = (
            EndTransaction(
                producer_group=self._group,
                tran_state_table_offset=half_offset,
                commit_log_offset=log_offset,
                commit_or_rollback=decision,
                msg_id="",
                topic=places.topic,
                broker_name=places.broker,
            )
            for half_offset, log_offset in pairs
        )
        numbers = connection.post_all(Frame(RequestCode.END_TRANSACTION, encode_header(each)) for each in requests)
        return [connection.take(number) for number in numbers]

    def _append(self, body: bytes, key: str | None = None) -> int:
        """Stores an entry; its offset in the ledger."""
        queue = self._queue()
        properties = encode_properties({PROPERTY_KEYS: key} if key else {}).decode()
        fields = {
            "a": self._group, "b": queue.topic, "c": "TBW102", "d": "1", "e": str(queue.queue_id), "f": "0",
            "g": str(time.time_ns() // 1_000_000), "h": "0", "i": properties, "j": "0", "k": "false",
        }  # fmt: skip
        reply = self._cluster.ask(queue.broker, queue.topic, Frame(RequestCode.SEND_MESSAGE_V2, fields, body))
        return int(reply.fields["queueOffset"])

    def _entries(self, key: str) -> list[Entry]:
        queue = self._queue()
        header = QueryMessage(queue.topic, key, _MOST_ENTRIES, 0, _END_OF_TIME_MS)
        request = Frame(RequestCode.QUERY_MESSAGE, encode_header(header))
        reply = self._cluster.retrying(lambda: self._cluster.connect(queue.broker, queue.topic).request(request))
        if reply.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        if reply.code != ResponseCode.SUCCESS:
            raise BrokerError(reply.code, reply.remark, queue.broker)
        found = [record for record in _records(reply.body) if record.properties.get(PROPERTY_KEYS) == key]
        found.sort(key=lambda record: record.queue_offset)
        return [msgspec.msgpack.decode(record.body, type=Entry) for record in found]

    def _part(self, offset: int) -> Places:
        queue = self._queue()
        request = pull_request(pull_fields(self._group, queue, Filter()), offset, 1)
        reply = self._cluster.ask(queue.broker, queue.topic, request)
        for record in _records(reply.body):
            if record.queue_offset == offset:
                return msgspec.msgpack.decode(record.body, type=Places)
        raise MessageNotFound(f"ledger {self._topic!r} has lost the entry at offset {offset}")

    def _queue(self) -> Queue:
        if self._found is None:
            route = self._cluster.route(self._topic)
            queues = sorted(
                {(queue.broker_name, queue.queue_id) for queue in (*route.write_queues, *route.read_queues)}
            )
            if len(queues) != 1:
                raise BadOption(
                    f"option ledgerTopic={self._topic!r}: the topic has {len(queues)} queues, and a ledger has exactly "
                    "one, which gives its entries their order; name a topic that does not exist, and it is made so"
                )
            self._found = Queue(self._topic, *queues[0])
        return self._found


def runtime_info(cluster: Cluster, broker: str, topic: str) -> dict[str, str]:
    """What a broker says of itself."""
    return decode_body(KVTable, cluster.ask(broker, topic, Frame(RequestCode.GET_BROKER_RUNTIME_INFO)).body).table


def require_skylark(broker: str, info: dict[str, str]) -> None:
    if info.get("implementation") != "skylark":
        raise BadOption(
            f"option deliveryGuarantee=exactly-once: broker {broker} is not a Skylark broker but "
            f"{info.get('brokerVersionDesc', 'another')}, which may deliver twice when the end of a transaction is "
            "repeated; deliveryGuarantee=at-least-once works with every broker"
        )


def _key(query: str, batch: int) -> str:
    return f"{query}:{batch}"


def _parts(places: Iterable[Places]) -> Iterator[Places]:
    """The same in portions that fit into a message."""
    for each in places:
        pairs = each.pairs()
        if len(pairs) <= _PART_HALVES:
            yield each
        else:
            for start in range(0, len(pairs), _PART_HALVES):
                yield Places.pack(each.broker, each.topic, pairs[start : start + _PART_HALVES])


def _records(data: bytes) -> Iterator[StoredMessage]:
    view = memoryview(data)
    while view:
        record = decode_record(view)
        yield record
        view = view[record.size_bytes :]
