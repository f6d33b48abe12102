"""`skylark broker`: a broker by itself, for one or more name servers."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skylark.cli import options
from skylark.cli.logs import LogFormat
from skylark.cli.output import announcing
from skylark.cli.serving import (
    Running,
    address,
    default_place,
    described_store,
    holds_store,
    log_to_stderr,
    reachable,
    run,
    warn_if_slow,
    writable_directory,
    writes_back,
)

if TYPE_CHECKING:
    from skylark.broker.config import BrokerConfig

log = logging.getLogger(__name__)

_FORMER_STORE = Path("data")


def broker(
    config: options.ConfigFile = None,
    namesrv: Annotated[
        str | None,
        typer.Option(
            "-n", "--namesrv", metavar="HOST:PORT[;HOST:PORT]", help="Name servers; else NAMESRV_ADDR is used."
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Address to listen on.", show_default="0.0.0.0, all", callback=options.a_host
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 takes a free one.", show_default="10911"),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory that messages are kept in.", show_default="$HOME/store"),
    ] = None,
    advertise: options.Advertise = None,
    print_config: Annotated[
        bool, typer.Option("-p", "--print-config", help="Print the effective settings and exit.")
    ] = False,
    verbose: options.Verbose = False,
    log_format: options.LogForm = LogFormat.TEXT,
) -> None:
    """Start a broker: it keeps messages and registers its topics with the name servers.

    It reads Apache's broker.conf. Options go before the file, the file before NAMESRV_ADDR.

    [bold]Examples[/bold]

    [cyan]skylark broker -n 127.0.0.1:9876[/cyan]  with the defaults

    [cyan]skylark broker -c broker.conf -n "10.0.0.1:9876;10.0.0.2:9876"[/cyan]  two name servers; mind the quotes

    [cyan]skylark broker -c broker.conf -p[/cyan]  what the file comes to, without starting
    """
    from skylark.config.properties import render

    log_to_stderr(verbose=verbose, form=log_format)
    effective = _effective_config(config, namesrv, store)
    if host is not None:
        effective.bind_address = host
    if port is not None:
        effective.listen_port = port
    if advertise is not None:
        effective.broker_ip1 = advertise
    if print_config:
        print(render(effective), end="")
        return
    writable_directory(Path(effective.store_path_root_dir), "the store")
    run(lambda: _serve(effective, config))


def _effective_config(config: Path | None, namesrv: str | None, store: Path | None) -> "BrokerConfig":
    import os

    from skylark.broker.config import from_mapping, set_name_servers
    from skylark.config import properties

    mapping = properties.read(config) if config else {}
    effective = from_mapping(mapping, source=str(config or "defaults"))
    if namesrv is not None:
        set_name_servers(effective, namesrv, source="-n")
    elif not effective.namesrv_addr and (inherited := os.environ.get("NAMESRV_ADDR")):
        set_name_servers(effective, inherited, source="NAMESRV_ADDR")
    if store is not None:
        effective.store_path_root_dir = str(store)
    elif "storePathRootDir" not in mapping:
        home = Path(effective.store_path_root_dir)
        place = default_place(home, _FORMER_STORE, holds_store, "set storePathRootDir or --store")
        effective.store_path_root_dir = str(place)
    return effective


async def _serve(config: "BrokerConfig", file: Path | None) -> None:
    from skylark.broker.app import Broker

    kept = described_store(Path(config.store_path_root_dir), config.store_path_commit_log)
    async with Running() as running:
        bound = await running.start(
            Broker(config, on_config_change=writes_back(file)),
            "broker",
            config.bind_address,
            config.listen_port,
            "another with --port",
        )
        where = address(reachable(config.bind_address, config.broker_ip1), bound)
        registered = (
            f"registers with {config.namesrv_addr}" if config.namesrv_addr else "registers nowhere: no -n given"
        )
        warn_if_slow()
        if not config.namesrv_addr:
            log.warning("this broker registers nowhere, so that no client finds it: give -n, or set namesrvAddr")
        with announcing():
            print(f"Broker {config.broker_name} in {config.broker_cluster_name} on {where}, {registered}")
            print(f"Messages in {kept}")
            print(f"ready broker={where}")
        await running.until_told_to_stop()
