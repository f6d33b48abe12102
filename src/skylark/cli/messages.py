"""`skylark send`, `skylark consume` and `skylark tail`: messages on the command line.

Bodies go to stdout and nothing else does, so that they can be piped; receipts of one message too. Progress is drawn on
stderr, and only when that is a terminal.
"""

import asyncio
import base64
import contextlib
import enum
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skylark.cli import options
from skylark.cli.addresses import NameServers
from skylark.cli.output import check_stdout, when_nobody_reads
from skylark.cli.progress import progress
from skylark.cli.sending import read_whole, send_lines
from skylark.cli.serving import Failure, log_to_stderr, on_signal_to_end, run

if TYPE_CHECKING:
    from skylark.client.lite_pull_consumer import LitePullConsumer
    from skylark.client.message import Message, MessageQueue

_TAIL_GROUP = "TOOLS_CONSUMER"  # every broker has it
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Topic = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Name of the topic.")]
Tag = Annotated[str, typer.Option(metavar="TAGS", help="Only messages with these tags, such as 'new || paid'.")]
Sql = Annotated[
    str | None,
    typer.Option(
        metavar="EXPRESSION", help="Only messages whose properties match, such as \"price > 5 AND kind = 'a'\"."
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="A line of JSON for each message, with where it came from. A body that is no UTF-8 is in body_base64.",
    ),
]
Max = Annotated[int | None, typer.Option("--max", min=1, metavar="COUNT", help="Stop after so many messages.")]
Idle = Annotated[float | None, typer.Option(min=0.1, metavar="SECONDS", help="Stop when nothing came for so long.")]


class Start(enum.StrEnum):
    FIRST = "first"
    LAST = "last"


def send(
    topic: Topic,
    body: Annotated[
        str | None,
        typer.Argument(metavar="[BODY]", show_default=False, help="The message; else lines of a file or stdin."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="Each line of FILE is a message.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="All of FILE, or of stdin, is one message.")] = False,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Tag of the messages.")] = None,
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Key to find the messages by; may be repeated.")
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="Property of the messages; may be repeated."),
    ] = None,
    delay_level: Annotated[
        int, typer.Option(min=0, max=18, metavar="LEVEL", help="Deliver later: 1 is 1 s, 3 is 10 s, 18 is 2 h.")
    ] = 0,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Deliver after any time, such as 90s, 15m, 2h or 1d.")
    ] = None,
    deliver_at: Annotated[
        datetime | None,
        typer.Option(metavar="TIME", help="Deliver at a time, such as 2030-01-31T08:00:00, local time."),
    ] = None,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Send messages: BODY, the lines of a file, or the lines of stdin.

    Ends when all are acknowledged, or with the first that fails. The topic is created if the broker allows that.
    Lines end with LF or CRLF, which is no part of the message; blank lines are left out and counted, as a message
    has a body. With --whole nothing is left out.

    [bold]Examples[/bold]

    [cyan]skylark send orders hello --tag new --key 42[/cyan]  one message

    [cyan]seq 100000 | skylark send orders[/cyan]  a message for each line

    [cyan]skylark send orders -f orders.jsonl -n 10.0.0.1:9876[/cyan]  the lines of a file

    [cyan]skylark send photos -f cat.jpg --whole[/cyan]  a file as one message

    [cyan]skylark send reminders "call Ann" --delay 90m[/cyan]  to be delivered in an hour and a half
    """
    from skylark.client.validation import MOST_MESSAGE_BYTES

    log_to_stderr(verbose=verbose)
    if body is not None and file is not None:
        raise Failure("give BODY or --file, not both")
    if body is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise Failure("nothing to send: give BODY, --file, or pipe lines into stdin")
    _check_text("--tag", [tag or ""])
    _check_text("--key", key or [])
    _check_text("--property", properties or [])
    labels: dict[str, Any] = {
        "tag": tag,
        "key": key,
        "properties": _properties(properties or []),
        "delay_level": delay_level,
        "delay_s": _seconds("--delay", delay) if delay is not None else None,
        "deliver_at": _zoned("--deliver-at", deliver_at) if deliver_at is not None else None,
    }

    # Here and not on the event loop, where Ctrl-C would not end the wait for a pipe.
    single = os.fsencode(body) if body is not None else read_whole(file, MOST_MESSAGE_BYTES) if whole else None

    async def main() -> None:
        from skylark.client.producer import Producer

        # How large a message may be is for the broker to say.
        async with Producer(namesrv, group="skylark-send", max_message_bytes=MOST_MESSAGE_BYTES) as producer:
            if single is not None:
                receipt = await producer.send(topic, single, **labels)
                where = f"queue {receipt.queue.queue_id} of {receipt.queue.broker_name}"
                print(f"{receipt.msg_id} {where} at offset {receipt.queue_offset}")
            else:
                await send_lines(producer, topic, file, MOST_MESSAGE_BYTES, labels)

    run_client(main)


def consume(
    topic: Topic,
    group: Annotated[str, typer.Option(metavar="GROUP", help="Consumer group; it shares the messages and remembers.")],
    tag: Tag = "*",
    sql: Sql = None,
    start: Annotated[Start, typer.Option("--from", help="Where a group that is new begins.")] = Start.LAST,
    max_count: Max = None,
    idle: Idle = None,
    as_json: AsJson = False,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Consume messages as a member of a group: each is given to one member, and not again.

    Bodies go to stdout, a line each. Stop with Ctrl-C: what was printed is committed. As with RocketMQ, a group that is
    new begins with the first message also of a topic so young that the broker has it in memory yet.

    [bold]Examples[/bold]

    [cyan]skylark consume orders --group billing[/cyan]  what comes from now on, or since the group's last time

    [cyan]skylark consume orders --group audit --from first --json[/cyan]  all that is there, with its properties

    [cyan]skylark consume orders --group dear --sql 'price > 100'[/cyan]  those whose properties match

    [cyan]skylark consume orders --group batch --max 1000 --idle 5 > orders.txt[/cyan]  up to 1000, or what there is
    """
    log_to_stderr(verbose=verbose)

    async def main() -> None:
        from skylark.client.lite_pull_consumer import LitePullConsumer

        async with LitePullConsumer(namesrv, group=group, from_where=start.value) as consumer:
            queues = await consumer.queues(topic)  # says at once when there is no such topic
            await _check_sql(namesrv, queues, sql)
            consumer.subscribe(topic, tag, sql=sql)
            await _print_messages(consumer, max_count, idle, as_json)

    run_client(main)


