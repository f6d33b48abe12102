"""The `skylark` command, a module per command family."""
