"""A broker with something of everything in it: topics, groups, members, locks, and messages of every kind.

What is named "text" is for the requests of a test. What is named "kept" no request names: it must stay as it was.
"""

from __future__ import annotations

from typing import Any

import msgspec

from broker.live import DEADLINE_S, Live, messages_of
from faults.requests_of_all_kinds import BROKER, BROKER_NAME, CLUSTER, DOOMED, NAME, STATIC, Kind
from skylark.net.connection import Connection
from skylark.net.pool import Pool
from skylark.wire import bodies, fastjson, mapping, pop, tables
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode
from skylark.wire.frame import Encoding, Frame
from skylark.wire.records import encode_batch, parse_message_id

KEPT = "kept"
SETTINGS: dict[str, object] = {
    "brokerName": BROKER_NAME,
    "brokerClusterName": CLUSTER,
    "enablePropertyFilter": True,
    "recallMessageEnable": True,
    "serverChannelMaxIdleTimeSeconds": 3600,
}


async def usable(answer: Any) -> Frame:
    found: Frame = await answer
    assert found.code == 0, found
    return found


async def _member(broker: Live) -> Pool:
    """The connection of a consumer and producer that answers what a broker asks its clients."""

    def answer(request: Frame, _: Connection) -> Frame:
        return request.reply(body=b'{"messageQueueTable":{}}')

    member = Pool(
        {
            RequestCode.GET_CONSUMER_RUNNING_INFO: answer,
            RequestCode.CONSUME_MESSAGE_DIRECTLY: answer,
            RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: answer,
            RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: answer,
        },
        connect_timeout_s=DEADLINE_S,
    )
    subscriptions = [
        bodies.Subscription(topic=NAME, sub_string="*", sub_version=1),
        bodies.Subscription(topic=KEPT, sub_string="a > 1", expression_type="SQL92", sub_version=1),
    ]
    consumer = bodies.ConsumerData(
        group_name=NAME,
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
        consume_from_where="CONSUME_FROM_FIRST_OFFSET",
        subscription_data_set=subscriptions,
    )
    beat = bodies.Heartbeat(
        client_id=NAME, consumer_data_set=[consumer], producer_data_set=[bodies.ProducerData(group_name=NAME)]
    )
    await usable(member.request(broker.address, Frame(RequestCode.HEART_BEAT, {}, encode_body(beat)), DEADLINE_S))
    return member


async def furnish(broker: Live) -> tuple[dict[int, Kind], Pool]:
    """Topics, groups, members, and messages of every kind; the requests that name them, and the member's connection."""
    for topic in (NAME, DOOMED, KEPT):
        await usable(
            broker.ask(
                RequestCode.UPDATE_AND_CREATE_TOPIC, topic=topic, defaultTopic="TBW102", readQueueNums=4,
                writeQueueNums=4, perm=6, topicFilterType="SINGLE_TAG",
            )
        )  # fmt: skip
        group = encode_body(tables.SubscriptionGroupConfig(group_name=topic))
        await usable(broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, group))
    item = mapping.MappingItem(bname=BROKER_NAME)
    detail = mapping.MappingDetail(topic=STATIC, bname=BROKER_NAME, total_queues=1, epoch=1, hosted_queues={0: [item]})
    await usable(
        broker.ask(
            RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC, encode_body(detail), topic=STATIC, defaultTopic="TBW102",
            readQueueNums=1, writeQueueNums=1, perm=6, topicFilterType="SINGLE_TAG",
        )
    )  # fmt: skip
    queue = bodies.MessageQueue(BROKER_NAME, 0, KEPT)
    lock = bodies.LockRequest(client_id=NAME, consumer_group=KEPT, mq_set=[queue])
    await usable(broker.ask(RequestCode.LOCK_BATCH_MQ, encode_body(lock)))
    register = {"brokerName": DOOMED, "brokerAddr": "127.0.0.1:1", "clusterName": CLUSTER, "brokerId": "1"}
    put = {"namespace": NAME, "key": NAME, "value": NAME}
    for request in (
        Frame(RequestCode.REGISTER_BROKER, register | {"haServerAddr": ""}), Frame(RequestCode.PUT_KV_CONFIG, put)
    ):  # fmt: skip
        await usable(broker.pool.request(broker.namesrv, request, DEADLINE_S))
    member = await _member(broker)
    return await _send_all_kinds(broker), member


