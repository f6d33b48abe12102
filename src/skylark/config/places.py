"""Where servers keep their files when nothing names a place: below the home directory, as Apache's servers do."""

from pathlib import Path


def at_home(*names: str) -> str:
    """A path below the home directory; below the current one for a user who has none, as in some containers."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path.cwd()
    return str(home.joinpath(*names))
