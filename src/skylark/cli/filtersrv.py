"""`skylark filtersrv`: a filter server, which runs the filter classes of consumers beside a broker."""

from typing import TYPE_CHECKING, Annotated

import typer

from skylark.cli import options
from skylark.cli.logs import LogFormat
from skylark.cli.output import announcing
from skylark.cli.serving import Failure, Running, address, log_to_stderr, reachable, run

if TYPE_CHECKING:
    from skylark.filterserver.config import FiltersrvConfig


def filtersrv(
    config: options.ConfigFile = None,
    broker: Annotated[
        str | None,
        typer.Option("-b", "--broker", metavar="HOST:PORT", help="Its broker.", show_default="127.0.0.1:10911"),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Address to listen on.", show_default="0.0.0.0, all", callback=options.a_host
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="Port; 0 takes a free one.", show_default="a free one"),
    ] = None,
    advertise: options.Advertise = None,
    upload: Annotated[
        bool,
        typer.Option("--upload", help="Take classes from consumers and run their code; only for those you trust."),
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the effective settings and exit.")
    ] = False,
    verbose: options.Verbose = False,
    log_format: options.LogForm = LogFormat.TEXT,
) -> None:
    """Start a filter server: consumers upload a Python class, and pull through here the messages that it lets through.

    Each class runs in a process of its own with limits on time and memory. That keeps a bad class from harming others;
    it does not keep a malicious one from reading what this user may read. So nothing is taken without --upload.

    [bold]Examples[/bold]

    [cyan]skylark filtersrv -b 127.0.0.1:10911 --upload[/cyan]  for a broker on this machine

    [cyan]skylark filtersrv -c filtersrv.conf[/cyan]  with connectWhichBroker and the rest from a file
    """
    from skylark.client.addresses import parse_name_servers
    from skylark.config import properties
    from skylark.filterserver.config import FiltersrvConfig, load

    log_to_stderr(verbose=verbose, form=log_format)
    effective = load(config) if config else FiltersrvConfig()
    if broker is not None:
        key = "connectWhichBroker"
        properties.update(effective, {key: broker}, allowed={key}, source="--broker")
    try:
        parse_name_servers([effective.connect_which_broker])
    except ValueError as error:
        raise Failure(f"the broker's address: {error}") from None
    if host is not None:
        effective.bind_address = host
    if port is not None:
        effective.listen_port = port
    if advertise is not None:
        effective.filter_server_ip = advertise
    if upload:
        effective.client_upload_filter_class_enable = True
    if print_config:
        print(properties.render(effective), end="")
        return
    run(lambda: _serve(effective))


async def _serve(config: "FiltersrvConfig") -> None:
    from skylark.filterserver.app import FilterServer

    async with Running() as running:
        bound = await running.start(
            FilterServer(config), "filter server", config.bind_address, config.listen_port, "another with --port"
        )
        where = address(reachable(config.bind_address, config.filter_server_ip), bound)
        takes = "takes classes" if config.client_upload_filter_class_enable else "takes no classes: no --upload given"
        with announcing():
            print(f"Filter server on {where} for broker {config.connect_which_broker}, {takes}")
            print(f"ready filtersrv={where}")
        await running.until_told_to_stop()
