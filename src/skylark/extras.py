"""What is installed only where it is asked for, and how to ask for it."""


def how_to_install(extra: str) -> str:
    return f"pip install '.[{extra}]' in a checkout of Skylark"
