"""Record golden bytes: real frames and real store files of Apache RocketMQ, kept in tests/golden.

Starts Apache's name server and broker from a directory of jars, puts a recording TCP proxy in front of both, drives
them with tests/golden/Traffic.java (Apache's Java client and admin tools) once per header encoding, and keeps one
frame of every shape it sees. The servers listen on 127.0.0.1 and advertise 127.0.0.2, where the proxy listens on the
same ports: everybody who follows a route passes through the proxy and no byte has to be rewritten.

    python tools/record_golden.py --jars DIRECTORY_WITH_APACHES_JARS

The header reader here is deliberately not skylark.wire's: the bytes must not be selected by the code they test.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import socket
import struct
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
REAL, ADVERTISED = "127.0.0.1", "127.0.0.2"
NAMESRV_PORT, BROKER_PORT = 17876, 17911
FRAME_LIMIT_BYTES = 24 * 1024
SEGMENT_BYTES = 4 * 1024
INDEX_SLOTS, INDEX_ENTRIES = 64, 256
INDEX_FILE_BYTES = 40 + INDEX_SLOTS * 4 + INDEX_ENTRIES * 20
TABLES = ("topics.json", "subscriptionGroup.json", "consumerOffset.json", "delayOffset.json")


@dataclass
class Header:
    code: int
    opaque: int
    flag: int
    fields: dict[str, str]
    body_bytes: int

    @property
    def is_response(self) -> bool:
        return bool(self.flag & 1)

    @property
    def is_one_way(self) -> bool:
        return bool(self.flag & 2)


def read_header(frame: bytes) -> Header:
    marked = struct.unpack_from(">I", frame, 4)[0]
    size, data = marked & 0xFFFFFF, frame[8 : 8 + (marked & 0xFFFFFF)]
    body_bytes = len(frame) - 8 - size
    if marked >> 24 == 0:
        header = json.loads(data)
        return Header(header["code"], header["opaque"], header["flag"], header.get("extFields") or {}, body_bytes)
    code, _language, _version, opaque, flag, remark_bytes = struct.unpack_from(">hBhiii", data)
    at = 17 + remark_bytes + 4
    fields: dict[str, str] = {}
    while at < size:
        key_bytes = struct.unpack_from(">h", data, at)[0]
        key = data[at + 2 : at + 2 + key_bytes].decode()
        at += 2 + key_bytes
        value_bytes = struct.unpack_from(">i", data, at)[0]
        fields[key] = data[at + 4 : at + 4 + value_bytes].decode()
        at += 4 + value_bytes
    return Header(code, opaque, flag, fields, body_bytes)


@dataclass
class Sample:
    """The first frame of a shape and the one with the largest body."""

    header: Header
    asked: int
    first: bytes
    largest: bytes
    largest_body_bytes: int


@dataclass
class Recording:
    samples: dict[tuple[object, ...], Sample] = field(default_factory=dict)

    def see(self, frame: bytes, header: Header, asked: int) -> None:
        if len(frame) > FRAME_LIMIT_BYTES:
            return
        shape = (asked, header.code, header.flag, frozenset(header.fields), header.body_bytes > 0)
        sample = self.samples.get(shape)
        if sample is None:
            self.samples[shape] = Sample(header, asked, frame, frame, header.body_bytes)
        elif header.body_bytes > sample.largest_body_bytes:
            sample.largest, sample.largest_body_bytes = frame, header.body_bytes

    def lines(self, names: dict[tuple[str, int], str]) -> list[dict[str, object]]:
        seen: Counter[str] = Counter()
        lines = []
        for sample in self.samples.values():
            request = names.get(("request", sample.asked), str(sample.asked)).lower()
            if sample.header.is_response:
                name = f"{request}.response.{names.get(('response', sample.header.code), sample.header.code)}".lower()
            else:
                name = f"{request}.{'oneway' if sample.header.is_one_way else 'request'}"
            for frame in dict.fromkeys((sample.first, sample.largest)):
                seen[name] += 1
                numbered = name if seen[name] == 1 else f"{name}.{seen[name]}"
                direction = "response" if sample.header.is_response else "request"
                lines.append({"name": numbered, "direction": direction, "code": sample.header.code, "hex": frame.hex()})
        return lines


class Tap:
    """One proxied connection: passes bytes on unchanged and cuts frames out of a copy."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.asked: dict[tuple[bool, int], int] = {}

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_client: bool) -> None:
        buffer = b""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                buffer = self.cut(buffer + data, from_client)
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self, buffer: bytes, from_client: bool) -> bytes:
        while len(buffer) >= 4 and len(buffer) >= (end := 4 + struct.unpack_from(">I", buffer)[0]):
            frame, buffer = buffer[:end], buffer[end:]
            header = read_header(frame)
            if header.is_response:
                asked = self.asked.pop((not from_client, header.opaque), -1)
            else:
                asked = header.code
                self.asked[from_client, header.opaque] = header.code
            self.recording.see(frame, header, asked)
        return buffer


