"""The option that names the name servers: checked here for every command that takes it, before anything starts."""

from typing import Annotated

import typer


def _checked(text: str | None) -> str | None:
    from skylark.client.addresses import parse_name_servers

    try:
        return text if text is None else ";".join(parse_name_servers(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


NameServers = Annotated[
    str,
    typer.Option(
        "-n",
        "--namesrv",
        envvar="NAMESRV_ADDR",
        show_envvar=False,
        metavar="HOST:PORT[;HOST:PORT]",
        help="Name servers; else NAMESRV_ADDR is used.",
        callback=_checked,
    ),
]
OtherNameServers = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Name servers of the target, if they are others.", callback=_checked),
]
