"""`skylark pipeline offsets`: where a stopped stream goes on. Spark's checkpoint is changed without Spark."""

import functools
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from skylark.cli import options
from skylark.cli.addresses import NameServersOfStream
from skylark.cli.pipeline import user_errors
from skylark.cli.queries import print_table
from skylark.cli.serving import Failure, log_to_stderr

if TYPE_CHECKING:
    from skylark.pipelines.moving import Plan, Shown, Stream

offsets = typer.Typer(
    name="offsets", help="Where a stopped stream goes on.", no_args_is_help=True, rich_markup_mode="rich"
)

StreamPath = Annotated[
    Path,
    typer.Argument(
        metavar="STREAM", show_default=False, help="The pipeline's file, or the directory of the stream's checkpoint."
    ),
]
Topic = Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only queues of this topic.")]
Broker = Annotated[str | None, typer.Option("--broker", metavar="NAME", help="Only queues at this broker.")]
QueueId = Annotated[int | None, typer.Option("--queue", min=0, metavar="NUMBER", help="Only queues of this number.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Don't ask: the stream is stopped, and the plan is right.")]
Replan = Annotated[
    bool, typer.Option("--replan", help="Also if a batch is planned that did not finish: it is planned anew.")
]
AsJson = Annotated[bool, typer.Option("--json", help="All of it as one JSON object.")]


