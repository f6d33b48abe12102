"""`skylark fetch-tables`: what a broker over Apache's store needs besides the messages."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from skylark.cli import options
from skylark.cli.serving import Failure, log_to_stderr, writable_directory


def fetch_tables(
    broker: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A broker that runs.")],
    store: Annotated[Path, typer.Option(metavar="DIR", help="The directory that its messages are kept in.")],
    verbose: options.Verbose = False,
) -> None:
    """Write a running broker's topics, groups and offsets as the JSON files that a broker starts from.

    For Apache's brokers that keep them in RocksDB. Let its clients stop first: what they consume afterwards would be
    consumed again.

    [bold]Example[/bold]

    [cyan]skylark fetch-tables 127.0.0.1:10911 --store /data/store[/cyan]  then stop that broker and move
    /data/store/config/rdb away
    """
    from skylark.broker.fetched_tables import FetchFailed, fetch

    log_to_stderr(verbose=verbose)
    writable_directory(store, "the store")
    try:
        written = asyncio.run(fetch(broker, store))
    except FetchFailed as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"cannot write the tables: {error}") from error
    for line in written:
        print(line)
