"""`skylark up --brokers N`: brokers in processes of their own that start, serve and end together."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from cli.commands import ANY_PORTS, Serving, assert_one_clear_line, serving, skylark
from skylark.broker.config import BrokerConfig
from skylark.cli.fleet import configs
from skylark.cli.serving import Failure
from skylark.client.sync import Producer

TWO = ["up", "--brokers", "2", *ANY_PORTS]
NAMES = ["broker-a", "broker-b"]
END_DEADLINE_S = 60.0
POLL_S = 0.02


def children(parent: Serving) -> dict[str, int]:
    """Name of the broker -> its process, told by the store that it holds open."""
    pid = parent.process.pid
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    by_name = {}
    for child in map(int, found):
        files = {str(path.readlink()) for path in Path(f"/proc/{child}/fd").iterdir()}
        by_name |= {name: child for name in NAMES if any(f"/{name}/" in file for file in files)}
    return by_name


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + END_DEADLINE_S
    while alive := [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and not is_zombie(pid)]:
        assert time.monotonic() < deadline, f"processes {alive} are still there"
        time.sleep(POLL_S)


def is_zombie(pid: int) -> bool:
    """Ended; an orphan stays in the table until the first process of the machine looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_producer_reaches_both_and_a_signal_stops_both(tmp_path: Path) -> None:
    with serving(*TWO, cwd=tmp_path) as up:
        ready = re.match(r"^ready namesrv=(\S+) broker=127\.0\.0\.1:(\d+);127\.0\.0\.1:(\d+)$", up.ready)
        assert ready is not None, up.ready
        with Producer(ready[1], group="senders") as producer:
            reached = {producer.send("Orders", b"x").queue.broker_name for _ in range(32)}
        assert reached == set(NAMES)
        brokers = children(up)
        assert set(brokers) == set(NAMES)
        assert up.stop(signal.SIGTERM) == (0, "", "")
        wait_gone(list(brokers.values()))
    for name in NAMES:
        assert (tmp_path / "data" / name / "commitlog").is_dir()
        assert not (tmp_path / "data" / name / "abort").exists()  # it had the time to stop cleanly


def test_one_that_dies_takes_the_others_along_and_is_named(tmp_path: Path) -> None:
    with serving(*TWO, cwd=tmp_path) as up:
        brokers = children(up)
        os.kill(brokers["broker-b"], signal.SIGKILL)
        output, errors = up.process.communicate(timeout=END_DEADLINE_S)
        assert (up.process.returncode, output) == (1, "")
        told = f"skylark: broker-b (process {brokers['broker-b']}) ended with status -9: all brokers stop"
        assert errors.splitlines()[-1] == told  # the name server may have seen it go before
        wait_gone(list(brokers.values()))
    assert not (tmp_path / "data" / "broker-a" / "abort").exists()


def test_no_broker_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    with serving(*TWO, cwd=tmp_path) as up:
        brokers = children(up)
        assert len(brokers) == 2
        up.process.kill()
        up.process.wait()
        wait_gone(list(brokers.values()))
    assert not (tmp_path / "data" / "broker-b" / "abort").exists()


def test_what_keeps_one_from_starting_is_said_and_stops_the_rest(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "broker-b").touch()
    done = skylark(*TWO, cwd=tmp_path)
    assert_one_clear_line(done, "cannot write to data/broker-b")
    assert not (tmp_path / "data" / "broker-a" / "abort").exists()


def test_a_port_in_use_is_named_with_its_broker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = skylark("up", "--brokers", "2", "--namesrv-port", "0", "--broker-port", str(port), cwd=tmp_path)
    assert_one_clear_line(done, f"the broker broker-a cannot listen on 127.0.0.1:{port}: the port is in use")


def test_each_has_a_name_ports_and_directories_of_its_own(tmp_path: Path) -> None:
    common = BrokerConfig(store_path_root_dir=str(tmp_path), store_path_commit_log="logs", ha_listen_port=7)
    one, two, three = configs(common, 3)
    assert [each.broker_name for each in (one, two, three)] == ["broker-a", "broker-b", "broker-c"]
    assert [each.listen_port for each in (one, two, three)] == [10911, 10921, 10931]
    assert (two.ha_listen_port, two.store_path_commit_log) == (17, "logs/broker-b")
    assert two.store_path_root_dir == str(tmp_path / "broker-b")
    assert [each.listen_port for each in configs(BrokerConfig(listen_port=0), 2)] == [0, 0]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="would listen on 65540: choose a lower --broker-port"):
        configs(BrokerConfig(listen_port=65530), 2)
    (tmp_path / "commitlog").mkdir()
    with pytest.raises(Failure, match="has the messages of a single broker"):
        configs(BrokerConfig(store_path_root_dir=str(tmp_path)), 2)
