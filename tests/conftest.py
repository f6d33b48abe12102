"""For all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings
from servers import SERVERS, SOON_ASKED, Server, fetch_apache

import skylark

# A test must not fail because the machine is busy.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

# Spark's JVMs live for seconds here, too short for the optimizing compiler to pay; see also spark_conf.
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
SPARK_CONF = str(Path(__file__).with_name("spark_conf"))
os.environ.setdefault("SPARK_CONF_DIR", SPARK_CONF)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (SPARK_CONF, os.environ.get("PYTHONPATH"))))
os.environ.setdefault("SPARK_LAUNCHER_OPTS", QUICK_JVM)


def pytest_configure() -> None:
    # A shell starts what runs in the background without Ctrl-C, and nohup what is to outlive its terminal: the commands
    # under test would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    refuse_stale_modules()


def refuse_stale_modules() -> None:
    """A compiled module that is older than its source would be tested in its place."""
    if os.environ.get("SKYLARK_PURE"):
        return
    stale = [source for source in compiled_sources() if is_stale(source)]
    if stale:
        raise pytest.UsageError(f"{stale[0]} is newer than what was compiled from it: make compiled")


def compiled_sources() -> list[Path]:
    package = Path(skylark.__file__).parent
    return [path.with_name(path.name.split(".")[0] + ".py") for path in package.rglob("*.so")]


def is_stale(source: Path) -> bool:
    return any(source.stat().st_mtime > path.stat().st_mtime for path in source.parent.glob(f"{source.stem}.*.so"))


@pytest.fixture(scope="session", autouse=True)
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The installed Spark without the archive that its Python processes import pyspark from.

    In it nothing is compiled, and so each of them would spend a second on that. What JVMs leave behind that are killed
    goes with the directory.
    """
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return
    home = tmp_path_factory.mktemp("spark-home")
    for name in ("bin", "jars", "sbin"):
        (home / name).symlink_to(Path(spec.origin).with_name(name))
    temporary = home / "tmp"
    temporary.mkdir()
    os.environ["SPARK_HOME"] = str(home)
    os.environ["SPARK_SUBMIT_OPTS"] = f"-Djava.io.tmpdir={temporary}"
    os.environ["SPARK_DAEMON_JAVA_OPTS"] = f"{QUICK_JVM} -Djava.io.tmpdir={temporary}"


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make beyond`: what runs against Apache's server in Skylark's place, and longer kills."""
    for item in items:
        if "kill" in item.path.stem:
            item.add_marker("kills")
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "apache" in (parameters.get("server"), parameters.get("kind")):
            item.add_marker("apache")
