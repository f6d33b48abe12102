"""`skylark up`: a name server and a broker in one process, or several brokers in processes of their own."""

import enum
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skylark.cli import options
from skylark.cli.logs import LogFormat
from skylark.cli.output import announcing
from skylark.cli.serving import (
    Running,
    Server,
    address,
    command,
    described_store,
    log_to_stderr,
    reachable,
    run,
    warn_if_slow,
    writable_directory,
    writes_back,
)

if TYPE_CHECKING:
    from skylark.broker.config import BrokerConfig
    from skylark.nameserver.config import NamesrvConfig

log = logging.getLogger(__name__)

# The name server has nothing to set in a broker's file, so its port is this command's own.
_NAMESRV_PORT = 9876
_NO_FILE_OF_ITS_OWN = "the file given with -c is the broker's; `skylark namesrv -c FILE` has one of its own"


class Flush(enum.StrEnum):
    ASYNC = "async"
    SYNC = "sync"


def up(
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address to listen on; 0.0.0.0 for all.",
            show_default="127.0.0.1",
            callback=options.a_host,
        ),
    ] = None,
    namesrv_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port of the name server; 0 takes a free one.")
    ] = _NAMESRV_PORT,
    broker_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Port of the broker; 0 takes a free one.", show_default="10911"
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory that messages are kept in.", show_default="./data")
    ] = None,
    brokers: Annotated[
        int,
        typer.Option(
            min=1, max=26, metavar="N", help="So many brokers, each with a process, a store and a port of its own."
        ),
    ] = 1,
    advertise: options.Advertise = None,
    flush: Annotated[
        Flush | None,
        typer.Option(help="When a send is acknowledged: written (async) or on the disk (sync).", show_default="async"),
    ] = None,
    filter_server: Annotated[
        bool,
        typer.Option(
            "--filter-server", help="Also a filter server, which runs the classes that consumers upload: trust them."
        ),
    ] = False,
    config: options.ConfigFile = None,
    verbose: options.Verbose = False,
    log_format: options.LogForm = LogFormat.TEXT,
) -> None:
    """Start a name server and a broker in one process.

    Any RocketMQ client works with it: point it at the name server's address. Stop with Ctrl-C.
    Options go before what the file given with -c says.

    A broker uses one core. With --brokers there are several, broker-a, broker-b and so on, in directories of these
    names in DIR and ten ports apart. Topics have queues in all of them. One that dies is started again, after a second
    at first and a minute at most; the others serve meanwhile.

    [bold]Examples[/bold]

    [cyan]skylark up[/cyan]  everything on this machine, messages in ./data

    [cyan]skylark up --namesrv-port 0 --broker-port 0[/cyan]  on free ports, for tests

    [cyan]skylark up --host 0.0.0.0 --advertise 192.168.1.20[/cyan]  for clients on other machines

    [cyan]skylark up --brokers 2[/cyan]  two brokers, on ports 10911 and 10921

    [cyan]skylark up --flush sync -c broker.conf[/cyan]  acknowledge only what is on the disk
    """
    log_to_stderr(verbose=verbose, form=log_format)
    broker_config = _broker_config(config, host, broker_port, store, advertise, flush)
    root = writable_directory(Path(broker_config.store_path_root_dir), "the store")

    from skylark.nameserver.config import NamesrvConfig

    namesrv_config = NamesrvConfig(
        bind_address=broker_config.bind_address,
        listen_port=namesrv_port,
        kv_config_path=str(root / "namesrv" / "kvConfig.json"),
    )
    broker_configs = [broker_config]
    if brokers > 1:
        from skylark.cli import fleet

        broker_configs = fleet.configs(broker_config, brokers)

    def server_of(each: "BrokerConfig", running: Running) -> Server:
        return _server_of(each, running, config, alone=brokers == 1, verbose=verbose, log_format=log_format)

    run(lambda: _serve(namesrv_config, broker_configs, server_of, filter_server=filter_server))


