"""`skylark pipeline dlq`: what a consumer group could not consume. It asks the brokers itself and starts no Spark."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from skylark.cli import options
from skylark.cli.addresses import NameServers
from skylark.cli.pipeline import user_errors
from skylark.cli.queries import excerpt, print_table
from skylark.cli.serving import log_to_stderr

if TYPE_CHECKING:
    from skylark.pipelines.dead_letters import Report

dlq = typer.Typer(name="dlq", help="Dead letters of a consumer group.", no_args_is_help=True, rich_markup_mode="rich")

Group = Annotated[str, typer.Argument(metavar="GROUP", show_default=False, help="The consumer group.")]
Tag = Annotated[str | None, typer.Option(metavar="TAG", help="Only dead letters with this tag.")]
Key = Annotated[str | None, typer.Option(metavar="KEY", help="Only dead letters with this key.")]


@dlq.command()
def inspect(
    group: Group,
    last: Annotated[int, typer.Option("-l", "--last", min=0, metavar="COUNT", help="Show so many of the last.")] = 10,
    tag: Tag = None,
    key: Key = None,
    begin: options.From = None,
    end: options.ToTime = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All of it as one JSON object. A body that is no UTF-8 is in body_base64.")
    ] = False,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Show the dead letters of a group: how many of which topic and tag, and the last of them.

    Nothing is consumed. Waiting are those that were not redriven yet.

    [bold]Examples[/bold]

    [cyan]skylark pipeline dlq inspect billing[/cyan]

    [cyan]skylark pipeline dlq inspect billing --tag paid --from 2026-01-31 --json[/cyan]
    """
    log_to_stderr(verbose=verbose)
    with user_errors():
        import msgspec

        from skylark.pipelines import dead_letters
        from skylark.pipelines.span import span

        dead_letters.check_names(group, None)
        wanted = dead_letters.Wanted(tag, key, span(begin, end))
        report = dead_letters.inspect(namesrv, group, wanted, last)
        if as_json:
            print(msgspec.json.encode(report).decode())
        else:
            _show(report)


@dlq.command()
def redrive(
    group: Group,
    to_topic: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Where they go.", show_default="the topic that each came from"),
    ] = None,
    tag: Tag = None,
    key: Key = None,
    begin: options.From = None,
    end: options.ToTime = None,
    most: Annotated[int | None, typer.Option("--max", min=1, metavar="COUNT", help="Send so many at most.")] = None,
    rate: options.Rate = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be sent, and send nothing.")] = False,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Send the dead letters of a group back to the topics that they came from.

    Each goes once, however often this is run: what was sent is noted in the topic SKYLARK_REDRIVEN. All groups of the
    topic get the messages again; to the retry topic of a group, only that group does.

    [bold]Examples[/bold]

    [cyan]skylark pipeline dlq redrive billing --dry-run[/cyan]  what would be sent

    [cyan]skylark pipeline dlq redrive billing --tag paid --max 1[/cyan]  one, to see how it goes

    [cyan]skylark pipeline dlq redrive billing --rate 50[/cyan]  the rest, gently

    [cyan]skylark pipeline dlq redrive billing --to-topic %RETRY%billing[/cyan]  for no other group
    """
    log_to_stderr(verbose=verbose)
    with user_errors():
        from skylark.pipelines import dead_letters
        from skylark.pipelines.span import span

        dead_letters.check_names(group, to_topic)
        wanted = dead_letters.Wanted(tag, key, span(begin, end))
        if dry_run:
            _tell(dead_letters.inspect(namesrv, group, wanted, 0), to_topic, most)
            return
        dead_letters.redrive(namesrv, group, wanted, to_topic=to_topic, most=most, rate=rate)


def _show(report: "Report") -> None:
    from rich.table import Table

    print(f"group {report.group}: {report.count:,} dead letters, {report.waiting:,} waiting")
    if not report.count:
        return
    kinds = Table("Topic", "Tag", "Dead letters", "Waiting", "First", "Last", box=None, pad_edge=False)
    for kind in report.kinds:
        kinds.add_row(
            kind.topic or "?",
            kind.tag or "",
            str(kind.count),
            str(kind.waiting),
            _utc(kind.first_ms),
            _utc(kind.last_ms),
        )
    print_table(kinds)
    if not report.last:
        return
    print()
    letters = Table(
        "Stored", "Queue", "Offset", "Topic", "Tag", "Keys", "Tries", "Redriven", "Body", box=None, pad_edge=False
    )
    for letter in report.last:
        letters.add_row(
            _utc(letter.stored_ms),
            f"{letter.broker}/{letter.queue_id}",
            str(letter.offset),
            letter.topic or "?",
            letter.tag or "",
            " ".join(letter.keys),
            str(letter.reconsume_times),
            "yes" if letter.redriven else "",
            excerpt(letter.raw_body),
        )
    print_table(letters)


def _tell(report: "Report", to_topic: str | None, most: int | None) -> None:
    """What a redrive would do."""
    count = min(report.waiting, most or report.waiting)
    print(f"group {report.group}: {count:,} of {report.count:,} dead letters would be sent")
    for kind in report.kinds:
        if kind.waiting:
            tag = f" with tag {kind.tag}" if kind.tag else ""
            print(
                f"  of {kind.waiting:,}{tag} from {kind.topic or '?'} to {to_topic or kind.topic or '? (--to-topic)'}"
            )


def _utc(timestamp_ms: int) -> str:
    return f"{datetime.fromtimestamp(timestamp_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
