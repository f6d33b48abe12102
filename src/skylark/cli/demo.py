"""`skylark demo`: a broker, orders, two streams and their result, with one command."""

import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from skylark.cli.pipeline import user_errors
from skylark.cli.serving import Failure, writable_directory

_STOP_TIMEOUT_S = 20


def demo(
    orders: Annotated[int, typer.Option(min=100, max=1_000_000, metavar="COUNT", help="Orders to produce.")] = 3000,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep messages and archive there, instead of removing them.")
    ] = None,
) -> None:
    """Start a broker, produce orders, add them up and archive them with Spark, and show the result.

    Everything is on free ports and in a temporary directory. It needs Java 17 and takes less than a minute.
    """
    with user_errors(), contextlib.ExitStack() as stack:
        from rich.console import Console

        from skylark.pipelines.demo import demonstrate, show
        from skylark.pipelines.session import check_java, session

        check_java()
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skylark-demo-")))
        if keep is not None:
            root = writable_directory(keep, "the demo").resolve()
        console = Console(highlight=False)
        with _server(root / "store") as namesrv:
            console.print(f"[bold]Skylark[/bold] serves at [green]{namesrv}[/green]; Spark starts")
            with session("local[2]", "skylark demo") as spark:
                result = demonstrate(spark, namesrv, root, orders, console)
        show(result, console)
        if result.streamed != result.archived:
            raise Failure("the stream and the archive differ")
        if keep is not None:
            console.print(f"\nmessages, archive and checkpoints are in {root}", markup=False)
        console.print("\nNow with your own: [cyan]skylark up[/cyan], and in docs/pipelines.md how to go on.")


@contextlib.contextmanager
def _server(store: Path) -> Iterator[str]:
    """`skylark up` on free ports beside this process; its name server's address."""
    command = [
        sys.executable,
        "-m",
        "skylark",
        "up",
        "--namesrv-port",
        "0",
        "--broker-port",
        "0",
        "--store",
        str(store),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            assert child.stdout is not None
            ready = next((line for line in child.stdout if line.startswith("ready namesrv=")), None)
            if ready is None:
                raise Failure(f"the broker does not start: exit code {child.wait()}")
            yield ready.split()[1].removeprefix("namesrv=")
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