def _broker_config(
    config: Path | None,
    host: str | None,
    port: int | None,
    store: Path | None,
    advertise: str | None,
    flush: Flush | None,
) -> "BrokerConfig":
    from skylark.broker.config import FlushDiskType, from_mapping
    from skylark.config import properties

    mapping = properties.read(config) if config else {}
    # One command on a laptop should not open a port to the whole network.
    mapping.setdefault("bindAddress", "127.0.0.1")
    # Nor should it write outside the directory that it was started in.
    mapping.setdefault("storePathRootDir", "./data")
    # The first filter by SQL and the first recall that somebody tries should work; Apache's broker, and so `skylark
    # broker`, has both off.
    mapping.setdefault("enablePropertyFilter", "true")
    mapping.setdefault("recallMessageEnable", "true")
    result = from_mapping(mapping, source=str(config or "defaults"))
    if given := mapping.get("namesrvAddr"):
        log.warning(
            "%s: namesrvAddr=%s is not used: the broker registers with the name server that is started with it; "
            "`skylark broker` registers with others",
            properties.place(str(config), given), given.strip(),
        )  # fmt: skip
    if host is not None:
        result.bind_address = host
    if port is not None:
        result.listen_port = port
    if store is not None:
        result.store_path_root_dir = str(store)
    if advertise is not None:
        result.broker_ip1 = advertise
    if flush is not None:
        result.flush_disk_type = FlushDiskType.SYNC_FLUSH if flush is Flush.SYNC else FlushDiskType.ASYNC_FLUSH
    return result


async def _serve(
    namesrv_config: "NamesrvConfig",
    broker_configs: "list[BrokerConfig]",
    server_of: "Callable[[BrokerConfig, Running], Server]",
    *,
    filter_server: bool,
) -> None:
    from skylark.broker.app import advertised_address
    from skylark.nameserver.app import NameServer

    host = namesrv_config.bind_address
    # The name server is on this machine, so the way to it does not show the address that others reach us at.
    advertised = broker_configs[0].broker_ip1 or advertised_address(host, "")
    stores = [described_store(Path(each.store_path_root_dir), each.store_path_commit_log) for each in broker_configs]
    async with Running() as running:
        name_server = NameServer(namesrv_config, on_config_change=writes_back(None, _NO_FILE_OF_ITS_OWN))
        namesrv_port = await running.start(
            name_server, "name server", host, namesrv_config.listen_port, "another with --namesrv-port"
        )
        brokers = []
        for config in broker_configs:
            config.broker_ip1, config.namesrv_addr = advertised, address(reachable(host), namesrv_port)
            server = server_of(config, running)
            port = await running.start(server, "broker", host, config.listen_port, "another with --broker-port")
            if filter_server:
                await _start_filter_server(running, host, advertised, address(reachable(host), port))
            brokers.append(address(reachable(host, advertised), port))
        namesrv_address = address(reachable(host, advertised), namesrv_port)
        warn_if_slow()
        with announcing():
            _greet(namesrv_address, brokers, broker_configs, stores)
            print(f"ready namesrv={namesrv_address} broker={';'.join(brokers)}")
        await running.until_told_to_stop()


def _server_of(
    config: "BrokerConfig",
    running: Running,
    file: Path | None,
    *,
    alone: bool,
    verbose: bool,
    log_format: LogFormat,
) -> Server:
    """A broker: in this process, unless there are others."""
    if alone:
        from skylark.broker.app import Broker

        return Broker(config, on_config_change=writes_back(file))
    from skylark.cli.fleet import BrokerProcess, Order

    process = BrokerProcess(Order(config, str(file) if file else None, verbose, log_format))
    running.at_stop(process.let_go)
    return process


async def _start_filter_server(running: Running, host: str, advertised: str, broker: str) -> None:
    from skylark.filterserver.app import FilterServer
    from skylark.filterserver.config import FiltersrvConfig

    config = FiltersrvConfig(
        connect_which_broker=broker, filter_server_ip=advertised, client_upload_filter_class_enable=True
    )
    await running.start(FilterServer(config), "filter server", host, 0, "another")


def _greet(namesrv_address: str, brokers: list[str], configs: "list[BrokerConfig]", stores: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape

    flush = "on the disk" if configs[0].flush_disk_type == "SYNC_FLUSH" else "written"
    lines = []
    for where, config, store in zip(brokers, configs, stores, strict=True):
        name = escape(f"{config.broker_name} in {config.broker_cluster_name}")
        lines.append(f"  broker       [green]{where}[/green]  {name}")
        lines.append(f"  store        {escape(store)}  a send is acknowledged when {flush}")
    shown = "\n".join(lines)
    Console(highlight=False, soft_wrap=True).print(
        f"""[bold]Skylark[/bold] speaks RocketMQ

  name server  [green]{namesrv_address}[/green]
{shown}

First message, from another terminal:

  {escape(command())} send Hello "it works" -n {namesrv_address}
  {escape(command())} tail Hello -n {namesrv_address}

or with Apache's tools: mqadmin sendMessage -n {namesrv_address} -t Hello -p "it works"
Any RocketMQ client: use {namesrv_address} as its name server. Stop with Ctrl-C.
"""
    )