@offsets.command()
def show(
    stream: StreamPath,
    namesrv: NameServersOfStream = None,
    as_json: AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Show where a stream is in each queue, what the queue has, and how many messages wait.

    A planned batch is one that did not finish; it is read again when the stream is started.

    [bold]Examples[/bold]

    [cyan]skylark pipeline offsets show paid.yaml[/cyan]

    [cyan]skylark pipeline offsets show /data/checkpoint --namesrv localhost:9876 --json[/cyan]
    """
    log_to_stderr(verbose=verbose)
    with user_errors():
        import msgspec

        from skylark.pipelines import moving

        found = moving.stream(stream)
        shown = moving.show(found, moving.ends_of(_server(found, namesrv), moving.queues_of(found)))
        if as_json:
            queues = [{**msgspec.to_builtins(place), "lag": place.lag} for place in shown.queues]
            print(msgspec.json.encode({**msgspec.to_builtins(shown), "queues": queues}).decode())
        else:
            _print(shown)


@offsets.command("set")
def set_offsets(
    stream: StreamPath,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHERE",
            show_default=False,
            help="earliest, latest, an offset, a time (UTC) such as 2026-01-31T12:00, or JSON as in startingOffsets.",
        ),
    ],
    topic: Topic = None,
    broker: Broker = None,
    queue: QueueId = None,
    replan: Replan = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
    namesrv: NameServersOfStream = None,
    verbose: options.Verbose = False,
) -> None:
    """Have a stopped stream go on from somewhere else: in all its queues, or in those that are named.

    The plan is shown before anything is changed, and what is changed is kept in the checkpoint's directory backups.
    Further back, messages are read and written again; further on, what lies between is never read.

    [bold]Examples[/bold]

    [cyan]skylark pipeline offsets set paid.yaml --to earliest --dry-run[/cyan]

    [cyan]skylark pipeline offsets set paid.yaml --to 2026-01-31T12:00 --topic orders --yes[/cyan]

    [cyan]skylark pipeline offsets set paid.yaml --to 120 --topic orders --broker broker-a --queue 0[/cyan]
    """
    log_to_stderr(verbose=verbose)
    with user_errors():
        from skylark.pipelines import moving

        where, wanted = moving.target(to), moving.Wanted(topic, broker, queue)
        found = moving.stream(stream)
        server = _server(found, namesrv)
        ends = moving.ends_of(server, moving.queues_of(found))
        at_time = functools.partial(moving.offsets_at, server)
        plan = moving.set_to(found, wanted, where, ends, at_time, replan=replan)
        _carry_out(found, plan, dry_run=dry_run, yes=yes, as_json=as_json)


@offsets.command()
def skip(
    stream: StreamPath,
    count: Annotated[
        int | None, typer.Option(min=1, metavar="COUNT", help="Pass over so many messages of each queue.")
    ] = None,
    offset: Annotated[
        int | None, typer.Option(min=0, metavar="OFFSET", help="Pass over the message at this offset of one queue.")
    ] = None,
    topic: Topic = None,
    broker: Broker = None,
    queue: QueueId = None,
    replan: Replan = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
    namesrv: NameServersOfStream = None,
    verbose: options.Verbose = False,
) -> None:
    """Have a stopped stream pass over messages: so many of each queue, or the one that an error named.

    With --offset nothing but that message is passed over. If the batch that failed has others before it, it is first
    made to end there: run the stream, which fails again, and say the same once more.

    [bold]Examples[/bold]

    [cyan]skylark pipeline offsets skip paid.yaml --topic orders --broker broker-a --queue 0 --offset 4711[/cyan]

    [cyan]skylark pipeline offsets skip paid.yaml --count 100 --topic orders --dry-run[/cyan]
    """
    log_to_stderr(verbose=verbose)
    if (count is None) == (offset is None):
        raise Failure("say what is passed over: --count COUNT or --offset OFFSET")
    with user_errors():
        from skylark.pipelines import moving

        wanted = moving.Wanted(topic, broker, queue)
        found = moving.stream(stream)
        ends = moving.ends_of(_server(found, namesrv), moving.queues_of(found))
        if count is not None:
            plan = moving.skip_count(found, wanted, count, ends, replan=replan)
        else:
            assert offset is not None
            plan = moving.skip_message(found, wanted, offset, ends)
        _carry_out(found, plan, dry_run=dry_run, yes=yes, as_json=as_json)


def _server(stream: "Stream", namesrv: str | None) -> str:
    chosen = namesrv or stream.name_server
    if chosen is None:
        raise Failure("the checkpoint does not say which name server the stream reads from: give --namesrv HOST:PORT")
    return chosen


def _carry_out(stream: "Stream", plan: "Plan", *, dry_run: bool, yes: bool, as_json: bool) -> None:
    from skylark.pipelines.checkpoints import apply

    wanted = plan.change is not None and not dry_run
    if wanted and not yes:
        _tell(plan, sys.stderr if as_json else sys.stdout)
        if not sys.stdin.isatty():
            raise Failure("nothing was changed: without a terminal to ask at, say --yes, or --dry-run")
        print(
            "Spark keeps no lock on a checkpoint, and this would spoil a stream that runs. It was written to last "
            f"at {stream.checkpoint.written:%Y-%m-%d %H:%M:%S} UTC.",
            file=sys.stderr,
        )
        typer.confirm("Is the stream stopped, and is this what you want?", abort=True, err=True)
    elif not as_json:
        _tell(plan, sys.stdout)
    backup = None
    if wanted:
        assert plan.change is not None
        backup = apply(stream.checkpoint, plan.change, datetime.now(UTC))
    if as_json:
        _print_json(plan, backup)
    elif backup is not None:
        print(f"done; what was there before is in {backup}")
    else:
        print("nothing was changed")


def _tell(plan: "Plan", file: Any) -> None:
    from skylark.pipelines.moving import effect

    for move in plan.moves:
        print(f"{move.queue}: {effect(move)}", file=file)
    for remark in plan.remarks:
        print(remark, file=file)


def _print_json(plan: "Plan", backup: Path | None) -> None:
    import msgspec

    moves = [
        {
            "topic": move.queue.topic,
            "broker": move.queue.broker,
            "queueId": move.queue.queue_id,
            "from": move.before,
            "to": move.after,
        }
        for move in plan.moves
    ]
    told = {
        "moves": moves,
        "remarks": plan.remarks,
        "changed": backup is not None,
        "backup": None if backup is None else str(backup),
    }
    print(msgspec.json.encode(told).decode())


def _print(shown: "Shown") -> None:
    from rich.table import Table

    finished = "no batch has finished" if shown.finished_batch is None else f"batch {shown.finished_batch} finished"
    planned = "" if shown.planned_batch is None else f"; batch {shown.planned_batch} is planned and did not finish"
    print(f"{shown.checkpoint}: {finished}{planned}")
    table = Table("Topic", "Broker", box=None, pad_edge=False)
    for heading in ("Queue", "Offset", "Planned to", "Min", "Max", "Lag"):
        table.add_column(heading, justify="right")
    for place in shown.queues:
        numbers = (place.queue_id, place.offset, place.planned, place.min, place.max, place.lag)
        table.add_row(place.topic, place.broker, *("-" if number is None else str(number) for number in numbers))
    print_table(table)
