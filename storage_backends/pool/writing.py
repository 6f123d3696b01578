"""One store: slots first, then the bytes, then the commit that makes an object visible.

All writes of a batch that go to one store get their slots by one request. A slot that was not
committed is given back when nothing writes to it any more. A slot belongs to the connection that it
was given on: it is written over the link of that one and no other, and while it is, that connection
is kept.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from xxhash import xxh3_64

from cacheflow.errors import BackendError, CacheFlowError, CapacityError
from cacheflow.kv import encode_header
from cacheflow.pool import Piece, messages
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.pool import Link
    from cacheflow.storage_backends.pool.guard import Guard
    from cacheflow.storage_backends.pool.peer import Peer
    from cacheflow.storage_backends.threads import IoThreads
    from cacheflow.types import Buffer, ObjectKey, Write

__all__ = ["Storing"]

_REQUEST_BYTES: Final = 4 << 20
"""Headers in one request, about."""


class _Place(NamedTuple):
    offset: int
    generation: int
    link: Link


class _Ended(NamedTuple):
    """How it went at one store."""

    status: TransferStatus
    error: CacheFlowError | None = None


class Storing:
    """``writes`` with their guards; ``route`` says which stores an object is to be in."""

    def __init__(
        self,
        writes: Sequence[Write],
        guards: Sequence[Guard],
        route: Callable[[ObjectKey], list[Peer]],
        threads: IoThreads,
        transfer_seconds: float,
    ) -> None:
        self._writes = writes
        self._guards = guards
        self._threads = threads
        self._seconds = transfer_seconds
        self._start = time.monotonic()
        self._routes = [route(write.info.key) for write in writes]
        self._groups: dict[Peer, list[int]] = {}
        for at, peers in enumerate(self._routes):
            for peer in peers:
                self._groups.setdefault(peer, []).append(at)
        self._opening: dict[Peer, asyncio.Task[dict[int, _Place | str]]] = {}
        self._committed: set[tuple[Peer, int]] = set()

    async def write(self, at: int) -> TransferResult:
        """The result of one write: OK if any store has it."""
        write = self._writes[at]
        peers = self._routes[at]
        if not peers:
            reason = "no store that should have it is up"
            error = BackendError(reason, operation="store", context="pool", is_temporary=True)
            return self._result(write, _Ended(TransferStatus.REFUSED, error))
        ends = await asyncio.gather(*(self._write_to(peer, at) for peer in peers))
        return self._result(write, min(ends, key=lambda ended: _RANK[ended.status]))

    async def aclose(self) -> None:
        """Nobody wants slots any more that were not given yet."""
        tasks = list(self._opening.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _write_to(self, peer: Peer, at: int) -> _Ended:
        try:
            place = await self._place(peer, at)
            if isinstance(place, str):
                return _refused(place)
            await self._transfer(peer, at, place)
            return await self._commit(peer, at, place)
        except BackendError as error:
            return _Ended(TransferStatus.FAILED, error)

    async def _transfer(self, peer: Peer, at: int, place: _Place) -> None:
        link = place.link
        if link is not peer.link:
            reason = "the connection is over that its slot was given on"
            raise BackendError(reason, operation="store", context=peer.name, is_temporary=True)
        pieces, offset = [], place.offset
        for buffer in self._guards[at].buffers:
            if buffer.nbytes:
                pieces.append(Piece(offset, place.generation, buffer))
            offset += buffer.nbytes
        try:
            await link.write(pieces, deadline=self._seconds)
            peer.delivered(link)
        except BackendError as error:
            peer.suspect_link(link, error)
            raise

    async def _commit(self, peer: Peer, at: int, place: _Place) -> _Ended:
        total = await self._checksum(at)
        request = messages.Commit(slots=((place.generation, total),))
        answer = await peer.ask(request, messages.CommitReply, is_work=True)
        self._committed.add((peer, place.generation))
        reason = "".join(answer.refused)
        if not reason:
            return _Ended(TransferStatus.OK)
        error = BackendError(reason, operation="store", context=peer.name, is_temporary=True)
        return _Ended(TransferStatus.FAILED, error)

    async def _checksum(self, at: int) -> int:
        guard = self._guards[at]
        guard.acquire()

        def work() -> int:
            try:
                return _digest(guard.buffers)
            finally:
                guard.release()

        total: int = await self._threads.run(work, guard.release)
        return total

    # -- slots ---------------------------------------------------------------------------------

    async def _place(self, peer: Peer, at: int) -> _Place | str:
        task = self._opening.get(peer)
        if task is None:
            task = self._opening[peer] = asyncio.create_task(self._open(peer))
            task.add_done_callback(_heard)
        return (await asyncio.shield(task)).get(at, "the store did not answer for it")

    async def _open(self, peer: Peer) -> dict[int, _Place | str]:
        places: dict[int, _Place | str] = {}
        connection, link = peer.connection()
        connection.hold()
        try:
            for batch in self._batches(self._groups[peer]):
                headers = tuple(header for _, header in batch)
                request, late = messages.Alloc(headers=headers), partial(_give_back, peer)
                answer = await peer.ask(request, messages.AllocReply, late, is_work=True)
                for (at, _), (offset, number, no) in zip(batch, answer.slots, strict=False):
                    places[at] = no or _Place(offset, number, link)
                    if not no:
                        connection.hold()
                        self._guards[at].when_over(partial(self._abandon, peer, number))
                        self._guards[at].when_over(connection.let_go)
        finally:
            connection.let_go()
        return places

    def _batches(self, group: Sequence[int]) -> list[list[tuple[int, bytes]]]:
        batches: list[list[tuple[int, bytes]]] = [[]]
        left = _REQUEST_BYTES
        for at in group:
            header = encode_header(self._writes[at].info)
            left -= len(header)
            if batches[-1] and (left < 0 or len(batches[-1]) == messages.BATCH):
                batches.append([])
                left = _REQUEST_BYTES - len(header)
            batches[-1].append((at, header))
        return batches

    def _abandon(self, peer: Peer, generation: int) -> None:
        if (peer, generation) not in self._committed:
            peer.abort([generation])

    def _result(self, write: Write, ended: _Ended) -> TransferResult:
        nbytes = write.nbytes if ended.status is TransferStatus.OK else 0
        seconds = time.monotonic() - self._start
        return TransferResult(write, ended.status, nbytes, seconds, ended.error)


_RANK: Final = {
    TransferStatus.OK: 0,
    TransferStatus.FULL: 1,
    TransferStatus.FAILED: 2,
    TransferStatus.REFUSED: 3,
}
"""Of the ends at several stores the first of these is that of the write."""


def _refused(reason: str) -> _Ended:
    if reason.startswith(("full", "busy")):
        return _Ended(TransferStatus.FULL, CapacityError(f"pool: {reason}"))
    error = BackendError(reason, operation="store", context="pool", is_temporary=True)
    is_passing = reason.startswith("draining")
    return _Ended(TransferStatus.REFUSED if is_passing else TransferStatus.FAILED, error)


def _digest(buffers: Sequence[Buffer]) -> int:
    digest = xxh3_64()
    for buffer in buffers:
        if buffer.view is not None:
            digest.update(buffer.view)
    return digest.intdigest()


def _give_back(peer: Peer, answer: messages.AllocReply) -> None:
    peer.abort([generation for _, generation, refusal in answer.slots if not refusal])


def _heard(task: asyncio.Task[dict[int, _Place | str]]) -> None:
    if not task.cancelled():
        task.exception()  # every write of the group hears of it
