"""Topics, groups and offsets of a broker that runs, as the JSON files that a broker starts from.

Apache's broker may keep them in RocksDB (`configManagerVersion=v2`, `storeType=defaultRocksDB`), which Apache's tools
can write as JSON only in part. What a slave asks its master for is all of it, in any of these forms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from skylark.net.pool import Pool
from skylark.store.tables import (
    ConsumerOffsetTable,
    SubscriptionGroupTable,
    TopicTable,
    consumer_offsets_path,
    save,
    subscription_groups_path,
    topics_path,
)
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Encoding, Frame

_TIMEOUT_S: Final = 60.0
T = TypeVar("T", bound=msgspec.Struct)


class FetchFailed(Exception):
    """The broker did not give a table; says which broker and why."""


async def fetch(address: str, root: Path) -> list[str]:
    """Asks a broker for its tables and keeps them below a store's root: all of them or, raising, none.

    Says what was written. Raises `FetchFailed` or OSError.
    """
    pool = Pool()
    try:
        topics = await _table(pool, address, RequestCode.GET_ALL_TOPIC_CONFIG, TopicTable)
        groups = await _table(pool, address, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, SubscriptionGroupTable)
        offsets = await _table(pool, address, RequestCode.GET_ALL_CONSUMER_OFFSET, ConsumerOffsetTable)
    finally:
        pool.close()
    save(topics_path(root), topics)
    save(subscription_groups_path(root), groups)
    save(consumer_offsets_path(root), offsets)
    return [
        f"{len(topics.topic_config_table)} topics in {topics_path(root)}",
        f"{len(groups.subscription_group_table)} groups in {subscription_groups_path(root)}",
        f"offsets of {len(offsets.offset_table)} pairs of topic and group in {consumer_offsets_path(root)}",
    ]


async def _table(pool: Pool, address: str, code: RequestCode, wanted: type[T]) -> T:
    try:
        answer = await pool.request(address, Frame(code, {}, encoding=Encoding.JSON), _TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise FetchFailed(f"{address} does not answer: {error}") from error
    if answer.code != ResponseCode.SUCCESS:
        raise FetchFailed(f"{address} answers {code.name} with {answer.code}: {answer.remark}")
    try:
        return fastjson.decode(answer.body, wanted)
    except fastjson.BadJson as error:
        raise FetchFailed(f"{address} answers {code.name} with what is no table: {error}") from None
