"""The entry point of the `skylark` command.

Whatever the user can put right ends in one line on stderr, `skylark: ...`, and a non-zero exit code: 2 for a command
line that makes no sense, 1 for the rest. A traceback means a defect in Skylark.
"""

import logging
import sys
from typing import Annotated

import typer

from skylark.cli.broker import broker
from skylark.cli.demo import demo
from skylark.cli.filtersrv import filtersrv
from skylark.cli.logs import is_json
from skylark.cli.messages import consume, send, tail
from skylark.cli.namesrv import namesrv
from skylark.cli.offsets import offsets
from skylark.cli.output import standard_streams, written
from skylark.cli.pipeline import pipeline, sql
from skylark.cli.queries import query, trace
from skylark.cli.ready_made import add_to
from skylark.cli.serving import Failure
from skylark.cli.takeover import fetch_tables
from skylark.cli.topics import topic
from skylark.cli.up import up
from skylark.config.properties import ConfigError

log = logging.getLogger(__name__)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up)
app.command()(namesrv)
app.command()(broker)
app.command()(filtersrv)
app.command()(send)
app.command()(consume)
app.command()(tail)
app.command()(query)
app.command()(trace)
app.command()(fetch_tables)
app.command()(sql)
app.command()(demo)
add_to(pipeline)
pipeline.add_typer(offsets)
app.add_typer(pipeline)
app.add_typer(topic)


def _version(asked: bool) -> None:
    if asked:
        from skylark.form import description

        print(f"skylark {description()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def skylark(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print version and form, and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Skylark is Apache RocketMQ rebuilt in Python: name server and broker that RocketMQ's clients and tools work with.

    Start with [cyan]skylark up[/cyan], then point any RocketMQ client at 127.0.0.1:9876.
    Each command explains itself: [cyan]skylark up --help[/cyan].
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    with standard_streams():
        code = _run()
    sys.exit(code)


def _run() -> int:
    code = None
    try:
        with written():
            code = app(prog_name="skylark", standalone_mode=False)
    except (Failure, ConfigError) as error:
        return _fail(str(error), 1)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "skylark"
        return _fail(f"{error.format_message()} (see {command} --help)", error.exit_code)
    except typer.Abort:
        return _fail("stopped", 130)
    return code if isinstance(code, int) else 0


def _fail(text: str, code: int) -> int:
    line = " ".join(text.split())
    if is_json():
        log.critical(line)  # whoever reads the log by machine reads this too
    else:
        print("skylark:", line, file=sys.stderr, flush=True)
    return code
