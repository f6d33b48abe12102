"""The topics of this broker: the table in topics.json, the rules for names, and the requests that change it.

A topic that somebody asks for, or sends to first, is there once it is on disk (`create`): a message must not outlive
the topic that it was sent to. If the disk refuses, there is no such topic, and the answer says why. What a broker makes
by itself (`put`) is there at once and on disk soon after; retry and dead-letter topics that a crash took are made anew
from their messages. `on_change` learns of every change, so that name servers do.

How many topics senders may make is divided among their hosts (`shares.py`), until the broker is started again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from skylark.broker.attributes import (
    CLEANUP_POLICY,
    MESSAGE_TYPE,
    RESERVE_TIME,
    TOPIC_ATTRIBUTES,
    BadAttribute,
    alter,
    kept,
    parse_changes,
    shown,
)
from skylark.broker.config import BrokerConfig
from skylark.broker.offsets import Offsets
from skylark.broker.shares import Shares
from skylark.broker.static_topics import BadMapping, StaticTopics
from skylark.broker.table_writer import EntryTable, not_written
from skylark.broker.turns import beside, next_turn, steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.request_bodies import request_body
from skylark.store.tables import TopicTable, load
from skylark.wire.bodies import TopicConfigs, TopicList, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import EncodedMap
from skylark.wire.frame import Frame
from skylark.wire.headers import CreateTopic, DeleteTopic, GetAllTopicConfig, GetTopicConfig
from skylark.wire.mapping import MappedTopicConfig, MappingDetail
from skylark.wire.tables import MAX_QUEUES, PERM_INHERIT, PERM_READ, PERM_WRITE, DataVersion, TopicConfig
from skylark.wire.typed import decode_header

__all__ = ["PERM_INHERIT", "PERM_READ", "PERM_WRITE", "Topics", "handlers", "validate_topic"]

log = logging.getLogger(__name__)

AUTO_CREATE_TOPIC: Final = "TBW102"
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
TRANSACTION_CHECK_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"
SYSTEM_PREFIX: Final = "rmq_sys_"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"

_ROCKSDB_TOPICS: Final = ("RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC", "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC")
_SYSTEM_TOPICS: Final = frozenset(
    (
        AUTO_CREATE_TOPIC, SCHEDULE_TOPIC, BENCHMARK_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_CHECK_TOPIC,
        SELF_TEST_TOPIC, OFFSET_MOVED_TOPIC, "RMQ_SYS_TRACE_TOPIC", "CHECKPOINT_TOPIC", *_ROCKSDB_TOPICS,
    )
)  # fmt: skip
FORBIDDEN_SEND_TOPICS: Final = frozenset(
    (
        SCHEDULE_TOPIC, HALF_TOPIC, OP_HALF_TOPIC, TRANSACTION_CHECK_TOPIC, SELF_TEST_TOPIC, OFFSET_MOVED_TOPIC,
        *_ROCKSDB_TOPICS,
    )
)  # fmt: skip
"""Topics that only the broker itself writes to."""

MAX_AUTO_CREATED_TOPICS: Final = 50_000
MAX_TOPICS: Final = 2 * MAX_AUTO_CREATED_TOPICS
"""However they come into being: what consumers need finds room when senders have none left. A topic takes 1 KB."""
TOPICS_PER_TURN: Final = 16
"""That are deleted: their directories are renamed, and the change of names is brought to disk in another thread."""
_PAGE_TOPICS: Final = 2_000
_MAX_NAME_LENGTH: Final = 127
MAX_RETRY_NAME_LENGTH: Final = 255
_LEGAL_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII)
_COMPACTION: Final = "COMPACTION"
_FAQ: Final = "https://rocketmq.apache.org/docs/bestPractice/06FAQ"


def suggest() -> str:
    """What Apache's remarks end with where the user has something to do."""
    return f"\nSee {_FAQ} for further details."


