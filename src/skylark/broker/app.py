"""The composition root of a broker: builds its parts, joins their handlers and runs what happens by the clock.

Nothing imports this module but the command line and tests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from skylark.broker import (
    admin,
    client_requests,
    filters,
    former_members,
    groups,
    kept_locks,
    locks,
    offsets,
    query,
    relays,
    resets,
    topics,
)
from skylark.broker.arrivals import Arrivals, too_late
from skylark.broker.assignment import Assignments
from skylark.broker.beginnings import Beginnings
from skylark.broker.checkback import CheckBack
from skylark.broker.clients import Clients
from skylark.broker.config import BrokerConfig, FlushDiskType
from skylark.broker.delay import Delayed
from skylark.broker.filterdata import FilterTable
from skylark.broker.filterservers import FilterServers
from skylark.broker.groups import Groups
from skylark.broker.halves import Halves
from skylark.broker.internal import is_internal
from skylark.broker.lines import Lines
from skylark.broker.locks import Locks
from skylark.broker.logical_queues import LogicalQueues
from skylark.broker.neighbours import Neighbours
from skylark.broker.offsets import Offsets
from skylark.broker.popping import Popping
from skylark.broker.ports import bind_both, listen_on_vip
from skylark.broker.pull import Pulls
from skylark.broker.put import Put
from skylark.broker.questions import Questions
from skylark.broker.recall import Recalls
from skylark.broker.registration import Registration
from skylark.broker.replies import Replies
from skylark.broker.retry import Retries
from skylark.broker.send import Sends
from skylark.broker.static_topics import StaticTopics
from skylark.broker.stats import Stats
from skylark.broker.timers import Timers
from skylark.broker.topics import Topics
from skylark.broker.transactions import Transactions
from skylark.net.addresses import unknown_host
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.pool import split_address
from skylark.net.server import Server, refused
from skylark.store import Store, StoreConfig, StoreError, foreign
from skylark.store.tables import config_directory, delay_offsets_path, timer_metrics_path
from skylark.wire import fastjson
from skylark.wire.codes import NAME_SERVER_CODES, RequestCode
from skylark.wire.frame import MAX_RECORDS_BYTES, Frame
from skylark.wire.records import encode_host
from skylark.wire.tables import TopicConfig

log = logging.getLogger(__name__)

_DELIVERY_INTERVAL_S: Final = 0.1
_LEAST_PAUSE_S: Final = 0.01
_HOUSEKEEPING_INTERVAL_S: Final = 10.0
_QUEUE_ENTRY_BYTES: Final = 20
_NAMES_SHOWN: Final = 10
_STORING: Final = (
    RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2, RequestCode.CONSUMER_SEND_MSG_BACK,
)  # fmt: skip
_OWN_PREFIXES: Final = (topics.RETRY_PREFIX, topics.DLQ_PREFIX)
_ANY_ADDRESS: Final = frozenset(("", "0.0.0.0", "::"))


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def steady_clock_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Broker:
    """A broker that can be started and stopped once."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Callable[[], int] = wall_clock_ms,
        on_config_change: Callable[[dict[str, str]], None] = lambda changed: None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._on_config_change = on_config_change
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Opens the store, serves, registers; returns the port. Raises OSError, StoreError or BadTable."""
        bound, vip = bind_both(host, port)
        try:
            port = self.config.listen_port = bound.getsockname()[1]
            self.config.broker_ip1 = self.config.broker_ip1 or advertised_address(host, self.config.namesrv_addr)
            self._build(port)
            for writer in self._table_writers:
                writer.write_in_background()
            for held in self._held_tables:
                held.write_in_background()
            await self._server.start(bound)
            if vip is not None:
                await listen_on_vip(self._server, vip)
        except BaseException:
            bound.close()
            if vip is not None:
                vip.close()
            raise
        await self._registration.start()
        for work in (
            self._deliver, self._deliver_timers, self._revive, self._write_ops, self._check_transactions,
            self._save_tables, self._write_held, self._keep_house, self._clean_store,
        ):  # fmt: skip
            self._tasks.append(asyncio.create_task(_repeat(work)))
        return port

    async def stop(self) -> None:
        """Leaves the routes, finishes what is in hand, and brings everything to disk."""
        self._remember_members()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._registration.stop()
        self._arrivals.close()
        self._popping.close()
        self._assignments.close()
        self._neighbours.close()
        # What is stored from here on might not be acknowledged any more, and would be sent again to another broker.
        for code in _STORING:
            self._served[code] = _too_late
        await self._server.stop()
        self._keep_locks()
        self._write_ops()
        self._store.flush()
        for writer in self._table_writers:
            writer.write_at_once()
        for held in self._held_tables:
            await held.write_at_once()
        self._save_tables()
        self._store.close()
        self._timers.close()

    async def register(self) -> None:
        """Tells the name servers of this broker now; one that does not answer is waited for no longer than a second."""
        await self._registration.published()

    def _build(self, port: int) -> None:
        config, clock = self.config, self._clock
        root = Path(config.store_path_root_dir)
        tables = config_directory(root)
        self._topics = Topics(tables, config, clock)
        foreign.check(root, {topic.topic_name: topic.attributes for topic in self._topics.all()})
        tables.mkdir(parents=True, exist_ok=True)
        self._static_topics = StaticTopics(tables, config.broker_name, clock)
        self._neighbours = Neighbours(config)
        self._groups = Groups(tables, config, clock)
        self._offsets = Offsets(tables)
        former, call_soon = former_members.take(tables, clock()), asyncio.get_running_loop().call_soon
        self._clients = Clients(self._topics, self._groups, config, former, call_soon)
        self._filters = FilterTable(tables, config, clock())
        self._clients.on_subscribe = lambda group, wanted, host: self._filters.subscribed(group, wanted, clock(), host)
        self._clients.on_empty = lambda group: self._filters.left(group, clock())
        self._stats = Stats(config.broker_cluster_name, clock(), self._topics.is_system)
        broker_host = encode_host(resolved(config.broker_ip1), port)
        self._store = Store.open(_store_config(config, broker_host), flushes=False)
        if not self._store.was_clean:
            self._offsets.keep_within(self._store.max_offset)
        self._find_lost_topics()
        self._find_lost_offsets()
        self._arrivals = Arrivals(self._record_of)
        self._put = Put(self._store, config, self._stats)
        self._delayed = Delayed(self._store, self._put, config.message_delay_level, delay_offsets_path(root))
        self._timers = Timers(config, self._store, self._put, timer_metrics_path(root), self._topics.__contains__)
        self._timers.recover(clock())
        self._popping = Popping(
            config, self._store, self._put, self._topics, self._groups, self._offsets, self._stats, clock,
            self._timers.delivered_to_ms, tables,
        )  # fmt: skip
        self._store.listeners = (self._arrivals.notify, *self._popping.listeners)
        self._assignments = Assignments(config, self._topics, self._groups, self._clients, tables, steady_clock_ms)
        self._table_writers = (
            self._topics.table.writer, self._groups.table.writer, self._static_topics.table.writer,
            self._filters.writer, self._assignments.writer,
        )  # fmt: skip
        self._held_tables = self._popping.held, self._delayed.held
        self._halves = Halves(self._store, self._put, self._offsets, config, broker_host)
        self._check_back = CheckBack(self._halves, self._store, self._put, self._topics, self._clients, config, clock())
        self._settle()
        self._address = _join(config.broker_ip1, port)
        ha_address = ""  # there is no replication yet, and an address that nobody listens on leads slaves astray
        self._registration = Registration(config, self._topics, self._address, ha_address, self._static_topics)
        self._topics.on_change = self._registration.topics_changed
        self._filter_servers = FilterServers(config, steady_clock_ms, lambda: self._registration.topics_changed([]))
        self._registration.set_filter_servers(self._filter_servers.addresses)
        self._static_topics.on_change = self._queues_moved
        ours = with_short_codes(LogicalQueues(self._static_topics, self._neighbours).translated(self._handlers()))
        self._served = refused(NAME_SERVER_CODES, _not_a_name_server(config.namesrv_addr)) | ours
        self._server = Server(
            self._served,
            closed=self._closed,
            idle_s=config.server_channel_max_idle_time_seconds,
        )

    def _settle(self) -> None:
        """Brings to disk what became of the end of the log after an unclean stop, before a checkpoint passes it: what
        proves nothing, since it lies behind a gap, is not to be believed by the start after the next crash.
        """
        if not self._store.was_clean and self._store.flush_log():
            try:
                self._save_offsets()
            except OSError as e:
                log.error("offsets can't be written, which is tried again: %s", e)
        self._store.start_flushing()

    def _find_lost_topics(self) -> None:
        """A table of topics that was lost, or an older one in its place, leaves queues that nobody can reach.

        Retry topics and dead letters are the broker's own to make. A crash may come before their table is written.
        """
        unknown = {name for name in self._store.topics() if name not in self._topics and not is_internal(name)}
        queues: dict[str, int] = {}
        for name, queue_id in self._store.queues() if unknown else ():
            if name in unknown and self._store.max_offset(name, queue_id):
                queues[name] = max(queues.get(name, 0), queue_id + 1)
        made = [TopicConfig(name, queues[name], queues[name]) for name in queues if name.startswith(_OWN_PREFIXES)]
        if made:
            self._topics.put(*made)
        lost = sorted(name for name in queues if name not in self._topics)
        if lost:
            more = f" and {len(lost) - _NAMES_SHOWN} more" if len(lost) > _NAMES_SHOWN else ""
            log.warning(
                "%s%s: messages of topics that topics.json does not have; they are there again when it is restored or "
                "the topics are made anew",
                ", ".join(lost[:_NAMES_SHOWN]), more,
            )  # fmt: skip

    def _find_lost_offsets(self) -> None:
        if self._offsets.is_new and self._store.topics():
            log.warning(
                "neither consumerOffset.json nor its backup is there, but messages are: consumer groups begin as new "
                "ones do. If they had consumed before, stop this broker and put the file back"
            )

    def _handlers(self) -> dict[int, Handler]:
        config, clock, store, put = self.config, self._clock, self._store, self._put
        queue_locks = self._locks = Locks()
        kept_locks.take(config_directory(Path(config.store_path_root_dir)), queue_locks, steady_clock_ms(), clock())
        self._clients.on_leave = queue_locks.release
        published = self._registration.published
        beginnings, questions = Beginnings(store, self._clients), Questions()
        sends = Sends(
            config, put, self._topics, self._groups, queue_locks, published, self._stats, clock, steady_clock_ms
        )
        handlers = {
            **sends.handlers(),
            **Replies(config, put, sends.check, self._clients, clock, self._address, questions).handlers(),
            **Recalls(config, put, self._topics, clock).handlers(),
            **self._timers.handlers(),
            **Retries(config, store, put, self._topics, self._groups, self._stats, clock).handlers(),
            **Transactions(self._halves, store, put, config, clock).handlers(),
            **Pulls(
                config, store, self._topics, self._groups, self._offsets, self._clients, self._arrivals, self._stats,
                self._filters,
            ).handlers(),
            **self._filter_servers.handlers(),
            **self._popping.handlers(),
            **self._assignments.handlers(),
            **topics.handlers(self._topics, self._offsets, self._forget_topics, published, self._static_topics),
            **groups.handlers(self._groups, self._offsets),
            **offsets.handlers(self._offsets, beginnings.find, self._topics, self._has_queue, self._groups),
            **locks.handlers(queue_locks, steady_clock_ms),
            **client_requests.handlers(self._clients, config, clock, filters.complaint),
            **relays.handlers(self._clients, store, self._topics, self._groups, config, questions),
            **query.handlers(store, self._clients, config),
            **resets.handlers(
                config, store, self._topics, self._groups, self._offsets, self._clients, self._arrivals
            ),
            **admin.handlers(
                config, store, self._topics, self._groups, self._offsets, self._clients, self._stats, clock,
                broker_addr=self._address,
                on_config_change=self._config_changed,
                delay_offsets=lambda: self._delayed.table.offset_table,
                delay_text=lambda: fastjson.dumps(self._delayed.table),
                timer_info=self._timers.info,
                is_static=self._static_topics.all().__contains__,
            ),
        }  # fmt: skip
        return Lines().in_line(handlers)

    def _closed(self, connection: Connection) -> None:
        self._clients.closed(connection)
        self._filter_servers.closed(connection)

    def _has_queue(self, topic: str, queue_id: int) -> bool:
        """By its topic's settings, or since it was there before those were changed and has messages."""
        found = self._topics.get(topic)
        count = max(found.read_queue_nums, found.write_queue_nums) if found is not None else 0
        return 0 <= queue_id < count or self._store.max_offset(topic, queue_id) > 0

    def _record_of(self, topic: str, queue_id: int, offset: int) -> memoryview | None:
        entry = self._store.entry(topic, queue_id, offset)
        return None if entry is None else self._store.record_at(entry.log_offset, entry.size_bytes)

    def _forget_topics(self, names: Collection[str]) -> None:
        self._store.delete_topics(names)
        self._popping.forget_topics(names)
        self._stats.forget_topics(names)

    def _queues_moved(self, name: str) -> None:
        """Pulls that wait for a logical queue may have to go on at another broker."""
        topic = self._topics.get(name)
        for queue_id in range(topic.read_queue_nums if topic is not None else 0):
            self._arrivals.wake(name, queue_id)

    def _config_changed(self, changed: dict[str, str]) -> None:
        """The store has settings of its own; a new permission must reach the routes."""
        _apply_to_store(self._store.config, self.config)
        if "brokerPermission" in changed:
            self._topics.renew()  # with the old version, name servers would keep the old permission
        self._on_config_change(changed)

    # What happens by the clock: each says after how many seconds it wants to be called again.

    def _deliver(self) -> float:
        wait_ms = self._delayed.deliver(self._clock())
        return max(wait_ms / 1000, _LEAST_PAUSE_S) if wait_ms else 0

    def _deliver_timers(self) -> float:
        now_ms = self._clock()
        try:
            busy = self._timers.turn(now_ms)
        except StoreError as e:
            log.error("timers wait: %s", e)
            return _HOUSEKEEPING_INTERVAL_S
        return 0 if busy else min(_DELIVERY_INTERVAL_S, (1000 - now_ms % 1000) / 1000)

    def _revive(self) -> float:
        return self._popping.revive(self._clock())

    def _write_ops(self) -> float:
        try:
            self._halves.write_ops(self._clock())
        except RequestFailed as e:
            log.warning("op messages of transactions wait: %s", e)
        return self.config.transaction_op_batch_interval / 1000

    def _check_transactions(self) -> float:
        return self._check_back.run(self._clock())

    def _save_tables(self) -> float:
        """Writes the tables that have changed; one that can't be written is tried again the next time."""
        self._halves.save()  # into the table of offsets
        for save in (
            self._save_offsets,
            self._topics.save,
            self._static_topics.save,
            self._groups.save,
            self._filters.save,
            self._assignments.writer.save,
            self._save_delayed,
            self._timers.save,
        ):
            try:
                save()
            except OSError as e:
                log.error("a table can't be written, and is tried again: %s", e)
        return self.config.flush_consumer_offset_interval / 1000

    def _write_held(self) -> float:
        """Writes the tables that wait for the log, soon after a flush."""
        for held in self._held_tables:
            try:
                held.write()
            except OSError as e:
                log.error("a table can't be written, and is tried again: %s", e)
        return max(self.config.flush_interval_commit_log / 1000, _DELIVERY_INTERVAL_S)

    def _save_offsets(self) -> None:
        self._popping.save(self._clock())

    def _remember_members(self) -> None:
        try:
            tables = config_directory(Path(self.config.store_path_root_dir))
            former_members.write(tables, self._clients.sharing(), self._clock())
        except OSError as e:
            log.error("the groups' members can't be written, and share their queues out anew: %s", e)

    def _keep_locks(self) -> None:
        try:
            tables = config_directory(Path(self.config.store_path_root_dir))
            kept_locks.write(tables, self._locks, steady_clock_ms(), self._clock())
        except OSError as e:
            log.error("queue locks can't be written, and are given to who asks first after the next start: %s", e)

    def _save_delayed(self) -> None:
        self._delayed.save(self._clock())

    def _keep_house(self) -> float:
        now_ms = self._clock()
        self._stats.tick(now_ms)
        self._clients.expire(now_ms)
        self._filters.clean(now_ms)
        self._locks.expire(steady_clock_ms())
        self._filter_servers.expire()
        return _HOUSEKEEPING_INTERVAL_S

    def _clean_store(self) -> float:
        more = self._store.clean(self._clock()).more
        self._timers.clean()
        return 0 if more else _HOUSEKEEPING_INTERVAL_S


