"""The process of one filter class, from the side of the server that feeds it.

A process that takes too long, eats too much or dies is killed and forgotten; `FilterClass` (in `classes`) decides when
to start the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

import skylark
from skylark.filterserver.child import LENGTH, Order, Verdict

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES: Final = 1 << 20
_START_S: Final = 20.0  # for an interpreter to start on a busy machine, before the class's own time begins


class ClassFailed(Exception):
    """The class can't decide; the text says why."""


class Worker:
    """A running process that holds one class."""

    def __init__(self, process: asyncio.subprocess.Process, order: Order) -> None:
        self._process = process
        self._order = order
        self._is_killed = False  # which the event loop notices a moment later

    @classmethod
    async def start(cls, order: Order) -> Worker:
        """Returns when the class is loaded. Raises ClassFailed."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-B", "-m", "skylark.filterserver.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            # Nothing of this server's environment: it may hold secrets.
            env={"PYTHONPATH": str(Path(skylark.__file__).parents[1]), "LANG": os.environ.get("LANG", "C.UTF-8")},
        )
        worker = cls(process, order)
        try:
            await worker._ask(msgspec.msgpack.encode(order), order.timeout_s + _START_S)
        except BaseException:
            await worker.stop()
            raise
        return worker

    async def judge(self, records: bytes) -> list[bool]:
        """Whether each of the records matches. Raises ClassFailed; the worker may be dead then."""
        return (await self._ask(records, self._order.timeout_s)).matches

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._is_killed

    def kill(self) -> None:
        if self.is_alive:
            self._is_killed = True
            # Not `Process.kill`: it looks first whether the process has ended, and so may take the status away from the
            # event loop, which then reports 255.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Returns when the process is gone."""
        self.kill()
        await self._process.wait()

    async def _ask(self, data: bytes, timeout_s: float) -> Verdict:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        name = self._order.class_name
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(LENGTH.pack(len(data)) + data)
                await stdin.drain()
                (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
                if size > MAX_ANSWER_BYTES:
                    raise ClassFailed(f"{name} gives an answer of {size} bytes")
                verdict = msgspec.msgpack.decode(await stdout.readexactly(size), type=Verdict)
        except TimeoutError:
            self.kill()
            raise ClassFailed(f"{name} did not decide within {timeout_s:g} s, and was stopped") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.stop()
            raise ClassFailed(
                f"the process of {name} ended by itself, with status {self._process.returncode}; "
                f"it may use {self._order.memory_bytes >> 20} MiB"
            ) from None
        except asyncio.CancelledError:
            self.kill()  # the answer that nobody waits for any more must not be taken for the next one's
            raise
        except (ClassFailed, msgspec.DecodeError) as e:
            self.kill()
            raise ClassFailed(f"{name} broke the conversation: {e}") from None
        if verdict.error:
            raise ClassFailed(verdict.error)
        return verdict
