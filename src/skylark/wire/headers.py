"""One typed struct per request header: the `fields` of a frame, with Python names and types.

Values travel as strings; `decode_header` and `encode_header` in `typed` convert and check them.
"""

from __future__ import annotations

import msgspec

from skylark.wire.numbers import Int, Long

# Requests to a broker.


class SendMessage(msgspec.Struct, rename="camel"):
    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int
    queue_id: Int
    sys_flag: Int
    born_timestamp: Long
    flag: Int
    properties: str | None = None
    reconsume_times: Int | None = None
    unit_mode: bool | None = None
    batch: bool | None = None
    max_reconsume_times: Int | None = None


class SendMessageV2(msgspec.Struct):
    """The same fields under one-letter names, which is what today's clients send."""

    producer_group: str = msgspec.field(name="a")
    topic: str = msgspec.field(name="b")
    default_topic: str = msgspec.field(name="c")
    default_topic_queue_nums: Int = msgspec.field(name="d")
    queue_id: Int = msgspec.field(name="e")
    sys_flag: Int = msgspec.field(name="f")
    born_timestamp: Long = msgspec.field(name="g")
    flag: Int = msgspec.field(name="h")
    properties: str | None = msgspec.field(default=None, name="i")
    reconsume_times: Int | None = msgspec.field(default=None, name="j")
    unit_mode: bool | None = msgspec.field(default=None, name="k")
    batch: bool | None = msgspec.field(default=None, name="m")
    max_reconsume_times: Int | None = msgspec.field(default=None, name="l")


class PushReply(msgspec.Struct, rename="camel"):
    """A reply on its way from the broker to the client that asked."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int
    queue_id: Int
    sys_flag: Int
    born_timestamp: Long
    flag: Int
    born_host: str
    store_host: str
    store_timestamp: Long
    properties: str | None = None
    reconsume_times: Int | None = None
    unit_mode: bool = False


class PullMessage(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str
    queue_id: Int
    queue_offset: Long
    max_msg_nums: Int
    sys_flag: Int
    commit_offset: Long
    suspend_timeout_millis: Long
    sub_version: Long
    lite_topic: str | None = None
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int | None = None
    request_source: Int | None = None
    proxy_froward_client_id: str | None = None


class RegisterFilterServer(msgspec.Struct, rename="camel"):
    filter_server_addr: str


class RegisterMessageFilterClass(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str
    class_name: str
    class_crc: Int = msgspec.field(name="classCRC")


class ConsumerSendMsgBack(msgspec.Struct, rename="camel"):
    offset: Long
    group: str
    delay_level: Int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool = False
    max_reconsume_times: Int | None = None


class EndTransaction(msgspec.Struct, rename="camel"):
    producer_group: str
    tran_state_table_offset: Long
    commit_log_offset: Long
    commit_or_rollback: Int
    msg_id: str
    from_transaction_check: bool = False
    topic: str | None = None
    transaction_id: str | None = None
    broker_name: str | None = msgspec.field(default=None, name="bname")


class CheckTransactionState(msgspec.Struct, rename="camel"):
    """A broker's question to a producer, with the stored half message as its body."""

    tran_state_table_offset: Long
    commit_log_offset: Long
    topic: str | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    broker_name: str | None = msgspec.field(default=None, name="bname")


class ResumeCheckHalfMessage(msgspec.Struct, rename="camel"):
    msg_id: str
    topic: str | None = None