async def _send_all_kinds(broker: Live) -> dict[int, Kind]:
    sent = await usable(broker.send(NAME, b"plain", {"KEYS": NAME, "TAGS": NAME, "a": "5"}))
    for topic in (NAME, KEPT, STATIC):
        for number in range(40):
            await usable(broker.send(topic, b"m%d" % number, {"KEYS": f"k{number}"}))
    await usable(broker.send(KEPT, b"delayed", {"DELAY": "1"}, queueId=1))
    await usable(broker.send(KEPT, b"timer", {"TIMER_DELAY_SEC": "10", "UNIQ_KEY": "timer"}, queueId=2))
    timer = await usable(broker.send(NAME, b"timer", {"TIMER_DELAY_SEC": "20", "UNIQ_KEY": "recalled"}))
    parts = encode_batch((0, b"part%d" % number, {}) for number in range(3))
    await usable(broker.send(KEPT, parts, batch=True, queueId=3))
    half = await usable(broker.send(NAME, b"half", {"TRAN_MSG": "true", "PGROUP": NAME}, sysFlag=4))
    await usable(
        broker.ask(RequestCode.UPDATE_CONSUMER_OFFSET, consumerGroup=KEPT, topic=KEPT, queueId=0, commitOffset=7)
    )
    popped = await usable(
        broker.ask(
            RequestCode.POP_MESSAGE, encoding=Encoding.JSON, consumerGroup=NAME, topic=NAME, queueId=0, maxMsgNums=2,
            invisibleTime=60_000, pollTime=0, bornTime=0, initMode=0,
        )
    )  # fmt: skip
    message = messages_of(popped)[0]
    header = msgspec.convert(popped.fields, pop.PopMessageResponse, strict=False)
    (parsed,) = pop.handles_of(header, BROKER_NAME, [(NAME, 0, message.queue_offset)])
    log_offset = str(parse_message_id(sent.fields["msgId"])[1])
    of_handle = {"extraInfo": parsed.encode(), "offset": str(message.queue_offset)}
    found: dict[int, dict[str, str]] = {
        RequestCode.RECALL_MESSAGE: {"recallHandle": timer.fields["recallHandle"]},
        RequestCode.CONSUMER_SEND_MSG_BACK: {"offset": log_offset, "delayLevel": "3"},
        RequestCode.VIEW_MESSAGE_BY_ID: {"offset": log_offset},
        RequestCode.CONSUME_MESSAGE_DIRECTLY: {"msgId": sent.fields["msgId"]},
        RequestCode.RESUME_CHECK_HALF_MESSAGE: {"msgId": half.fields["msgId"]},
        RequestCode.END_TRANSACTION: {
            "commitLogOffset": str(parse_message_id(half.fields["msgId"])[1]),
            "tranStateTableOffset": half.fields["queueOffset"],
            "msgId": half.fields["transactionId"],
        },
        RequestCode.ACK_MESSAGE: of_handle,
        RequestCode.CHANGE_MESSAGE_INVISIBLETIME: of_handle | {"invisibleTime": "60000"},
        RequestCode.POP_MESSAGE: {"invisibleTime": "60000"},
    }
    kinds = {code: kind._replace(fields={**kind.fields, **found.get(code, {})}) for code, kind in BROKER.items()}
    kinds[RequestCode.SEND_BATCH_MESSAGE] = kinds[RequestCode.SEND_BATCH_MESSAGE]._replace(data=parts)
    acks = {"it": parsed.invisible_ms, "pt": parsed.pop_time_ms, "rq": parsed.revive_queue, "so": parsed.start_offset}
    batch = kinds[RequestCode.BATCH_ACK_MESSAGE]
    kinds[RequestCode.BATCH_ACK_MESSAGE] = batch._replace(members=acks)
    return kinds


def of_static(kinds: dict[int, Kind]) -> dict[int, Kind]:
    """The requests about queues, for a static topic."""
    codes = (
        RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE, RequestCode.GET_MAX_OFFSET,
        RequestCode.GET_MIN_OFFSET, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, RequestCode.GET_EARLIEST_MSG_STORETIME,
        RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET,
    )  # fmt: skip
    name = {code: "b" if code == RequestCode.SEND_MESSAGE_V2 else "topic" for code in codes}
    return {code: kinds[code]._replace(fields={**kinds[code].fields, name[code]: STATIC}) for code in codes}


async def everything(broker: Live) -> dict[str, Any]:
    """What must be the same after a restart."""
    found: dict[str, Any] = {}
    for topic, queues in ((NAME, 4), (KEPT, 4), (STATIC, 1)):
        for queue_id in range(queues):
            texts = found[f"{topic}-{queue_id}"] = []
            while (answer := await broker.pull(topic, len(texts), queueId=queue_id, group=KEPT)).code == 0:
                texts += [f"{message.queue_offset} {message.body[:50]!r}" for message in messages_of(answer)]
    for code in (
        RequestCode.GET_ALL_TOPIC_CONFIG, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.GET_ALL_CONSUMER_OFFSET, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE,
    ):  # fmt: skip
        found[code.name] = fastjson.loads((await usable(broker.ask(code))).body)
    del found["GET_ALL_TOPIC_CONFIG"]["dataVersion"]  # each start gives the topics another one
    values = Frame(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": NAME})
    found["kv"] = (await broker.pool.request(broker.namesrv, values, DEADLINE_S)).body
    offsets = found["GET_ALL_CONSUMER_OFFSET"]
    found["GET_ALL_CONSUMER_OFFSET"] = offsets["offsetTable"]  # the rest is not kept
    return found
