"""`skylark namesrv`: a name server by itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skylark.cli import options
from skylark.cli.logs import LogFormat
from skylark.cli.output import announcing
from skylark.cli.serving import (
    Running,
    address,
    command,
    default_place,
    log_to_stderr,
    reachable,
    run,
    writable_directory,
    writes_back,
)

if TYPE_CHECKING:
    from skylark.nameserver.config import NamesrvConfig

_FORMER_KV_CONFIG = Path("data", "namesrv", "kvConfig.json")


def namesrv(
    config: options.ConfigFile = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Address to listen on.", show_default="0.0.0.0, all", callback=options.a_host
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "-p", "--port", min=0, max=65535, metavar="PORT", help="Port; 0 takes a free one.", show_default="9876"
        ),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the effective settings and exit.")
    ] = False,
    verbose: options.Verbose = False,
    log_format: options.LogForm = LogFormat.TEXT,
) -> None:
    """Start a name server: brokers register with it, clients ask it where a topic lives.

    Name servers know nothing of each other: start two or three, and give every broker and client all
    of their addresses.

    [bold]Examples[/bold]

    [cyan]skylark namesrv[/cyan]  on port 9876 of all addresses

    [cyan]skylark namesrv -c namesrv.conf -p 9877[/cyan]  with settings from Apache's file
    """
    from skylark.config.properties import render

    log_to_stderr(verbose=verbose, form=log_format)
    effective = _effective_config(config)
    if host is not None:
        effective.bind_address = host
    if port is not None:
        effective.listen_port = port
    if print_config:
        print(render(effective), end="")
        return
    writable_directory(Path(effective.kv_config_path).parent, "the key-value settings")
    kept = Path(effective.kv_config_path)
    described = f"{kept.absolute()} ({'there before this start' if kept.exists() else 'not there yet'})"
    run(lambda: _serve(effective, config, described))


def _effective_config(config: Path | None) -> "NamesrvConfig":
    from skylark.config import properties
    from skylark.nameserver.config import from_mapping

    mapping = properties.read(config) if config else {}
    effective = from_mapping(mapping, source=str(config or "defaults"))
    if "kvConfigPath" not in mapping:
        home = Path(effective.kv_config_path)
        effective.kv_config_path = str(default_place(home, _FORMER_KV_CONFIG, Path.exists, "set kvConfigPath"))
    return effective


async def _serve(config: "NamesrvConfig", file: Path | None, kept: str) -> None:
    from skylark.nameserver.app import NameServer

    async with Running() as running:
        bound = await running.start(
            NameServer(config, on_config_change=writes_back(file)),
            "name server",
            config.bind_address,
            config.listen_port,
            "another with -p",
        )
        where = address(reachable(config.bind_address), bound)
        with announcing():
            print(
                f"Name server on {address(config.bind_address, bound)}. Start a broker: {command()} broker -n {where}"
            )
            print(f"Key-value settings in {kept}")
            print(f"ready namesrv={where}")
        await running.until_told_to_stop()
