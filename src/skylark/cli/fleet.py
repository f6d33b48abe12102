"""Several brokers under one name server: what `skylark up --brokers N` starts.

The process of the command has the name server. Each broker is a child with an event loop, a core and a store of its
own; broker-b listens ten ports above broker-a, and so on. A child reads its settings from the first line of its
standard input and answers with one line, `ready PORT` or `failed WHY`. Then it serves until that input ends, which it
does also when the parent is killed: no broker outlives its fleet.
"""

import asyncio
import string
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

import msgspec

from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.cli.serving import Failure, Running, log_to_stderr, run, writable_directory, writes_back

_PORT_STEP = 10
_MAX_PORT = 65535
_STOP_DEADLINE_S = 60.0
_READY, _FAILED = "ready", "failed"


class Order(msgspec.Struct):
    """What a child is told."""

    config: BrokerConfig
    file: str | None
    """Where the settings came from; changed ones go back there."""
    verbose: bool


def configs(common: BrokerConfig, count: int) -> list[BrokerConfig]:
    """The settings of each broker: the common ones with a name, a port and directories of its own."""
    root = Path(common.store_path_root_dir)
    if (root / "commitlog").exists():
        raise Failure(f"{root} has the messages of a single broker: choose another directory with --store")
    last_port = common.listen_port + _PORT_STEP * (count - 1)
    if common.listen_port and last_port > _MAX_PORT:
        raise Failure(f"the last of {count} brokers would listen on {last_port}: choose a lower --broker-port")
    return [_of_its_own(common, number) for number in range(count)]


def _of_its_own(common: BrokerConfig, number: int) -> BrokerConfig:
    name = f"broker-{string.ascii_lowercase[number]}"
    log = common.store_path_commit_log
    return msgspec.structs.replace(
        common,
        broker_name=name,
        listen_port=common.listen_port and common.listen_port + _PORT_STEP * number,
        ha_listen_port=common.ha_listen_port and common.ha_listen_port + _PORT_STEP * number,
        store_path_root_dir=str(Path(common.store_path_root_dir) / name),
        store_path_commit_log=log and str(Path(log) / name),
    )


class BrokerProcess:
    """A broker in a child process, as a server that can be started and stopped.

    `on_death` is told of an end that nobody asked for.
    """

    def __init__(self, order: Order, on_death: Callable[[Failure], None]) -> None:
        self._order = order
        self._on_death = on_death
        self._child: Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        self._order.config.bind_address, self._order.config.listen_port = host, port
        # In a session of its own: Ctrl-C is for the parent, which then ends its children.
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(self._order) + b"\n")
        word, _, rest = (await child.stdout.readline()).decode().rstrip("\n").partition(" ")
        if word != _READY:
            await self.stop()
            raise Failure(rest or f"{self._name} ended while it started")
        self._watch = asyncio.create_task(self._report_death(child))
        return int(rest)

    @property
    def _name(self) -> str:
        return self._order.config.broker_name

    async def _report_death(self, child: Process) -> None:
        status = await child.wait()
        self._on_death(Failure(f"{self._name} (process {child.pid}) ended with status {status}: all brokers stop"))

    async def stop(self) -> None:
        """The end of its input tells the child to stop; one that does not is killed."""
        child = self._child
        if child is None:
            return
        if self._watch is not None:
            self._watch.cancel()
        assert child.stdin is not None
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), _STOP_DEADLINE_S)
        except TimeoutError:
            child.kill()
            await child.wait()


async def _serve() -> None:
    """The child's life."""
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    order = msgspec.json.decode(await orders.readline(), type=Order)
    config = order.config
    log_to_stderr(verbose=order.verbose, name=config.broker_name)
    try:
        async with Running() as running:
            writable_directory(Path(config.store_path_root_dir), "the store")
            broker = Broker(config, on_config_change=writes_back(Path(order.file) if order.file else None))
            what = f"broker {config.broker_name}"
            port = await running.start(
                broker, what, config.bind_address, config.listen_port, "another with --broker-port"
            )
            print(_READY, port, flush=True)
            parent = asyncio.create_task(orders.read())
            parent.add_done_callback(lambda _: running.stop())
            await running.until_told_to_stop()
    except Failure as problem:
        print(_FAILED, problem, flush=True)


if __name__ == "__main__":
    run(_serve)