def tail(
    topic: Topic,
    last: Annotated[
        int, typer.Option("-l", "--last", min=0, metavar="COUNT", help="Begin so many messages of each queue back.")
    ] = 10,
    since: Annotated[
        str | None, typer.Option(metavar="AGE", help="Begin so long ago instead: 30s, 10m, 2h, 1d.")
    ] = None,
    tag: Tag = "*",
    sql: Sql = None,
    max_count: Max = None,
    idle: Idle = None,
    as_json: AsJson = False,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Watch a topic: the last messages and what comes. It disturbs no group and leaves no trace.

    [bold]Examples[/bold]

    [cyan]skylark tail orders[/cyan]  the last 10 of each queue, then new ones

    [cyan]skylark tail orders --since 10m --tag paid[/cyan]  those of the last ten minutes

    [cyan]skylark tail orders --last 100 --idle 1 --json[/cyan]  the last 100 of each queue, then end
    """
    log_to_stderr(verbose=verbose)
    since_ms = None if since is None else _age_ms(since)

    async def main() -> None:
        from skylark.client.lite_pull_consumer import LitePullConsumer
        from skylark.client.routes import NOTHING_TO_READ

        async with LitePullConsumer(namesrv, group=_TAIL_GROUP, auto_commit=False) as consumer:
            queues = await consumer.queues(topic)
            if not queues:
                raise Failure(f"topic {topic!r}: {NOTHING_TO_READ}")
            await _check_sql(namesrv, queues, sql)
            starts = {queue: await _tail_start(consumer, queue, last, since_ms) for queue in queues}
            consumer.assign(queues, tag, sql=sql)
            for queue, offset in starts.items():
                await consumer.seek(queue, offset)
            await _print_messages(consumer, max_count, idle, as_json)

    run_client(main)


async def _check_sql(namesrv: str, queues: "list[MessageQueue]", sql: str | None) -> None:
    """Asks a broker whether it takes the expression: a consumer would go on trying for ever."""
    from skylark.client.pull_consumer import PullConsumer

    if sql is not None and queues:
        async with PullConsumer(namesrv, group=_TAIL_GROUP) as puller:
            await puller.pull(queues[0], await puller.max_offset(queues[0]), 1, sql=sql)


async def _tail_start(consumer: "LitePullConsumer", queue: "MessageQueue", last: int, since_ms: int | None) -> int:
    if since_ms is not None:
        return await consumer.offset_for_time(queue, since_ms)
    return max(await consumer.min_offset(queue), await consumer.max_offset(queue) - last)


def _age_ms(age: str) -> int:
    return time.time_ns() // 1_000_000 - _seconds("--since", age) * 1000


def _seconds(option: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    if found is None:
        raise Failure(f"{option} {text!r} is not a length of time: expected a number with s, m, h or d, such as 10m")
    return int(found[1]) * _UNITS_S[found[2]]


def run_client(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a command; what goes wrong with the servers is one line."""
    from skylark.client.errors import NotReachable, RocketMQError

    try:
        check_stdout()
        run(main)
    except KeyboardInterrupt:
        raise typer.Abort from None
    except NotReachable as error:
        raise Failure(f"{error}; is it running there? skylark up starts one here") from error
    except (RocketMQError, ValueError) as error:
        raise Failure(str(error)) from error


def _zoned(option: str, moment: datetime) -> datetime:
    try:
        return moment.astimezone()
    except (ValueError, OverflowError, OSError):  # the first and the last days of the calendar
        raise Failure(f"{option} {moment.isoformat()} is no time that a message can be delivered at") from None


def _check_text(option: str, given: list[str]) -> None:
    """Bytes of the command line that are no text come as surrogates; only a body may have any bytes."""
    for text in given:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise Failure(f"{option} {text!r} is no text in this terminal's encoding")


def _properties(pairs: list[str]) -> dict[str, str] | None:
    for pair in pairs:
        if "=" not in pair:
            raise Failure(f"--property {pair!r} is no property: expected NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs) or None


# Printing.


async def _print_messages(
    consumer: "LitePullConsumer", max_count: int | None, idle_s: float | None, as_json: bool
) -> None:
    count = 0
    with progress("received", only_if=not sys.stdout.isatty()) as advance:
        async for message in _until_stopped(consumer, idle_s):
            sys.stdout.buffer.write(as_json_line(message) if as_json else message.body + b"\n")
            sys.stdout.buffer.flush()
            count += 1
            advance(count)
            if count == max_count:
                return


async def _until_stopped(consumer: "LitePullConsumer", idle_s: float | None) -> AsyncIterator["Message"]:
    """Messages until a signal asks for the end, until nobody reads what is printed, or until none came for a while."""
    from skylark.client.errors import ClientClosed

    loop = asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []

    def close(_: int = 0) -> None:
        closing.append(loop.create_task(consumer.close()))

    def close_from_thread() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it ended by itself
            loop.call_soon_threadsafe(close)

    on_signal_to_end(close)
    when_nobody_reads(close_from_thread)
    while True:
        try:
            messages = await consumer.poll(idle_s or 3600.0, 1)
        except ClientClosed:
            await asyncio.gather(*closing)
            return
        if not messages and idle_s is not None:
            if failures := consumer.failures():  # a server that is away is not the end of the messages
                raise Failure(f"nothing came for {idle_s:g} s, but {failures[0]}")
            return
        for message in messages:
            yield message


def _body(body: bytes) -> dict[str, str | None]:
    """JSON has no bytes: those that are no text are not made one."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body": None, "body_base64": base64.b64encode(body).decode()}


def as_json_line(message: "Message") -> bytes:
    record = {
        "topic": message.topic,
        **_body(message.body),
        "tag": message.tag,
        "keys": message.keys,
        "msg_id": message.msg_id,
        "broker": message.broker,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "born_at": message.born_at.isoformat(),
        "stored_at": message.stored_at.isoformat(),
        "reconsume_times": message.reconsume_times,
        "properties": message.properties,
    }
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
