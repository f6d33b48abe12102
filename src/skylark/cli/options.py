"""Options that more than one command takes."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("-c", "--config", metavar="FILE", help="Settings in Apache's .properties format.")
]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Log what happens, not only what goes wrong.")]
Advertise = Annotated[
    str | None,
    typer.Option(
        metavar="HOST", help="Address that clients are told to connect to; needed behind NAT or in a container."
    ),
]
