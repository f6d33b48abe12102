"""Several brokers under one name server: what `skylark up --brokers N` starts.

The process of the command has the name server. Each broker is a child with an event loop, a core and a store of its
own; broker-b listens ten ports above broker-a, and so on. A child reads its settings from the first line of its
standard input and answers with one line, `ready PORT` or `failed WHY`. Then it serves until that input ends, which it
does also when the parent is killed: no broker outlives its fleet. Meanwhile `changed {"key":"value"}` tells of settings
that an operator changed. A child that ends by itself is replaced; the others and the name server go on.
"""

import asyncio
import logging
import string
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from skylark.broker.app import Broker
from skylark.broker.config import BrokerConfig
from skylark.cli.logs import LogFormat
from skylark.cli.serving import Failure, Running, log_to_stderr, run, writable_directory, writes_back
from skylark.config import properties

log = logging.getLogger(__name__)

_PORT_STEP = 10
_MAX_PORT = 65535
_STOP_DEADLINE_S = 60.0
_MAX_LINE_BYTES = 1 << 20
# A broker that stayed up for so long has recovered from what ended it.
_STEADY_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_READY, _FAILED, _CHANGED = "ready", "failed", "changed"


class Order(msgspec.Struct):
    """What a child is told."""

    config: BrokerConfig
    file: str | None
    """Where the settings came from; changed ones go back there."""
    verbose: bool
    log_format: LogFormat = LogFormat.TEXT


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
        store_path_root_dir=str(Path(common.store_path_root_dir) / name),
        store_path_commit_log=log and str(Path(log) / name),
    )


def next_pause_s(last_s: float, lived_s: float) -> float:
    """How long to wait before a broker that ended is started again, after `last_s` the time before; 0 at first."""
    if last_s == 0 or lived_s >= _STEADY_S:
        return _FIRST_PAUSE_S
    return min(2 * last_s, _LONGEST_PAUSE_S)


class BrokerProcess:
    """A broker in a child process, as a server that can be started and stopped.

    When the process ends and nobody asked for it, another one takes its place: the same store, the same port, and the
    settings as they were, also those that were changed meanwhile. It is tried for ever, with growing pauses.
    """

    def __init__(self, order: Order, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._order = order
        self._sleep = sleep
        self._child: Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        self._order.config.bind_address, self._order.config.listen_port = host, port
        child = await self._launch()
        self._keeper = asyncio.create_task(self._keep_up(child))
        return self._order.config.listen_port

    def let_go(self) -> None:
        """From now on the child may end, and nothing takes its place."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def stop(self) -> None:
        """The end of its input tells the child to stop; one that does not is killed."""
        self.let_go()
        if self._keeper is not None:
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._child is not None:
            await _end(self._child)

    async def _launch(self) -> Process:
        """A process that serves; what keeps it from that is a `Failure`."""
        config = self._order.config
        # In a session of its own: Ctrl-C is for the parent, which then ends its children.
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=_MAX_LINE_BYTES
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(self._order) + b"\n")
        word, _, rest = (await child.stdout.readline()).decode().rstrip("\n").partition(" ")
        if word != _READY:
            await _end(child)
            raise Failure(rest or f"{config.broker_name} ended with status {child.returncode} while it started")
        config.listen_port = int(rest)  # the one to come back on, if any would do
        return child

    async def _keep_up(self, child: Process) -> None:
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while True:
            began_s = loop.time()
            status = await self._until_it_ends(child)
            pause_s = next_pause_s(pause_s, loop.time() - began_s)
            log.warning(
                "%s (process %d) ended with status %d: it is started again in %g s",
                self._name, child.pid, status, pause_s,
            )  # fmt: skip
            child, pause_s = await self._replacement(pause_s)
            log.warning("%s is back on port %d (process %d)", self._name, self._order.config.listen_port, child.pid)

    async def _replacement(self, pause_s: float) -> tuple[Process, float]:
        """The process that takes the place, and the pause before it."""
        while True:
            await self._sleep(pause_s)
            try:
                return await self._launch(), pause_s
            except (Failure, OSError) as problem:
                pause_s = next_pause_s(pause_s, 0)
                log.warning("%s does not start: %s; it is tried again in %g s", self._name, problem, pause_s)

    async def _until_it_ends(self, child: Process) -> int:
        """Its status, after everything that it had to tell was heard."""
        assert child.stdout is not None
        try:
            async for line in child.stdout:
                word, _, rest = line.decode().partition(" ")
                if word == _CHANGED:
                    changes = msgspec.json.decode(rest, type=dict[str, str])
                    own = {key: changes[key] for key in changes.keys() & properties.keys(BrokerConfig)}
                    properties.update(self._order.config, own, allowed=own)
        except ValueError as problem:  # also a line that is longer than any setting should be
            log.warning("%s changed a setting, and what takes its place may not have it: %s", self._name, problem)
            while await child.stdout.read(_MAX_LINE_BYTES):
                pass  # or it would wait for a reader
        return await child.wait()

    @property
    def _name(self) -> str:
        return self._order.config.broker_name


async def _end(child: Process) -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        await asyncio.wait_for(child.wait(), _STOP_DEADLINE_S)
    except TimeoutError:
        child.kill()
        await child.wait()


async def _serve() -> None:
    """The child's life."""
    loop, orders = asyncio.get_running_loop(), asyncio.StreamReader(_MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    line = await orders.readline()
    if not line:
        return  # the parent is gone already
    order = msgspec.json.decode(line, type=Order)
    config = order.config
    log_to_stderr(verbose=order.verbose, name=config.broker_name, form=order.log_format)
    try:
        async with Running() as running:
            writable_directory(Path(config.store_path_root_dir), "the store")
            broker = Broker(config, on_config_change=_tells_and_writes(Path(order.file) if order.file else None))
            what = f"broker {config.broker_name}"
            port = await running.start(
                broker, what, config.bind_address, config.listen_port, "another with --broker-port"
            )
            print(_READY, port, flush=True)
            parent = asyncio.create_task(orders.read())
            parent.add_done_callback(lambda _: running.stop())
            await running.until_told_to_stop()
    except Failure as problem:
        print(_FAILED, " ".join(str(problem).split()), flush=True)


def _tells_and_writes(file: Path | None) -> Callable[[dict[str, str]], None]:
    """Changed settings go to the parent, for the process that may take this one's place, and into their file."""
    write = writes_back(file)

    def tell(changed: dict[str, str]) -> None:
        print(_CHANGED, msgspec.json.encode(changed).decode(), flush=True)
        write(changed)

    return tell


if __name__ == "__main__":
    run(_serve)
