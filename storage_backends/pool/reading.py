"""One load: leases first, then the bytes, then whether they can be believed.

What a lookup found is leased by it. Other reads of a batch that go to one store are leased by one
request; such a lease is given back when its transfer can touch nothing any more. A read that took
nearly as long as its lease is believed only if the store still has the same generation there.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from cacheflow.errors import BackendError
from cacheflow.kv import format_name
from cacheflow.pool import Piece, messages
from cacheflow.storage_backends.pool.channel import Refused
from cacheflow.types import Buffer, MemoryKind, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.pool import Link
    from cacheflow.storage_backends.pool.guard import Guard
    from cacheflow.storage_backends.pool.peer import Peer
    from cacheflow.storage_backends.pool.places import Place
    from cacheflow.types import ObjectKey, Read

__all__ = ["Loading"]


class Loading:
    """``reads`` with their guards; ``route`` says which stores may have an object, best first."""

    def __init__(
        self,
        reads: Sequence[Read],
        guards: Sequence[Guard],
        route: Callable[[ObjectKey], list[Peer]],
        transfer_seconds: float,
    ) -> None:
        self._reads = reads
        self._guards = guards
        self._seconds = transfer_seconds
        self._start = time.monotonic()
        self._routes = [route(read.key) for read in reads]
        self._known: list[Place | None] = []
        """Of each read where lookups have found it in its first store."""
        self._groups: dict[Peer, list[int]] = {}
        """Other reads, by their first store: those are leased together."""
        for at, peers in enumerate(self._routes):
            place = peers[0].places.find(reads[at].key) if peers else None
            if place is not None and not self._is_good(place, peers[0]):
                place = None
            self._known.append(place)
            if peers and place is None:
                self._groups.setdefault(peers[0], []).append(at)
        self._leasing: dict[Peer, asyncio.Task[dict[int, Place]]] = {}

    async def read(self, at: int) -> TransferResult:
        """The result of one read; an object that no store delivers is MISSING."""
        read = self._reads[at]
        error: BackendError | None = None
        place = self._known[at]
        for peer in self._routes[at]:
            try:
                result = await self._read_at(peer, at, place)
                if result is not None:
                    return result
            except BackendError as failure:
                error = failure
            place = None
            if self._guards[at].in_use:  # what failed may still write there
                return self._result(read, TransferStatus.LATE, 0, error)
        if not self._routes[at]:
            reason = "no store that should have it is up"
            error = BackendError(reason, operation="load", context="pool", is_temporary=True)
        return self._result(read, TransferStatus.MISSING, 0, error)

    async def _read_at(self, peer: Peer, at: int, known: Place | None) -> TransferResult | None:
        """From one store; None if it has it not."""
        key = self._reads[at].key
        place = known or peer.places.find(key)
        if place is not None and self._is_good(place, peer):
            try:
                return await self._read(peer, at, place)
            except Refused:  # it has been deleted or replaced since the lookup
                peer.places.forget(key)
        place = await self._place(peer, at)
        return None if place is None else await self._read(peer, at, place)

    @staticmethod
    def _is_good(place: Place, peer: Peer) -> bool:
        return place.link is peer.link and time.monotonic() < place.fresh_until

    async def aclose(self) -> None:
        """Nobody wants leases any more that were not given yet."""
        tasks = list(self._leasing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _read(self, peer: Peer, at: int, place: Place) -> TransferResult:
        read, guard = self._reads[at], self._guards[at]
        [buffer] = guard.buffers
        nbytes = max(0, min(buffer.nbytes, place.nbytes - read.offset))
        if nbytes:
            piece = Piece(place.offset + read.offset, place.generation, _first(buffer, nbytes))
            place.readers.append(guard)
            try:
                await self._transfer(peer, place.link, piece)
            finally:
                if not guard.in_use:
                    place.readers.remove(guard)
            if time.monotonic() >= place.sure_until:
                await self._confirm(peer, read, place)
        is_whole = nbytes == buffer.nbytes
        return self._result(read, TransferStatus.OK if is_whole else TransferStatus.SHORT, nbytes)

    async def _transfer(self, peer: Peer, link: Link | None, piece: Piece) -> None:
        if link is None:
            raise BackendError("the store is down", operation="load", context=peer.name)
        if piece.buffer.kind is MemoryKind.DEVICE and not peer.takes_device_memory:
            reason = "it is reached over a transport that takes host memory only"
            raise BackendError(reason, operation="load", context=peer.name, is_temporary=True)
        try:
            await link.read([piece], deadline=self._seconds)
        except Refused:
            raise  # the link works: the lease is over
        except BackendError as error:
            peer.suspect_link(link, error)
            raise
        peer.delivered(link)

    async def _confirm(self, peer: Peer, read: Read, place: Place) -> None:
        """Raises BackendError if the slot may have been used again while it was being read."""
        request = messages.Lease(names=(format_name(read.key),))
        answer = await peer.ask(request, messages.LeaseReply, partial(_give_back, peer))
        _give_back(peer, answer)
        if [slot[2] for slot in answer.slots if slot] != [place.generation]:
            reason = "its lease ended before the read did"
            raise BackendError(reason, operation="load", context=peer.name, is_temporary=True)

    # -- leases --------------------------------------------------------------------------------

    async def _place(self, peer: Peer, at: int) -> Place | None:
        group = self._groups.get(peer, ())
        if at not in group:  # another store than the first one failed: one by one
            return (await self._lease(peer, [at])).get(at)
        task = self._leasing.get(peer)
        if task is None:
            task = self._leasing[peer] = asyncio.create_task(self._lease(peer, list(group)))
            task.add_done_callback(_heard)
        place = (await asyncio.shield(task)).get(at)
        if place is None or self._is_good(place, peer):
            return place
        return (await self._lease(peer, [at])).get(at)  # it has waited long for its turn

    async def _lease(self, peer: Peer, group: list[int]) -> dict[int, Place]:
        places: dict[int, Place] = {}
        for first in range(0, len(group), messages.BATCH):
            batch = group[first : first + messages.BATCH]
            names = tuple(format_name(self._reads[at].key) for at in batch)
            link, asked = peer.link, time.monotonic()
            request, late = messages.Lease(names=names), partial(_give_back, peer)
            answer = await peer.ask(request, messages.LeaseReply, late, is_work=True)
            for at, slot in zip(batch, answer.slots, strict=False):
                if slot is not None:
                    places[at] = peer.place(slot, link, asked)
                    self._guards[at].when_over(partial(peer.release, slot[2], link))
        return places

    def _result(
        self,
        read: Read,
        status: TransferStatus,
        nbytes: int,
        error: BackendError | None = None,
    ) -> TransferResult:
        return TransferResult(read, status, nbytes, time.monotonic() - self._start, error)


def _give_back(peer: Peer, answer: messages.LeaseReply) -> None:
    for slot in answer.slots:
        if slot is not None:
            peer.release(slot[2], peer.link)


def _first(buffer: Buffer, nbytes: int) -> Buffer:
    if nbytes == buffer.nbytes:
        return buffer
    view = None if buffer.view is None else buffer.view[:nbytes]
    return Buffer(buffer.address, nbytes, buffer.kind, view, buffer.hold)


def _heard(task: asyncio.Task[dict[int, Place]]) -> None:
    if not task.cancelled():
        task.exception()  # every read of the group hears of it
