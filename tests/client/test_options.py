"""What clients may be told: each option is checked before anything starts; RocketMQ's values mean what they mean."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from client.inbox import Inbox
from skylark.client.app import App
from skylark.client.compression import Codec
from skylark.client.errors import InvalidMessage
from skylark.client.listening import ConsumeHook
from skylark.client.lite_pull_consumer import LitePullConsumer
from skylark.client.message import Message
from skylark.client.options import check_callback, codec_among, reconsume_times
from skylark.client.producer import Producer
from skylark.client.pulling import Limits
from skylark.client.push_consumer import PushConsumer
from skylark.client.session import Session
from skylark.client.simple_consumer import SimpleConsumer
from skylark.client.starting import Start
from skylark.client.transactions import TransactionProducer
from skylark.testing import LocalCluster


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": "DEFAULT_CONSUMER"}, "give the group a name"),
        ({"group": 3}, "group is 3; it must be a str"),
        ({"namespace": 3}, "namespace is 3; it must be a str"),
        ({"model": "broadcast"}, "model is 'broadcast'; it takes 'clustering' or 'broadcasting'"),
        ({"model": None}, "model is None"),
        ({"orderly": 1}, "orderly is 1; it must be True or False"),
        ({"from_where": "CONSUME_FROM_MIN_OFFSET"}, "it takes 'last', 'first'"),
        ({"from_where": True}, "from_where is True"),
        ({"from_where": -1}, "from_where is -1"),
        ({"concurrency": 0}, "concurrency is 0; it must be between 1 and 1000"),
        ({"concurrency": 2.0}, "concurrency is 2.0; it must be a whole number"),
        ({"batch_size": 1025}, "batch_size is 1025; it must be between 1 and 1024"),
        ({"batch_size": True}, "batch_size is True"),
        ({"pull_batch_size": 2000}, "pull_batch_size is 2000; it must be between 1 and 1024"),
        ({"max_reconsume_times": -2}, "None or -1 for the group's setting"),
        ({"max_reconsume_times": "3"}, "max_reconsume_times is '3'"),
        ({"consume_timeout_s": 0}, "consume_timeout_s is 0; it must be 0.001 or more seconds"),
        ({"consume_timeout_s": float("nan")}, "consume_timeout_s is nan"),
        ({"suspend_s": -1}, "suspend_s is -1"),
        ({"pull_interval_s": 66}, "pull_interval_s is 66; it must be between 0 and 65.535"),
        ({"commit_interval_s": 0}, "commit_interval_s is 0"),
        ({"rebalance_interval_s": "20"}, "it must be a number of seconds"),
        ({"shutdown_timeout_s": -1}, "shutdown_timeout_s is -1"),
        ({"limits": {"messages": 3}}, "must be skylark.client.pulling.Limits"),
        ({"limits": Limits(messages=0)}, "limits.messages is 0; it must be between 1 and 65535"),
        ({"limits": Limits(size_bytes=0)}, "limits.size_bytes is 0"),
        ({"limits": Limits(span=0)}, "limits.span is 0"),
        ({"strategy": "AVG"}, "strategy is 'AVG'; it must be a function of 3 arguments"),
        ({"strategy": lambda queues, members: queues}, "is called with 3 arguments, which it does not take"),
        ({"hooks": [ConsumeHook]}, "must be an object"),
        ({"hooks": [print]}, "an object with before and after"),
        ({"queues_changed": lambda topic: None}, "is called with 2 arguments"),
        ({"offsets_directory": "/tmp"}, "must be a pathlib.Path"),
        ({"trace": 1}, "trace is 1; it takes True, False or the name of a topic"),
        ({"trace": "no topic!"}, "illegal characters"),
    ],
)
def test_options_of_a_push_consumer_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidMessage, match=says.replace("(", r"\(")):
        PushConsumer(**({"group": "g", "listener": print} | options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"timeout_s": 0}, "timeout_s is 0; it must be 0.001 or more"),
        ({"attempt_timeout_s": -1}, "attempt_timeout_s is -1"),
        ({"retries": -1}, "retries is -1; it must be 0 or more"),
        ({"retries": 1.5}, "a whole number"),
        ({"compression": "gzip"}, "compression is 'gzip'; it takes 'zlib', 'lz4' or 'zstd'"),
        ({"compression_level": 10}, "compression_level is 10; it must be between 0 and 9"),
        ({"compress_over_bytes": -1}, "compress_over_bytes is -1"),
        ({"max_message_bytes": 0}, "max_message_bytes is 0"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"max_in_flight_bytes": 0}, "max_in_flight_bytes is 0"),
        ({"default_topic": "a b"}, "illegal characters"),
        ({"default_topic_queues": 0}, "default_topic_queues is 0"),
        ({"hooks": [ConsumeHook()]}, "an object with before_send and after_send"),
        ({"trace": None}, "trace is None"),
        ({"group": ""}, "the group is empty"),
    ],
)
def test_options_of_a_producer_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        Producer(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"request_timeout_s": 0}, "request_timeout_s is 0"),
        ({"unit_mode": "false"}, "unit_mode is 'false'; it must be True or False"),
        ({"namespace": None}, "namespace is None; it must be a str"),
        ({"namespace_v2": 2}, "namespace_v2 is 2"),
        ({"instance": 5}, "instance is 5; it must be a str"),
        ({"client_ip": 5}, "client_ip is 5; it must be a str"),
        ({"rpc_hooks": None}, "rpc_hooks is None; it takes several"),
    ],
)
def test_options_of_a_session_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        Session("localhost:1", **options)


def test_what_is_no_list_and_no_session_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="hooks is None; it takes several"):
        PushConsumer("localhost:1", "g", hooks=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="hooks is 5; it takes several"):
        Producer("localhost:1", hooks=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="retry_codes is 5; it takes several"):
        Producer("localhost:1", retry_codes=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="session is 'localhost:1'; it must be"):
        Producer(session="localhost:1")  # type: ignore[arg-type]


def test_options_of_a_transaction_producer_that_are_refused() -> None:
    with pytest.raises(InvalidMessage, match="is called with one argument"):
        TransactionProducer("localhost:9876", "g", checker=lambda: True)
    with pytest.raises(InvalidMessage, match="max_checks is 0"):
        TransactionProducer("localhost:9876", "g", checker=None, max_checks=0)
    with pytest.raises(InvalidMessage, match=r"it takes several, as in \['orders'\]"):
        TransactionProducer("localhost:9876", "g", checker=None, topics="orders")


def test_values_of_rocketmqs_world_mean_what_they_mean_there() -> None:
    assert [reconsume_times(value) for value in (None, -1, 0, 3)] == [None, None, 0, 3]
    assert codec_among("ZSTD") is Codec.ZSTD
    assert codec_among(None) is None
    assert Start.of("CONSUME_FROM_LAST_OFFSET", 0) == Start("last")
    assert Start.of("CONSUME_FROM_FIRST_OFFSET", 0) == Start("first")
    assert Start.of("CONSUME_FROM_TIMESTAMP", 3_600_000) == Start("timestamp", 1_800_000)
    assert Start.of(datetime(1970, 1, 1, 1, tzinfo=UTC), 0) == Start("timestamp", 3_600_000)


def test_minus_one_tries_of_a_simple_consumer_are_the_usual_ones() -> None:
    assert SimpleConsumer("localhost:1", "g", max_reconsume_times=-1)._max_times == 16
    with pytest.raises(InvalidMessage, match="max_reconsume_times is -2"):
        SimpleConsumer("localhost:1", "g", max_reconsume_times=-2)


def test_capitals_are_a_broadcasting_consumer(tmp_path: Path) -> None:
    async def run() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster, Producer(cluster.name_servers) as producer:
            inboxes = Inbox(), Inbox()
            consumers = [
                PushConsumer(
                    cluster.name_servers, "g", listener=inbox, model="BROADCASTING", from_where="first",
                    offsets_directory=tmp_path / str(number),
                )
                for number, inbox in enumerate(inboxes)
            ]  # fmt: skip
            await producer.send("orders", b"to all")
            for consumer in consumers:
                consumer.subscribe("orders")
            async with consumers[0], consumers[1]:
                for inbox in inboxes:
                    await inbox.wait(1)

    asyncio.run(run())


def test_minus_one_tries_are_the_groups_setting() -> None:
    async def run() -> None:
        failed = asyncio.Event()
        again = asyncio.Event()

        async def fail(message: Message) -> bool:
            (again if message.reconsume_times else failed).set()
            return bool(message.reconsume_times)

        settings = {"messageDelayLevel": "1s 1s 1s"}
        async with (
            LocalCluster(topics={"orders": 1}, settings=settings) as cluster,
            Producer(cluster.name_servers) as producer,
        ):
            consumer = PushConsumer(
                cluster.name_servers, "g", listener=fail, max_reconsume_times=-1, from_where="first"
            )
            consumer.subscribe("orders")
            async with consumer:
                await producer.send("orders", b"x")
                await failed.wait()
                async with asyncio.timeout(30):  # a dead letter would never come
                    await again.wait()

    asyncio.run(run())


def takes_none() -> None: ...


def takes_two(message: Message, more: Message) -> None: ...


def takes_by_name(*, message: Message) -> None: ...


def gives(message: Message) -> Iterator[Message]:
    yield message


async def gives_later(message: Message) -> AsyncIterator[Message]:
    yield message


class Handlers:
    def right(self, message: Message) -> None: ...

    def __call__(self, message: Message, more: Message) -> None: ...


@pytest.mark.parametrize("listener", [takes_none, takes_two, takes_by_name, Handlers(), Handlers.right, 3])
def test_a_listener_that_does_not_take_a_message_is_refused_at_the_start(listener: Any) -> None:
    consumer = PushConsumer("localhost:1", "g", listener=listener)
    consumer.subscribe("orders")
    with pytest.raises(InvalidMessage, match=r"the listener .*one argument"):
        asyncio.run(consumer.start())
    with pytest.raises(InvalidMessage, match=r"the handler .*one argument"):
        App("localhost:1").consumer("orders", group="g")(listener)


@pytest.mark.parametrize("listener", [gives, gives_later])
def test_a_listener_with_a_yield_would_never_run(listener: Any) -> None:
    with pytest.raises(InvalidMessage, match=f"{listener.__name__} has a yield"):
        check_callback("the listener", listener, "message")


@pytest.mark.parametrize("listener", [Handlers().right, print, partial(takes_two, more=None), lambda *messages: None])
def test_listeners_that_take_a_message(listener: Any) -> None:
    check_callback("the listener", listener, "message")


def test_a_consumer_without_a_subscription_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with LocalCluster() as cluster:
            inbox = Inbox()
            with caplog.at_level(logging.WARNING, "skylark.client"):
                async with PushConsumer(cluster.name_servers, "g", listener=inbox):
                    assert any("starts without a subscription" in record.message for record in caplog.records)

    asyncio.run(run())


def test_the_filter_is_checked() -> None:
    consumer = PushConsumer("localhost:1", "g")
    with pytest.raises(InvalidMessage, match=r"the filter .* one argument"):
        consumer.subscribe("orders", filter=takes_none)  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="tag is None"):
        consumer.subscribe("orders", None)  # type: ignore[arg-type]


async def coroutine(*_: object) -> Any:
    """Nobody would wait for it, and what it says would not count."""


class Awaited:
    async def __call__(self, *_: object) -> Any: ...


@pytest.mark.parametrize("function", [coroutine, partial(coroutine, 1), Awaited()], ids=["plain", "partial", "object"])
def test_what_is_called_on_the_event_loop_is_no_coroutine_function(function: Any) -> None:
    says = "is a coroutine function, and nobody would wait for it"
    with pytest.raises(InvalidMessage, match=f"the filter .* {says}"):
        PushConsumer("localhost:1", "g").subscribe("orders", filter=function)
    for make in (PushConsumer, LitePullConsumer):
        with pytest.raises(InvalidMessage, match=f"strategy .* {says}"):
            make("localhost:1", "g", strategy=function)
    with pytest.raises(InvalidMessage, match=f"queues_changed .* {says}"):
        PushConsumer("localhost:1", "g", queues_changed=function)
