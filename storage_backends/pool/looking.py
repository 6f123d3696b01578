"""What the stores of a pool have, asked side by side, and remembered as far as it stays true.

Stores that do not answer have nothing. Where several have an object, those count whose copy is
the very one that was listed. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from cacheflow.errors import BackendError
from cacheflow.pool import messages
from cacheflow.storage_backends.pool.headers import Headers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from cacheflow.pool import Link
    from cacheflow.storage_backends.flights import Flights
    from cacheflow.storage_backends.pool.headers import Listed
    from cacheflow.storage_backends.pool.members import Members
    from cacheflow.storage_backends.pool.peer import Peer
    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey

__all__ = ["Looking"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_MOST_PLACES: Final = 65536
"""Objects of which is remembered which stores have them."""
_SLICE: Final = 32
"""Chunks that are dealt with in one go: a millisecond, then others have the loop."""
_FEW: Final = 16
"""Headers that are decoded on the loop: less than a millisecond."""


class _Answer(NamedTuple):
    """What one store has."""

    peer: Peer
    found: dict[ChunkKey, list[ChunkInfo]]


class Looking:
    """Lookups over ``members``, as ``flights``. ``lacks`` is told of stores without an object that
    others have, and of these."""

    def __init__(
        self,
        members: Members,
        flights: Flights,
        lacks: Callable[[Peer, ChunkInfo, Sequence[Peer]], None] = lambda peer, info, others: None,
    ) -> None:
        self._members = members
        self._flights = flights
        self._lacks = lacks
        self._headers: dict[str, Headers] = {}
        self._places: OrderedDict[ObjectKey, tuple[str, ...]] = OrderedDict()

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        """See the contract."""
        asked: dict[Peer, list[ChunkKey]] = {}
        async for some in _slices(list(dict.fromkeys(keys))):
            for key in some:
                for peer in self._members.of(key.digest):
                    asked.setdefault(peer, []).append(key)
        works = [partial(self._lookup_at, peer, chunks) for peer, chunks in asked.items()]
        answers = [answer for answer in await self._flights.all(works) if answer is not None]
        found: list[Sequence[ChunkInfo]] = []
        async for some in _slices(keys):
            found += [self._merged(key, answers) for key in some]
        return found

    def route(self, key: ObjectKey) -> list[Peer]:
        """Stores that are up and may have the object."""
        names = self._places.get(key)
        if names is None:
            return self._members.of(key.chunk.digest)
        known = self._members.peers
        return [known[name] for name in names if name in known and known[name].is_up]

    async def has(self, peer: Peer, key: ObjectKey) -> bool:
        """Whether the store has the object, whichever version of it.

        Raises:
            BackendError: it does not answer.
        """
        request = messages.Lookup(chunks=(key.chunk.digest,), known=(), lease=False)
        answer = await peer.ask(request, messages.LookupReply)
        pairs = [(key.chunk, objects) for objects in answer.found[:1]]
        found = await _decoded(self.headers_of(peer), pairs)
        return any(listed.info.key == key for objects in found for listed in objects)

    def found_at(self, peer: Peer, key: ObjectKey) -> None:
        """The store has a copy too, from now on."""
        names = self._places.get(key)
        if names is not None and peer.name not in names:
            self._places[key] = (*names, peer.name)

    def changed(self, key: ObjectKey) -> None:
        """Somebody here has replaced or deleted it: what was known of it is out of date."""
        self._places.pop(key, None)
        for peer in self._members.peers.values():
            peer.places.forget(key)

    def headers_of(self, peer: Peer) -> Headers:
        """What is known of the store's objects, in this start of it."""
        instance = peer.hello.instance if peer.hello is not None else b""
        known = self._headers.get(peer.name)
        if known is None or known.instance != instance:
            known = self._headers[peer.name] = Headers(instance)
        return known

    async def _lookup_at(self, peer: Peer, chunks: Sequence[ChunkKey]) -> _Answer | None:
        """None if the store does not answer."""
        headers, found = self.headers_of(peer), {}
        at = 0
        while at < len(chunks):
            batch = chunks[at : at + messages.BATCH]
            digests, asked_at = tuple(chunk.digest for chunk in batch), time.monotonic()
            link = peer.link
            request = messages.Lookup(chunks=digests, known=headers.known(batch), lease=True)
            try:
                answer = await peer.ask(request, messages.LookupReply)
            except BackendError as error:
                _log.debug("store %s: lookup: %s", peer.name, error)
                return None
            if not 0 < len(answer.found) <= len(batch):
                return None
            async for some in _slices(list(zip(batch, answer.found, strict=False))):
                decoded = await _decoded(headers, some)
                for (chunk, _), objects in zip(some, decoded, strict=True):
                    headers.keep(chunk, objects)
                    found[chunk] = [listed.info for listed in objects]
                    _remember_places(peer, objects, link, asked_at)
            at += len(answer.found)
        return _Answer(peer, found)

    def _merged(self, chunk: ChunkKey, answers: Sequence[_Answer]) -> list[ChunkInfo]:
        """Objects of a chunk, each once, and remembered who has exactly that one."""
        infos: dict[ObjectKey, ChunkInfo] = {}
        places: dict[ObjectKey, tuple[str, ...]] = {}
        for peer, found in answers:
            for info in found.get(chunk, ()):
                if infos.setdefault(info.key, info) == info:
                    places[info.key] = (*places.get(info.key, ()), peer.name)
        self._tell_holes(chunk, answers, infos, places)
        for key, names in places.items():
            self._places[key] = names
            self._places.move_to_end(key)
        while len(self._places) > _MOST_PLACES:
            self._places.popitem(last=False)
        return list(infos.values())

    def _tell_holes(
        self,
        chunk: ChunkKey,
        answers: Sequence[_Answer],
        infos: Mapping[ObjectKey, ChunkInfo],
        places: Mapping[ObjectKey, tuple[str, ...]],
    ) -> None:
        for peer, found in answers:
            if chunk not in found or len(infos) == len(found[chunk]):
                continue
            here = {info.key for info in found[chunk]}
            for key in infos.keys() - here:
                others = [other for other, _ in answers if other.name in places[key]]
                self._lacks(peer, infos[key], others)


async def _slices(items: Sequence[T]) -> AsyncGenerator[Sequence[T], None]:
    """``items`` in order, few at a time, the loop's other work in between."""
    for at in range(0, len(items), _SLICE):
        if at:
            await asyncio.sleep(0)
        yield items[at : at + _SLICE]


async def _decoded(
    headers: Headers, pairs: Sequence[tuple[ChunkKey, Sequence[tuple[int, bytes, int]]]]
) -> list[list[Listed]]:
    """Of each chunk, with what a store answered for it."""
    new = sum(bool(header) for _, objects in pairs for _, header, _ in objects)

    def decode() -> list[list[Listed]]:
        return [headers.decode(chunk, objects) for chunk, objects in pairs]

    return decode() if new <= _FEW else await asyncio.to_thread(decode)


def _remember_places(
    peer: Peer, objects: Sequence[Listed], link: Link | None, asked_at: float
) -> None:
    if peer.link is not link:
        return  # the leases have ended with their connection
    for generation, info, offset in objects:
        if generation:
            slot = (offset, info.nbytes, generation)
            peer.places.put(info.key, peer.place(slot, link, asked_at))