def validate_topic(name: str) -> str | None:
    """What is wrong with the name of a topic, or None. Names become directories, so this is a security check too."""
    if not name.strip():
        return "The specified topic is blank."
    if not _LEGAL_NAME.fullmatch(name):
        return f"The specified topic: {name}, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        if len(name) > MAX_RETRY_NAME_LENGTH:
            return (
                f"The specified topic is DLQ or Retry topic: {name}, and it's longer than topic max length: "
                f"{MAX_RETRY_NAME_LENGTH}"
            )
    elif len(name) > _MAX_NAME_LENGTH:
        return f"The specified topic: {name}, is longer than topic max length: {_MAX_NAME_LENGTH}"
    return None


def _builtin_topics(config: BrokerConfig) -> list[TopicConfig]:
    """The topics that every broker has, under the names and with the queues that Apache's has them."""

    def topic(name: str, queues: int, perm: int = PERM_READ | PERM_WRITE) -> TopicConfig:
        return TopicConfig(topic_name=name, read_queue_nums=queues, write_queue_nums=queues, perm=perm)

    both = PERM_READ | PERM_WRITE
    cluster, broker = config.broker_cluster_name, config.broker_name
    topics = [
        topic(SELF_TEST_TOPIC, 1),
        topic(BENCHMARK_TOPIC, 1024),
        topic(cluster, 16, PERM_INHERIT | (both if config.cluster_topic_enable else 0)),
        topic(broker, 1, PERM_INHERIT | (both if config.broker_topic_enable else 0)),
        topic(OFFSET_MOVED_TOPIC, 1),
        topic(SCHEDULE_TOPIC, 18),
        topic(f"{cluster}_REPLY_TOPIC", 1),
        topic(f"{SYSTEM_PREFIX}REVIVE_LOG_{cluster}", 8),
        topic(f"{SYSTEM_PREFIX}SYNC_BROKER_MEMBER_{broker}", 1, PERM_INHERIT),
        topic(HALF_TOPIC, 1),
        topic(OP_HALF_TOPIC, 1),
        *(topic(name, 1) for name in _ROCKSDB_TOPICS),
        topic(f"{SYSTEM_PREFIX}wheel_timer", 1),
    ]
    if config.auto_create_topic_enable:
        queues = config.default_topic_queue_nums
        topics.append(topic(AUTO_CREATE_TOPIC, queues, PERM_INHERIT | PERM_READ | PERM_WRITE))
    if config.trace_topic_enable:
        topics.append(topic(config.msg_trace_topic_name, 1))
    return topics


