"""`python -m skylark` is the command `skylark`."""

from skylark.cli.main import main

main()
