"""Options that more than one command takes."""

from pathlib import Path
from typing import Annotated

import typer

from skylark.cli.logs import LogFormat

ConfigFile = Annotated[
    Path | None, typer.Option("-c", "--config", metavar="FILE", help="Settings in Apache's .properties format.")
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Log what happens, not only what goes wrong.")]
LogForm = Annotated[
    LogFormat, typer.Option("--log-format", help="One line an event on stderr: text for people, json for machines.")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST", help="Address that clients are told to connect to; needed behind NAT or in a container."
    ),
]
From = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="Only what was stored at this time (UTC) or later.")
]
ToTime = Annotated[
    str | None, typer.Option("--to-time", metavar="TIME", help="Only what was stored before this time (UTC).")
]
Rate = Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="Messages a second at most.")]
