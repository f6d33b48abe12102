"""`skylark pipeline archive`, `replay` and `compact`: pipelines that need no file.

Names and times are checked before Spark starts, which takes seconds. Spark and what needs it are imported inside the
commands: the command line must also work without them.
"""

import contextlib
import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from skylark.cli import options
from skylark.cli.addresses import NameServers
from skylark.cli.dead_letters import dlq
from skylark.cli.pipeline import Conf, Master, pairs, user_errors
from skylark.cli.report import report
from skylark.cli.serving import Failure, log_to_stderr

Tags = Annotated[str | None, typer.Option(metavar="TAGS", help="Only messages with these tags, such as 'new || paid'.")]
Topics = Annotated[list[str], typer.Argument(metavar="TOPIC...", show_default=False, help="Names of topics.")]


def add_to(pipeline: typer.Typer) -> None:
    """Registers the commands."""
    pipeline.command()(archive)
    pipeline.command()(replay)
    pipeline.command()(compact)
    pipeline.command()(report)
    pipeline.add_typer(dlq)


def archive(
    topics: Topics,
    to: Annotated[str, typer.Option(metavar="PATH", help="Directory or URL of the files.", show_default=False)],
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Go on until stopped, with a batch each 30s, 5m ...; else stop at the end."),
    ] = None,
    tags: Tags = None,
    sql: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help="Only messages whose properties match, as SQL92.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Consumer group that shows the progress in admin tools.")
    ] = None,
    max_per_batch: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Messages in a batch at most.")] = 500_000,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Go on when messages expired before they were archived.")
    ] = False,
    master: Master = "local[*]",
    conf: Conf = None,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Keep topics as Parquet files, by topic and date: each message exactly once.

    A run goes on where the last one ended, however it ended; the first begins with the oldest message.

    [bold]Examples[/bold]

    [cyan]skylark pipeline archive orders --to lake[/cyan]  what there is now

    [cyan]skylark pipeline archive orders payments --to s3a://bucket/lake --every 1m[/cyan]  until stopped
    """
    log_to_stderr(verbose=verbose)
    with user_errors():
        from skylark.pipelines import archive as archiving
        from skylark.pipelines.checkpoints import held, local_path
        from skylark.pipelines.keeping import CHECKPOINT
        from skylark.pipelines.progress import follow
        from skylark.pipelines.session import session
        from skylark.pipelines.topics import existing

        every_ms = None if every is None else archiving.interval_ms(every)
        existing(namesrv, topics)
        lake = local_path(to)
        with (
            contextlib.nullcontext() if lake is None else held(lake / CHECKPOINT),
            session(master, "archive", conf=pairs(conf, "--conf"), verbose=verbose) as spark,
        ):
            begin = functools.partial(
                archiving.archive,
                spark,
                namesrv,
                topics,
                to,
                tags=tags,
                sql_filter=sql,
                every_ms=every_ms,
                max_per_batch=max_per_batch,
                group=group,
                skip_lost=skip_lost,
            )
            follow(begin(), title=f"{', '.join(topics)} to {to}", again=begin)


def replay(
    path: Annotated[str, typer.Argument(metavar="PATH", show_default=False, help="What archive wrote to.")],
    target: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Where the messages go.")],
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="The topic of the archive; needed if it has several.")
    ] = None,
    begin: options.From = None,
    end: options.ToTime = None,
    rate: options.Rate = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where it is kept how far this came.",
            show_default="checkpoints/replay-...-to-TOPIC.json",
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Send everything, also what was sent before.")] = False,
    master: Master = "local[*]",
    conf: Conf = None,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Send archived messages to a topic again, in their order.

    Bodies, keys, tags and properties are kept. Messages of one original queue stay in order; the others come by the
    time at which they were stored. A run goes on where the last one ended, however it ended.

    [bold]Examples[/bold]

    [cyan]skylark pipeline replay lake orders-again[/cyan]  all of them, as fast as it goes

    [cyan]skylark pipeline replay lake orders-again --from 2026-01-31 --to-time 2026-02-01 --rate 500[/cyan]
    one day, slowly
    """
    log_to_stderr(verbose=verbose)
    with user_errors():
        from skylark.pipelines import replay as replaying
        from skylark.pipelines.lake import check_path
        from skylark.pipelines.session import session
        from skylark.pipelines.span import span
        from skylark.pipelines.topics import existing

        period = span(begin, end)
        check_path(path)
        existing(namesrv, [target])
        with session(master, "replay", conf=pairs(conf, "--conf"), verbose=verbose) as spark:
            replaying.replay(
                spark,
                path,
                namesrv,
                target,
                checkpoint=checkpoint,
                topic=topic,
                span=period,
                rate=rate,
                restart=restart,
            )


def compact(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    to: Annotated[str | None, typer.Option(metavar="PATH", help="Directory or URL of the snapshot.")] = None,
    to_topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Send the latest messages to a topic.")] = None,
    lake: Annotated[
        str | None, typer.Option(metavar="PATH", help="Read the topic from what archive wrote there.")
    ] = None,
    delete_tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="A message with this tag deletes its key, as an empty one does.")
    ] = None,
    keep_deleted: Annotated[
        bool, typer.Option("--keep-deleted", help="Keep the last message of a deleted key, with --to.")
    ] = False,
    master: Master = "local[*]",
    conf: Conf = None,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Keep the latest message of each key, as a snapshot of Parquet files or in another topic.

    Each run begins with the oldest message. A snapshot replaces the one before, as a whole.

    [bold]Examples[/bold]

    [cyan]skylark pipeline compact customers --to snapshots/customers[/cyan]

    [cyan]skylark pipeline compact customers --lake lake --to-topic customers-latest --delete-tag closed[/cyan]
    """
    log_to_stderr(verbose=verbose)
    if (to is None) == (to_topic is None):
        raise Failure("say where the latest messages go: --to PATH or --to-topic TOPIC")
    if keep_deleted and to is None:
        raise Failure("--keep-deleted needs --to: a topic gets no messages of deleted keys")
    with user_errors():
        from skylark.pipelines import compact as compacting
        from skylark.pipelines.lake import check_path
        from skylark.pipelines.session import session
        from skylark.pipelines.topics import existing

        if lake is not None:
            check_path(lake)
        asked = [name for name in (topic if lake is None else None, to_topic) if name is not None]
        if asked:
            existing(namesrv, asked)
        with session(master, "compact", conf=pairs(conf, "--conf"), verbose=verbose) as spark:
            if lake is None:
                messages = compacting.topic_messages(spark, namesrv, topic)
            else:
                messages = compacting.lake_messages(spark, lake, topic)
            run = compacting.Compaction(messages, topic, delete_tag=delete_tag, keep_deleted=keep_deleted)
            if to is not None:
                done = run.to_files(spark, to)
            else:
                assert to_topic is not None
                done = run.to_topic(namesrv, to_topic)
            print(done, file=sys.stderr)
