"""The installed `skylark` command as its users meet it: a process with output, an exit code and signals."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
from pathlib import Path

import pytest

from cli.commands import (
    ANY_PORTS,
    DEADLINE_S,
    SKYLARK,
    TIME,
    assert_one_clear_line,
    serving,
    skylark,
    started,
    without_reader,
)
from skylark import form
from skylark.net.pool import Pool
from skylark.wire.codes import RequestCode, ResponseCode
from skylark.wire.frame import Frame

READY_UP = re.compile(r"^ready namesrv=127\.0\.0\.1:(\d+) broker=127\.0\.0\.1:(\d+)$")


def test_help_teaches(tmp_path: Path) -> None:
    for arguments in ([], ["--help"]):
        done = skylark(*arguments, cwd=tmp_path)
        assert done.returncode == 0
        assert "Start with skylark up" in done.stdout
    for command, example in [
        ("up", "skylark up --host 0.0.0.0 --advertise"),
        ("namesrv", "skylark namesrv -c namesrv.conf"),
        ("broker", "skylark broker -n 127.0.0.1:9876"),
    ]:
        done = skylark(command, "--help", cwd=tmp_path)
        assert done.returncode == 0
        assert example in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_version(tmp_path: Path) -> None:
    told = skylark("--version", cwd=tmp_path).stdout
    form_here = "compiled" if form.is_compiled() else r"plain Python \(slower\)"
    assert re.fullmatch(rf"skylark \d+\.\d+\.\d+, {form_here}, CPython 3\.\d+\.\d+\n", told)
    told = skylark("--version", cwd=tmp_path, SKYLARK_PURE="1").stdout
    assert ", plain Python (slower), " in told


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["up", "--nonsense"], r"No such option: --nonsense \(see skylark up --help\)"),
        (["upp"], "No such command 'upp'"),
        (["up", "--broker-port", "70000"], "--broker-port.*65535"),
        (["up", "--broker-port", "many"], "--broker-port"),
        (["up", "--flush", "never"], "'async', 'sync'"),
        (["up", "-c", "absent.conf"], r"cannot read absent\.conf: No such file or directory"),
        (["broker", "-n", "nowhere"], "-n: namesrvAddr='nowhere' is not allowed: expected host:port"),
        (["broker", "-p", "-n", ""], "-n: no name server is given; it takes host:port"),
        (["broker", "-p", "-n", " "], "-n: no name server is given; it takes host:port"),
        (["broker", "-n", "::1"], r"-n: '::1' has no port: .* \[::1\]:9876"),
        (["broker", "-n", "a..b:9876"], "-n: 'a..b:9876' has no host that exists"),
        (["broker", "-n", "localhost:9876;localhost:99999"], "-n: 'localhost:99999' has no port that exists"),
        (["filtersrv", "-b", "localhost:99999"], "the broker's address: 'localhost:99999' has no port that exists"),
        (["broker", "-c", "bad.conf"], r"bad\.conf line 1: listenPort='high' is not allowed: expected a whole number"),
        (["namesrv", "-c", "bad.conf"], r"bad\.conf line 1: listenPort='high' is not allowed: expected a whole number"),
        (["up", "-c", "conf.json"], r"skylark: conf\.json line 1: '\{' is not a key: this looks like JSON; Apache's"),
        (["broker", "-c", "."], r"cannot read \.: Is a directory"),
        (["up", "--store", "bad.conf/store", *ANY_PORTS], r"cannot write to bad\.conf/store.*Not a directory"),
        (["broker", "--store", "bad.conf/store"], r"cannot write to bad\.conf/store.*Not a directory"),
        (["broker", "--store", "bad.conf"], r"cannot write to bad\.conf, the directory of the store: it is a file"),
        (["namesrv", "-c", "below.conf"], r"cannot write to bad\.conf.*key-value"),
        (["namesrv", "--host", "a..b"], r"the name server cannot start: .*: 'a\.\.b': "),
        (
            ["broker", "--host", "127.0.0.1", "--port", "0", "--advertise", "c..d"],
            r"the broker cannot start: .*: 'c\.\.d': ",
        ),
        (["broker", "--advertise", "10.0.0.1:10911"], r"'--advertise': '10\.0\.0\.1:10911' is not .*, without a port"),
        (["up", "--host", "10.0.0.1:9876"], r"'--host': '10\.0\.0\.1:9876' is not .*, without a port"),
        (["broker", "-c", "port.conf"], r"port\.conf line 1: brokerIP1='10\.0\.0\.1:10911' is not .*, without a port"),
        (["fetch-tables", "127.0.0.1:1", "--store", "store"], r"127\.0\.0\.1:1 does not answer"),
        (
            ["up", "--host", "192.0.2.1", *ANY_PORTS],
            r"cannot listen on 192\.0\.2\.1:0: this machine has no such address",
        ),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: list[str], pattern: str, tmp_path: Path) -> None:
    (tmp_path / "bad.conf").write_text("listenPort=high\n")
    (tmp_path / "conf.json").write_text('{\n  "brokerName": "a"\n}\n')
    (tmp_path / "port.conf").write_text("brokerIP1=10.0.0.1:10911\n")
    (tmp_path / "below.conf").write_text("kvConfigPath=bad.conf/kvConfig.json\n")
    assert_one_clear_line(skylark(*arguments, cwd=tmp_path), pattern)


def test_a_bad_name_server_in_the_environment_is_named(tmp_path: Path) -> None:
    done = skylark("broker", cwd=tmp_path, NAMESRV_ADDR="nowhere")
    assert_one_clear_line(done, "NAMESRV_ADDR: namesrvAddr='nowhere' is not allowed")
    done = skylark("broker", "-p", cwd=tmp_path, NAMESRV_ADDR=" ")
    assert_one_clear_line(done, "NAMESRV_ADDR: no name server is given")


def test_the_effective_settings_are_printed(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text("brokerName=a\nbrokerNam=b\nenableCalcFilterBitMap=true\n")
    done = skylark("broker", "-c", "broker.conf", "-p", cwd=tmp_path, NAMESRV_ADDR="10.0.0.1:9876")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "brokerName=a" in lines
    assert "namesrvAddr=10.0.0.1:9876" in lines
    assert "unknown key brokerNam (did you mean brokerName?)" in done.stderr
    assert "enableCalcFilterBitMap is an Apache RocketMQ setting that Skylark ignores" in done.stderr
    done = skylark("broker", "-p", "-n", "10.0.0.2:9876;10.0.0.3:9876", cwd=tmp_path, NAMESRV_ADDR="10.0.0.1:9876")
    assert "namesrvAddr=10.0.0.2:9876;10.0.0.3:9876" in done.stdout.splitlines()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broker.conf"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_serves_and_stops_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    with serving("up", *ANY_PORTS, cwd=tmp_path, PATH="/usr/bin:/bin") as up:
        ports = READY_UP.match(up.ready)
        assert ports is not None, up.ready
        text = "\n".join(up.output)
        assert sum(line.startswith("ready ") for line in up.output) == 1
        assert f'{SKYLARK} send Hello "it works" -n 127.0.0.1:{ports[1]}' in text  # it is not on the PATH
        assert str(tmp_path / "data") in text
        for port in ports.groups():
            socket.create_connection(("127.0.0.1", int(port)), timeout=10).close()
        assert (tmp_path / "data" / "abort").exists()
        assert up.stop(number) == (0, "", "")
        assert len(up.complaints) == (0 if form.is_compiled() else 1)
    assert not (tmp_path / "data" / "abort").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_up_takes_file_and_options(tmp_path: Path) -> None:
    (tmp_path / "broker.conf").write_text(
        "brokerName=from-file\nlistenPort=0\nstorePathRootDir=elsewhere\nbrokerIP1=192.0.2.9\n"
        "namesrvAddr=192.0.2.8:9876\n"
    )
    arguments = ["up", "-c", "broker.conf", "--namesrv-port", "0", "--store", "given", "--flush", "sync"]
    with serving(*arguments, "--advertise", "localhost", cwd=tmp_path) as up:
        assert re.match(r"^ready namesrv=localhost:\d+ broker=localhost:\d+$", up.ready)
        assert any("from-file" in line for line in up.output)
        assert any("when on the disk" in line for line in up.output)
        code, _, err = up.stop(signal.SIGTERM)
    assert code == 0
    assert "broker.conf line 5: namesrvAddr=192.0.2.8:9876 is not used: " in err
    assert (tmp_path / "given").is_dir()
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("option", "other", "what"),
    [("--namesrv-port", "--broker-port", "name server"), ("--broker-port", "--namesrv-port", "broker")],
)
def test_a_port_in_use(option: str, other: str, what: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = skylark("up", option, str(port), other, "0", cwd=tmp_path)
    assert_one_clear_line(done, f"the {what} cannot listen on 127.0.0.1:{port}: the port is in use.* {option}")


def test_a_store_in_use(tmp_path: Path) -> None:
    with serving("up", *ANY_PORTS, cwd=tmp_path) as up:
        assert_one_clear_line(skylark("up", *ANY_PORTS, cwd=tmp_path), "the broker cannot start: .*data")
        assert up.stop(signal.SIGTERM)[0] == 0


async def updated(namesrv: str, settings: bytes) -> None:
    pool = Pool()
    answer = await pool.request(namesrv, Frame(RequestCode.UPDATE_NAMESRV_CONFIG, body=settings), DEADLINE_S)
    pool.close()
    assert answer.code == ResponseCode.SUCCESS, answer.remark


def test_name_server_and_broker_apart(tmp_path: Path) -> None:
    (tmp_path / "namesrv.conf").write_text("# ours\nenableTopicList = true\n")
    with serving("namesrv", "-c", "namesrv.conf", "-p", "0", "--host", "127.0.0.1", cwd=tmp_path) as namesrv:
        where = namesrv.ready.removeprefix("ready namesrv=")
        asyncio.run(updated(where, b"enableTopicList=false\norderMessageEnable=true"))
        assert (tmp_path / "namesrv.conf").read_text() == "# ours\nenableTopicList=false\norderMessageEnable=true\n"
        with serving("broker", "-n", where, "--port", "0", "--host", "127.0.0.1", cwd=tmp_path) as broker:
            assert re.match(r"^ready broker=127\.0\.0\.1:\d+$", broker.ready)
            assert any(f"registers with {where}" in line for line in broker.output)
            assert broker.stop(signal.SIGTERM) == (0, "", "")
            assert len(broker.complaints) == (0 if form.is_compiled() else 1)
        assert namesrv.stop(signal.SIGINT) == (0, "", "")
        assert not namesrv.complaints  # no message goes through it


def test_a_server_without_file_descriptors_says_so(tmp_path: Path) -> None:
    with serving("namesrv", "-p", "0", "--host", "127.0.0.1", cwd=tmp_path) as namesrv:
        _, most = resource.prlimit(namesrv.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(namesrv.process.pid, resource.RLIMIT_NOFILE, (3, most))
        told = namesrv.until_told("ERROR net.server: clients are turned away: .* may have 3: allow more with ulimit -n")
        resource.prlimit(namesrv.process.pid, resource.RLIMIT_NOFILE, (most, most))
        assert namesrv.stop(signal.SIGTERM) == (0, "", told.string)


SERVE_BROKER = ["broker", "-c", "broker.conf", "--host", "127.0.0.1"]
SERVE_NAMESRV = ["namesrv", "-p", "0", "--host", "127.0.0.1"]


def test_servers_keep_their_files_at_home_and_say_so(tmp_path: Path) -> None:
    """As Apache's do with Apache's example files, which name no directory."""
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    (here / "broker.conf").write_text("brokerName=broker-a\nlistenPort=0\n")
    for state in ("empty", "in use"):
        with serving(*SERVE_BROKER, cwd=here, HOME=str(home), NAMESRV_ADDR="") as broker:
            assert f"Messages in {home / 'store'} ({state} before this start)" in broker.output
            code, out, err = broker.stop(signal.SIGTERM)
            assert (code, out) == (0, "")
            assert re.fullmatch(rf"{TIME} WARNING cli\.broker: this broker registers nowhere, .*\n", err), err
    with serving(*SERVE_NAMESRV, cwd=here, HOME=str(home)) as namesrv:
        assert f"Key-value settings in {home / 'namesrv' / 'kvConfig.json'} (not there yet)" in namesrv.output
    assert [path.name for path in here.iterdir()] == ["broker.conf"]


def test_files_of_former_versions_are_found(tmp_path: Path) -> None:
    """They kept them in ./data."""
    home = tmp_path / "home"
    (tmp_path / "broker.conf").write_text("brokerName=broker-a\nlistenPort=0\n")
    (tmp_path / "data" / "commitlog").mkdir(parents=True)
    (tmp_path / "data" / "namesrv").mkdir()
    (tmp_path / "data" / "namesrv" / "kvConfig.json").write_text('{"configTable":{}}')
    with serving(*SERVE_BROKER, cwd=tmp_path, HOME=str(home)) as broker:
        assert f"Messages in {tmp_path / 'data'} (in use before this start)" in broker.output
        broker.until_told(
            f"{tmp_path / 'data'} is used, as in former versions; the default is {home / 'store'} now: set"
        )
    with serving(*SERVE_NAMESRV, cwd=tmp_path, HOME=str(home)) as namesrv:
        assert any(str(tmp_path / "data" / "namesrv" / "kvConfig.json") in line for line in namesrv.output)
    (home / "store" / "commitlog").mkdir(parents=True)
    done = skylark(*SERVE_BROKER, cwd=tmp_path, HOME=str(home))
    assert_one_clear_line(done, "both .*store and .*data are in use, .* set storePathRootDir or --store")


def test_a_log_for_machines(tmp_path: Path) -> None:
    """Every line on stderr is an object, also the one that says why the command ends."""
    (tmp_path / "broker.conf").write_text("listenPort=0\nbrokerNam=b\n")
    arguments = ["up", "-c", "broker.conf", "--namesrv-port", "0", "--log-format", "json"]
    with serving(*arguments, cwd=tmp_path) as up:
        second = skylark(*arguments, cwd=tmp_path)
        *_, errors = up.stop(signal.SIGKILL)
    events = [json.loads(line) for line in errors.splitlines()]
    assert events[0]["message"].startswith("broker.conf line 2: unknown key brokerNam")
    assert [event["level"] for event in map(json.loads, second.stderr.splitlines())] == ["WARNING", "CRITICAL"]
    assert "the broker cannot start" in second.stderr
    with serving(*arguments, cwd=tmp_path) as up:
        event = json.loads(up.until_told("after an unclean stop").string)
        assert (event["level"], event["logger"]) == ("WARNING", "store.store")
        assert set(event) == {"time", "level", "logger", "message"}
        assert up.stop(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "is_full"),
    [(["up", *ANY_PORTS], False), (["namesrv", "-p", "0"], False), (["namesrv", "-p", "0"], True)],
)
def test_a_server_that_nobody_hears_goes_on_serving(arguments: list[str], is_full: bool, tmp_path: Path) -> None:
    stdout = os.open("/dev/full", os.O_WRONLY) if is_full else without_reader()
    try:
        with started(*arguments, cwd=tmp_path, stdout=stdout) as process:
            assert process.stderr is not None
            assert any("stdout takes nothing" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert (process.wait(DEADLINE_S), process.stderr.read()) == (0, "")
    finally:
        os.close(stdout)


def test_ctrl_c_while_the_command_starts_is_one_line(tmp_path: Path) -> None:
    """The import of the command waits for a reader of the pipe, so the signal comes in the middle of it."""
    package = tmp_path / "typer"
    package.mkdir()
    (package / "__init__.py").write_text("open('begun', 'w').close()\nimport time\ntime.sleep(1000)\n")
    os.mkfifo(tmp_path / "begun")
    with started("up", cwd=tmp_path, PYTHONPATH=str(tmp_path)) as process:
        (tmp_path / "begun").read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=DEADLINE_S) == ("", "skylark: stopped\n")
        assert process.returncode == 130
