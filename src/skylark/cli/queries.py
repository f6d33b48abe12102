"""`skylark query` and `skylark trace`: messages that are stored already, and what became of them."""

import json
import re
import sys
import time
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Annotated

import typer

from skylark.cli import options
from skylark.cli.addresses import NameServers
from skylark.cli.messages import AsJson, as_json_line, run_client
from skylark.cli.serving import Failure, log_to_stderr

if TYPE_CHECKING:
    from rich.table import Table

    from skylark.client.message import Message, MessageQueue
    from skylark.client.query import QueryClient
    from skylark.client.traces import TraceEvent

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SHOWN_BODY_CHARACTERS = 60
_MOST = 2**63 - 1
_MOST_SHOWN = 2**31 - 1


def query(
    topic: Annotated[
        str | None, typer.Argument(metavar="[TOPIC]", show_default=False, help="Name of the topic.")
    ] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Messages that were sent with this key.")] = None,
    unique_key: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The message with this msg_id of its receipt."),
    ] = None,
    offset_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="The message with this offset_msg_id of its receipt; needs no topic."),
    ] = None,
    offset: Annotated[
        int | None,
        typer.Option(min=0, max=_MOST, metavar="OFFSET", help="The message at an offset; needs --queue."),
    ] = None,
    queue: Annotated[int | None, typer.Option(metavar="NUMBER", help="The queue of --offset.")] = None,
    broker: Annotated[
        str | None, typer.Option(metavar="NAME", help="The broker of --queue, where the topic has several.")
    ] = None,
    when: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="TIME", help="Messages from a time on: 10m ago, or a date such as 2026-01-31T12:00."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only messages before this time; with --time or --key.")
    ] = None,
    max_count: Annotated[
        int, typer.Option("--max", min=1, max=_MOST_SHOWN, metavar="COUNT", help="Show so many at most.")
    ] = 64,
    as_json: AsJson = False,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Look up messages by key, by id, by offset or by time. Nothing is consumed.

    [bold]Examples[/bold]

    [cyan]skylark query orders --key 42[/cyan]  what was sent with key 42

    [cyan]skylark query orders --unique-key 7F0000010B6A...[/cyan]  by the msg_id of a receipt

    [cyan]skylark query --id 7F00000100002A9F0000000000000000[/cyan]  by the offset_msg_id of a receipt

    [cyan]skylark query orders --queue 3 --offset 1000[/cyan]  by its place in the queue

    [cyan]skylark query orders --time 10m --json[/cyan]  what came in the last ten minutes
    """
    log_to_stderr(verbose=verbose)
    ways = {"--key": key, "--unique-key": unique_key, "--id": offset_id, "--offset": offset, "--time": when}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise Failure(f"give one of {', '.join(ways)}" + (f", not {' and '.join(given)}" if given else ""))
    if topic is None and offset_id is None:
        raise Failure(f"{given[0]} needs the topic: skylark query TOPIC {given[0]} ...")
    if offset is None and (queue is not None or broker is not None):
        raise Failure(f"--queue and --broker go with --offset, not with {given[0]}")
    if until is not None and key is None and when is None:
        raise Failure(f"--until goes with --time and --key, not with {given[0]}")
    end_ms = _MOST if until is None else time_ms("--until", until)

    async def main() -> None:
        from skylark.client.query import QueryClient

        async with QueryClient(namesrv) as client:
            name = topic or ""
            if key is not None:
                found = await client.by_key(name, key, max_count=max_count, end=end_ms)
            elif unique_key is not None:
                found = [await client.by_unique_key(name, unique_key)]
            elif offset_id is not None:
                found = [await _by_id(client, offset_id)]
            elif offset is not None:
                found = [await client.by_offset(await _queue(client, name, queue, broker), offset)]
            else:
                found = await client.by_time(name, time_ms("--time", when or ""), end_ms, max_count=max_count)
        if not found:
            raise Failure(f"topic {topic} has no such message")
        _show(found, as_json)

    run_client(main)


def trace(
    msg_id: Annotated[str, typer.Argument(metavar="MSGID", show_default=False, help="The msg_id of the receipt.")],
    trace_topic: Annotated[
        str, typer.Option("-t", "--trace-topic", metavar="TOPIC", help="Where the clients write their traces.")
    ] = "RMQ_SYS_TRACE_TOPIC",
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each record.")] = False,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Tell what became of a message: when it was sent, by whom it was consumed, and how that went.

    MSGID is the producer's id, the msg_id of a receipt. Only clients that trace leave records: trace=True in Python,
    enableTrace in Java.

    [bold]Examples[/bold]

    [cyan]skylark trace 7F0000010B6A18B4AAC2123456780000[/cyan]  as a table

    [cyan]skylark trace 7F0000010B6A18B4AAC2123456780000 --json[/cyan]  all that is known, for programs
    """
    log_to_stderr(verbose=verbose)

    async def main() -> None:
        from skylark.client.errors import RouteNotFound
        from skylark.client.query import QueryClient

        async with QueryClient(namesrv) as client:
            try:
                events = await client.trace(msg_id, trace_topic=trace_topic)
            except RouteNotFound:
                raise Failure(
                    f"nothing was traced: topic {trace_topic} does not exist; trace=True of a client in Python, "
                    "enableTrace in Java and traceTopicEnable=true of a broker switch traces on"
                ) from None
        if not events:
            raise Failure(f"topic {trace_topic} has no trace of message {msg_id}; its clients may not trace")
        if as_json:
            for event in events:
                print(json.dumps(event.to_dict(), ensure_ascii=False))
        else:
            print_table(_trace_table(events))

    run_client(main)