class Topics:
    """The table of topics."""

    def __init__(self, config_dir: Path, config: BrokerConfig, clock: Callable[[], int]) -> None:
        path = config_dir / "topics.json"
        self._config = config
        self._clock = clock
        builtin = {topic.topic_name: topic for topic in _builtin_topics(config)}
        self.system_topics = _SYSTEM_TOPICS | builtin.keys()
        stored = load(path, TopicTable) or TopicTable(data_version=DataVersion(timestamp_ms=clock()))
        self._topics = builtin | {name: _limited(topic) for name, topic in stored.topic_config_table.items()}
        self.table = EntryTable(
            path, "topic", self._topics, stored.data_version, self._clock, lambda: _WrittenTopics, self._changed
        )
        self._creators: dict[str, str] = {}  # of the topics that senders made, their hosts
        self._expected: set[str] = set()  # those of them that are not in the table yet, nor on their way there
        self._shares = Shares()
        self.get = self._topics.get
        self.data_version = stored.data_version
        self.on_change: Callable[[list[TopicConfig]], None] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._topics

    def __len__(self) -> int:
        return len(self._topics)

    def all(self) -> Iterable[TopicConfig]:
        return self._topics.values()

    @property
    def may_be_mixed(self) -> bool:
        """Whether a topic may be given the message type MIXED."""
        return self._config.enable_mixed_message_type

    def is_system(self, name: str) -> bool:
        return name in self.system_topics or name.startswith(SYSTEM_PREFIX)

    def inherited(
        self, name: str, default_topic: str, client_queue_nums: int, topic_sys_flag: int, host: str = ""
    ) -> TopicConfig | None:
        """What the new topic of a sender is like, by the default topic if that may be inherited from; else None."""
        pattern = self._topics.get(default_topic)
        if pattern is None:
            log.warning("topic %s is not created: there is no default topic %s", name, default_topic)
            return None
        may_inherit = default_topic != AUTO_CREATE_TOPIC or self._config.auto_create_topic_enable
        if not (may_inherit and pattern.perm & PERM_INHERIT):
            log.warning("topic %s is not created: %s can't be inherited from", name, default_topic)
            return None
        if not self.has_room_for_senders(host):
            log.warning("topic %s is not created: %s", name, self.fullness(host))
            return None
        queues = max(0, min(client_queue_nums, pattern.write_queue_nums))
        return TopicConfig(
            topic_name=name,
            read_queue_nums=queues,
            write_queue_nums=queues,
            perm=pattern.perm & ~PERM_INHERIT,
            topic_filter_type=pattern.topic_filter_type,
            topic_sys_flag=topic_sys_flag,
        )

    def has_room_for_senders(self, host: str = "") -> bool:
        left = MAX_AUTO_CREATED_TOPICS - len(self.table) - len(self._expected)
        return self._shares.has_room(host, 1, left - 1)

    def fullness(self, host: str) -> str:
        return (
            f"clients of {host} have made {self._shares.held(host)} topics, there are {len(self.table)}, and from "
            f"{MAX_AUTO_CREATED_TOPICS} on senders make none"
        )

    def take_share(self, name: str, host: str) -> None:
        """A sender on `host` makes a topic."""
        if name not in self._creators:
            self._creators[name] = host
            self._shares.add(host, 1)
            self._expected.add(name)

    def give_back_share(self, name: str) -> None:
        """It is not there after all, or not any more."""
        self._expected.discard(name)
        self._shares.add(self._creators.pop(name, ""), -1)

    def create_for_send_back(
        self, name: str, queue_nums: int, perm: int, topic_sys_flag: int, order: bool | None = None
    ) -> TopicConfig | None:
        """The retry or dead-letter topic of a group, with that many queues at least; `order` is set unless it is None.

        It grows with what its group is allowed, so that whoever sends there may choose among all of them. None if there
        are too many topics.
        """
        topic = self._topics.get(name)
        if (
            topic is not None
            and topic.read_queue_nums >= queue_nums <= topic.write_queue_nums
            and (order is None or topic.order == order)
        ):
            return topic  # as with every heartbeat but the first
        queue_nums = max(0, min(queue_nums, MAX_QUEUES))
        if topic is None:
            if len(self.table) >= MAX_TOPICS:
                log.warning("topic %s is not created: there are %d topics", name, len(self.table))
                return None
            topic = TopicConfig(
                topic_name=name,
                read_queue_nums=queue_nums,
                write_queue_nums=queue_nums,
                perm=perm,
                topic_sys_flag=topic_sys_flag,
                order=bool(order),
            )
            self.put(topic)
            return topic
        wanted = msgspec.structs.replace(
            topic,
            read_queue_nums=max(topic.read_queue_nums, queue_nums),
            write_queue_nums=max(topic.write_queue_nums, queue_nums),
            order=topic.order if order is None else order,
        )
        if wanted != topic:
            self.put(wanted)
        return wanted

    def put(self, *topics: TopicConfig) -> None:
        """Adds or replaces topics as one change."""
        self._expected.difference_update([topic.topic_name for topic in topics])
        self.table.put({topic.topic_name: topic for topic in topics})

    async def create(self, *topics: TopicConfig) -> None:
        """Adds or replaces topics as one change, once it is on disk. Raises RequestFailed: then nothing has changed."""
        self._expected.difference_update([topic.topic_name for topic in topics])
        try:
            await self.table.create({topic.topic_name: topic for topic in topics})
        except Exception as e:
            what = topics[0].topic_name if len(topics) == 1 else f"{len(topics)} topics"
            raise not_written(f"{what} can't be created or changed", e) from e

    def delete(self, name: str) -> TopicConfig | None:
        self.give_back_share(name)
        return self.table.delete(name)

    def mark_ordered(self, names: Iterable[str]) -> None:
        """Topics that the name servers' configuration calls ordered."""
        unordered = [topic for name in names if (topic := self._topics.get(name)) is not None and not topic.order]
        if unordered:
            self.put(*(msgspec.structs.replace(topic, order=True) for topic in unordered))

    def renew(self) -> None:
        """Gives the table a new version, though no topic changed: what routes say of it depends on the broker too.

        It is not written: every start gives the table another one.
        """
        self.data_version.next_version(self._clock())
        if self.on_change is not None:
            self.on_change([])

    def page(self, version: DataVersion | None, start: int, count: int) -> dict[str, TopicConfig]:
        """The topics from the `start`-th by name on; from the first if the table changed since `version`."""
        if version != self.data_version:
            start = 0
        return {name: self._topics[name] for name in sorted(self._topics)[start : start + count]}

    def save(self) -> None:
        """Writes the table now if it holds what the disk does not. Raises OSError."""
        self.table.writer.save()

    def _changed(self, topics: list[TopicConfig]) -> None:
        if self.on_change is not None:
            self.on_change(topics)


