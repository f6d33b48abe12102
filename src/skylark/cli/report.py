"""`skylark pipeline report`: what happens in topics and consumer groups, as figures.

What can be wrong is looked for before Spark starts. Only the report goes to stdout.
"""

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from skylark.cli.addresses import NameServers
from skylark.cli.pipeline import Conf, Master, pairs, user_errors
from skylark.cli.queries import time_ms
from skylark.cli.serving import Failure

_YEAR_10000_MS: Final = 253_402_300_800_000


def report(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False, help="Names of topics.")],
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="A consumer group; repeatable.", show_default="all that consume the topics"),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Messages from a time on: an age such as 1h, or a date in UTC such as 2026-01-31T12:00.",
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Messages before this time.")] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, metavar="COUNT", help="So many keys, slow messages ...")] = 10,
    message: Annotated[
        str | None, typer.Option(metavar="ID", help="Also the whole trace of the message with this id or key.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with charts; needs matplotlib, the extra report.")
    ] = None,
    parquet: Annotated[
        str | None, typer.Option(metavar="DIR", help="Add the rows to Parquet files, a directory for each section.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
    lake: Annotated[
        str | None, typer.Option(metavar="PATH", help="Read messages from what skylark pipeline archive wrote.")
    ] = None,
    master: Master = "local[*]",
    conf: Conf = None,
    namesrv: NameServers = "127.0.0.1:9876",
) -> None:
    """Throughput, lag, latency, hot keys, retries, dead letters and traces of topics and their groups.

    Nothing is consumed: no group's progress changes.

    [bold]Examples[/bold]

    [cyan]skylark pipeline report orders --since 1h[/cyan]  tables, of all groups that consume it

    [cyan]skylark pipeline report orders payments --group billing --html report.html[/cyan]  and a page with charts

    [cyan]skylark pipeline report orders --since 1d --parquet lake/reports[/cyan]  a history, by a scheduler

    [cyan]skylark pipeline report orders --lake lake --until 2026-01-31[/cyan]  of messages that brokers deleted
    """
    with user_errors():
        import msgspec
        from rich.console import Console

        from skylark.pipelines.report import charts, gathering, page, tables, terminal
        from skylark.pipelines.session import session
        from skylark.pipelines.span import Span

        asked = gathering.Asked(
            name_server=namesrv,
            topics=list(dict.fromkeys(topics)),
            groups=group or [],
            span=Span(_time("--since", since), _time("--until", until)),
            lake=lake,
            top=top,
            message=message,
        )
        if html is not None:
            charts.check()
            _check_file(html)
        known = gathering.check(asked)
        status = Console(stderr=True).status("starting Spark")
        with status, session(master, "report", conf=pairs(conf, "--conf")) as spark:
            made = gathering.gather(spark, asked, known, time.time_ns() // 1_000_000, status.update)
            if parquet is not None:
                tables.write(spark, made, parquet)
        if as_json:
            print(msgspec.json.encode(made).decode())
        else:
            terminal.show(made, sys.stdout)
        if html is not None:
            _write(html, page.page(made))
            print(f"{html} is written", file=sys.stderr)


def _time(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    ms = time_ms(option, text, UTC)
    if not 0 <= ms < _YEAR_10000_MS:
        raise Failure(f"{option} {text!r} lies before 1970 or after 9999")
    return datetime.fromtimestamp(ms / 1000, UTC)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from error


def _check_file(path: Path) -> None:
    """A page that can't be written is said before the work, not after it."""
    if path.is_dir() or not path.parent.is_dir():
        raise Failure(f"--html {path}: expected a file in a directory that exists")
