"""The ledger of exactly-once writes: what was decided about each batch of a query.

Tasks send half messages, which nobody gets, and write their places to the ledger topic. When all are done, the driver
writes a manifest behind them. **The manifest is the decision**: whatever happens, its half messages are committed and
no others of that batch are.

    part      the places of half messages: how a manifest finds them
    manifest  the attempts of tasks that make up the batch, the ledger offsets of their parts, and what the rows were
    aborted   attempts that must not be decided for any more
    done      every transaction of the batch is committed

- The topic has one queue, so everybody sees the same order. Of several manifests for one batch (a driver that was
  thought dead) the first counts, unless it names an attempt that was aborted before it.
- There is one ledger of a name in a cluster (`sole`). Only the master of its broker is asked: a slave may be behind.
- Entries are found by their keys in the broker's index: `QUERY:BATCH`, and manifests also by `:QUERY`.
- The ledger is read as all of Spark reads (`READ_GROUP`): the group of a query is a producer's.
- A manifest says what its rows were (`Content`). A batch that comes again with others is not the one that was decided:
  its checkpoint was restored or copied, or the query gives other rows each time. That is an error, and never silence.
- Every batch has a manifest, also one without rows, so a batch that comes again is always known.
- Skylark commits a half message once, however often it is asked to, also when it has given up asking for its producer
  (`transactionCheckMax`). So a manifest can be carried out again, by anybody, as long as the log is kept
  (`fileReservedTime`); and nobody needs to answer for half messages without a decision: the broker gives them up.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np

from skylark.client.errors import BrokerError, MessageNotFound, NotReachable, RocketMQError
from skylark.net.blocking import BlockingConnection
from skylark.spark.cluster import (
    READ_GROUP,
    Cluster,
    Filter,
    check_may_read,
    pull_fields,
    pull_request,
    unless_busy,
)
from skylark.spark.content import Content
from skylark.spark.options import BadOption
from skylark.spark.queues import Queue
from skylark.spark.sole import ensure_sole, require_sole
from skylark.wire.bodies import decode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.headers import EndTransaction, QueryMessage
from skylark.wire.message import (
    KEY_SEPARATOR,
    PROPERTY_KEYS,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_ROLLBACK,
    StoredMessage,
)
from skylark.wire.records import decode_record, encode_properties
from skylark.wire.routes import MASTER_ID, KVTable
from skylark.wire.typed import encode_header

_ENDS_AT_ONCE: Final = 256
_PAGE_ENTRIES: Final = 64  # more are never answered at once
_WHOLE_BYTES: Final = 4 << 20  # an answer of that size may have had no room for more
_END_OF_TIME_MS: Final = (1 << 63) - 1

_T = TypeVar("_T")


class Places(msgspec.Struct, frozen=True):
    """Where half messages are, at one broker: pairs of offsets, in the queue of halves and in the log."""

    broker: str
    topic: str  # of any of them
    packed: bytes
    group: str | None = None
    """the producer group that they were sent by, and that must end them; ledgers of old don't name it"""

    @classmethod
    def pack(cls, broker: str, topic: str, offsets: Sequence[int], group: str | None = None) -> Places:
        """`offsets` has those of a pair behind each other."""
        table = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        steps = np.diff(table, axis=0, prepend=np.zeros((1, 2), dtype=np.int64))
        return cls(broker, topic, zlib.compress(steps.astype("<i8").tobytes(), 1), group)

    def pairs(self) -> list[tuple[int, int]]:
        steps = np.frombuffer(zlib.decompress(self.packed), dtype="<i8").reshape(-1, 2)
        return [(half, log) for half, log in np.cumsum(steps, axis=0).tolist()]


