"""To one store: reads and writes as flights of the reactor, each with its deadline.

A deadline, or a caller who goes away, ends the waiting and nothing else: what has begun goes on,
and the memory that it touches is held until it has ended. What has not begun is taken back.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from cacheflow.errors import BackendError
from cacheflow.storage_backends.nixl.flights import Flight
from cacheflow.types import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.pool import Piece
    from cacheflow.storage_backends.nixl.agent import Range, Way
    from cacheflow.storage_backends.nixl.hello import Hello
    from cacheflow.storage_backends.nixl.memory import OurMemory
    from cacheflow.storage_backends.nixl.reactor import Reactor
    from cacheflow.types import Buffer, Hold

__all__ = ["NixlLink"]

_Done: TypeAlias = "asyncio.Future[BaseException | None]"
_Started: TypeAlias = tuple[Flight, _Done]


class NixlLink:
    """Made by the transport; ``closed`` is called once, when it is not to be used any more."""

    def __init__(
        self,
        peer: str,
        hello: Hello,
        reactor: Reactor,
        memory: OurMemory,
        closed: Callable[[], None],
    ) -> None:
        self._peer: Final = peer
        self._hello: Final = hello
        self._reactor = reactor
        self._memory = memory
        self._closed = closed
        self._is_closed = False
        self._is_broken = False
        """A transfer failed: NIXL's connections do not come back by themselves."""

    async def read(self, pieces: Sequence[Piece], *, deadline: float) -> None:
        await self._move("READ", pieces, deadline)

    async def write(self, pieces: Sequence[Piece], *, deadline: float) -> None:
        await self._move("WRITE", pieces, deadline)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._closed()

    async def _move(self, way: Way, pieces: Sequence[Piece], deadline: float) -> None:
        self._check(way, pieces)
        try:
            if all(map(self._is_ready, pieces)):
                await self._move_ready(way, pieces, deadline)
                return
            for piece in pieces:
                piece.buffer.hold.acquire()
            try:
                async with asyncio.timeout(deadline):
                    await self._move_all(way, pieces)
            finally:
                for piece in pieces:
                    piece.buffer.hold.release()
        except TimeoutError:
            raise self._error(way, f"not there after {deadline:.3g} s") from None

    def _is_ready(self, piece: Piece) -> bool:
        return self._memory.is_registered(piece.buffer)

    def _check(self, way: Way, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if not 0 <= piece.offset <= self._hello.nbytes - piece.buffer.nbytes:
                raise ValueError(
                    f"{piece.buffer.nbytes} bytes at {piece.offset} are not in an arena of "
                    f"{self._hello.nbytes}"
                )
        if self._is_closed:
            raise self._error(way, "the link was closed")
        if self._is_broken:
            raise self._error(way, "the connection broke")

    async def _move_ready(self, way: Way, pieces: Sequence[Piece], deadline: float) -> None:
        """All of it lies in registered memory: flights and a timer are enough.

        Raises:
            TimeoutError: the deadline has passed.
        """
        flights = self._all_direct(way, pieces)
        timer = asyncio.get_running_loop().call_later(deadline, _late, flights)
        try:
            for _, done in flights:
                if (error := await done) is not None:
                    self._judge(way, error)
        finally:
            timer.cancel()
            for flight, _ in flights:
                self._reactor.withdraw(flight)

    async def _move_all(self, way: Way, pieces: Sequence[Piece]) -> None:
        """What lies in registered memory at once, in one flight a kind; then the rest by slab."""
        if any(self._is_strange_device(piece.buffer) for piece in pieces):
            # The thread does things in their order: what was to be registered before this is then.
            await self._reactor.call(lambda agent: None)
        rest: list[Piece] = []
        ready: list[Piece] = []
        for piece in pieces:
            (ready if self._is_ready(piece) else rest).append(piece)
        flights = self._all_direct(way, ready)
        try:
            for piece in rest:
                await self._by_slab(way, piece)
            for _, done in flights:
                self._judge(way, await done)
        finally:
            for flight, _ in flights:
                self._reactor.withdraw(flight)

    def _is_strange_device(self, buffer: Buffer) -> bool:
        return buffer.kind is MemoryKind.DEVICE and not self._memory.is_registered(buffer)

    def _all_direct(self, way: Way, pieces: Sequence[Piece]) -> list[_Started]:
        """A flight for each kind of memory among ``pieces``."""
        if len(pieces) == 1:
            return [self._direct(way, pieces[0].buffer.kind, pieces)]
        kinds: dict[MemoryKind, list[Piece]] = {}
        for piece in pieces:
            kinds.setdefault(piece.buffer.kind, []).append(piece)
        return [self._direct(way, kind, group) for kind, group in kinds.items()]

    def _direct(self, way: Way, kind: MemoryKind, group: Sequence[Piece]) -> _Started:
        arena = self._hello.address
        ours, theirs, holds = [], [], []
        for piece in group:
            buffer = piece.buffer
            ours.append((buffer.address, buffer.nbytes))
            theirs.append((arena + piece.offset, buffer.nbytes))
            holds.append(buffer.hold)
        return self._fly(way, ours, theirs, holds, kind=kind)

    async def _by_slab(self, way: Way, piece: Piece) -> None:
        buffer = piece.buffer
        if self._is_strange_device(buffer):
            raise ValueError(
                "device memory has to be registered first (register_memory); if it was, the log "
                "says why NIXL did not take it"
            )
        for at in range(0, buffer.nbytes, self._memory.part_bytes):
            nbytes = min(self._memory.part_bytes, buffer.nbytes - at)
            stop = await self._memory.stopover(self._peer, nbytes)
            flight, done = self._fly(
                way,
                [(stop.buffer.address, nbytes)],
                [(self._hello.address + piece.offset + at, nbytes)],
                [stop.buffer.hold, buffer.hold],
                before=stop.copy_from(buffer.address + at) if way == "WRITE" else None,
                after=stop.copy_to(buffer.address + at) if way == "READ" else None,
            )
            try:
                self._judge(way, await done)
            finally:
                self._reactor.withdraw(flight)
                stop.release()

    def _fly(
        self,
        way: Way,
        ours: Sequence[Range],
        theirs: Sequence[Range],
        holds: Sequence[Hold],
        *,
        kind: MemoryKind = MemoryKind.PAGEABLE,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> _Started:
        done: _Done = asyncio.get_running_loop().create_future()
        flight = Flight(
            way,
            self._peer,
            ours,
            theirs,
            holds,
            told=partial(_resolve, done),
            kind=kind,
            before=before,
            after=after,
        )
        self._reactor.submit(flight)
        return flight, done

    def _judge(self, way: Way, error: BaseException | None) -> None:
        if error is None:
            return
        if isinstance(error, TimeoutError):  # of ours: the transfer goes on
            raise error
        self._is_broken = True
        if isinstance(error, BackendError):
            raise self._error(way, str(error.args[0])) from None
        raise error

    def _error(self, way: Way, what: str) -> BackendError:
        operation = "load" if way == "READ" else "store"
        return BackendError(
            f"NIXL: {what}", operation=operation, context=self._peer, is_temporary=True
        )


def _late(flights: Sequence[_Started]) -> None:
    """Whoever waits for them does so no longer."""
    for _, done in flights:
        _resolve(done, TimeoutError())


def _resolve(done: _Done, error: BaseException | None) -> None:
    if not done.done():
        done.set_result(error)
