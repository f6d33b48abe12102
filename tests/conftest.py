"""For all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from servers import SERVERS, SOON_ASKED, Server, fetch_apache

# A test must not fail because the machine is busy.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Gives the server of a kind: a name server and a broker in processes of their own, started when first asked for.

    A parametrized fixture that started them would do so again each time that the kind changes.
    """
    running: dict[str, Server] = {}

    def get(kind: str) -> Server:
        if kind not in running:
            if kind == "apache":
                fetch_apache()
            wanted = {"enablePropertyFilter": "true", "recallMessageEnable": "true", **SOON_ASKED}
            server = SERVERS[kind](tmp_path_factory.mktemp(kind), **wanted)
            server.start()
            running[kind] = server
        return running[kind]

    yield get
    for server in running.values():
        server.kill()
