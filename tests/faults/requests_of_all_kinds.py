"""Every request code of broker and name server, each with what is in it, and the values at which fields break.

`Kind` says what a request is made of. `requests` gives the request as a client sends it, then one after the other those
with one field changed, in the header or in the JSON body. The names of a sample are all "text", and so is everything
that the servers of the test have: most of the requests find what they name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from skylark.wire import bodies, fastjson, headers, mapping, pop, recall, routes, tables
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Encoding, Frame
from wire.poisoned import sample

NAME = "text"
BROKER_NAME, CLUSTER = "broker-a", "cluster-a"  # which can't be those of a topic
DOOMED = "doomed"
"""What the requests that delete something delete."""
STATIC = "static"

LARGE = "x" * (64 << 10)
INTS = (-(2**31) - 1, -(2**31), 2**31 - 1, 2**31, -(2**63), 2**63 - 1, 2**63, 10**30, -1, 0)
TEXTS = ("", "\0", "a\nb\x1b", "%RETRY%", str(10**30), "-1", LARGE)
OTHERS: tuple[Any, ...] = (None, -1, -(2**31), 2**31, -(2**63), 2**63, 10**30, "", "\0", LARGE, True, [], {}, [[]])
BROKEN = (b"", b"\0", b"{", b"[]", b"null", b"1", b'"text"', b"\xff\xfe", b"{" * 5000, LARGE.encode())

# What a header has in its fields besides "text" and 1; None leaves it out.
FIELDS: dict[str, str | None] = {
    **dict.fromkeys(("queueId", "e", "queueOffset", "sysFlag", "f", "flag", "h", "pollTime", "bornTime"), "0"),
    **dict.fromkeys(("suspendTimeoutMillis", "reconsumeTimes", "j", "bodyCrc32", "topicSeq", "groupSeq"), "0"),
    **dict.fromkeys(
        ("unitMode", "k", "batch", "m", "compressed", "order", "jstackEnable", "isOrder", "force"), "false"
    ),
    **dict.fromkeys(("readQueueNums", "writeQueueNums", "defaultTopicQueueNums", "d"), "4"),
    **dict.fromkeys(("liteTopic", "requestSource", "proxyFrowardClientId", "indexType", "lastKey", "isPart"), None),
    **dict.fromkeys(("subscription", "exp"), "*"),
    **dict.fromkeys(("expressionType", "expType"), "TAG"),
    **dict.fromkeys(("properties", "i"), "KEYS\x01text\x02TAGS\x01text\x02"),
    **dict.fromkeys(("defaultTopic", "c"), "TBW102"),
    **dict.fromkeys(("brokerName", "bname"), BROKER_NAME),
    **dict.fromkeys(("clusterName", "cluster"), CLUSTER),
    **dict.fromkeys(("heartbeatTimeoutMillis", "heartbeatTimeoutMills"), "120000"),
    "endTimestamp": str(2**61),
    "maxMsgNums": "32",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "attributes": "+message.type=NORMAL",
    "boundaryType": "LOWER",
    "dataVersion": '{"stateVersion":0,"timestamp":1,"counter":1}',
    "brokerAddr": "127.0.0.1:1",
    "haServerAddr": "127.0.0.1:2",
    "filterServerAddr": "127.0.0.1:3",
    "statsName": "TOPIC_PUT_NUMS",
}
# The same for bodies.
MEMBERS: dict[str, Any] = {
    **dict.fromkeys(("queueId", "heartbeatFingerprint", "startOffset", "logicOffset", "gen", "q"), 0),
    **dict.fromkeys(("readQueueNums", "writeQueueNums", "readQueueNum", "writeQueueNum"), 4),
    **dict.fromkeys(("classFilterMode", "withoutSub", "order", "consumeMessageOrderly"), False),
    **dict.fromkeys(("endOffset", "timeOfEnd"), -1),
    **dict.fromkeys(("brokerName", "bname"), BROKER_NAME),
    "cluster": CLUSTER,
    "perm": 6,
    "topicFilterType": "SINGLE_TAG",
    "consumeType": "CONSUME_PASSIVELY",
    "messageModel": "CLUSTERING",
    "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
    "expressionType": "TAG",
    "subString": "*",
    "tagsSet": [],
    "codeSet": [],
    "attributes": {},
    "mode": "PULL",
    "strategyName": "AVG",
    "type": "CUSTOMIZED",
    "scope": "__global__",
    "b": "AQ==",
    "r": "0",
}


class Kind(NamedTuple):
    """A header with its fields, a JSON body, or neither; and what is particular about the request."""

    header: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    fields: Mapping[str, str] = MappingProxyType({})
    data: bytes = b""
    members: Mapping[str, Any] = MappingProxyType({})


_SEND = Kind(headers.SendMessage, data=b"body")
_SEND_V2 = Kind(headers.SendMessageV2, data=b"body")
_TO_NOBODY = {"properties": "REPLY_TO_CLIENT\x01text\x02", "i": "REPLY_TO_CLIENT\x01text\x02"}

BROKER: dict[int, Kind] = {
    RequestCode.SEND_MESSAGE: _SEND,
    RequestCode.SEND_MESSAGE_V2: _SEND_V2,
    RequestCode.SEND_BATCH_MESSAGE: _SEND_V2._replace(fields={"m": "true"}),
    RequestCode.SEND_REPLY_MESSAGE: _SEND._replace(fields=_TO_NOBODY),
    RequestCode.SEND_REPLY_MESSAGE_V2: _SEND_V2._replace(fields=_TO_NOBODY),
    RequestCode.RECALL_MESSAGE: Kind(recall.Recall),
    RequestCode.GET_TIMER_CHECK_POINT: Kind(),
    RequestCode.GET_TIMER_METRICS: Kind(),
    RequestCode.CONSUMER_SEND_MSG_BACK: Kind(headers.ConsumerSendMsgBack),
    RequestCode.END_TRANSACTION: Kind(headers.EndTransaction, fields={"commitOrRollback": "8"}),
    RequestCode.RESUME_CHECK_HALF_MESSAGE: Kind(headers.ResumeCheckHalfMessage),
    RequestCode.PULL_MESSAGE: Kind(headers.PullMessage, fields={"sysFlag": "5"}),
    RequestCode.LITE_PULL_MESSAGE: Kind(headers.PullMessage, fields={"sysFlag": "4"}),
    RequestCode.REGISTER_FILTER_SERVER: Kind(headers.RegisterFilterServer),
    RequestCode.PEEK_MESSAGE: Kind(pop.PeekMessage),
    RequestCode.NOTIFICATION: Kind(pop.Notification),
    RequestCode.POLLING_INFO: Kind(pop.PollingInfo),
    RequestCode.POP_MESSAGE: Kind(pop.PopMessage, fields={"queueId": "-1"}),
    RequestCode.ACK_MESSAGE: Kind(pop.AckMessage),
    RequestCode.BATCH_ACK_MESSAGE: Kind(body=pop.BatchAckMessage),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: Kind(pop.ChangeInvisibleTime),
    RequestCode.QUERY_ASSIGNMENT: Kind(body=pop.QueryAssignment),
    RequestCode.SET_MESSAGE_REQUEST_MODE: Kind(body=pop.SetMessageRequestMode),
    RequestCode.GET_ALL_MESSAGE_REQUEST_MODE: Kind(),
    RequestCode.UPDATE_AND_CREATE_TOPIC: Kind(headers.CreateTopic),
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST: Kind(body=bodies.TopicConfigs),
    RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC: Kind(
        headers.CreateTopic, mapping.MappingDetail, {"topic": DOOMED}, members={"topic": DOOMED}
    ),
    RequestCode.DELETE_TOPIC_IN_BROKER: Kind(headers.DeleteTopic, fields={"topic": DOOMED}),
    RequestCode.GET_ALL_TOPIC_CONFIG: Kind(headers.GetAllTopicConfig),
    RequestCode.GET_TOPIC_CONFIG: Kind(headers.GetTopicConfig),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: Kind(),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: Kind(body=tables.SubscriptionGroupConfig),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: Kind(body=bodies.GroupConfigs),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: Kind(headers.GetAllSubscriptionGroup),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: Kind(headers.GetSubscriptionGroupConfig),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: Kind(headers.DeleteSubscriptionGroup, fields={"groupName": DOOMED}),
    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN: Kind(headers.UpdateGroupForbidden),
    RequestCode.QUERY_CONSUMER_OFFSET: Kind(headers.QueryConsumerOffset),
    RequestCode.UPDATE_CONSUMER_OFFSET: Kind(headers.UpdateConsumerOffset),
    RequestCode.GET_ALL_CONSUMER_OFFSET: Kind(),
    RequestCode.LOCK_BATCH_MQ: Kind(body=bodies.LockRequest),
    RequestCode.UNLOCK_BATCH_MQ: Kind(body=bodies.LockRequest),
    RequestCode.HEART_BEAT: Kind(body=bodies.Heartbeat),
    RequestCode.UNREGISTER_CLIENT: Kind(headers.UnregisterClient, fields={"clientID": DOOMED}),
    RequestCode.CHECK_CLIENT_CONFIG: Kind(body=bodies.CheckClient),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: Kind(headers.GetConsumerListByGroup),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: Kind(headers.GetConsumerConnectionList),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: Kind(headers.GetProducerConnectionList),
    RequestCode.GET_ALL_PRODUCER_INFO: Kind(),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: Kind(headers.QuerySubscriptionByConsumer),
    RequestCode.GET_CONSUMER_RUNNING_INFO: Kind(headers.GetConsumerRunningInfo),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: Kind(headers.ConsumeMessageDirectlyResult),
    RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: Kind(headers.GetConsumerStatus),
    RequestCode.VIEW_MESSAGE_BY_ID: Kind(headers.ViewMessage),
    RequestCode.QUERY_MESSAGE: Kind(headers.QueryMessage),
    RequestCode.GET_MAX_OFFSET: Kind(headers.GetMaxOffset),
    RequestCode.GET_MIN_OFFSET: Kind(headers.GetMinOffset),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: Kind(headers.SearchOffset),
    RequestCode.GET_EARLIEST_MSG_STORETIME: Kind(headers.GetEarliestMsgStoretime),
    RequestCode.QUERY_CONSUME_QUEUE: Kind(headers.QueryConsumeQueue),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: Kind(headers.ResetOffset),
    RequestCode.CLONE_GROUP_OFFSET: Kind(headers.CloneGroupOffset),
    RequestCode.GET_TOPIC_STATS_INFO: Kind(headers.GetTopicStatsInfo),
    RequestCode.GET_CONSUME_STATS: Kind(headers.GetConsumeStats),
    RequestCode.GET_BROKER_CONSUME_STATS: Kind(headers.GetConsumeStatsInBroker),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: Kind(headers.QueryTopicConsumeByWho),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: Kind(headers.QueryTopicsByConsumer),
    RequestCode.QUERY_CONSUME_TIME_SPAN: Kind(headers.QueryConsumeTimeSpan),
    RequestCode.QUERY_CORRECTION_OFFSET: Kind(headers.QueryCorrectionOffset),
    RequestCode.GET_BROKER_RUNTIME_INFO: Kind(),
    RequestCode.GET_BROKER_CONFIG: Kind(),
    RequestCode.UPDATE_BROKER_CONFIG: Kind(data=b"brokerPermission=6\n"),
    RequestCode.VIEW_BROKER_STATS_DATA: Kind(headers.ViewBrokerStatsData),
    RequestCode.GET_ALL_DELAY_OFFSET: Kind(),
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: Kind(),
    RequestCode.CLEAN_UNUSED_TOPIC: Kind(),
    RequestCode.DELETE_EXPIRED_COMMITLOG: Kind(),
}
NAME_SERVER: dict[int, Kind] = {
    RequestCode.REGISTER_BROKER: Kind(
        headers.RegisterBroker,
        routes.RegisterBrokerBody,
        {"brokerId": "1", "brokerName": DOOMED},
        members={"topicConfigTable": {name: {"topicName": name, "perm": 6} for name in (NAME, DOOMED)}},
    ),
    RequestCode.UNREGISTER_BROKER: Kind(headers.UnregisterBroker, fields={"brokerName": DOOMED}),
    RequestCode.BROKER_HEARTBEAT: Kind(headers.BrokerHeartbeat),
    RequestCode.QUERY_DATA_VERSION: Kind(headers.QueryDataVersion, tables.DataVersion),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: Kind(headers.RegisterTopic, routes.TopicRouteData, {"topic": DOOMED}),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: Kind(headers.DeleteTopicFromNamesrv, fields={"topic": DOOMED}),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: Kind(headers.WipeWritePermOfBroker),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: Kind(headers.AddWritePermOfBroker),
    RequestCode.GET_BROKER_MEMBER_GROUP: Kind(headers.GetBrokerMemberGroup),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: Kind(headers.GetRouteInfo),
    RequestCode.GET_BROKER_CLUSTER_INFO: Kind(),
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: Kind(),
    RequestCode.GET_TOPICS_BY_CLUSTER: Kind(headers.GetTopicsByCluster),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: Kind(),
    RequestCode.GET_UNIT_TOPIC_LIST: Kind(),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: Kind(),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: Kind(),
    RequestCode.PUT_KV_CONFIG: Kind(headers.PutKVConfig, fields={"key": DOOMED}),
    RequestCode.GET_KV_CONFIG: Kind(headers.GetKVConfig),
    RequestCode.DELETE_KV_CONFIG: Kind(headers.DeleteKVConfig, fields={"key": DOOMED}),
    RequestCode.GET_KVLIST_BY_NAMESPACE: Kind(headers.GetKVListByNamespace),
    RequestCode.UPDATE_NAMESRV_CONFIG: Kind(data=b"deleteTopicWithBrokerRegistration=false\n"),
    RequestCode.GET_NAMESRV_CONFIG: Kind(),
}


class Asked(NamedTuple):
    """What was changed in a request, and the request."""

    what: str
    frame: Frame


def requests(code: int, kind: Kind, *, only_large: bool = False) -> Iterator[Asked]:
    """The request as it should be, then with one thing changed after the other, and as it should be once more."""
    fields, body = _fields(kind), _body(kind)
    yield Asked("usual", _frame(code, fields, body, Encoding.JSON))
    for number, (what, changed) in enumerate(_changed_fields(kind, fields, only_large=only_large)):
        yield Asked(what, _frame(code, changed, body, Encoding(number % 2)))
    if isinstance(body, bytes):
        for number, data in enumerate(BROKEN[-1:] if only_large else BROKEN):
            yield Asked(f"body {number}", _frame(code, fields, data, Encoding(number % 2)))
    else:
        for number, (what, value) in enumerate(_changed(body, only_large=only_large)):
            yield Asked(f"body{what}", _frame(code, fields, value, Encoding(number % 2)))
    yield Asked("usual again", _frame(code, fields, body, Encoding.BINARY))


def _frame(code: int, fields: dict[str, str], body: Any, encoding: Encoding) -> Frame:
    return Frame(code, dict(fields), body if isinstance(body, bytes) else fastjson.dumps(body), encoding=encoding)


def _fields(kind: Kind) -> dict[str, str]:
    if kind.header is None:
        return {}
    whole = {name: str(value).lower() for name, value in sample(inspect.type_info(kind.header)).items()}
    found = {**whole, **FIELDS, **kind.fields}
    return {name: value for name, value in found.items() if value is not None and name in whole}


def _body(kind: Kind) -> Any:
    return kind.data if kind.body is None else _usual(sample(inspect.type_info(kind.body)), {**MEMBERS, **kind.members})


def _usual(value: Any, members: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        found = {key: members[key] if key in members else _usual(each, members) for key, each in value.items()}
        return type(value)(found)
    return [_usual(each, members) for each in value] if isinstance(value, list) else value


def _changed_fields(kind: Kind, fields: dict[str, str], *, only_large: bool) -> Iterator[tuple[str, dict[str, str]]]:
    if kind.header is None:
        yield "unknown field", {"text": LARGE}
        return
    for field in msgspec.structs.fields(kind.header):
        name = field.encode_name
        values = TEXTS if "str" in str(field.type) else (*map(str, INTS), "", LARGE)
        for number, value in enumerate((LARGE,) if only_large else values):
            yield f"{name} {number}", fields | {name: value}
        yield f"{name} left out", {key: value for key, value in fields.items() if key != name}


def _changed(value: Any, path: str = "", *, only_large: bool) -> Iterator[tuple[str, Any]]:
    """The value with one leaf or branch after the other replaced."""
    for number, other in enumerate((LARGE,) if only_large else OTHERS):
        yield f"{path} {number}", other
    if isinstance(value, dict):
        for key, each in value.items():
            for what, changed in _changed(each, f"{path}.{key}", only_large=only_large):
                yield what, type(value)(value | {key: changed})
    elif isinstance(value, list):
        for each in value:
            for what, changed in _changed(each, f"{path}[]", only_large=only_large):
                yield what, [changed]
