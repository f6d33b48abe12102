"""`skylark topic`: topics made by hand. The messages in them are the business of `skylark send` and its kin."""

from typing import Annotated

import typer

from skylark.cli import options
from skylark.cli.addresses import NameServers
from skylark.cli.messages import run_client
from skylark.cli.serving import Failure, log_to_stderr

topic = typer.Typer(name="topic", help="Create topics.", no_args_is_help=True, rich_markup_mode="rich")


@topic.callback()
def _topic() -> None:
    """A callback makes it a group, also while there is only one command."""


@topic.command()
def create(
    name: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False, help="Name of the topic.")],
    queues: Annotated[int, typer.Option(min=1, max=65_536, metavar="COUNT", help="Queues on each broker.")] = 8,
    brokers: Annotated[
        list[str] | None,
        typer.Option("--broker", metavar="NAME", help="Only on this broker, by name; may be repeated."),
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="Only on the brokers of this cluster.")] = None,
    permission: Annotated[str, typer.Option(metavar="rw|r|w", help="Whether it can be read, written or both.")] = "rw",
    attributes: Annotated[
        list[str] | None,
        typer.Option("--attribute", metavar="NAME=VALUE", help="Such as message.type=FIFO; may be repeated."),
    ] = None,
    namesrv: NameServers = "127.0.0.1:9876",
    verbose: options.Verbose = False,
) -> None:
    """Create a topic on all brokers or on those you choose, or change the queues of one that is there.

    [bold]Examples[/bold]

    [cyan]skylark topic create orders[/cyan]  on all brokers, with 8 queues on each

    [cyan]skylark topic create orders --queues 16 --broker broker-a --broker broker-b[/cyan]  on two of them

    [cyan]skylark topic create steps --attribute message.type=FIFO[/cyan]  of a type
    """
    log_to_stderr(verbose=verbose)
    pairs = dict(_pair(text) for text in attributes or [])

    async def main() -> None:
        from skylark.client.admin import AdminClient

        async with AdminClient(namesrv) as admin:
            done = await admin.create_topic(
                name,
                queues=queues,
                brokers=brokers or None,
                cluster=cluster,
                permission=permission,  # type: ignore[arg-type]
                attributes=pairs,
            )
        typer.echo(f"topic {name} has {queues} queue{'s' * (queues > 1)} on {', '.join(done)}")

    run_client(main)


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise Failure(f"--attribute {text!r} is not of the form NAME=VALUE")
    return name, value
