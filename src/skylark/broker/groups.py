"""The consumer groups of this broker: the table in subscriptionGroup.json, and the requests that change it.

A group comes into being when somebody first asks for it, if the broker may create groups by itself: then it is there at
once and on disk soon after. One that an operator asks for is there once it is on disk. What is forbidden to a group of
a topic is a set of bits; the one for reading is the only one that anybody sets.

Groups that clients create stay when those are gone. How many that may be is divided among the clients' hosts
(`shares.py`), until the broker is started again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from skylark.broker.attributes import GROUP_ATTRIBUTES, BadAttribute, alter
from skylark.broker.config import BrokerConfig
from skylark.broker.entry_room import EntryRoom
from skylark.broker.offsets import SYSTEM_GROUP_PREFIX, Offsets
from skylark.broker.shares import Shares
from skylark.broker.table_writer import EntryTable, not_written
from skylark.broker.turns import beside, steps
from skylark.net.connection import Connection, Handler, RequestFailed
from skylark.net.request_bodies import request_body
from skylark.store.tables import SubscriptionGroupTable, load
from skylark.wire.bodies import GroupConfigs, GroupForbidden, decode_body, encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.fastjson import EncodedMap
from skylark.wire.frame import Frame
from skylark.wire.headers import (
    DeleteSubscriptionGroup,
    GetAllSubscriptionGroup,
    GetSubscriptionGroupConfig,
    UpdateGroupForbidden,
)
from skylark.wire.tables import MAX_QUEUES, PERM_READ, DataVersion, SubscriptionGroupConfig
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

MAX_AUTO_CREATED_GROUPS: Final = 20_000
"""A group takes 3 KB with its retry topic."""
MAX_GROUPS: Final = 5 * MAX_AUTO_CREATED_GROUPS
MAX_SIZE_BYTES: Final = 8 << 20
"""Of what groups take beyond their own, with delays of retries and subscriptions that an operator gives them."""
MAX_FORBIDDEN: Final = 65_536
_OWN_BYTES: Final = 1_024
_DELAY_BYTES: Final = 40
_SUBSCRIPTION_BYTES: Final = 256
_BUILTIN_GROUPS: Final = (
    "TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY", "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER", "CID_RMQ_SYS_TRANS",
)  # fmt: skip
_PAGE_GROUPS: Final = 2_000
_SHOWN: Final = 20
_MAX_TOPIC_LENGTH: Final = 255
_MAX_NAME_LENGTH: Final = 120  # leaves room for the prefixes of the group's own topics
_LEGAL_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+", re.ASCII)


def validate_group(name: str) -> str | None:
    """What is wrong with the name of a group, or None."""
    if not name.strip():
        return "The specified group is blank."
    if not _LEGAL_NAME.fullmatch(name):
        return f"The specified group: {name}, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(name) > _MAX_NAME_LENGTH:
        return f"The specified group: {name}, is longer than group max length: {_MAX_NAME_LENGTH}"
    return None


class Asker(Protocol):
    """Whose request it is: a connection, or what a test has in its place."""

    @property
    def peer(self) -> tuple[str, int]: ...


class Groups:
    """The table of consumer groups."""

    def __init__(self, config_dir: Path, config: BrokerConfig, clock: Callable[[], int]) -> None:
        path = config_dir / "subscriptionGroup.json"
        self._config = config
        stored = load(path, SubscriptionGroupTable) or SubscriptionGroupTable(
            data_version=DataVersion(timestamp_ms=clock())
        )
        builtin = {name: SubscriptionGroupConfig(group_name=name) for name in _BUILTIN_GROUPS}
        self._groups = builtin | {name: _limited(group) for name, group in stored.subscription_group_table.items()}
        self._forbidden = stored.forbidden_table
        self._forbidden_pairs = sum(map(len, self._forbidden.values()))
        self.data_version = stored.data_version
        self.table = EntryTable(path, "group", self._groups, stored.data_version, clock, self._rendered)
        self._room = EntryRoom(_OWN_BYTES, MAX_SIZE_BYTES)
        for group in self._groups.values():
            self._room.keep(group.group_name, _size_bytes(group))
        self._creators: dict[str, str] = {}  # group -> host
        self._shares = Shares()

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def get(self, name: str, client: Asker | None = None) -> SubscriptionGroupConfig | None:
        """The group, created if it is not there and may be; else None. Raises RequestFailed if there is no room for a
        group that `client` asks for.
        """
        group = self._groups.get(name)
        if group is None and self._may_create(name):
            host = "" if client is None else client.peer[0]
            if not self._shares.has_room(host, 1, MAX_AUTO_CREATED_GROUPS - len(self.table) - 1):
                if client is None:
                    return None
                raise self._no_room(name, host)
            group = SubscriptionGroupConfig(group_name=name)
            self._creators[name] = host
            self._shares.add(host, 1)
            self.put(group)
        return group

    def all(self) -> Iterable[SubscriptionGroupConfig]:
        return self._groups.values()

    def put(self, *groups: SubscriptionGroupConfig) -> None:
        """Adds or replaces groups as one change."""
        self.table.put({group.group_name: group for group in groups})

    async def create(self, *groups: SubscriptionGroupConfig) -> None:
        """Adds or replaces groups as one change, once it is on disk. Raises RequestFailed: then nothing has changed."""
        before = self._room.take({group.group_name: _size_bytes(group) for group in groups})
        try:
            await self.table.create({group.group_name: group for group in groups})
        except Exception as e:
            self._room.give_back(before)
            what = groups[0].group_name if len(groups) == 1 else f"{len(groups)} groups"
            raise not_written(f"{what} can't be created or changed", e) from e

    def delete(self, name: str) -> SubscriptionGroupConfig | None:
        forbidden = self._forbidden.pop(name, None)
        if forbidden is not None:
            self._forbidden_pairs -= len(forbidden)
            self.table.changed()
        self._shares.add(self._creators.pop(name, ""), -1)
        self._room.remove(name)
        return self.table.delete(name)

    def is_forbidden(self, group: str, topic: str) -> bool:
        """Whether an operator has forbidden the group to read the topic."""
        return bool(self._forbidden.get(group, {}).get(topic, 0) & PERM_READ)

    def forbid(self, group: str, topic: str, forbidden: bool) -> None:
        """Forbids or allows the group to read the topic."""
        if self.is_forbidden(group, topic) == forbidden:
            return
        topics = self._forbidden.setdefault(group, {})
        bits = topics.get(topic, 0) ^ PERM_READ
        self._forbidden_pairs += (bits != 0) - (topic in topics)
        if bits:
            topics[topic] = bits
        else:
            del topics[topic]
        if not topics:
            del self._forbidden[group]
        log.info("group %s may %sread topic %s", group, "not " if forbidden else "", topic)
        self.table.changed()

    @property
    def may_forbid_more(self) -> bool:
        return self._forbidden_pairs < MAX_FORBIDDEN

    def page(
        self, version: DataVersion | None, start: int, count: int
    ) -> tuple[dict[str, SubscriptionGroupConfig], dict[str, dict[str, int]]]:
        """The groups from the `start`-th by name on, from the first if the table changed since `version`; and what is
        forbidden to them.
        """
        if version != self.data_version:
            start = 0
        names = sorted(self._groups)[start : start + count]
        forbidden = {name: dict(self._forbidden[name]) for name in names if name in self._forbidden}
        return {name: self._groups[name] for name in names}, forbidden

    def save(self) -> None:
        """Writes the table now if it holds what the disk does not. Raises OSError."""
        self.table.writer.save()

    def _may_create(self, name: str) -> bool:
        if not (self._config.auto_create_subscription_group or name.startswith(SYSTEM_GROUP_PREFIX)):
            return False
        return validate_group(name) is None

    def _no_room(self, name: str, host: str) -> RequestFailed:
        return RequestFailed(
            ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
            f"subscription group [{name}] is not created: clients of {host} have created {self._shares.held(host)} "
            f"groups, there are {len(self.table)}, and from {MAX_AUTO_CREATED_GROUPS} on clients create none. Delete "
            f"groups that nobody uses, or create this one as an operator does (updateSubGroup)",
        )

    def forbidden(self) -> dict[str, dict[str, int]]:
        """A copy of all that is forbidden: group -> topic -> bits."""
        return {group: dict(topics) for group, topics in self._forbidden.items()}

    def _rendered(self) -> Callable[[DataVersion, EncodedMap], WrittenGroups]:
        forbidden = self.forbidden()
        return lambda version, groups: WrittenGroups(version, forbidden, groups)


class WrittenGroups(msgspec.Struct, rename="camel"):
    """A `SubscriptionGroupTable` on its way to the disk or to a client."""

    data_version: DataVersion
    forbidden_table: dict[str, dict[str, int]]
    subscription_group_table: EncodedMap


def _size_bytes(group: SubscriptionGroupConfig) -> int:
    """What of a group can be of any size, as estimated."""
    policy = group.group_retry_policy.customized_retry_policy
    return (
        (len(policy.next) * _DELAY_BYTES if policy is not None else 0)
        + sum(len(key) + len(value) for key, value in group.attributes.items())
        + sum(
            _SUBSCRIPTION_BYTES + len(each.topic) + len(each.expression or "") + len(each.expression_type or "")
            for each in group.subscription_data_set or ()
        )
    )


def _limited(group: SubscriptionGroupConfig) -> SubscriptionGroupConfig:
    """The group as it may be: an older version took any number of retry queues."""
    if group.retry_queue_nums <= MAX_QUEUES:
        return group
    log.warning("group %s has more retry queues than the %d that a topic can have", group, MAX_QUEUES)
    return msgspec.structs.replace(group, retry_queue_nums=MAX_QUEUES)


def handlers(groups: Groups, offsets: Offsets) -> dict[int, Handler]:
    requests = _GroupRequests(groups, offsets)
    return {
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: requests.update,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: requests.update_list,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: requests.get_all,
        RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: requests.get,
        RequestCode.DELETE_SUBSCRIPTIONGROUP: requests.delete,
        RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: requests.forbid,
    }


class _GroupRequests:
    def __init__(self, groups: Groups, offsets: Offsets) -> None:
        self._groups = groups
        self._offsets = offsets

    def update(self, request: Frame, connection: Connection) -> Frame | Awaitable[Frame]:
        if not request.body:
            return request.reply()
        return self._put(request, [request_body(SubscriptionGroupConfig, request.body)], connection)

    def update_list(self, request: Frame, connection: Connection) -> Awaitable[Frame]:
        return self._put(request, request_body(GroupConfigs, request.body).group_config_list, connection)

    def get_all(self, request: Frame, _: Connection) -> Awaitable[Frame]:
        if request.fields:
            header = decode_header(GetAllSubscriptionGroup, request)
            known = decode_body(DataVersion, header.data_version.encode()) if header.data_version else None
            count = min(_PAGE_GROUPS, header.max_group_num or _PAGE_GROUPS)
            table, forbidden = self._groups.page(known, max(0, header.group_seq), max(0, count))
        else:  # clients before 5.3 know no pages
            table = {group.group_name: group for group in self._groups.all()}
            forbidden = self._groups.forbidden()
        return self._tell_all(request, table, msgspec.structs.replace(self._groups.data_version), forbidden)

    async def _tell_all(
        self,
        request: Frame,
        table: dict[str, SubscriptionGroupConfig],
        version: DataVersion,
        forbidden: dict[str, dict[str, int]],
    ) -> Frame:
        fields = {"totalGroupNum": str(len(self._groups))}
        encoded = self._groups.table.encoded
        body = await beside(lambda: encode_body(WrittenGroups(version, forbidden, encoded(table))))
        return request.reply(fields=fields, body=body)

    def get(self, request: Frame, connection: Connection) -> Frame:
        group = self._groups.get(decode_header(GetSubscriptionGroupConfig, request).group, connection)
        if group is None:
            raise RequestFailed(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
        return request.reply(body=encode_body(group))

    async def delete(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(DeleteSubscriptionGroup, request)
        log.info("%r deletes group %s", connection, header.group_name)
        self._groups.delete(header.group_name)
        self._offsets.group_deleted(header.group_name, with_offsets=header.clean_offset)
        await self._written(f"{header.group_name} is deleted, but comes back with the next start")
        return request.reply()

    async def forbid(self, request: Frame, _: Connection) -> Frame:
        header = decode_header(UpdateGroupForbidden, request)
        if header.readable is not None:
            self._check_names(header)
            self._groups.forbid(header.group, header.topic, not header.readable)
            await self._written(f"what {header.group} may read is changed, but not after the next start")
        readable = not self._groups.is_forbidden(header.group, header.topic)
        answer = GroupForbidden(group=header.group, readable=readable, topic=header.topic)
        return request.reply(remark="", body=encode_body(answer))

    async def _written(self, otherwise: str) -> None:
        try:
            await self._groups.table.writer.written()
        except Exception as e:
            raise not_written(otherwise, e) from e

    def _check_names(self, header: UpdateGroupForbidden) -> None:
        remark = validate_group(header.group)
        if remark is None and len(header.topic) > _MAX_TOPIC_LENGTH:
            remark = f"The specified topic has {len(header.topic)} characters, and names have {_MAX_TOPIC_LENGTH}"
        if remark is None and not header.readable and not self._groups.may_forbid_more:
            remark = f"{MAX_FORBIDDEN} pairs of group and topic are forbidden: allow some before you forbid others"
        if remark is not None:
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, remark)

    async def _put(self, request: Frame, groups: list[SubscriptionGroupConfig], connection: Connection) -> Frame:
        names = [group.group_name for group in groups[:_SHOWN]]
        log.info("%r creates or changes %d groups: %s", connection, len(groups), ", ".join(names))
        altered = []
        await self._groups.table.idle({group.group_name for group in groups})
        async for group in steps(groups):
            self._check(group)
            altered.append(self._with_attributes(group))
        new = sum(group.group_name not in self._groups for group in groups)
        if new and len(self._groups.table) + new > MAX_GROUPS:
            raise RequestFailed(
                ResponseCode.INVALID_PARAMETER,
                f"there are {len(self._groups)} groups, and this broker takes {MAX_GROUPS}: delete some before you "
                f"create others",
            )
        if altered:
            await self._groups.create(*altered)
        return request.reply()

    @staticmethod
    def _check(group: SubscriptionGroupConfig) -> None:
        remark = validate_group(group.group_name)
        if remark is None and group.retry_queue_nums > MAX_QUEUES:
            remark = (
                f"The group[{group.group_name}] asks for {group.retry_queue_nums} retry queues: retryQueueNums "
                f"goes up to {MAX_QUEUES}"
            )
        if remark is not None:
            raise RequestFailed(ResponseCode.INVALID_PARAMETER, remark)

    def _with_attributes(self, group: SubscriptionGroupConfig) -> SubscriptionGroupConfig:
        """The group with the attributes that its changes lead to."""
        old = self._groups.get(group.group_name) if group.group_name in self._groups else None
        try:
            attributes = alter(GROUP_ATTRIBUTES, None if old is None else old.attributes, group.attributes)
        except BadAttribute as e:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, str(e)) from None
        return msgspec.structs.replace(group, attributes=attributes)
