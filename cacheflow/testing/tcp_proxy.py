"""A TCP proxy whose connections can be cut or swallowed, for tests of what lies behind a network.

Runs on a thread of its own, so that it goes on whatever the test's event loop does. To stand in
for a server that names its own ports, give it another address with the same ports.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["TcpProxy"]

_BLOCK: Final = 1 << 16
_SECONDS: Final = 10.0


class TcpProxy:
    """From ``host`` to ``target``, on each of ``ports``. Use it with ``with``; methods block."""

    def __init__(self, host: str, target: str, ports: Sequence[int]) -> None:
        self._host = host
        self._target = target
        self._ports = ports
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_SECONDS)
        self._loop.close()

    def swallow(self) -> None:
        """From now on nothing gets through, and nobody is told."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def pass_on(self) -> None:
        """Everything gets through again."""
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        """Reset every connection."""
        self._loop.call_soon_threadsafe(self._abort)

    def _run(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_SECONDS)

    async def _listen(self) -> None:
        self._open.set()
        self._servers = [
            await asyncio.start_server(lambda r, w, p=port: self._serve(r, w, p), self._host, port)  # type: ignore[misc]
            for port in self._ports
        ]

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        self._open.set()
        self._abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:  # they end by themselves: nothing is connected any more
            await asyncio.wait(tasks, timeout=_SECONDS / 2)

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        self._writers.add(writer)
        try:
            await self._open.wait()
            there = await asyncio.open_connection(self._target, port)
            self._writers.add(there[1])
            try:
                ways = (self._pump(reader, there[1]), self._pump(there[0], writer))
                await asyncio.gather(*ways)
            finally:
                self._writers.discard(there[1])
                there[1].transport.abort()
        except OSError:
            pass  # one of the two sides is gone: so is the other
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_BLOCK):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.transport.abort()  # an end in one direction is the end: nobody here half-closes