def _limited(topic: TopicConfig) -> TopicConfig:
    """The topic as it may be: an older version took any number of queues."""
    if max(topic.read_queue_nums, topic.write_queue_nums) <= MAX_QUEUES:
        return topic
    log.warning("topic %s has more queues than the %d that a topic can have: the rest is left out", topic, MAX_QUEUES)
    return msgspec.structs.replace(
        topic,
        read_queue_nums=min(topic.read_queue_nums, MAX_QUEUES),
        write_queue_nums=min(topic.write_queue_nums, MAX_QUEUES),
    )


def _as_given(topic: TopicConfig) -> TopicConfig:
    """The topic with the attributes that it was given."""
    attributes = shown(topic.attributes)
    return topic if attributes is topic.attributes else msgspec.structs.replace(topic, attributes=attributes)


class _WrittenTopics(msgspec.Struct, rename="camel"):
    """A `TopicTable` on its way to the disk."""

    data_version: DataVersion
    topic_config_table: EncodedMap


class _AllTopics(msgspec.Struct, rename="camel"):
    """The answer to GET_ALL_TOPIC_CONFIG."""

    data_version: DataVersion
    topic_config_table: EncodedMap
    mapping_data_version: DataVersion
    topic_queue_mapping_detail_map: dict[str, MappingDetail]
    topic_queue_mapping_info_map: dict[str, str] = {}


def handlers(
    topics: Topics,
    offsets: Offsets,
    delete_queues: Callable[[Collection[str]], None],
    published: Callable[[], Awaitable[None]],
    static_topics: StaticTopics,
) -> dict[int, Handler]:
    """`delete_queues(topics)` lets the store forget the queues of topics; `published()` waits for the name servers."""
    requests = _TopicRequests(topics, offsets, delete_queues, published, static_topics)
    return {
        RequestCode.UPDATE_AND_CREATE_TOPIC: requests.update,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: requests.update_list,
        RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC: requests.update_static,
        RequestCode.DELETE_TOPIC_IN_BROKER: requests.delete,
        RequestCode.GET_ALL_TOPIC_CONFIG: requests.get_all,
        RequestCode.GET_TOPIC_CONFIG: requests.get,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: requests.system_topics,
    }


