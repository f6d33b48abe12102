"""What operators ask a broker: how it is doing, how it is set, and to clean up.

Settings change as a whole or not at all, and only those in `UPDATABLE_KEYS`: whoever can reach the broker could
otherwise make it write where they want. What changed goes to `on_config_change`, which writes it back to the file that
the broker was started with and lets the parts of the broker know that hold a setting of their own.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from skylark.broker.clients import Clients
from skylark.broker.config import NO_EFFECT_KEYS, UPDATABLE_KEYS, BrokerConfig, cautions, is_harmless
from skylark.broker.groups import Groups
from skylark.broker.offsets import Offsets
from skylark.broker.progress import Progress
from skylark.broker.stats import Rate, Stats, Totals
from skylark.broker.timers import NO_TIMERS
from skylark.broker.topics import SCHEDULE_TOPIC, TOPICS_PER_TURN, Topics
from skylark.broker.turns import next_turn
from skylark.config import properties
from skylark.config.apache_keys import BROKER_KEYS
from skylark.config.properties import ConfigError
from skylark.config.without_effect import WithoutEffect, remark_on
from skylark.net.connection import MAX_WAITING_REQUESTS, Connection, Handler, RequestFailed
from skylark.store.store import Store
from skylark.wire import fastjson
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import PROTOCOL_VERSION, Frame
from skylark.wire.headers import ViewBrokerStatsData
from skylark.wire.stats import BrokerStatsData, KeyValues, StatsItem
from skylark.wire.tables import DataVersion
from skylark.wire.typed import decode_header

log = logging.getLogger(__name__)

VERSION_NAME: Final = "V5_5_0"
"""Of the version of Apache RocketMQ whose protocol this is; clients and tools know no other versions."""

_MAX_SETTINGS_BYTES: Final = 64 << 10  # more than all that there are take


def handlers(
    config: BrokerConfig,
    store: Store,
    topics: Topics,
    groups: Groups,
    offsets: Offsets,
    clients: Clients,
    stats: Stats,
    clock: Callable[[], int],
    *,
    broker_addr: str,
    on_config_change: Callable[[dict[str, str]], None] = lambda changed: None,
    delay_offsets: Callable[[], Mapping[int, int]] = dict,
    delay_text: Callable[[], bytes] = bytes,
    timer_info: Callable[[int], dict[str, str]] = lambda now_ms: NO_TIMERS,
    is_static: Callable[[str], bool] = lambda topic: False,
) -> dict[int, Handler]:
    """`delay_offsets` gives the next offset of each delay level, `delay_text` the table they are kept in as JSON;
    `timer_info` what there is to say of the timers now; `is_static` tells static topics.
    """
    admin = Admin(config, store, topics, stats, clock, on_config_change, delay_offsets, delay_text, timer_info)
    progress = Progress(config, store, topics, groups, offsets, clients, stats, clock, broker_addr, is_static)
    return admin.handlers() | progress.handlers()


class Admin:
    """Answers what is not about single topics and groups."""

    def __init__(
        self,
        config: BrokerConfig,
        store: Store,
        topics: Topics,
        stats: Stats,
        clock: Callable[[], int],
        on_config_change: Callable[[dict[str, str]], None],
        delay_offsets: Callable[[], Mapping[int, int]],
        delay_text: Callable[[], bytes],
        timer_info: Callable[[int], dict[str, str]],
    ) -> None:
        self._config = config
        self._store = store
        self._topics = topics
        self._stats = stats
        self._clock = clock
        self._on_config_change = on_config_change
        self._delay_offsets = delay_offsets
        self._delay_text = delay_text
        self._timer_info = timer_info
        self._config_version = DataVersion(timestamp_ms=clock())
        self._without_effect = WithoutEffect(NO_EFFECT_KEYS)

    def handlers(self) -> dict[int, Handler]:
        return {
            RequestCode.GET_BROKER_RUNTIME_INFO: self._runtime_info,
            RequestCode.GET_BROKER_CONFIG: self._get_config,
            RequestCode.UPDATE_BROKER_CONFIG: self._update_config,
            RequestCode.VIEW_BROKER_STATS_DATA: self._view_stats,
            RequestCode.GET_ALL_DELAY_OFFSET: self._all_delay_offsets,
            RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: self._clean_queues,
            RequestCode.CLEAN_UNUSED_TOPIC: self._clean_unused_topics,
            RequestCode.DELETE_EXPIRED_COMMITLOG: self._delete_expired_log,
        }

    # Settings.

    def _get_config(self, request: Frame, connection: Connection) -> Frame:
        version = fastjson.dumps(self._config_version).decode()
        settings = properties.render(self._config) + self._without_effect.render()
        return request.reply(fields={"version": version}, body=settings.encode())

    def _update_config(self, request: Frame, connection: Connection) -> Frame:
        changed = self.update_config(_parse_settings(request.body))
        if changed:
            log.info("%r changes %s", connection, ", ".join(f"{key}={value}" for key, value in changed.items()))
        return request.reply(remark=remark_on([key for key in changed if key in NO_EFFECT_KEYS]))

    def update_config(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """Sets what differs from now, and gives it. Raises RequestFailed, and then nothing has changed."""
        current = properties.parse(properties.render(self._config))
        wanted = {key: value.strip() for key, value in wanted.items() if current.get(key) != value.strip()}
        idle = {key: value for key, value in wanted.items() if key in NO_EFFECT_KEYS}
        own = {key: value for key, value in wanted.items() if key not in idle}
        code = ResponseCode.INVALID_PARAMETER if UPDATABLE_KEYS.issuperset(own) else ResponseCode.NO_PERMISSION
        try:
            own = {key: value for key, value in own.items() if not is_harmless(key, value, source="update")}
            self._without_effect.check(idle)
            changed = properties.update(self._config, own, allowed=UPDATABLE_KEYS, known=BROKER_KEYS)
        except ConfigError as error:
            raise RequestFailed(code, str(error)) from error
        for key, caution in cautions(self._config).items():
            if key in changed:
                log.warning("%s=%s %s", key, changed[key], caution)
        changed |= self._without_effect.set(idle)
        if changed:
            self._config_version.next_version(self._clock())
            self._on_config_change(changed)
        return changed

    # Counters.

    def _view_stats(self, request: Frame, connection: Connection) -> Frame:
        header = decode_header(ViewBrokerStatsData, request)
        rates = self._stats.view(header.stats_name, header.stats_key)
        if rates is None:
            raise RequestFailed(
                ResponseCode.SYSTEM_ERROR, f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            )
        data = BrokerStatsData(
            stats_minute=_item(rates.minute), stats_hour=_item(rates.hour), stats_day=_item(rates.day)
        )
        return request.reply(body=fastjson.dumps(data))

    def _all_delay_offsets(self, request: Frame, connection: Connection) -> Frame:
        text = self._delay_text()
        if not text:
            raise RequestFailed(ResponseCode.SYSTEM_ERROR, "No delay offset in this broker")
        return request.reply(body=text)

    def _runtime_info(self, request: Frame, connection: Connection) -> Frame:
        return request.reply(body=fastjson.dumps(KeyValues(table=self.runtime_info())))

    def runtime_info(self) -> dict[str, str]:
        """Everything that `mqadmin brokerStatus` prints, under Apache's names."""
        now_ms = self._clock()
        return {
            "brokerActive": "true",
            "brokerVersion": str(PROTOCOL_VERSION),
            "brokerVersionDesc": VERSION_NAME,
            "implementation": "skylark",  # not Apache's: tells clients that repeated ends of transactions count once
            "startAcceptSendRequestTimeStamp": "0",
            **_traffic(self._stats, now_ms),
            **_store_info(self._store, self._config),
            **self._delays(),
            **self._timer_info(now_ms),
            **_NOT_HERE,
        }

    def _delays(self) -> dict[str, str]:
        return {
            f"scheduleMessageOffset_{level}": f"{offset},{self._store.max_offset(SCHEDULE_TOPIC, level - 1)}"
            for level, offset in sorted(self._delay_offsets().items())
        }

    # Cleaning.

    def _clean_queues(self, request: Frame, connection: Connection) -> Frame:
        """A round of retention, in which queue files go with the log segments that they speak of.

        A queue without messages stays, other than with Apache: its next message must not get an offset again.
        """
        log.info("%r cleans the consume queues: %s", connection, self._store.clean(self._clock()))
        return request.reply()

    def _delete_expired_log(self, request: Frame, connection: Connection) -> Frame:
        self._store.delete_expired_soon()
        log.warning("%r deletes expired files at any hour: %s", connection, self._store.clean(self._clock()))
        return request.reply()

    async def _clean_unused_topics(self, request: Frame, connection: Connection) -> Frame:
        """Deletes the queues of topics that are gone from the topic table."""
        found = sorted(filter(self._is_unused, self._store.topics()))
        for at in range(0, len(found), TOPICS_PER_TURN):
            some = [topic for topic in found[at : at + TOPICS_PER_TURN] if self._is_unused(topic)]
            log.warning("%r deletes the queues of what are no topics any more: %s", connection, ", ".join(some))
            self._store.delete_topics(some)
            await next_turn()
        return request.reply()

    def _is_unused(self, topic: str) -> bool:
        return topic not in self._topics and not self._topics.is_system(topic)


