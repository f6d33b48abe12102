"""Settings of a group change while it consumes, and count from then on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker.live import MAY_SUSPEND, Live, live_broker, messages_of
from skylark.wire.bodies import encode_body
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame
from skylark.wire.tables import CustomizedRetryPolicy, ExponentialRetryPolicy, GroupRetryPolicy, SubscriptionGroupConfig


async def change(broker: Live, **settings: object) -> None:
    group = SubscriptionGroupConfig(group_name="g", **settings)  # type: ignore[arg-type]
    answer = await broker.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, encode_body(group))
    assert answer.code == ResponseCode.SUCCESS


async def waiting_pull(broker: Live) -> asyncio.Task[Frame]:
    """A member of the group waits for the second message; the broker has seen that before whatever comes next."""
    await broker.send("t")
    await broker.heartbeat("g", "t")
    pull = asyncio.create_task(broker.pull("t", 1, group="g", wait_ms=60_000, sysFlag=MAY_SUSPEND))
    await asyncio.sleep(0)
    return pull


def test_a_group_that_is_stopped_gets_nothing_though_it_waited(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            pull = await waiting_pull(broker)
            await change(broker, consume_enable=False)
            await broker.send("t")
            refused = await pull
            assert (refused.code, refused.remark) == (
                ResponseCode.NO_PERMISSION,
                "subscription group no permission, g",
            )
            await change(broker, consume_enable=True)
            assert (await broker.pull("t", 1, group="g", sysFlag=0)).code == ResponseCode.SUCCESS

    asyncio.run(run())


def test_a_topic_is_forbidden_to_a_group_and_allowed_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            pull = await waiting_pull(broker)

            async def forbid(readable: object) -> bytes:
                answer = await broker.ask(
                    RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, group="g", topic="t", readable=readable
                )
                return answer.body

            assert await forbid(False) == b'{"group":"g","readable":false,"topic":"t"}'
            await broker.send("t")
            refused = await pull
            assert (refused.code, refused.remark) == (
                ResponseCode.NO_PERMISSION,
                "the consumer group[g] is forbidden for topic[t]",
            )
            assert await forbid(True) == b'{"group":"g","readable":true,"topic":"t"}'
            assert (await broker.pull("t", 1, group="g", sysFlag=0)).code == ResponseCode.SUCCESS

    asyncio.run(run())


def test_a_member_that_waits_is_sent_to_a_reset_offset_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            pull = await waiting_pull(broker)
            reset = {"group": "g", "topic": "t", "isForce": True}
            answer = await broker.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, timestamp=0, **reset)
            assert answer.code == ResponseCode.SUCCESS, answer.remark
            sent = await pull
            assert (sent.code, sent.remark) == (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_RESET")
            assert sent.fields["nextBeginOffset"] == "0"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("policy", "levels"),
    [
        (GroupRetryPolicy(), ["3", "4"]),
        (GroupRetryPolicy(type="EXPONENTIAL"), ["3", "4"]),
        (
            GroupRetryPolicy(type="EXPONENTIAL", exponential_retry_policy=ExponentialRetryPolicy(initial=1_500)),
            ["2", "2"],
        ),
        (
            GroupRetryPolicy(customized_retry_policy=CustomizedRetryPolicy(next=[0, 0, 1_000, 99_000_000])),
            ["1", "18"],
        ),
    ],
)
def test_messages_wait_as_long_as_the_policy_of_their_group_says(
    tmp_path: Path, policy: GroupRetryPolicy, levels: list[str]
) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await change(broker, group_retry_policy=policy)
            await broker.send("t", reconsumeTimes=0)
            await broker.send("t", reconsumeTimes=1)
            found = []
            for message in messages_of(await broker.pull("t", 0)):
                back = await broker.ask(
                    RequestCode.CONSUMER_SEND_MSG_BACK, offset=message.log_offset, group="g", delayLevel=0
                )
                assert back.code == ResponseCode.SUCCESS
            for queue in range(18):
                parked = await broker.pull("SCHEDULE_TOPIC_XXXX", 0, queueId=queue)
                found += messages_of(parked)
            found.sort(key=lambda message: message.reconsume_times)
            assert [message.properties["DELAY"] for message in found] == levels

    asyncio.run(run())


def test_the_groups_limit_counts_when_the_consumer_names_none(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_broker(tmp_path) as broker:
            await change(broker, retry_max_times=1)
            await broker.send("t", b"tired", reconsumeTimes=1)
            (message,) = messages_of(await broker.pull("t", 0))
            await broker.ask(RequestCode.CONSUMER_SEND_MSG_BACK, offset=message.log_offset, group="g", delayLevel=0)
            (dead,) = await broker.until_found("%DLQ%g")
            assert dead.body == b"tired"

    asyncio.run(run())


def test_delays_of_policies() -> None:
    growing = ExponentialRetryPolicy(initial=100, max=1_000, multiplier=3)
    assert [growing.delay_ms(times) for times in (-1, 0, 1, 2, 3, 1_000_000)] == [100, 100, 300, 900, 1_000, 1_000]
    listed = CustomizedRetryPolicy(next=[1, 2, 3, 4])
    assert [listed.delay_ms(times) for times in (-1, 0, 1, 2)] == [3, 3, 4, 4]
    assert CustomizedRetryPolicy(next=[]).delay_ms(0) == GroupRetryPolicy().delay_ms(0) == 10_000
