"""Instructions that a broker spends on a request, counted by valgrind: figures that a busy machine does not change.

    python -m bench.instructions                          every kind of request
    python -m bench.instructions pull-json heartbeat      only these
    python -m bench.instructions --against ../before      also those of another checkout, which must be compiled too

A broker and a client that knows the bytes of its requests run in one process, so the kernel's work is not counted and
the client's hardly. Each kind runs twice, with few requests and with many: the difference is free of the start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
HOST: Final = "127.0.0.1"
TOPIC: Final = "orders"
FEW, MANY = 100, 900
AT_ONCE: Final = 50
BODY: Final = b"x" * 128
VALGRIND: Final = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")

SEND: Final = {
    "a": "producers", "b": TOPIC, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1700000000000", "h": "0",
    "i": "KEYS\x01k1\x02TAGS\x01a\x02UNIQ_KEY\x017F0000010A2B18B4AAC21D2E3F400001",
    "j": "0", "k": "false", "m": "false",
}  # fmt: skip
PULL: Final = {
    "consumerGroup": "readers", "topic": TOPIC, "queueId": "0", "queueOffset": "0", "maxMsgNums": "32", "sysFlag": "4",
    "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": "*", "subVersion": "0", "expressionType": "TAG",
}  # fmt: skip
POP: Final = {
    "consumerGroup": "poppers", "topic": TOPIC, "queueId": "0", "maxMsgNums": "1", "invisibleTime": "60000",
    "pollTime": "0", "bornTime": "9000000000000", "initMode": "0", "expType": "TAG", "exp": "*", "order": "false",
}  # fmt: skip
HEARTBEAT: Final = (
    b'{"clientID":"10.0.0.1@1","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","consumeType":'
    b'"CONSUME_PASSIVELY","groupName":"readers","messageModel":"CLUSTERING","subscriptionDataSet":[{"classFilterMode":'
    b'false,"codeSet":[],"expressionType":"TAG","subString":"*","subVersion":1,"tagsSet":[],"topic":"orders"}],'
    b'"unitMode":false}],"heartbeatFingerprint":0,"isWithoutSub":false,"producerDataSet":[{"groupName":"producers"}]}'
)


def requests() -> dict[str, Callable[[bool], bytes]]:
    """The bytes of one request of each kind; those of a pull that finds a batch are the same each time."""
    from skylark.wire.frame import Encoding, Frame
    from skylark.wire.framing import encode_frame

    def made(code: int, fields: dict[str, str], body: bytes = b"") -> Callable[[bool], bytes]:
        def encoded(is_binary: bool) -> bytes:
            frame = Frame(code, dict(fields), body, encoding=Encoding.BINARY if is_binary else Encoding.JSON)
            frame.version = 513
            return encode_frame(frame)

        return encoded

    part = (
        struct.pack(">iiiii", 4 * 5 + len(BODY) + 2 + 7, 0, 0, 0, len(BODY))
        + BODY
        + struct.pack(">h", 7)
        + b"TAGS\x01a\x02"
    )
    return {
        "send": made(310, SEND, BODY),
        "batch": made(320, SEND | {"i": "", "m": "true"}, part * 32),
        "pull": made(11, PULL),
        "pull-tag": made(11, PULL | {"subscription": "a || b"}),
        "pop": made(200050, POP),
        "heartbeat": made(34, {}, HEARTBEAT),
    }


KINDS: Final = (
    "send-json",
    "send-binary",
    "batch-json",
    "pull-json",
    "pull-binary",
    "pull-tag-json",
    "pop-json",
    "heartbeat-json",
)


async def checked(reader: asyncio.StreamReader) -> None:
    from skylark.wire.framing import FrameDecoder

    size = await reader.readexactly(4)
    [answer] = FrameDecoder().feed(size + await reader.readexactly(int.from_bytes(size)))
    if answer.code:
        raise SystemExit(f"refused with {answer.code}: {answer.remark}")


async def serve_and_ask(kind: str, count: int, root: Path) -> None:
    from skylark.broker.app import Broker
    from skylark.broker.config import from_mapping
    from skylark.net import connection

    # Under valgrind a turn of the loop takes fifty times as long, and a host would use up its part of it.
    vars(connection)["perf_counter"] = repeat(0.0).__next__
    name, _, encoding = kind.rpartition("-")
    made = requests()
    settings = {
        "brokerName": "broker-a",
        "storePathRootDir": str(root),
        "mappedFileSizeCommitLog": str(64 << 20),
        "autoCreateTopicEnable": "true",
    }
    broker = Broker(from_mapping(settings, source="bench"))
    port = await broker.start(HOST, 0)
    reader, writer = await asyncio.open_connection(HOST, port)

    async def ask(each: bytes, times: int) -> None:
        writer.write(each)
        await checked(reader)
        for begun in range(1, times, AT_ONCE):
            together = min(times - begun, AT_ONCE)
            writer.write(each * together)
            for _ in range(together):
                await reader.readexactly(int.from_bytes(await reader.readexactly(4)))

    await ask(made["send"](False), 1)
    await ask(made["heartbeat"](False), 1)
    await ask(made["batch"](False), 1 if name != "pop" else MANY // 32 + 2)
    await ask(made[name](encoding == "binary"), count)
    writer.close()
    await broker.stop()


def run(kind: str, count: int, tree: Path, compiled: str, *before: str) -> str:
    """What a process says that handles so many requests, run under the program that stands before it."""
    with tempfile.TemporaryDirectory() as directory:
        own = {"PYTHONPATH": f"{tree / 'src'}:{ROOT}", "PYTHONHASHSEED": "0", "PYTHONPYCACHEPREFIX": compiled}
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | own
        command = [*before, sys.executable, "-m", "bench.instructions", "--run", f"{kind}:{count}:{directory}/store"]
        ran = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{kind} with {tree}:\n{ran.stderr}")
        return ran.stderr


def per_request(kind: str, tree: Path) -> float:
    with tempfile.TemporaryDirectory() as compiled:
        run(kind, FEW, tree, compiled)  # so that neither of the others compiles the sources
        few, many = (
            int(re.findall(r"Collected : (\d+)", run(kind, count, tree, compiled, *VALGRIND))[0])
            for count in (FEW, MANY)
        )
    return (many - few) / (MANY - FEW)


def report(kinds: Iterable[str], before: Path | None) -> None:
    for kind in kinds:
        now = per_request(kind, ROOT)
        if before is None:
            print(f"{kind:16}{now:12,.0f}", flush=True)
        else:
            then = per_request(kind, before)
            print(f"{kind:16}{then:12,.0f}{now:12,.0f}{100 * (now / then - 1):+8.1f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help="another checkout: before, now, change")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        kind, count, root = options.run.split(":", 2)
        asyncio.run(serve_and_ask(kind, int(count), Path(root)))
        return
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed")
    report(options.kinds or KINDS, options.against and options.against.resolve())


if __name__ == "__main__":
    main()