def with_short_codes(handlers: dict[int, Handler]) -> dict[int, Handler]:
    """The handlers also under what is left of codes that the binary header has no room for.

    A Java client that is set to write binary headers cuts the codes of the requests about popping off, and Apache's
    broker does not know them then.
    """
    return {code & 0xFFFF: handler for code, handler in handlers.items() if code > 0x7FFF} | handlers


async def _repeat(work: Callable[[], float]) -> None:
    """Calls `work` for ever. An error that nobody thought of is logged and does not end it."""
    while True:
        try:
            pause_s = work()
        except Exception:
            log.exception("%s failed, and is tried again", work.__qualname__)
            pause_s = _HOUSEKEEPING_INTERVAL_S
        await asyncio.sleep(pause_s)


def advertised_address(host: str, namesrv_addr: str) -> str:
    """The address that clients are told: the one listened on or, if that is any, the one that faces the name server."""
    if host not in _ANY_ADDRESS:
        return host
    server = namesrv_addr.partition(";")[0]
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
            probe.connect(split_address(server) if server else ("192.0.2.1", 9))
            found: str = probe.getsockname()[0]
            return found
    except (OSError, ValueError):
        return "127.0.0.1"


def resolved(host: str) -> str:
    """The number behind a host, IPv4 if there is one: message ids hold numbers. Raises OSError for an unknown name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as e:
        raise unknown_host(host, e) from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0]).partition("%")[0]


def _not_a_name_server(namesrv_addr: str) -> str:
    known = f"this one registers with {namesrv_addr}" if namesrv_addr else "port 9876 by default"
    return f"this is a broker; give the address of a name server ({known})"


def _too_late(request: Frame, connection: Connection) -> Frame:
    raise too_late()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _store_config(config: BrokerConfig, store_host: bytes) -> StoreConfig:
    store_config = StoreConfig(
        root=Path(config.store_path_root_dir),
        commit_log_dir=Path(config.store_path_commit_log) if config.store_path_commit_log else None,
        segment_bytes=config.mapped_file_size_commit_log,
        # Up to whole entries, as Apache does it: the size of a store's files must be the same for both.
        queue_entries_per_file=-(-config.mapped_file_size_consume_queue // _QUEUE_ENTRY_BYTES),
        store_host=store_host,
        delay_levels=config.message_delay_level,
        flush_sync=config.flush_disk_type is FlushDiskType.SYNC_FLUSH,
        flush_interval_ms=config.flush_interval_commit_log,
        index_enabled=config.message_index_enable,
        index_slots=config.max_hash_slot_num,
        index_entries=config.max_index_num,
    )
    _apply_to_store(store_config, config)
    return store_config


def _apply_to_store(store_config: StoreConfig, config: BrokerConfig) -> None:
    """What may change while the broker runs."""
    store_config.max_message_bytes = min(config.max_message_size, MAX_RECORDS_BYTES)  # a larger one could not leave
    store_config.file_reserved_hours = config.file_reserved_time
    store_config.delete_when = config.delete_when
    store_config.disk_max_used_ratio = config.disk_max_used_space_ratio
    store_config.disk_clean_forcibly_ratio = config.disk_space_clean_forcibly_ratio
    store_config.disk_warning_ratio = config.disk_space_warning_level_ratio
    store_config.clean_forcibly = config.clean_file_forcibly_enable
    store_config.max_transfer_bytes_in_memory = config.max_transfer_bytes_on_message_in_memory
    store_config.max_transfer_count_in_memory = config.max_transfer_count_on_message_in_memory
    store_config.max_transfer_bytes_on_disk = config.max_transfer_bytes_on_message_in_disk
    store_config.max_transfer_count_on_disk = config.max_transfer_count_on_message_in_disk
    store_config.memory_ratio = config.access_message_in_memory_max_ratio
