"""`skylark pipeline` and `skylark sql`: data pipelines on Spark.

Spark and what it needs are an extra, so nothing of it is imported before a command runs.
"""

import contextlib
import enum
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from skylark.cli import options
from skylark.cli.addresses import NameServers, OtherNameServers
from skylark.cli.output import check_stdout, when_nobody_reads
from skylark.cli.serving import Failure, log_to_stderr
from skylark.extras import how_to_install

pipeline = typer.Typer(
    name="pipeline",
    help="Data pipelines on Spark, between topics and files.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


def _readable(file: Path) -> Path:
    """Told also where there is no Spark."""
    try:
        with file.open("rb"):
            return file
    except OSError as e:
        raise Failure(f"cannot read the pipeline {file}: {e.strerror}") from e


File = Annotated[
    Path, typer.Argument(metavar="FILE", show_default=False, help="The pipeline, in YAML.", callback=_readable)
]
Master = Annotated[
    str,
    typer.Option(metavar="URL", help="Spark's master: local[2], spark://host:7077, ..."),
]
Conf = Annotated[list[str] | None, typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark; repeatable.")]
Once = Annotated[bool, typer.Option("--once", help="End when everything that is there now was processed.")]
SourceOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of the source, such as tags=paid; repeatable."),
]


class Start(enum.StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"


class DeployMode(enum.StrEnum):
    CLIENT = "client"
    CLUSTER = "cluster"


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Makes what a user can put right one line; without the extra, that is how to get it."""
    try:
        from skylark.pipelines.errors import Mistakes, PipelineError
    except ImportError as e:
        raise Failure(f"pipelines need Spark, and {e.name or e} is missing: {how_to_install('spark')}") from e
    try:
        check_stdout()
        yield
    except PipelineError as e:
        *others, last = e.errors if isinstance(e, Mistakes) else (e,)
        for mistake in others:
            print("skylark:", " ".join(str(mistake).split()), file=sys.stderr)
        raise Failure(str(last)) from e
    except KeyboardInterrupt:
        raise typer.Abort from None


def pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """`NAME=VALUE` of an option that may be repeated."""
    found = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"expected NAME=VALUE, not {text!r}", param_hint=option)
        found[name] = value
    return found


@pipeline.command("run")
def run_pipeline(
    file: File,
    once: Once = False,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="Spark's master.", show_default="as in FILE, else local[*]")
    ] = None,
    conf: Conf = None,
    verbose: options.Verbose = False,
) -> None:
    """Run a pipeline until Ctrl-C, or once.

    Where it has come to is kept in its checkpoint: the next run goes on from there.

    [bold]Examples[/bold]

    [cyan]skylark pipeline run orders.yaml[/cyan]  until stopped

    [cyan]skylark pipeline run orders.yaml --once[/cyan]  what is there now, for a scheduler
    """
    log_to_stderr(verbose=verbose)
    with user_errors():
        from skylark.pipelines import spec
        from skylark.pipelines.checking import check_servers
        from skylark.pipelines.running import run
        from skylark.pipelines.session import session

        declared = spec.read(file)
        settings = {**spec.settings_of(declared), **pairs(conf, "--conf")}
        check_servers(declared)
        chosen = master or declared.pipeline.spark.master
        with session(chosen, declared.pipeline.name, conf=settings, verbose=verbose) as spark:
            run(declared, spark, once=once)


@pipeline.command()
def validate(file: File, conf: Conf = None) -> None:
    """Check a pipeline without running it: keys, types, options, and SQL against the source's columns.

    All mistakes are told, one a line. No server is asked. The columns that the sink would get are printed.
    """
    with user_errors():
        from skylark.pipelines import spec
        from skylark.pipelines.checking import check
        from skylark.pipelines.session import session

        declared = spec.read(file)
        settings = {**spec.settings_of(declared), **pairs(conf, "--conf")}
        with session("local[1]", declared.pipeline.name, conf=settings) as spark:
            columns = check(declared, spark)
        print(f"{file}: {declared.pipeline.name} is valid; its sink gets")
        for column in columns.fields:
            print(f"  {column.name} {column.dataType.simpleString()}")


@pipeline.command()
def submit(
    file: File,
    master: Annotated[
        str, typer.Option(metavar="URL", help="The cluster: spark://host:7077, yarn, k8s://...", show_default=False)
    ],
    deploy_mode: Annotated[
        DeployMode, typer.Option(help="Where the driver runs: here (client) or there.")
    ] = DeployMode.CLIENT,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The Python of the workers, with Skylark and its extra spark.")
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(metavar="ARCHIVE", help="An environment packed by venv-pack or conda-pack, for the workers."),
    ] = None,
    py_files: Annotated[
        str, typer.Option(metavar="FILES", help="More modules for the workers, separated by commas.")
    ] = "",
    conf: Conf = None,
    once: Once = False,
    package: Annotated[
        Path | None, typer.Option(metavar="ZIP", help="Where Skylark's own sources are packed for the workers.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--print", help="Write the spark-submit call out, don't run it.")] = False,
) -> None:
    """Run a pipeline on a Spark cluster with spark-submit, or write that call out.

    [bold]Examples[/bold]

    [cyan]skylark pipeline submit orders.yaml --master spark://head:7077 --python /opt/skylark/bin/python[/cyan]

    [cyan]skylark pipeline submit orders.yaml --master yarn --environment env.tar.gz --print --package sky.zip[/cyan]
    """
    if python is not None and environment is not None:
        raise typer.BadParameter("it excludes --environment", param_hint="--python")
    code = 0
    with user_errors(), tempfile.TemporaryDirectory(prefix="skylark-submit-") as directory:
        from skylark.pipelines import spec
        from skylark.pipelines import submit as submitting

        declared = spec.read(file)
        if deploy_mode is DeployMode.CLUSTER:
            submitting.check_paths(declared)
        submission = submitting.Submission(
            file=file.resolve(),
            name=declared.pipeline.name,
            master=master,
            deploy_mode=deploy_mode.value,
            python=python,
            environment=environment,
            py_files=[name for name in py_files.split(",") if name],
            conf={**spec.settings_of(declared), **pairs(conf, "--conf")},
            once=once,
        )
        if dry_run and package is None:
            package = Path("skylark-package.zip")
        packed = submitting.write_package((package or Path(directory) / "skylark.zip").resolve())
        # Beside a package that is kept, since the call that is written out names both.
        aside = packed if dry_run else Path(directory) / "skylark"
        call = submitting.command(submission, packed, submitting.write_settings(aside.with_suffix(".conf"), submission))
        if dry_run:
            print(submitting.written_out(call))
            return
        code = submitting.run(call)
    if code:
        raise typer.Exit(code)


@pipeline.command()
def etl(
    statement: Annotated[
        str, typer.Argument(metavar="SQL", show_default=False, help="What to make of the messages, the table `input`.")
    ],
    source: Annotated[str, typer.Option("--from", metavar="TOPIC", help="Topic to read.", show_default=False)],
    target: Annotated[str, typer.Option("--to", metavar="TOPIC", help="Topic to write.", show_default=False)],
    checkpoint: Annotated[
        Path, typer.Option(metavar="DIR", help="Where it is kept how far this came.", show_default=False)
    ],
    namesrv: NameServers = "127.0.0.1:9876",
    to_namesrv: OtherNameServers = None,
    start: Annotated[Start, typer.Option(help="Where the first run begins.")] = Start.EARLIEST,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Consumer group whose lag shows how far this is.")
    ] = None,
    source_options: SourceOption = None,
    sink_options: Annotated[
        list[str] | None, typer.Option("--sink-option", metavar="NAME=VALUE", help="An option of the sink; repeatable.")
    ] = None,
    once: Once = False,
    master: Master = "local[*]",
    conf: Conf = None,
) -> None:
    """Topic to topic in SQL, until Ctrl-C or once.

    The columns of the result are the message: body, and if you like tags, keys, properties.

    [bold]Example[/bold]

    [cyan]skylark pipeline etl "select body, keys from input where tags = 'paid'" --from orders --to paid --checkpoint
    ./paid -n localhost:9876[/cyan]
    """
    with user_errors():
        from skylark.pipelines import spec
        from skylark.pipelines.checking import check_servers
        from skylark.pipelines.running import run
        from skylark.pipelines.session import session

        reading = {"nameServer": namesrv, "subscribe": source, "startingOffsets": start.value}
        if group is not None:
            reading["group"] = group
        declared = spec.Declared(
            spec.Pipeline(
                name=re.sub(r"[^\w.-]", "_", f"{source}-to-{target}")[:100],
                source=spec.Source(format="rocketmq", options={**reading, **pairs(source_options, "--option")}),
                transforms=[spec.Transform(sql=statement)],
                sink=spec.Sink(
                    format="rocketmq",
                    options={
                        "nameServer": to_namesrv or namesrv,
                        "topic": target,
                        **pairs(sink_options, "--sink-option"),
                    },
                ),
                checkpoint=str(checkpoint),
            ),
            spec.Document("skylark pipeline etl", {}),
            Path.cwd(),
        )
        spec.check_options(declared)
        settings = pairs(conf, "--conf")
        check_servers(declared)
        with session(master, declared.pipeline.name, conf=settings) as spark:
            run(declared, spark, once=once)


def sql(
    statement: Annotated[
        str, typer.Argument(metavar="SQL", show_default=False, help="A query; its tables are topics.")
    ],
    namesrv: NameServers = "127.0.0.1:9876",
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each row. Bytes that are no UTF-8 are in NAME_base64.")
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="CSV with a header. For bytes that are no UTF-8, select base64(body).")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="ROWS", help="Most rows to print.", show_default="1000 in a table")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Go on with messages that come later.")] = False,
    start: Annotated[
        Start | None,
        typer.Option("--from", help="Where topics are read from.", show_default="earliest; with --stream latest"),
    ] = None,
    source_options: SourceOption = None,
    master: Master = "local[*]",
    conf: Conf = None,
) -> None:
    """Query topics with SQL. Only the rows go to stdout.

    A topic has the columns topic, broker, queueId, offset, body, tags, keys, properties, bornTimestamp, storeTimestamp,
    reconsumeTimes and msgId. Names that are not plain words go in backticks.

    [bold]Examples[/bold]

    [cyan]skylark sql "select tags, count(*) as n from orders group by tags order by n desc" -n localhost:9876[/cyan]

    [cyan]skylark sql 'select keys, cast(body as string) from `%DLQ%billing`' --json -n localhost:9876[/cyan]

    [cyan]skylark sql "select tags, count(*) from orders group by tags" --stream -n localhost:9876[/cyan]
    """
    if as_json and as_csv:
        raise typer.BadParameter("it excludes --csv", param_hint="--json")
    if start is Start.LATEST and not stream:
        raise typer.BadParameter("latest needs --stream: a query that ends would find nothing", param_hint="--from")
    with user_errors():
        from skylark.pipelines import sql as querying
        from skylark.pipelines.rows import Printer, Style
        from skylark.pipelines.session import session

        style = Style.JSON if as_json else Style.CSV if as_csv else Style.TABLE
        printer = Printer(style, limit if limit is not None or style != Style.TABLE or stream else 1000)
        chosen = start or (Start.LATEST if stream else Start.EARLIEST)
        given = pairs(source_options, "--option")
        if not any(name.lower().startswith("starting") for name in given):
            given["startingOffsets"] = chosen.value
        settings = {"spark.sql.streaming.forceDeleteTempCheckpointLocation": "true", **pairs(conf, "--conf")}
        querying.check(statement, name_server=namesrv, options=given, settings=settings, stream=stream)
        with session(master, "skylark sql", conf=settings) as spark:
            frame = querying.query(spark, statement, name_server=namesrv, options=given, stream=stream)
            if stream and frame.isStreaming:
                querying.show_stream(frame, printer, watch=when_nobody_reads)
            else:
                querying.show(frame, printer)