class QueryConsumerOffset(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str
    queue_id: Int
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffset(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str
    queue_id: Int
    commit_offset: Long


class GetConsumerListByGroup(msgspec.Struct, rename="camel"):
    consumer_group: str


class UnregisterClient(msgspec.Struct, rename="camel"):
    client_id: str = msgspec.field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


class NotifyConsumerIdsChanged(msgspec.Struct, rename="camel"):
    consumer_group: str


class GetMaxOffset(msgspec.Struct, rename="camel"):
    topic: str
    queue_id: Int
    committed: bool = True


class GetMinOffset(msgspec.Struct, rename="camel"):
    topic: str
    queue_id: Int


class SearchOffset(msgspec.Struct, rename="camel"):
    topic: str
    queue_id: Int
    timestamp: Long
    lite_topic: str | None = None
    boundary_type: str | None = None


class GetEarliestMsgStoretime(msgspec.Struct, rename="camel"):
    topic: str
    queue_id: Int


class QueryMessage(msgspec.Struct, rename="camel"):
    topic: str
    key: str
    max_num: Int
    begin_timestamp: Long
    end_timestamp: Long
    index_type: str | None = None
    last_key: str | None = None


class ViewMessage(msgspec.Struct, rename="camel"):
    offset: Long
    topic: str | None = None


class CreateTopic(msgspec.Struct, rename="camel"):
    topic: str
    default_topic: str
    read_queue_nums: Int
    write_queue_nums: Int
    perm: Int
    topic_filter_type: str
    topic_sys_flag: Int | None = None
    order: bool = False
    attributes: str | None = None
    force: bool = False


class DeleteTopic(msgspec.Struct, rename="camel"):
    topic: str


class GetTopicConfig(msgspec.Struct, rename="camel"):
    topic: str
    lo: bool | None = None


class GetTopicStatsInfo(msgspec.Struct, rename="camel"):
    topic: str


class GetAllTopicConfig(msgspec.Struct, rename="camel"):
    topic_seq: Int
    data_version: str | None = None
    max_topic_num: Int | None = None


class DeleteSubscriptionGroup(msgspec.Struct, rename="camel"):
    group_name: str
    clean_offset: bool = False


class GetSubscriptionGroupConfig(msgspec.Struct, rename="camel"):
    group: str


class GetAllSubscriptionGroup(msgspec.Struct, rename="camel"):
    group_seq: Int
    data_version: str | None = None
    max_group_num: Int | None = None


class GetConsumeStats(msgspec.Struct, rename="camel"):
    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class GetConsumerConnectionList(msgspec.Struct, rename="camel"):
    consumer_group: str


class GetProducerConnectionList(msgspec.Struct, rename="camel"):
    producer_group: str


class GetConsumerRunningInfo(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str
    jstack_enable: bool = False


class GetConsumerStatus(msgspec.Struct, rename="camel"):
    topic: str
    group: str
    client_addr: str | None = None


class ResetOffset(msgspec.Struct, rename="camel"):
    group: str
    topic: str
    timestamp: Long
    force: bool = msgspec.field(name="isForce")
    queue_id: Int = -1
    offset: Long | None = None


class ConsumeMessageDirectlyResult(msgspec.Struct, rename="camel"):
    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None
    topic_sys_flag: Int | None = None
    group_sys_flag: Int | None = None


class QueryTopicConsumeByWho(msgspec.Struct, rename="camel"):
    topic: str


class QueryTopicsByConsumer(msgspec.Struct, rename="camel"):
    group: str


class QuerySubscriptionByConsumer(msgspec.Struct, rename="camel"):
    group: str
    topic: str | None = None


class QueryConsumeTimeSpan(msgspec.Struct, rename="camel"):
    topic: str
    group: str


class QueryConsumeQueue(msgspec.Struct, rename="camel"):
    topic: str | None = None
    queue_id: Int = 0
    index: Long = 0
    count: Int = 0
    consumer_group: str | None = None


class CloneGroupOffset(msgspec.Struct, rename="camel"):
    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class QueryCorrectionOffset(msgspec.Struct, rename="camel"):
    compare_group: str
    topic: str
    filter_groups: str | None = None


class ViewBrokerStatsData(msgspec.Struct, rename="camel"):
    stats_name: str
    stats_key: str


class GetConsumeStatsInBroker(msgspec.Struct, rename="camel"):
    order: bool = msgspec.field(name="isOrder")


class UpdateGroupForbidden(msgspec.Struct, rename="camel"):
    group: str
    topic: str
    readable: bool | None = None


# Requests to a name server.


class GetRouteInfo(msgspec.Struct, rename="camel"):
    topic: str
    accept_standard_json_only: bool | None = None


class RegisterBroker(msgspec.Struct, rename="camel"):
    broker_name: str
    broker_addr: str
    cluster_name: str
    ha_server_addr: str
    broker_id: Long
    heartbeat_timeout_millis: Long | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int = 0
    is_part: bool | None = None
    """Skylark's own: there are more topics than those in this registration."""


class UnregisterBroker(msgspec.Struct, rename="camel"):
    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long


class QueryDataVersion(msgspec.Struct, rename="camel"):
    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Long


class BrokerHeartbeat(msgspec.Struct, rename="camel"):
    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Long | None = None
    epoch: Int | None = None
    max_offset: Long | None = None
    confirm_offset: Long | None = None
    heartbeat_timeout_mills: Long | None = None
    election_priority: Int | None = None


class PutKVConfig(msgspec.Struct, rename="camel"):
    namespace: str
    key: str
    value: str


class GetKVConfig(msgspec.Struct, rename="camel"):
    namespace: str
    key: str


class DeleteKVConfig(msgspec.Struct, rename="camel"):
    namespace: str
    key: str


class GetKVListByNamespace(msgspec.Struct, rename="camel"):
    namespace: str


class WipeWritePermOfBroker(msgspec.Struct, rename="camel"):
    broker_name: str


class AddWritePermOfBroker(msgspec.Struct, rename="camel"):
    broker_name: str


class DeleteTopicFromNamesrv(msgspec.Struct, rename="camel"):
    topic: str
    cluster_name: str | None = None


class RegisterTopic(msgspec.Struct, rename="camel"):
    topic: str


class GetTopicsByCluster(msgspec.Struct, rename="camel"):
    cluster: str


class GetBrokerMemberGroup(msgspec.Struct, rename="camel"):
    cluster_name: str
    broker_name: str
