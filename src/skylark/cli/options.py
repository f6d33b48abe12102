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


def a_host(text: str | None) -> str | None:
    """Checks an option that takes a host, which a port does not belong to."""
    from skylark.config.hosts import A_HOST, is_host

    if text is not None and not is_host(text):
        raise typer.BadParameter(f"{text!r} is not {A_HOST}")
    return text


Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="Address that clients are told to connect to; needed behind NAT or in a container.",
        callback=a_host,
    ),
]
From = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="Only what was stored at this time (UTC) or later.")
]
ToTime = Annotated[
    str | None, typer.Option("--to-time", metavar="TIME", help="Only what was stored before this time (UTC).")
]
Rate = Annotated[int | None, typer.Option(min=1, metavar="COUNT", help="Messages a second at most.")]
