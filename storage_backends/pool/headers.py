"""Headers of objects in one store, by generation: sent once, known until forgotten.

A generation never names another object in one start of a store, so what is known of it stays true.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import ChunkInfo, ChunkKey

__all__ = ["Headers", "Listed"]

_log = logging.getLogger(__name__)
_MOST_CHUNKS: Final = 8192
_MOST_SAID: Final = 4096
"""Generations named in one request."""


class Listed(NamedTuple):
    """An object in a store; generation 0: on its disk only."""

    generation: int
    info: ChunkInfo
    offset: int


class Headers:
    """Of one start of one store."""

    def __init__(self, instance: bytes) -> None:
        self.instance = instance
        self._known: OrderedDict[ChunkKey, dict[int, ChunkInfo]] = OrderedDict()

    def known(self, chunks: Sequence[ChunkKey]) -> tuple[int, ...]:
        """Generations that need not be sent again."""
        said = [generation for chunk in chunks for generation in self._known.get(chunk, ())]
        return tuple(said[:_MOST_SAID])

    def decode(self, chunk: ChunkKey, objects: Sequence[tuple[int, bytes, int]]) -> list[Listed]:
        """What a store listed of one chunk; what is no valid object of it is left out. May take
        milliseconds: run it in a thread if there are many."""
        infos = self._known.get(chunk, {})
        found = []
        for generation, header, offset in objects:
            info = _decoded(chunk, header) if header else infos.get(generation)
            if info is not None:
                found.append(Listed(generation, info, offset))
        return found

    def keep(self, chunk: ChunkKey, found: Sequence[Listed]) -> None:
        """Remember what :meth:`decode` gave. On the loop."""
        infos = {listed.generation: listed.info for listed in found if listed.generation}
        if not infos:
            self._known.pop(chunk, None)
            return
        self._known[chunk] = infos
        self._known.move_to_end(chunk)
        while len(self._known) > _MOST_CHUNKS:
            self._known.popitem(last=False)


def _decoded(chunk: ChunkKey, header: bytes) -> ChunkInfo | None:
    try:
        info = decode_header(header)
    except IntegrityError as error:
        _log.warning("an object of %r is ignored: %s", chunk, error)
        return None
    return info if info.key.chunk == chunk else None
