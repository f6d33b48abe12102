"""A network between two servers of a test, which can hold back what is sent, or lose it, and tell nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skylark.net.pool import split_address


class _Link:
    def __init__(self) -> None:
        self.is_cut = False
        self.far: asyncio.StreamWriter | None = None


class Relay:
    """Passes connections on to a server, until they are cut."""

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self._links: list[_Link] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.address = ""

    @property
    def dials(self) -> int:
        """How many connections there were."""
        return len(self._links)

    def pause(self) -> None:
        """Holds everything back, as if the server hung: it can be dialled and does not answer."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self, *, is_noticed: bool = True) -> None:
        """From now on, the connections of now lead nowhere. Who dialled is not told; the server may notice it."""
        for link in self._links:
            link.is_cut = True
            if is_noticed and link.far is not None:
                link.far.transport.abort()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link()
        self._links.append(link)
        try:
            far_reader, link.far = await asyncio.open_connection(*self._target)
            await asyncio.gather(self._pass(reader, link.far, link), self._pass(far_reader, writer, link))
        except OSError:
            pass  # nobody is there, or not any more
        finally:
            writer.transport.abort()
            if link.far is not None:
                link.far.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
        try:
            while data := await reader.read(65_536):
                await self._flowing.wait()
                if not link.is_cut:
                    writer.write(data)
        except OSError:
            pass
        await self._flowing.wait()
        if link.is_cut:
            await asyncio.Event().wait()  # the other end is not told
        writer.close()


@asynccontextmanager
async def relay(target: str) -> AsyncIterator[Relay]:
    between = Relay(target)
    await between.start()
    try:
        yield between
    finally:
        await between.stop()