def _parse_settings(body: bytes) -> dict[str, str]:
    if len(body) > _MAX_SETTINGS_BYTES:
        raise RequestFailed(
            ResponseCode.INVALID_PARAMETER,
            f"the settings have {len(body)} bytes, and may have up to {_MAX_SETTINGS_BYTES}",
        )
    try:
        return properties.parse(body.decode())
    except (UnicodeDecodeError, ConfigError) as error:
        raise RequestFailed(ResponseCode.INVALID_PARAMETER, f"the settings can't be read: {error}") from error


def _item(rate: Rate) -> StatsItem:
    return StatsItem(sum=rate.sum, tps=rate.tps, avgpt=rate.average)


def _traffic(stats: Stats, now_ms: int) -> dict[str, str]:
    totals = stats.totals(now_ms)
    yesterday, today = stats.yesterday_morning, stats.this_morning

    def tps(value: Callable[[Totals], int]) -> str:
        return " ".join(str(rate) for rate in stats.recent_tps(value))

    return {
        "bootTimestamp": str(stats.started_ms),
        "runtime": _duration(now_ms - stats.started_ms),
        "putTps": tps(lambda t: t.put_count),
        "getFoundTps": tps(lambda t: t.got_times),
        "getMissTps": tps(lambda t: t.missed),
        "getTotalTps": tps(lambda t: t.got_times + t.missed),
        "getTransferredTps": tps(lambda t: t.got_count),
        "putMessageTimesTotal": str(totals.put_count),
        "putMessageSizeTotal": str(totals.put_bytes),
        "putMessageAverageSize": str(totals.put_bytes / max(1, totals.put_count)),
        "putMessageFailedTimes": str(stats.failed_puts),
        "putMessageEntireTimeMax": str(stats.slowest_put_ms),
        "putMessageDistributeTime": str(stats.took),
        "putLatency99": f"{stats.took.percentile_ms(0.99):.2f}",
        "putLatency999": f"{stats.took.percentile_ms(0.999):.2f}",
        "msgPutTotalYesterdayMorning": str(yesterday.user_put_count),
        "msgPutTotalTodayMorning": str(today.user_put_count),
        "msgPutTotalTodayNow": str(totals.user_put_count),
        "msgGetTotalYesterdayMorning": str(yesterday.user_got_count),
        "msgGetTotalTodayMorning": str(today.user_got_count),
        "msgGetTotalTodayNow": str(totals.user_got_count),
    }


