"""Starting, stopping and failing, with servers that only remember what was done to them."""

import asyncio
import errno
import os
import signal
import socket
from pathlib import Path

import pytest

from skylark.cli.serving import Failure, Running, address, reachable, run, writable_directory, writes_back
from skylark.store.api import StoreLocked


class FakeServer:
    def __init__(self, name: str, events: list[str], error: Exception | None = None) -> None:
        self.name = name
        self.events = events
        self.error = error

    async def start(self, host: str, port: int) -> int:
        if self.error is not None:
            raise self.error
        self.events.append(f"start {self.name}")
        return port or 4242

    async def stop(self) -> None:
        self.events.append(f"stop {self.name}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_servers_in_reverse_order(number: signal.Signals) -> None:
    events: list[str] = []

    async def serve() -> None:
        async with Running() as running:
            assert await running.start(FakeServer("a", events), "name server", "127.0.0.1", 0, "another") == 4242
            assert await running.start(FakeServer("b", events), "broker", "127.0.0.1", 7, "another") == 7
            running.at_stop(lambda: events.append("asked"))
            os.kill(os.getpid(), number)
            await running.until_told_to_stop()

    run(serve)
    assert events == ["start a", "start b", "asked", "stop b", "stop a"]


def test_a_hang_up_that_nohup_ignores_stays_ignored() -> None:
    async def serve() -> None:
        async with Running():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(serve)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_started_is_stopped_when_the_next_one_fails() -> None:
    events: list[str] = []
    busy = OSError(errno.EADDRINUSE, "error while attempting to bind on address ('127.0.0.1', 7)")

    async def serve() -> None:
        async with Running() as running:
            await running.start(FakeServer("a", events), "name server", "127.0.0.1", 0, "another")
            await running.start(FakeServer("b", events, busy), "broker", "127.0.0.1", 7, "another with --broker-port")

    with pytest.raises(Failure) as caught:
        run(serve)
    assert str(caught.value) == (
        "the broker cannot listen on 127.0.0.1:7: the port is in use; "
        "stop what uses it or choose another with --broker-port"
    )
    assert events == ["start a", "stop a"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.EACCES, "bind"), "not permitted; choose another above 1023"),
        (OSError(errno.EADDRNOTAVAIL, "bind"), "this machine has no such address"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError(errno.ENOSPC, "write", "x/y"), "cannot start: No space left on device: x/y"),
        (PermissionError(errno.EACCES, "open", "x/y"), "cannot start: Permission denied: x/y"),
        (StoreLocked("./data is in use"), "cannot start: ./data is in use"),
    ],
)
def test_what_keeps_a_server_from_starting_is_said_in_words(error: Exception, text: str) -> None:
    async def serve() -> None:
        async with Running() as running:
            await running.start(FakeServer("a", [], error), "broker", "127.0.0.1", 7, "another")

    with pytest.raises(Failure) as caught:
        asyncio.run(serve())
    assert str(caught.value).endswith(text)
    assert "\n" not in str(caught.value)


def test_a_defect_is_not_dressed_up_as_a_failure() -> None:
    async def serve() -> None:
        async with Running() as running:
            await running.start(FakeServer("a", [], KeyError("x")), "broker", "127.0.0.1", 7, "another")

    with pytest.raises(KeyError):
        asyncio.run(serve())


def test_a_directory_is_made_or_refused(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    assert writable_directory(wanted, "the store") == wanted
    assert list(wanted.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(Failure, match=r"cannot write to .*file.*, the directory of the store: "):
            writable_directory(path, "the store")


def test_changed_settings_go_back_into_their_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "broker.conf"
    path.write_text("# ours\nmaxMessageSize=1\n")
    writes_back(path)({"maxMessageSize": "2"})
    assert path.read_text() == "# ours\nmaxMessageSize=2\n"
    writes_back(None)({"maxMessageSize": "3"})
    assert "maxMessageSize=3 will not outlive this process: it was started without -c FILE" in caplog.text
    caplog.clear()
    writes_back(tmp_path / "absent" / "broker.conf")({"maxMessageSize": "3", "traceOn": "false"})
    assert "maxMessageSize=3, traceOn=false will not outlive this process: " in caplog.text
    assert "broker.conf: No such file or directory" in caplog.text


def test_addresses_that_clients_can_use() -> None:
    assert address(reachable("0.0.0.0"), 1) == "127.0.0.1:1"
    assert address(reachable("10.0.0.1"), 1) == "10.0.0.1:1"
    assert address(reachable("0.0.0.0", "example.org"), 1) == "example.org:1"
    assert address(reachable("::1"), 1) == "[::1]:1"


def test_up_takes_sql_filters_and_recalls_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    from skylark.cli.up import _broker_config

    config = _broker_config(None, None, None, None, None, None)
    assert config.enable_property_filter
    assert config.recall_message_enable
    file = tmp_path / "broker.conf"
    file.write_text("enablePropertyFilter=false\nrecallMessageEnable=false")
    config = _broker_config(file, None, None, None, None, None)
    assert not config.enable_property_filter
    assert not config.recall_message_enable
