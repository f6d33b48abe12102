"""What a broker can be told: the keys of Apache's `broker.conf` that Skylark honours, with Apache 5.5.0's defaults.

Apache spreads these over BrokerConfig, MessageStoreConfig and NettyServerConfig, but reads all of them from one file;
here they are one record. Two defaults differ: `listenPort` is 10911, which Apache's start script sets; an empty
`brokerIP1` means the address that the broker was told to listen on, if that is a concrete one.

A setting that another way of keeping messages or tables hangs on is kept to, or refused with what to do instead: a
broker that ignored it would start without them.
"""

import enum
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, field

from skylark.config import properties, without_effect
from skylark.config.apache_keys import BROKER_KEYS
from skylark.config.hosts import Host
from skylark.config.places import at_home
from skylark.config.properties import ConfigError
from skylark.net.addresses import parse_name_servers
from skylark.store import foreign
from skylark.wire.frame import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

_INT_MAX = 2**31 - 1

Port = Annotated[int, Meta(ge=0, le=65535)]
Any32 = Annotated[int, Meta(ge=-_INT_MAX - 1, le=_INT_MAX)]
Count = Annotated[int, Meta(ge=1, le=_INT_MAX)]
Millis = Annotated[int, Meta(ge=1, le=_INT_MAX)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Word = Annotated[str, Meta(pattern=r"^\S+$", description="a name without blanks")]
_NAME_SERVERS = "namesrvAddr"
_LOG_PATH = "storePathCommitLog"
Addresses = Annotated[
    str,
    # A first look: `set_name_servers` reads them.
    Meta(pattern=r"^(?:.*:\d.*)?$", description="host:port, several separated by a semicolon"),
]


class FlushDiskType(enum.StrEnum):
    ASYNC_FLUSH = "ASYNC_FLUSH"
    SYNC_FLUSH = "SYNC_FLUSH"


class BrokerRole(enum.StrEnum):
    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


class MessageRequestMode(enum.StrEnum):
    PULL = "PULL"
    POP = "POP"


def _host_name() -> str:
    return socket.gethostname() or "DEFAULT_BROKER"


class BrokerConfig(msgspec.Struct, rename="camel", kw_only=True):
    """One broker's settings. Mutable, because operators change some while it runs (`UPDATABLE_KEYS`)."""

    # Who this broker is and where it is found
    broker_cluster_name: Word = "DefaultCluster"
    broker_name: Word = field(default_factory=_host_name)
    broker_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    broker_role: BrokerRole = BrokerRole.ASYNC_MASTER
    broker_ip1: Host = field(default="", name="brokerIP1")
    bind_address: Host = "0.0.0.0"
    listen_port: Port = 10911
    namesrv_addr: Addresses = ""
    register_name_server_period: Any32 = 30_000
    register_broker_timeout_mills: Millis = 24_000
    force_register: bool = True
    compressed_register: bool = False
    enable_split_registration: bool = False
    split_registration_size: Count = 800
    forward_timeout: Millis = 3_000
    region_id: Word = "DefaultRegion"
    trace_on: bool = True

    # Topics and groups
    broker_permission: Annotated[
        int, Meta(ge=0, le=6, multiple_of=2, description="2 (write), 4 (read), 6 (both) or 0 (neither)")
    ] = 6
    default_topic_queue_nums: Annotated[int, Meta(ge=1, le=10_000)] = 8
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    cluster_topic_enable: bool = True
    broker_topic_enable: bool = True
    enable_mixed_message_type: bool = False
    enable_topic_message_type_check: bool = False
    trace_topic_enable: bool = False
    msg_trace_topic_name: Word = "RMQ_SYS_TRACE_TOPIC"

    # Sending
    max_message_size: Count = 4 << 20
    message_delay_level: Annotated[
        str,
        Meta(pattern=r"^\d+[smhd](?: +\d+[smhd])*$", description="delays separated by blanks, such as 1s 5s 10m 2h"),
    ] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    sync_flush_timeout: Millis = 5_000

    # Timers
    timer_wheel_enable: bool = True
    timer_max_delay_sec: Annotated[int, Meta(ge=1, le=_INT_MAX)] = 3 * 24 * 3600
    timer_precision_ms: Millis = 1000
    timer_roll_window_slot: Count = 2 * 24 * 3600
    timer_congest_num_each_slot: Count = _INT_MAX
    mapped_file_size_timer_log: Annotated[int, Meta(ge=4096, le=_INT_MAX)] = 100 << 20
    append_topic_for_timer_delete_key: bool = False
    recall_message_enable: bool = False
    allow_recall_when_broker_not_writeable: bool = True
    store_reply_message_enable: bool = True

    # Transactions
    reject_transaction_message: bool = False
    transaction_time_out: Millis = 6_000
    transaction_check_max: Count = 15
    transaction_check_interval: Millis = 30_000
    transaction_op_msg_max_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 4096
    transaction_op_batch_interval: Millis = 3_000

    # Pulling
    long_polling_enable: bool = True
    short_polling_time_mills: Millis = 1_000
    slave_read_enable: bool = False
    access_message_in_memory_max_ratio: Percent = 40
    max_transfer_bytes_on_message_in_memory: Count = 256 << 10
    max_transfer_count_on_message_in_memory: Count = 32
    max_transfer_bytes_on_message_in_disk: Count = 64 << 10
    max_transfer_count_on_message_in_disk: Count = 8
    enable_property_filter: bool = False
    filter_support_retry: bool = False
    filter_data_clean_time_span: Millis = 24 * 3600 * 1000
    expect_consumer_num_use_filter: Count = 32
    max_error_rate_of_bloom_filter: Annotated[int, Meta(ge=1, le=99)] = 20
    default_query_max_num: Count = 32

    # Popping
    revive_queue_num: Annotated[int, Meta(ge=1, le=128)] = 8
    revive_interval: Millis = 1_000
    max_pop_polling_size: Count = 100_000
    pop_polling_size: Count = 1_024
    pop_long_polling_force_notify_interval: Annotated[int, Meta(ge=0, le=_INT_MAX)] = 800
    init_pop_offset_by_check_msg_in_mem: bool = True
    pop_from_retry_probability: Percent = 20
    pop_from_retry_probability_for_priority: Percent = 0
    priority_order_asc: bool = True
    enable_retry_topic_v2: bool = False
    retrieve_message_from_pop_retry_topic_v1: bool = True
    use_separate_retry_queue: bool = False
    pop_response_return_actual_retry_topic: bool = False
    server_load_balancer_enable: bool = True
    load_balance_poll_name_server_interval: Millis = 30_000
    default_message_request_mode: MessageRequestMode = MessageRequestMode.PULL
    default_pop_share_queue_num: Annotated[int, Meta(ge=-1, le=_INT_MAX)] = -1

    # Clients and offsets
    notify_consumer_ids_changed_enable: bool = True
    channel_expired_timeout: Millis = 120_000
    server_channel_max_idle_time_seconds: Count = 120
    flush_consumer_offset_interval: Millis = 5_000
    use_server_side_reset_offset: bool = True

    # The store
    store_path_root_dir: Annotated[str, Meta(min_length=1, description="a directory")] = field(
        default_factory=lambda: at_home("store")
    )
    store_path_commit_log: Annotated[
        str, Meta(description="a directory, or nothing for commitlog below storePathRootDir")
    ] = ""
    mapped_file_size_commit_log: Annotated[int, Meta(ge=4096, le=_INT_MAX)] = 1 << 30
    mapped_file_size_consume_queue: Annotated[int, Meta(ge=20, le=_INT_MAX)] = 300_000 * 20
    flush_disk_type: FlushDiskType = FlushDiskType.ASYNC_FLUSH
    flush_interval_commit_log: Millis = 500
    delete_when: Annotated[
        str,
        Meta(
            pattern=r"^(?:[01]?\d|2[0-3])(?:;(?:[01]?\d|2[0-3]))*;?$",
            description="hours of the day from 0 to 23, several separated by a semicolon",
        ),
    ] = "04"
    file_reserved_time: Annotated[int, Meta(ge=0, le=_INT_MAX)] = 72
    disk_max_used_space_ratio: Any32 = 75
    disk_space_clean_forcibly_ratio: Any32 = 85
    disk_space_warning_level_ratio: Any32 = 90
    clean_file_forcibly_enable: bool = True
    message_index_enable: bool = True
    max_hash_slot_num: Count = 5_000_000
    max_index_num: Count = 20_000_000
    max_msgs_num_batch: Count = 64


# What an operator may change while the broker runs. Paths, addresses and identity are not in it: whoever can send a
# request could otherwise make the broker write files of their choice.
UPDATABLE_KEYS = frozenset(
    """
    accessMessageInMemoryMaxRatio allowRecallWhenBrokerNotWriteable appendTopicForTimerDeleteKey
    autoCreateSubscriptionGroup autoCreateTopicEnable brokerPermission cleanFileForciblyEnable compressedRegister
    defaultMessageRequestMode defaultPopShareQueueNum defaultQueryMaxNum defaultTopicQueueNums deleteWhen
    diskMaxUsedSpaceRatio diskSpaceCleanForciblyRatio diskSpaceWarningLevelRatio enableMixedMessageType
    enablePropertyFilter enableRetryTopicV2 enableSplitRegistration enableTopicMessageTypeCheck fileReservedTime
    filterDataCleanTimeSpan filterSupportRetry initPopOffsetByCheckMsgInMem loadBalancePollNameServerInterval
    longPollingEnable maxMessageSize maxMsgsNumBatch maxPopPollingSize maxTransferBytesOnMessageInDisk
    maxTransferBytesOnMessageInMemory
    maxTransferCountOnMessageInDisk maxTransferCountOnMessageInMemory notifyConsumerIdsChangedEnable
    popFromRetryProbability popFromRetryProbabilityForPriority popLongPollingForceNotifyInterval popPollingSize
    popResponseReturnActualRetryTopic priorityOrderAsc recallMessageEnable rejectTransactionMessage
    retrieveMessageFromPopRetryTopicV1 reviveInterval serverLoadBalancerEnable shortPollingTimeMills slaveReadEnable
    splitRegistrationSize
    storeReplyMessageEnable timerCongestNumEachSlot timerMaxDelaySec traceOn traceTopicEnable transactionCheckInterval
    transactionCheckMax transactionOpBatchInterval transactionOpMsgMaxSize transactionTimeOut useSeparateRetryQueue
    useServerSideResetOffset
    """.split()
)

# Apache's settings that promise something Skylark cannot keep yet. Ignoring one of these would leave its owner with a
# broker that is less safe than the file says, or without messages or tables that Apache's broker keeps elsewhere: so
# any value but the harmless one is refused, with what to do where that is not plain.
_HARMLESS_VALUES = {
    "aclEnable": "false",
    "authenticationEnabled": "false",
    "authorizationEnabled": "false",
    "allAckInSyncStateSet": "false",
    "configManagerVersion": "v1",
    "enableControllerMode": "false",
    "enableDLegerCommitLog": "false",
    "enableLmq": "false",
    "enableMultiDispatch": "false",
    "inSyncReplicas": "1",
    "messageStorePlugIn": "",
    "minInSyncReplicas": "1",
    "readOnlyCommitLogStorePaths": "",
    "storeType": "default",
    "timerRocksDBEnable": "false",
    "transRocksDBEnable": "false",
    "useTLS": "false",
}
NO_EFFECT_KEYS = without_effect.harmless(BROKER_KEYS) - properties.keys(BrokerConfig) - _HARMLESS_VALUES.keys()
"""Apache's keys that an operator may set while the broker runs, for nothing."""

_MOVE_THE_LOG = (
    "stop Apache's broker, move the files of all directories into one, and set storePathCommitLog to that one"
)
_ADVICE = {
    "configManagerVersion": f"topics, groups and offsets are in RocksDB; {foreign.FETCH_TABLES}",
    "messageStorePlugIn": "what the plug-in keeps elsewhere cannot be read; without it, the store itself can",
    "readOnlyCommitLogStorePaths": f"the messages there would be missing; {_MOVE_THE_LOG}",
    "storeType": f"tables and queues are in RocksDB; {foreign.FETCH_TABLES}, and that of the queues as well: they are "
    "built again from the log",
    "timerRocksDBEnable": "let Apache's broker move its timers with mqadmin switchTimerEngine first",
    "transRocksDBEnable": "let Apache's broker end all transactions first",
}
_PATH_SEPARATOR = ","
_NO_REPLICATION = "there is no replication yet, so nothing listens there and nothing is announced"
# Apache's keys that make no difference here, for a reason that their owner should know.
_SERVED_OTHERWISE = {
    "brokerIP2": _NO_REPLICATION,
    "enableConsumeQueueExt": "the tags in consumequeue_ext are read; new entries have theirs in the queue itself, "
    "which Apache's broker reads as well",
    "haListenPort": _NO_REPLICATION,
}
_UNREAD = "Apache's broker does not read this key"
# Keys that broker.conf has in many an article, and that Apache's broker passes over.
_OF_ARTICLES = {
    "abortFile": f"{_UNREAD}: it is the file abort in storePathRootDir",
    "checkTransactionMessageEnable": f"{_UNREAD} any more: transactions are checked, see transactionCheckInterval",
    "filterServerNums": f"{_UNREAD} any more: start a filter server with skylark filtersrv",
    "mapedFileSizeCommitLog": f"{_UNREAD} any more: it is mappedFileSizeCommitLog now",
    "mapedFileSizeConsumeQueue": f"{_UNREAD} any more: it is mappedFileSizeConsumeQueue now, in bytes",
    "storeCheckpoint": f"{_UNREAD}: it is the file checkpoint in storePathRootDir",
    "storePathConsumeQueue": f"{_UNREAD}: consume queues are in consumequeue below storePathRootDir",
    "storePathIndex": f"{_UNREAD}: index files are in index below storePathRootDir",
}


def load(path: Path) -> BrokerConfig:
    """The settings in the `.properties` file at `path`."""
    return from_mapping(properties.read(path), source=str(path))


def from_mapping(mapping: Mapping[str, str], *, source: str) -> BrokerConfig:
    """The settings in `mapping`; raises `ConfigError` for what cannot be, warns about what has no effect."""
    effective = {key: value for key, value in mapping.items() if not is_harmless(key, value, source=source)}
    log_path = mapping.get(_LOG_PATH, "")
    if _PATH_SEPARATOR in log_path:
        raise ConfigError(
            f"{properties.place(source, log_path)}: {_LOG_PATH}={log_path.strip()!r} is several directories, which is "
            f"not supported yet: expected one; {_MOVE_THE_LOG}"
        )
    for level, notes in ((logging.INFO, _SERVED_OTHERWISE), (logging.WARNING, _OF_ARTICLES)):
        for key in sorted(notes.keys() & mapping.keys()):
            log.log(level, "%s: %s: %s", properties.place(source, mapping[key]), key, notes[key])
            del effective[key]
    config = properties.bind(BrokerConfig, effective, source=source, ignored=BROKER_KEYS)
    if config.namesrv_addr:
        set_name_servers(config, effective[_NAME_SERVERS], source=source)
    if config.broker_role is BrokerRole.SLAVE:
        raise ConfigError(f"{source}: brokerRole='SLAVE' is not supported yet: expected ASYNC_MASTER or SYNC_MASTER")
    if config.broker_id != 0:
        # Apache does the same: a master's id is 0, whatever the file says.
        log.warning("%s: brokerId=%d is taken as 0, the id of a master", source, config.broker_id)
        config.broker_id = 0
    for key, caution in cautions(config).items():
        text = effective[key]
        log.warning("%s: %s=%s %s", properties.place(source, text), key, text.strip(), caution)
    config.register_name_server_period = _period_ms(config)
    return config


def cautions(config: BrokerConfig) -> dict[str, str]:
    """What settings come to that can't be taken at their word, by key."""
    found = {}
    if config.broker_role is BrokerRole.SYNC_MASTER:
        found["brokerRole"] = (
            "promises a copy on a slave, and there is no replication yet: sends are acknowledged as with ASYNC_MASTER"
        )
    if config.max_message_size > MAX_FRAME_BYTES:
        found["maxMessageSize"] = (
            f"is more than a request can carry: it has at most {MAX_FRAME_BYTES} bytes, headers and properties included"
        )
    if config.register_name_server_period != _period_ms(config):
        found["registerNameServerPeriod"] = f"is taken as {_period_ms(config)}, as Apache's broker does"
    return found


def _period_ms(config: BrokerConfig) -> int:
    return max(10_000, min(config.register_name_server_period, 60_000))


def is_harmless(key: str, value: str, *, source: str) -> bool:
    """Whether this is the harmless value of a setting whose others promise what Skylark can't keep: `ConfigError`."""
    harmless = _HARMLESS_VALUES.get(key)
    if harmless is None or value.strip().lower() == harmless:
        return harmless is not None
    advice = f"; {_ADVICE[key]}" if key in _ADVICE else ""
    where = properties.place(source, value)
    raise ConfigError(
        f"{where}: {key}={value.strip()!r} is not supported yet: expected {harmless or 'nothing'}{advice}"
    )


def set_name_servers(config: BrokerConfig, text: str, *, source: str) -> None:
    """Takes the name servers as users write them, and keeps them as `host:port;host:port`.

    Raises `ConfigError`, also if there are none: a variable that is not set must not make a broker that nobody finds.
    """
    properties.update(config, {_NAME_SERVERS: text}, allowed={_NAME_SERVERS}, source=source)
    try:
        config.namesrv_addr = ";".join(parse_name_servers(config.namesrv_addr))
    except ValueError as error:
        raise ConfigError(f"{properties.place(source, text)}: {error}") from None