async def proxy(port: int, recording: Recording) -> asyncio.Server:
    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(REAL, port)
        except ConnectionError:
            writer.close()
            return
        tap = Tap(recording)
        await asyncio.gather(
            tap.pump(reader, upstream_writer, from_client=True),
            tap.pump(upstream_reader, writer, from_client=False),
        )

    return await asyncio.start_server(accepted, ADVERTISED, port)


class Apache:
    """Apache's processes, run in a scratch directory with relative paths, so that no answer contains a machine's."""

    def __init__(self, jars: Path, scratch: Path, encoding: str) -> None:
        self.scratch = scratch
        self.options = [
            *("-Xmx512m", "-XX:TieredStopAtLevel=1", f"-Drocketmq.serialize.type={encoding}"),
            *("-Duser.home=home", "-Drocketmq.home.dir=home", "-cp", f"{jars}/*"),
        ]
        self.running: list[asyncio.subprocess.Process] = []

    async def spawn(self, *arguments: str, options: tuple[str, ...] = ()) -> asyncio.subprocess.Process:
        command = ["java", *options, *self.options, *arguments]
        clean = {key: value for key, value in os.environ.items() if key not in ("NAMESRV_ADDR", "ROCKETMQ_HOME")}
        return await asyncio.create_subprocess_exec(
            *command, cwd=self.scratch, env=clean, stdout=asyncio.subprocess.PIPE
        )

    async def serve(self, main_class: str, settings: dict[str, object]) -> None:
        name = f"{main_class.rsplit('.', 1)[1]}.properties"
        (self.scratch / name).write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        process = await self.spawn(main_class, "-c", name)
        self.running.append(process)
        assert process.stdout is not None
        async with asyncio.timeout(120):
            while line := await process.stdout.readline():
                if b"boot success" in line:
                    return
                sys.stderr.write(line.decode())
        raise SystemExit(f"{main_class} did not start")

    async def client(self, *arguments: str, options: tuple[str, ...] = ()) -> str:
        process = await self.spawn(str(GOLDEN / "Traffic.java"), *arguments, options=options)
        try:
            async with asyncio.timeout(400):
                output = (await process.communicate())[0].decode()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise SystemExit(f"Traffic {arguments} failed:\n{output}")
        return output

    async def stop(self) -> None:
        for process in reversed(self.running):
            process.terminate()
            await process.wait()


BROKER_SETTINGS: dict[str, object] = {
    "brokerClusterName": "golden-cluster",
    "brokerName": "broker-a",
    "brokerIP1": ADVERTISED,
    "brokerIP2": REAL,
    "bindAddress": REAL,
    "listenPort": BROKER_PORT,
    "haListenPort": BROKER_PORT + 1,
    "namesrvAddr": f"{ADVERTISED}:{NAMESRV_PORT}",
    "storePathRootDir": "store",
    "autoCreateTopicEnable": "true",
    "mappedFileSizeCommitLog": SEGMENT_BYTES,
    "maxHashSlotNum": INDEX_SLOTS,
    "maxIndexNum": INDEX_ENTRIES,
}


