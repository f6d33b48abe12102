"""Apache's mqadmin 5.5.0 in a driver process, and how to read what it prints."""

from __future__ import annotations

import re

from drivers import Driver
from servers import Server

STACK_TRACE = "\tat "


class Admin:
    """Runs commands with the name server's address; gives what they printed."""

    def __init__(self, driver: Driver, server: Server) -> None:
        self._driver = driver
        self._server = server

    def __call__(self, *command: str) -> str:
        output = self._run(command)
        assert STACK_TRACE not in output, output
        return output

    def refused(self, *command: str) -> str:
        """What a command printed that the servers refused."""
        output = self._run(command)
        assert STACK_TRACE in output, output
        return output

    def _run(self, command: tuple[str, ...]) -> str:
        output: str = self._driver.call("admin", args="\n".join([*command, "-n", self._server.namesrv_addr]))["output"]
        assert not output.startswith("The sub command"), output
        return output


def columns(output: str) -> list[list[str]]:
    """The words of each line that is not a heading."""
    return [line.split() for line in output.splitlines() if line.strip() and not line.startswith("#")]


def value(output: str, name: str) -> str:
    """The rest of the line `name: rest` or `name = rest`."""
    found = re.search(rf"^{re.escape(name)}\s*[:=]\s*(.*?)\s*$", output, re.MULTILINE)
    assert found is not None, f"{name} is not in:\n{output}"
    return found[1]


def make_topic(admin: Admin, server: Server, topic: str, queues: int = 4) -> str:
    return admin("updateTopic", "-b", server.broker_addr, "-t", topic, "-r", str(queues), "-w", str(queues))
