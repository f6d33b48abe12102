"""The command `skylark`, also as `python -m skylark`. Ctrl-C may come before the rest is imported."""

import contextlib
import os
import sys


def main() -> None:
    try:
        from skylark.cli.main import main as run

        run()
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            os.write(2, b"skylark: stopped\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
