"""Data pipelines on Spark between topics and files: declared in YAML, ready-made, and as SQL on the command line."""