class Manifest(msgspec.Struct, frozen=True, tag="manifest", tag_field="kind"):
    attempts: list[str]
    parts: list[int]
    content: Content | None = None
    """ledgers of old don't have it"""


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
        self._masters: dict[str, str] = {}

    def prepare(self) -> None:
        """Makes the topic if there never was one. Raises BadOption for one that can't be a ledger.

        Raises BrokerError if it can't be read: after a decision it would be too late to find that out.
        """

        def check(broker: str, address: str) -> None:
            request = Frame(RequestCode.GET_BROKER_RUNTIME_INFO)
            require_skylark(broker, decode_body(KVTable, self._cluster.ask_address(address, request).body).table)

        queue = self._keep(ensure_sole(self._cluster, self._topic, check))
        info = self._ask(queue.broker, Frame(RequestCode.GET_BROKER_RUNTIME_INFO))
        require_skylark(queue.broker, decode_body(KVTable, info.body).table)
        self._pull(0)

    def verdict(self, query: str, batch: int) -> Verdict:
        found = self._entries(batch_key(query, batch))
        return verdict(msgspec.msgpack.decode(record.body, type=Entry) for record in found)

    def latest(self, query: str) -> int | None:
        """The last batch of the query that has a manifest; None if there is none, or only some of old."""
        found = self._page(query_key(query), _END_OF_TIME_MS)
        keys = [_keys(record) for record in found]
        return max((int(of[0].rpartition(":")[2]) for of in keys if query_key(query) in of), default=None)

    def add_part(self, places: Places) -> int:
        """Notes where half messages are, and returns the number by which a manifest names the note."""
        return self._append(msgspec.msgpack.encode(places))

    def decide(
        self, query: str, batch: int, attempts: Sequence[str], parts: Sequence[int], content: Content
    ) -> Verdict:
        """Writes the manifest; what counts may be one that came before it."""
        entry = Manifest(list(attempts), list(parts), content)
        self._append(msgspec.msgpack.encode(entry), KEY_SEPARATOR.join((batch_key(query, batch), query_key(query))))
        return self.verdict(query, batch)

    def abort(self, query: str, batch: int, attempts: Sequence[str]) -> Verdict:
        """From here on no manifest with these attempts counts; one from before may."""
        self._append(msgspec.msgpack.encode(Aborted(list(attempts))), batch_key(query, batch))
        return self.verdict(query, batch)

    def finish(self, query: str, batch: int, manifest: Manifest) -> None:
        """Commits what was decided, and notes that it is done. May be repeated."""
        try:
            for offset in manifest.parts:
                self.end(self._part(offset), SYS_TRANSACTION_COMMIT)
        except (BrokerError, MessageNotFound) as e:
            raise RocketMQError(
                f"batch {batch} of query {query} is decided and can't be delivered to its end: {e}; if the broker has "
                "deleted that part of its log since (fileReservedTime), those rows are lost: start with a new "
                "checkpoint, or another writeId, from where they are read"
            ) from e
        self._append(msgspec.msgpack.encode(Done()), batch_key(query, batch))

    def roll_back(self, parts: Iterable[int]) -> None:
        for offset in parts:
            self.end(self._part(offset), SYS_TRANSACTION_ROLLBACK)

    def end(self, places: Places, decision: int) -> None:
        """Ends the transactions in their order. Raises BrokerError if the broker no longer has one, or refuses."""
        pairs = places.pairs()
        for start in range(0, len(pairs), _ENDS_AT_ONCE):
            some = pairs[start : start + _ENDS_AT_ONCE]
            for reply in self._retrying(lambda some=some: self._end(places, some, decision)):  # type: ignore[misc]
                if reply.code != ResponseCode.SUCCESS:
                    raise BrokerError(reply.code, reply.remark, places.broker)

    def _end(self, places: Places, pairs: Sequence[tuple[int, int]], decision: int) -> list[Frame]:
        connection = self._connect(places.broker)
        requests = (
            EndTransaction(
                producer_group=places.group or self._group,
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
        return [unless_busy(connection.take(number), connection) for number in numbers]

    def _append(self, body: bytes, keys: str | None = None) -> int:
        """Stores an entry; its offset in the ledger."""
        queue = self._queue()
        properties = encode_properties({PROPERTY_KEYS: keys} if keys else {}).decode()
        fields = {
            "a": self._group, "b": queue.topic, "c": "TBW102", "d": "1", "e": str(queue.queue_id), "f": "0",
            "g": str(time.time_ns() // 1_000_000), "h": "0", "i": properties, "j": "0", "k": "false",
        }  # fmt: skip
        reply = self._ask(queue.broker, Frame(RequestCode.SEND_MESSAGE_V2, fields, body))
        if reply.code != ResponseCode.SUCCESS:
            raise BrokerError(reply.code, reply.remark, queue.broker)
        return int(reply.fields["queueOffset"])

    def _entries(self, key: str) -> list[StoredMessage]:
        """All entries of a key, in their order.

        The broker answers with the newest, so it is asked again for what is older. It compares hashes of keys only.
        """
        found: dict[int, StoredMessage] = {}
        end_ms = _END_OF_TIME_MS
        while True:
            page = self._page(key, end_ms)
            known = len(found)
            found.update((record.queue_offset, record) for record in page)
            is_whole = len(page) < _PAGE_ENTRIES and sum(record.size_bytes for record in page) < _WHOLE_BYTES
            if is_whole:
                return [found[offset] for offset in sorted(found) if key in _keys(found[offset])]
            if len(found) == known:
                raise RocketMQError(f"ledger {self._topic!r} has too many entries of one second under the key {key}")
            end_ms = min(record.store_timestamp_ms for record in page)

    def _page(self, key: str, end_ms: int) -> list[StoredMessage]:
        queue = self._queue()
        header = QueryMessage(queue.topic, key, _PAGE_ENTRIES, 0, end_ms)
        reply = self._ask(queue.broker, Frame(RequestCode.QUERY_MESSAGE, encode_header(header)))
        if reply.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        if reply.code != ResponseCode.SUCCESS:
            raise BrokerError(reply.code, reply.remark, queue.broker)
        return list(_records(reply.body))

    def _part(self, offset: int) -> Places:
        for record in self._pull(offset):
            if record.queue_offset == offset:
                return msgspec.msgpack.decode(record.body, type=Places)
        raise MessageNotFound(f"ledger {self._topic!r} has lost the entry at offset {offset}")

    def _pull(self, offset: int) -> list[StoredMessage]:
        """The entry there, if there is one. Raises BrokerError if Spark may not read."""
        queue = self._queue()
        reply = self._ask(queue.broker, pull_request(pull_fields(READ_GROUP, queue, Filter()), offset, 1))
        check_may_read(reply, queue.broker)
        return list(_records(reply.body))

    def _queue(self) -> Queue:
        return self._found or self._keep(require_sole(self._cluster, self._topic))

    def _keep(self, queues: Sequence[Queue]) -> Queue:
        if len(queues) != 1:
            raise BadOption(
                f"option ledgerTopic={self._topic!r}: the topic has {len(queues)} queues (at broker "
                f"{', '.join(dict.fromkeys(queue.broker for queue in queues))}), and a ledger has exactly one, which "
                "gives its entries their order; name a topic that does not exist, and it is made so"
            )
        self._found = queues[0]
        return queues[0]

    def _ask(self, broker: str, request: Frame) -> Frame:
        """The answer of a broker's master, whatever its code is; one that is away or busy is asked again."""

        def ask() -> Frame:
            connection = self._connect(broker)
            return unless_busy(connection.request(request), connection)

        return self._retrying(ask)

    def _retrying(self, work: Callable[[], _T]) -> _T:
        def attempt() -> _T:
            try:
                return work()
            except OSError:
                self._masters.clear()  # one of them may have moved
                raise

        return self._cluster.retrying(attempt)

    def _connect(self, broker: str) -> BlockingConnection:
        """To the master, also when the topic that its half messages are for was deleted."""
        if broker not in self._masters:
            address = self._cluster.groups().get(broker, {}).get(MASTER_ID)
            if address is None:
                raise NotReachable(f"broker {broker} is away: start it again; what is decided can't be read without it")
            self._masters[broker] = address
        return self._cluster.connect_to(self._masters[broker])


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


def batch_key(query: str, batch: int) -> str:
    return f"{query}:{batch}"


def query_key(query: str) -> str:
    """That of no batch of any query: a `writeId` may end like a batch."""
    return f":{query}"


def _keys(record: StoredMessage) -> list[str]:
    return record.properties.get(PROPERTY_KEYS, "").split(KEY_SEPARATOR)


def _records(data: bytes) -> Iterator[StoredMessage]:
    view = memoryview(data)
    while view:
        record = decode_record(view)
        yield record
        view = view[record.size_bytes :]