class _TopicRequests:
    def __init__(
        self,
        topics: Topics,
        offsets: Offsets,
        delete_queues: Callable[[Collection[str]], None],
        published: Callable[[], Awaitable[None]],
        static_topics: StaticTopics,
    ) -> None:
        self._topics = topics
        self._static_topics = static_topics
        self._offsets = offsets
        self._delete_queues = delete_queues
        self._published = published
        self._mapping = asyncio.Lock()  # one change of a static topic after the other
        self._changes: set[asyncio.Future[None]] = set()

    def update(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        header = decode_header(CreateTopic, request)
        log.info("%r creates or changes topic %s", connection, header.topic)
        try:
            changes = parse_changes(header.attributes)
        except BadAttribute as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, str(e)) from None
        topic = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
            attributes=changes,
        )
        self._check(topic)
        return self._change(request, topic)

    async def update_list(self, request: Frame, connection: Connection) -> Frame:
        topics = request_body(TopicConfigs, request.body).topic_config_list
        log.info("%r creates or changes %d topics", connection, len(topics))
        changed = []
        await self._topics.table.idle({topic.topic_name for topic in topics})
        async for topic in steps(topics):
            self._check(topic)
            if topic != self._topics.get(topic.topic_name):
                changed.append(self._with_attributes(topic))
        return await self._create(request, changed)

    def update_static(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        """A topic, and what of its logical queues this broker has."""
        header = decode_header(CreateTopic, request)
        detail = request_body(MappingDetail, request.body)
        log.info("%r creates or changes static topic %s", connection, header.topic)
        topic = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
        )
        self._check(topic)
        return self._change_static(request, topic, detail, force=header.force)

    def delete(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        name = decode_header(DeleteTopic, request).topic
        log.info("%r deletes topic %s", connection, name)
        self._check_name(name)
        return self._delete(request, name)

    def get_all(self, request: Frame, _: Connection) -> Awaitable[Frame]:
        version = self._topics.data_version
        if request.fields:
            header = decode_header(GetAllTopicConfig, request)
            known = decode_body(DataVersion, header.data_version.encode()) if header.data_version else None
            count = min(_PAGE_TOPICS, header.max_topic_num or _PAGE_TOPICS)
            table = self._topics.page(known, max(0, header.topic_seq), max(0, count))
        else:  # clients before 5.3 know no pages
            table = {topic.topic_name: topic for topic in self._topics.all()}
        mapping_version = self._static_topics.table.version
        details = {name: detail for name, detail in self._static_topics.all().items() if name in table}
        versions = msgspec.structs.replace(version), msgspec.structs.replace(mapping_version)
        told = {name: _as_given(topic) for name, topic in table.items()}
        return self._tell_all(request, told, *versions, details)

    async def _tell_all(
        self,
        request: Frame,
        table: dict[str, TopicConfig],
        version: DataVersion,
        mapping_version: DataVersion,
        details: dict[str, MappingDetail],
    ) -> Frame:
        fields = {"totalTopicNum": str(len(self._topics))}
        encoded = self._topics.table.encoded
        body = await beside(lambda: encode_body(_AllTopics(version, encoded(table), mapping_version, details)))
        return request.reply(fields=fields, body=body)

    def get(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(GetTopicConfig, request)
        topic = self._topics.get(header.topic)
        if topic is None:
            raise RequestFailed(ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {header.topic}")
        detail = self._static_topics.get(header.topic) if header.lo else None
        return request.reply(
            body=encode_body(MappedTopicConfig(**msgspec.structs.asdict(_as_given(topic)), mapping_detail=detail))
        )

    def system_topics(self, request: Frame, _: Connection) -> Frame:
        return request.reply(body=encode_body(TopicList(topic_list=sorted(self._topics.system_topics))))

    def _check(self, topic: TopicConfig) -> None:
        self._check_name(topic.topic_name)
        if topic.topic_filter_type not in ("SINGLE_TAG", "MULTI_TAG"):
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, f"topicFilterType = [{topic.topic_filter_type}] value invalid"
            )
        queues = (topic.read_queue_nums, topic.write_queue_nums)
        if not all(0 <= number <= MAX_QUEUES for number in queues) or not 0 <= topic.perm <= 7:
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"The topic[{topic.topic_name}] asks for {queues[0]} read queues, {queues[1]} write queues and perm "
                f"{topic.perm}: queues go from 0 to {MAX_QUEUES}, perm from 0 to 7",
            )
        if topic.attributes.get(f"+{MESSAGE_TYPE}") == "MIXED" and not self._topics.may_be_mixed:
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, "MIXED message type is not supported.")
        if topic.attributes.get(f"+{CLEANUP_POLICY}") == _COMPACTION:  # to keep one message per key
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"{CLEANUP_POLICY}={_COMPACTION} is not supported by this broker: leave {CLEANUP_POLICY} out, or "
                "create the topic elsewhere",
            )

    def _check_name(self, name: str) -> None:
        remark = validate_topic(name)
        if remark is None and self._topics.is_system(name):
            remark = f"The topic[{name}] is conflict with system topic."
        if remark is not None:
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, remark)

    def _with_attributes(self, topic: TopicConfig) -> TopicConfig:
        """The topic with the attributes that its changes lead to."""
        old = self._topics.get(topic.topic_name)
        try:
            attributes = alter(TOPIC_ATTRIBUTES, None if old is None else shown(old.attributes), topic.attributes)
        except BadAttribute as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, str(e)) from None
        if f"+{RESERVE_TIME}" in topic.attributes:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "Update topic reserveTime not supported")
        return msgspec.structs.replace(topic, attributes=kept(attributes))

    def _check_room(self, topics: list[TopicConfig]) -> None:
        new = sum(topic.topic_name not in self._topics for topic in topics)
        if new and len(self._topics.table) + new > MAX_TOPICS:
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"there are {len(self._topics)} topics, and this broker takes {MAX_TOPICS}: delete some, or create "
                f"{'this one' if new == 1 else 'these'} elsewhere",
            )

    async def _change(self, request: Frame, topic: TopicConfig) -> Frame:
        await self._topics.table.idle((topic.topic_name,))
        if topic == self._topics.get(topic.topic_name):
            return await self._when_published(request)
        return await self._create(request, [self._with_attributes(topic)])

    async def _create(self, request: Frame, topics: list[TopicConfig]) -> Frame:
        self._check_room(topics)
        if topics:
            await self._topics.create(*topics)
        return await self._when_published(request)

    async def _change_static(self, request: Frame, topic: TopicConfig, detail: MappingDetail, *, force: bool) -> Frame:
        """Goes on to its end when whoever asks is gone in the middle."""
        change = asyncio.ensure_future(self._create_static(topic, detail, force=force))
        self._changes.add(change)
        change.add_done_callback(self._changed)
        await asyncio.shield(change)
        return await self._when_published(request)

    def _changed(self, change: asyncio.Future[None]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # looked at

    async def _create_static(self, topic: TopicConfig, detail: MappingDetail, *, force: bool) -> None:
        """Takes a topic and its mapping; both, or neither if one of them can't be written."""
        name = topic.topic_name
        async with self._mapping:
            await self._topics.table.idle((name,))
            self._check_room([topic])
            altered = self._with_attributes(topic)
            former = self._static_topics.get(name)
            try:
                mapped = self._static_topics.checked(name, detail, force=force)
            except BadMapping as e:
                raise RequestFailed(ResponseCode.SYSTEM_ERROR, str(e)) from None
            await self._static_topics.create(name, mapped)
            try:
                await self._topics.create(altered)
            except RequestFailed:
                self._static_topics.restore(name, former)
                raise

    async def _when_published(self, request: Frame) -> Frame:
        """Success, once a client that asks for the route of the topic gets it."""
        await self._published()
        return request.reply()

    async def _when_written(self, request: Frame, otherwise: str) -> Frame:
        """Success, once what has changed in memory is on disk."""
        try:
            await self._topics.table.writer.written()
            await self._static_topics.table.writer.written()
        except Exception as e:
            raise not_written(otherwise, e) from e
        return request.reply()

    async def _delete(self, request: Frame, name: str) -> Frame:
        # A topic that consumers popped from has a retry topic for each of their groups, under one of two names.
        retry_topics = [
            retry_topic
            for group in self._offsets.groups_of(name)
            for retry_topic in (f"{RETRY_PREFIX}{group}+{name}", f"{RETRY_PREFIX}{group}_{name}")
            if retry_topic in self._topics
        ]
        at = 0
        while len(retry_topics) - at > TOPICS_PER_TURN:
            self._forget(retry_topics[at : at + TOPICS_PER_TURN])
            at += TOPICS_PER_TURN
            await next_turn()
        # What is left goes in one step, so that no group commits an offset of a topic that is gone.
        try:
            self._offsets.remove_topics({name, *retry_topics})
        except OSError as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, f"{name} is not deleted, its offsets are kept: {e}") from e
        self._forget([*retry_topics[at:], name])
        return await self._when_written(request, f"{name} is deleted, but comes back with the next start")

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            self._topics.delete(name)
            self._static_topics.delete(name)
        self._delete_queues(names)