def _store_info(store: Store, config: BrokerConfig) -> dict[str, str]:
    root = Path(config.store_path_root_dir)
    log_dir = config.store_path_commit_log or str(root / "commitlog")
    disk_ratio = str(store.disk_ratio())
    disk = shutil.disk_usage(root)
    first = store.message_at(store.log_min_offset)
    return {
        "commitLogDiskRatio": disk_ratio,
        f"commitLogDiskRatio_{log_dir}": disk_ratio,
        "consumeQueueDiskRatio": disk_ratio,
        "commitLogMinOffset": str(store.log_min_offset),
        "commitLogMaxOffset": str(store.log_max_offset),
        "commitLogDirCapacity": f"Total : {human_bytes(disk.total)}, Free : {human_bytes(disk.free)}.",
        "remainHowManyDataToFlush": human_bytes(store.log_max_offset - store.flushed_offset),
        "earliestMessageTimeStamp": str(first.store_timestamp_ms if first is not None else -1),
    }


# Parts of Apache's broker that this one does without: messages are in their queues when they are in the log, there are
# no pools of threads with queues before them and no pool of buffers; reads of the mapped log are too quick to be timed.
# Tools ask for the names all the same.
_NOT_HERE: Final = {
    "dispatchBehindBytes": "0",
    "dispatchMaxBuffer": "0",
    "getMessageEntireTimeMax": "0",
    "pageCacheLockTimeMills": "0",
    "remainTransientStoreBufferNumbs": "0",
    **{f"{pool}ThreadPoolQueueSize": "0" for pool in ("send", "pull", "litePull", "query", "ack")},
    **{f"{pool}ThreadPoolQueueHeadWaitTimeMills": "0" for pool in ("send", "pull", "litePull", "query", "ack")},
    **{
        f"{pool}ThreadPoolQueueCapacity": str(MAX_WAITING_REQUESTS)
        for pool in ("send", "pull", "litePull", "query", "ack", "EndTransaction")
    },
    "EndTransactionQueueSize": "0",
}


def human_bytes(size_bytes: int) -> str:
    """
    >>> human_bytes(1023), human_bytes(1536), human_bytes(1 << 40)
    ('1023 B', '1.5 KiB', '1.0 TiB')
    """
    if size_bytes < 1024:
        return f"{size_bytes} B"
    power = (size_bytes.bit_length() - 1) // 10
    return f"{size_bytes / (1 << 10 * power):.1f} {'KMGTPE'[power - 1]}iB"


def _duration(elapsed_ms: int) -> str:
    minutes, seconds = divmod(max(0, elapsed_ms) // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"[ {days} days, {hours} hours, {minutes} minutes, {seconds} seconds ]"
