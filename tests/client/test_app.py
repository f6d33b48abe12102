"""Handlers by decorator, and how an app ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from client.inbox import DEADLINE_S, Inbox, numbered
from client.plain import send
from skylark.client.app import App
from skylark.client.errors import ClientClosed, InvalidMessage, NotReachable, OtherEventLoop
from skylark.client.message import Message
from skylark.client.offsets import RemoteOffsets
from skylark.client.session import Session
from skylark.testing import LocalCluster


def test_handlers_get_the_messages_of_their_topics_and_send_others() -> None:
    async def main() -> None:
        async with LocalCluster(topics={"orders": 2, "bills": 2, "letters": 1}) as cluster:
            app = App(cluster.name_servers, from_where="first")
            producer = app.producer("office")
            bills, letters = Inbox(), Inbox()

            @app.consumer("orders", group="billing", tag="new || paid")
            async def order(message: Message) -> None:
                await producer.send("bills", message.body, tag="bill")

            @app.consumer("bills", group="billing")
            async def bill(message: Message) -> None:
                await bills(message)
                await producer.send("letters", message.body)

            got: list[bytes] = []

            @app.consumer("letters", group="post")
            def letter(message: Message) -> None:
                got.append(message.body)
                loop.call_soon_threadsafe(asyncio.ensure_future, letters(message))

            loop = asyncio.get_running_loop()
            async with app:
                assert set(app.consumers) == {"billing", "post"}
                for number in range(6):
                    await producer.send("orders", b"%d" % number, tag=["new", "paid", "lost"][number % 3])
                await letters.wait(4)
            assert sorted(got) == sorted(bills.bodies) == [b"0", b"1", b"3", b"4"]
            assert not app.consumers
            assert not app.session.is_running

    asyncio.run(main())


def test_plain_and_asynchronous_handlers_share_a_group() -> None:
    async def main() -> None:
        async with LocalCluster(topics={"one": 1, "two": 1}) as cluster:
            app = App(cluster.name_servers, from_where="first")
            producer = app.producer()
            inbox = Inbox()
            app.consumer("one", group="g")(inbox.__call__)
            plain: list[bytes] = []

            @app.consumer("two", group="g")
            def two(message: Message) -> None:
                plain.append(message.body)

            async with app:
                await producer.send("two", b"2")
                await producer.send("one", b"1")
                await inbox.wait(1)
                async with asyncio.timeout(DEADLINE_S):
                    while not plain:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            assert (inbox.bodies, plain) == ([b"1"], [b"2"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        ({"topic": "one", "group": "g"}, "has a handler of topic"),
        ({"topic": "two", "group": "g", "orderly": False}, "has options already"),
        ({"topic": "two", "group": "g"}, "takes batches"),
    ],
)
def test_declarations_that_contradict_each_other(again: dict[str, object], reason: str) -> None:
    app = App()
    app.consumer("one", group="g", batch_size=5)(lambda _: None)
    with pytest.raises(InvalidMessage, match=reason):
        app.consumer(**again)  # type: ignore[arg-type]


def test_declarations_come_before_the_start() -> None:
    async def main() -> None:
        async with LocalCluster() as cluster, App(cluster.name_servers) as app:
            with pytest.raises(ClientClosed):
                app.consumer("t", group="g")
            with pytest.raises(ClientClosed):
                app.producer()
            with pytest.raises(ClientClosed):
                await app.__aenter__()

    asyncio.run(main())


def test_an_app_that_cannot_start_leaves_nothing_open() -> None:
    async def main() -> None:
        app = App("127.0.0.1:1")
        app.consumer("t", group="g")(lambda _: None)
        with pytest.raises(NotReachable):
            await app.__aenter__()
        assert not app.session.is_running
        assert not app.consumers

    asyncio.run(main())


def test_serving_ends_when_asked_to() -> None:
    async def main() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            app = App(cluster.name_servers, from_where="first")

            @app.consumer("orders", group="g")
            async def handle(_: Message) -> None:
                app.stop()

            serving = asyncio.create_task(app.serve())
            async with Session(cluster.name_servers) as session:
                [queue] = (await session.routes.get("orders")).read_queues
                await send(session, queue, b"stop")
            async with asyncio.timeout(DEADLINE_S):
                await serving
            assert not app.session.is_running

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before it begins", "while it starts", "from a thread"])
def test_stop_counts_whenever_and_wherever_it_is_called(when: str) -> None:
    async def main() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            app = App(cluster.name_servers)
            app.consumer("orders", group="g")(print)
            for _ in range(2):
                serving = asyncio.create_task(app.serve())
                if when == "before it begins":
                    app.stop()
                elif when == "while it starts":
                    await asyncio.sleep(0)
                    app.stop()
                else:
                    await until_it_runs(app)
                    await asyncio.to_thread(app.stop)
                async with asyncio.timeout(DEADLINE_S):
                    await serving

    asyncio.run(main(), debug=True)  # which refuses what is not safe for threads


async def until_it_runs(app: App) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not (app.consumers and all(each.queues for each in app.consumers.values())):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_what_serves_already_goes_on() -> None:
    async def main() -> None:
        async with LocalCluster(topics={"orders": 1}) as cluster:
            app = App(cluster.name_servers)
            app.consumer("orders", group="g")(print)
            serving = asyncio.create_task(app.serve())
            await asyncio.sleep(0)  # it starts
            with pytest.raises(ClientClosed, match="runs already"):
                await app.serve()
            with pytest.raises(ClientClosed, match="runs already"):
                await app.__aenter__()
            with pytest.raises(OtherEventLoop, match=r"await app\.serve\(\)"):
                app.run()
            await until_it_runs(app)
            os.kill(os.getpid(), signal.SIGTERM)  # its signals are as they were
            async with asyncio.timeout(DEADLINE_S):
                await serving

    asyncio.run(main())


def test_it_serves_in_a_thread_which_gets_no_signals() -> None:
    async def serve(app: App) -> None:
        serving = asyncio.create_task(app.serve())
        await until_it_runs(app)
        app.stop()
        await serving

    with LocalCluster(topics={"orders": 1}) as cluster:
        app = App(cluster.name_servers)
        app.consumer("orders", group="g")(print)
        asyncio.run(asyncio.to_thread(asyncio.run, serve(app)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_handler_finish_and_commits(number: signal.Signals) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from skylark.client.app import App

        app = App(sys.argv[1], from_where="first")

        @app.consumer("orders", group="g", concurrency=1)
        async def handle(message):
            print("begun", message.body.decode(), flush=True)
            await until_it_ends()
            print("done", message.body.decode(), flush=True)

        async def until_it_ends():
            [held] = [each for each in app.consumers["g"]._member.assignments if each.queue.topic == "orders"]
            while not held.revoked:
                await asyncio.sleep(0.01)

        app.run()
        print("ended", flush=True)
    """)

    with LocalCluster(topics={"orders": 1}) as cluster:

        async def fill() -> None:
            async with Session(cluster.name_servers) as session:
                [queue] = (await session.routes.get("orders")).read_queues
                await send(session, queue, *numbered(3))

        async def committed() -> int:
            async with Session(cluster.name_servers) as session:
                [queue] = (await session.routes.get("orders")).read_queues
                return await RemoteOffsets(session, "g").fetch(queue)

        asyncio.run(fill())
        with subprocess.Popen(
            [sys.executable, "-c", program, cluster.name_servers], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "begun m0\n"
            os.kill(child.pid, number)
            assert child.stdout.read() == "done m0\nended\n"
            assert child.wait(DEADLINE_S) == 0
        assert asyncio.run(committed()) == 1