async def _by_id(client: "QueryClient", offset_id: str) -> "Message":
    """Both kinds of id look alike."""
    from skylark.client.errors import InvalidMessage, MessageNotFound, NotReachable

    try:
        return await client.by_id(offset_id)
    except (InvalidMessage, MessageNotFound, NotReachable) as error:
        raise Failure(f"{error}; for the id that send prints: skylark query TOPIC --unique-key ID") from error


def time_ms(option: str, text: str, zone: tzinfo | None = None) -> int:
    """Milliseconds since 1970 of an age (10m), a date (in `zone`, or local, unless it names one) or such a number."""
    text = text.strip()
    if found := re.fullmatch(r"(\d{1,9})([smhd])(?: ago)?", text):
        return time.time_ns() // 1_000_000 - int(found[1]) * _UNITS_S[found[2]] * 1000
    if re.fullmatch(r"\d{11,18}", text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp() * 1000)
    except ValueError:
        raise Failure(
            f"{option} {text!r} is no time: expected an age such as 10m, a date such as 2026-01-31T12:00, or "
            "milliseconds since 1970"
        ) from None


async def _queue(client: "QueryClient", topic: str, queue_id: int | None, broker: str | None) -> "MessageQueue":
    queues = await client.queues(topic)
    if queue_id is None:
        raise Failure(f"--offset needs --queue: topic {topic} has {len(queues)} queues")
    found = [q for q in queues if q.queue_id == queue_id and broker in (None, q.broker_name)]
    if not found:
        known = ", ".join(f"{q.queue_id} at {q.broker_name}" for q in queues)
        raise Failure(f"topic {topic} has no such queue: it has {known}")
    if len(found) > 1:
        raise Failure(f"--queue {queue_id} needs --broker: {', '.join(q.broker_name for q in found)}")
    return found[0]


def _show(messages: "list[Message]", as_json: bool) -> None:
    if as_json:
        for message in messages:
            sys.stdout.buffer.write(as_json_line(message))
        return
    print_table(message_table(messages))


def message_table(messages: "list[Message]") -> "Table":
    from rich.table import Column, Table

    # An id is there to be copied: the other columns make room.
    whole = Column("Message id", min_width=max(len(message.msg_id) for message in messages))
    table = Table(whole, "Broker", "Queue", "Offset", "Stored", "Tag", "Keys", "Body", box=None)
    for message in messages:
        table.add_row(
            message.msg_id,
            message.broker or message.store_host,
            str(message.queue_id),
            str(message.queue_offset),
            _local(message.store_timestamp_ms),
            message.tag or "",
            " ".join(message.keys),
            excerpt(message.body),
        )
    return table


def _trace_table(events: "list[TraceEvent]") -> "Table":
    from rich.table import Table

    table = Table("What", "Group", "Client", "Time", "Cost", "Result", box=None)
    for event in events:
        cost = "" if event.cost_ms is None else f"{event.cost_ms} ms"
        table.add_row(event.what, event.group, event.client_host, _local(event.time_ms), cost, event.result)
    return table


def print_table(table: "Table") -> None:
    """As wide as the table wants where nobody looks: a pipe has no width."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False).print(table)


def _local(timestamp_ms: int) -> str:
    if not timestamp_ms:
        return ""
    return f"{datetime.fromtimestamp(timestamp_ms / 1000, UTC).astimezone():%Y-%m-%d %H:%M:%S.%f}"[:-3]


def excerpt(body: bytes) -> str:
    text = body[: 4 * _SHOWN_BODY_CHARACTERS].decode("utf-8", "replace").replace("\n", " ")
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    if len(text) > _SHOWN_BODY_CHARACTERS:
        text = text[: _SHOWN_BODY_CHARACTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return text
