"""The option that names the name servers: checked here for every command that takes it, before anything starts."""

from typing import Annotated

import typer

_VARIABLE = "NAMESRV_ADDR"


def _checked(context: typer.Context, parameter: typer.CallbackParam, text: str | None) -> str | None:
    from skylark.client.addresses import parse_name_servers

    try:
        return text if text is None else ";".join(parse_name_servers(text))
    except ValueError as error:
        source = context.get_parameter_source(parameter.name or "")
        is_inherited = source is not None and source.name == "ENVIRONMENT"
        raise typer.BadParameter(str(error), param_hint=_VARIABLE if is_inherited else None) from None


NameServers = Annotated[
    str,
    typer.Option(
        "-n",
        "--namesrv",
        envvar=_VARIABLE,
        show_envvar=False,
        metavar="HOST:PORT[;HOST:PORT]",
        help=f"Name servers; else {_VARIABLE} is used.",
        callback=_checked,
    ),
]
NameServersOfStream = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--namesrv",
        metavar="HOST:PORT[;HOST:PORT]",
        help="Name servers.",
        show_default="those that the stream reads from",
        callback=_checked,
    ),
]
OtherNameServers = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Name servers of the target, if they are others.", callback=_checked),
]