async def record(jars: Path, scratch: Path, encoding: str) -> tuple[list[dict[str, object]], Path]:
    (scratch / "home").mkdir(parents=True)
    apache = Apache(jars, scratch, encoding)
    recording = Recording()
    proxies = [await proxy(port, recording) for port in (NAMESRV_PORT, BROKER_PORT)]
    namesrv, broker = f"{ADVERTISED}:{NAMESRV_PORT}", f"{ADVERTISED}:{BROKER_PORT}"
    names = dict[tuple[str, int], str]()
    for line in (await apache.client("names")).splitlines():
        kind, number, name = line.split()
        names.setdefault((kind, int(number)), name)
    try:
        listen = {"listenPort": NAMESRV_PORT, "bindAddress": REAL}
        await apache.serve("org.apache.rocketmq.namesrv.NamesrvStartup", listen)
        await apache.serve("org.apache.rocketmq.broker.BrokerStartup", BROKER_SETTINGS)
        sys.stderr.write(await apache.client("rich", namesrv, broker))
        await apache.client("plain", namesrv, options=("-Dorg.apache.rocketmq.client.sendSmartMsg=false",))
    finally:
        await apache.stop()
        for server in proxies:
            server.close()
    return recording.lines(names), scratch / "store"


def private_words(scratch: Path) -> list[bytes]:
    """What would tell where the recording was made: names, paths, and addresses as text and as in message keys."""
    addresses = {(family, str(where[0])) for family, _, _, _, where in socket.getaddrinfo(socket.gethostname(), None)}
    outside = [(family, address) for family, address in addresses if not address.startswith(("127.", "::1", "fe80"))]
    words = [str(scratch), str(Path.home()), socket.gethostname(), *(address for _, address in outside)]
    words += [socket.inet_pton(family, address).hex().upper() for family, address in outside]
    # Shorter names, such as a machine called vm, are part of too many other words.
    return [word.encode() for word in words if len(word) > 4]


def reject_private(data: bytes, scratch: Path, where: str) -> None:
    for word in private_words(scratch):
        if word in data:
            raise SystemExit(f"{where} contains {word!r}")


def write_frames(path: Path, lines: list[dict[str, object]], scratch: Path) -> None:
    for line in lines:
        reject_private(bytes.fromhex(str(line["hex"])), scratch, str(line["name"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{path.name}: {len(lines)} frames, {path.stat().st_size} bytes")


def copy_store(source: Path, target: Path, scratch: Path) -> None:
    """Keep what was written and drop the zeros that fixed-size files end with; full log segments stay whole."""
    shutil.rmtree(target, ignore_errors=True)
    segments = sorted((source / "commitlog").iterdir())
    queues = (source / "consumequeue").rglob("[0-9]" * 20)
    tables = [source / "checkpoint", *(source / "config" / name for name in TABLES)]
    for path in [*segments, *queues, *(source / "index").iterdir(), *tables]:
        data = path.read_bytes()
        if path.parent.name == "index":
            data = data[:INDEX_FILE_BYTES]
        elif path in segments:
            data = log_prefix(data)
        elif "consumequeue" in path.parts:
            data = queue_prefix(data)
        if not data.strip(b"\0"):
            continue
        reject_private(data, scratch, path.name)
        kept = target / path.relative_to(source)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(data)
    layout = {"segment_bytes": SEGMENT_BYTES, "index_slots": INDEX_SLOTS, "index_entries": INDEX_ENTRIES}
    (target / "layout.json").write_text(json.dumps(layout) + "\n")
    print(f"store: {sum(path.stat().st_size for path in target.rglob('*') if path.is_file())} bytes")


def log_prefix(data: bytes) -> bytes:
    end = 0
    while end + 4 <= len(data) and (size := struct.unpack_from(">I", data, end)[0]):
        end += size
    return data[:end]


def queue_prefix(data: bytes) -> bytes:
    end = 0
    while end + 20 <= len(data) and struct.unpack_from(">I", data, end + 8)[0]:
        end += 20
    return data[:end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jars", type=Path, required=True, help="Apache RocketMQ 5.5.0's jars with their dependencies")
    jars = parser.parse_args().jars.resolve()
    for encoding in ("json", "rocketmq"):
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            lines, store = asyncio.run(record(jars, scratch, encoding.upper()))
            write_frames(GOLDEN / f"frames_{encoding}.jsonl", lines, scratch)
            if encoding == "json":
                copy_store(store, GOLDEN / "store", scratch)


if __name__ == "__main__":
    main()
