"""A count on the terminal, while a command has nothing else to say."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(verb: str, *, only_if: bool = True) -> Iterator[Callable[[int], None]]:
    """A line on the terminal that counts up; nothing where there is no terminal, or where bodies go to it."""
    if not only_if or sys.stderr is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.completed:,.0f} messages " + verb), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda count: bar.update(task, completed=count)
