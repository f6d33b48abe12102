"""Asks a broker and its name server everything that they answer, with every field at its limits; see `main`.

What goes wrong is a complaint: a request without an answer, an answer that tells of an internal error or has a number
that Java has not, a traceback in the log, memory that is kept, or something that is not there after a restart.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from broker.live import DEADLINE_S, Live, live_broker, messages_of
from faults.furnished import KEPT, SETTINGS, everything, furnish, of_static
from faults.requests_of_all_kinds import BROKER, INTS, LARGE, NAME_SERVER, Asked, Kind, requests
from skylark.broker import config as broker_config
from skylark.form import is_compiled
from skylark.nameserver import config as name_server_config
from skylark.net.connection import INTERNAL_ERROR, MAX_HEADER_BYTES
from skylark.net.pool import Pool, split_address
from skylark.wire.bodies import Heartbeat, encode_body
from skylark.wire.codes import NAME_SERVER_CODES, RequestCode, ResponseCode
from skylark.wire.frame import MAX_FRAME_BYTES, Encoding, Frame
from skylark.wire.framing import encode_frame
from skylark.wire.numbers import LONG_MAX, LONG_MIN

AT_ONCE = 64
_CLASS_NAME = re.compile(r"\b[A-Z]\w+(?:Error|Exception)\b(?!>)")
# A request that waits for messages may wait for ever then, so it is not waited for.
_WAITS = ("pollTime", "bornTime", "suspendTimeoutMillis")
_UNANSWERED = {(RequestCode.END_TRANSACTION, f"commitOrRollback {INTS.index(0)}")}
"""A producer that does not know yet gets no answer, as Apache does it."""
_FOUND_OR_NOT = {
    "POP_MESSAGE": {ResponseCode.SUCCESS, ResponseCode.POLLING_TIMEOUT},
    "PEEK_MESSAGE": {ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND},
}
"""What was popped for no time comes back when the broker looks next: which request finds it depends on the machine."""
_KEPT_BYTES = 4 << 20


class Clock:
    """The time stands still until it is moved."""

    def __init__(self) -> None:
        self.now_ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now_ms


class Tracebacks(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(f"{record.name}: {record.getMessage()[:300]}: {record.exc_info[1]!r}"[:600])


class Walk:
    def __init__(self, broker: Live) -> None:
        self.broker = broker
        self.complaints: list[str] = []
        self.answers: dict[str, str] = {}
        self._pool = Pool(connect_timeout_s=DEADLINE_S)
        self._patient = Pool(connect_timeout_s=DEADLINE_S)
        self._waiting: list[asyncio.Future[Frame]] = []

    async def close(self) -> None:
        """Leaves as a client does that goes away."""
        self._patient.close()
        self._pool.close()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        self._waiting.clear()
        await self.broker.ask(RequestCode.GET_BROKER_CONFIG)
        self._pool, self._patient = Pool(connect_timeout_s=DEADLINE_S), Pool(connect_timeout_s=DEADLINE_S)

    async def ask_all(self, where: str, address: str, kinds: dict[int, Kind], *, only_large: bool = False) -> None:
        for code, kind in kinds.items():
            some = list(requests(code, kind, only_large=only_large))
            at_once = [
                each for each in some if not each.what.startswith(_WAITS) and (code, each.what) not in _UNANSWERED
            ]
            await self.ask(f"{where} {RequestCode(code).name}", address, at_once)
            for asked in some:
                if asked.what.startswith(_WAITS):
                    self._waiting.append(asyncio.ensure_future(self._patient.request(address, asked.frame, DEADLINE_S)))

    async def ask(self, where: str, address: str, asked: Iterable[Asked]) -> None:
        todo = list(asked)
        for start in range(0, len(todo), AT_ONCE):
            some = todo[start : start + AT_ONCE]
            answers = await asyncio.gather(
                *(self._pool.request(address, each.frame, DEADLINE_S) for each in some), return_exceptions=True
            )
            for each, answer in zip(some, answers, strict=True):
                self._note(f"{where} {each.what}", answer)

    def _note(self, where: str, answer: Frame | BaseException) -> None:
        if isinstance(answer, BaseException):
            self.complaints.append(f"{where}: {answer!r}")
            return
        remark = answer.remark or ""
        told = re.sub(r"[0-9]+", "#", remark)[:300]  # offsets and ports differ from run to run
        by_chance = answer.code in _FOUND_OR_NOT.get(where.split()[1], ())
        found = "some or none" if by_chance else f"{answer.code} {told} {bool(answer.body)}"
        self.answers[where] = f"{found} {sorted(answer.fields)}"
        if remark == INTERNAL_ERROR or _CLASS_NAME.search(remark):
            self.complaints.append(f"{where}: {remark[:300]}")
        for name, value in answer.fields.items():
            if re.fullmatch(r"-?[0-9]+", value) and not LONG_MIN <= int(value) <= LONG_MAX:
                self.complaints.append(f"{where}: {name} is {value}")


def of_settings(settings: Iterable[str], code: int, current: bytes) -> Iterable[Asked]:
    """Every setting with values at its limits, and with its own in between."""
    own = dict(line.split("=", 1) for line in current.decode().splitlines() if "=" in line)
    for number, text in enumerate((LARGE, f"{LARGE}=1", "a\\\n" * (5 << 20), "=\n" * (5 << 20))):
        yield Asked(f"settings {number}", Frame(code, {}, text.encode()))
    for key in sorted(settings):
        for number, value in enumerate((-(2**31), 2**31, 10**30, -1, 0, "", "\0")):
            yield Asked(f"{key} {number}", Frame(code, {}, f"{key}={value}\n".encode()))
            yield Asked(f"{key} as it was", Frame(code, {}, f"{key}={own.get(key, '')}\n".encode()))


def of_other_servers(codes: Iterable[int]) -> Iterable[Asked]:
    for code in (*sorted(codes), -1, 0, 32767, -32768):
        yield Asked(f"{code}", Frame(code, {"text": "text"}, b"text", encoding=Encoding.BINARY))
    for code in (2**31 - 1, -(2**31)):
        yield Asked(f"{code}", Frame(code))


def of_16_mib() -> Iterable[Asked]:
    """The largest frames that there may be."""
    text = "x" * (MAX_FRAME_BYTES - 4096)
    yield Asked("16 MiB: client id", Frame(RequestCode.HEART_BEAT, {}, encode_body(Heartbeat(client_id=text))))
    yield Asked("16 MiB: body", Frame(RequestCode.UPDATE_BROKER_CONFIG, {}, text.encode()))
    for encoding in Encoding:
        header = of_text("x" * (MAX_HEADER_BYTES + 1), encoding)
        yield Asked(f"{MAX_HEADER_BYTES} bytes of header: {encoding.name}", header)


def of_text(text: str, encoding: Encoding) -> Frame:
    return Frame(RequestCode.GET_MAX_OFFSET, {"topic": text, "queueId": "0"}, encoding=encoding)


def too_large() -> Iterable[bytes]:
    """What costs a connection: a frame that is too long, and headers of 16 MiB."""
    yield (MAX_FRAME_BYTES + 1).to_bytes(4, "big")
    for encoding in Encoding:
        yield encode_frame(of_text("x" * (MAX_FRAME_BYTES - 4096), encoding))


async def end_of(address: str, data: bytes) -> bytes:
    """What comes before the connection is closed on which that was sent."""
    reader, writer = await asyncio.open_connection(*split_address(address))
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def heap_bytes() -> int:
    """What is allocated now, in small pieces and in large ones."""

    class Info(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t) for name in "arena blocks small maps mapped used free taken left keep".split()
        ]

    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info
    info = mallinfo()
    return int(info.mapped + info.taken) + 64 * sys.getallocatedblocks()


def missing_codes(broker: Live) -> list[str]:
    """The codes that a server has a handler for and this test no request."""
    assert broker._broker is not None
    ours = set(broker._broker._server._handlers) - NAME_SERVER_CODES
    missing = ours - set(BROKER) - {known & 0xFFFF for known in BROKER}  # some have a short code as well
    return [f"there is no request of code {code}" for code in sorted(missing | (NAME_SERVER_CODES - set(NAME_SERVER)))]


def differing(was: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in was.keys() | now.keys():
            yield from differing(was.get(key), now.get(key), f"{where}.{key}")
    elif was != now:
        yield f"{where} was {was!r:.300}, and after a restart is {now!r:.300}"


async def ask_everything(this: Walk, broker: Live, kinds: dict[int, Kind]) -> None:
    await this.ask_all("name server", broker.namesrv, NAME_SERVER)
    await this.ask_all("broker", broker.address, kinds)
    await this.ask_all("static", broker.address, of_static(kinds))
    config = (await broker.ask(RequestCode.GET_BROKER_CONFIG)).body
    settings = of_settings(broker_config.UPDATABLE_KEYS, RequestCode.UPDATE_BROKER_CONFIG, config)
    await this.ask("broker", broker.address, settings)
    config = (await broker.pool.request(broker.namesrv, Frame(RequestCode.GET_NAMESRV_CONFIG), DEADLINE_S)).body
    settings = of_settings(name_server_config.UPDATABLE_KEYS, RequestCode.UPDATE_NAMESRV_CONFIG, config)
    await this.ask("name server", broker.namesrv, settings)
    await this.ask("broker", broker.address, of_other_servers(NAME_SERVER_CODES))
    await this.ask("name server", broker.namesrv, of_other_servers(BROKER))
    for where, address in (("broker", broker.address), ("name server", broker.namesrv)):
        for data in too_large():
            assert await end_of(address, data) == b""
        for asked in of_16_mib():
            await this.ask(where, address, [asked])


async def look_for_growth(this: Walk, broker: Live, kinds: dict[int, Kind]) -> None:
    """What the largest values leave behind when their client has gone, the second time that they come."""
    sizes = []
    for _ in range(2):
        await this.ask_all("large: name server", broker.namesrv, NAME_SERVER, only_large=True)
        await this.ask_all("large: broker", broker.address, kinds, only_large=True)
        await this.close()
        sizes.append(heap_bytes())
    if sizes[1] - sizes[0] > _KEPT_BYTES:
        this.complaints.append(f"memory is kept: {sizes}")


async def walk(root: Path) -> dict[str, Any]:
    log = Tracebacks()
    logging.getLogger().addHandler(log)
    clock = Clock()
    async with live_broker(root, clock, **SETTINGS) as broker:
        this = Walk(broker)
        this.complaints += missing_codes(broker)
        kinds, member = await furnish(broker)
        await ask_everything(this, broker, kinds)
        answers = dict(this.answers)
        await look_for_growth(this, broker, kinds)
        member.close()
        before = await everything(broker)
    async with live_broker(root, clock, **SETTINGS) as broker:
        after = await everything(broker)
        this.complaints += differing(before, after, "")
        clock.now_ms += 60_000
        for queue_id, body in ((1, b"delayed"), (2, b"timer")):
            while (answer := await broker.pull(KEPT, 0, queueId=queue_id, wait_ms=10_000)).code != 0:
                pass
            assert [message.body for message in messages_of(answer)] == [body]
    this.complaints += [f"traceback: {each}" for each in log.found]
    return {"compiled": is_compiled(), "answers": answers, "complaints": this.complaints}


def main() -> None:
    """Prints what was found as JSON."""
    random.seed(0)  # a pop begins at any queue
    print(json.dumps(asyncio.run(walk(Path(sys.argv[1])))))


if __name__ == "__main__":
    main()
