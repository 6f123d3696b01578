"""``StorageBackend``: one tier's store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from cacheflow.types import (
        Buffer,
        Capabilities,
        ChunkInfo,
        ChunkKey,
        Extent,
        Loan,
        ObjectKey,
        Read,
        StorePart,
        TransferResult,
        Write,
    )

__all__ = ["StorageBackend"]


class StorageBackend(ABC):
    """One tier's store of objects. All methods batch; results are per key, misses are values.

    A backend moves bytes and never interprets a payload; the restorer verifies. Every method may be
    cancelled at any await. A buffer's hold is acquired before the first await of the call that was
    given it and released only when no one can touch the buffer any more. Used from one event loop.
    """

    name: ClassVar[str]
    """Registry name, e.g. ``nvme``."""
    capabilities: Capabilities

    @classmethod
    @abstractmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """Open the store described by ``options`` (the backend's own settings model).

        Raises:
            ConfigError: an option is unknown or unusable; the message names it.
            IntegrityError: what lies there is not a store of this kind or version.
        """

    @abstractmethod
    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        """All stored objects of each chunk, with their ranges and tables; empty for a miss.

        An object is listed only if :meth:`load` can read it now (same validity rule).
        """

    async def survey(
        self, keys: Sequence[ChunkKey], wanted: Sequence[int]
    ) -> list[Sequence[ChunkInfo]]:
        """What :meth:`lookup` finds of some chunks, for whoever is about to store what is missing.

        ``keys``: of a whole prompt; ``wanted``: the indices of those that are asked about. For
        decorators that learn from uses: this is none, and where a chunk lies in its prompt says how
        likely it will be loaded. A plain store has no need of it.
        """
        return await self.lookup([keys[index] for index in wanted])

    def declines(self, chunk: ChunkKey, start: int, stop: int, cells: int) -> bool:
        """Whether ``chunk``, which a survey has not found, need not be copied and stored: what
        would have to leave for it is worth more. For decorators that evict; a plain store takes
        what there is room for.

        ``cells``: token-layers, which were computed somewhere in tokens ``[start, stop)``.
        """
        return False

    @abstractmethod
    def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        """Run the reads; yield each as it ends, in any order. Storage errors are results.

        Closing the iterator early abandons the rest: queued reads are dropped, running ones end on
        their own and release their holds then.
        """

    def borrow(self, extents: Sequence[Extent]) -> Loan | None:
        """Lend stored bytes where they lie, one part for each extent; None: load them instead.

        For stores in this process's memory, whose bytes need not be copied to be read. A lent view
        is read-only and stays as it is until the loan is given back, whatever is stored, evicted,
        deleted or closed meanwhile. What cannot be lent is a part with another status than OK.
        Must not block: what has to be waited for is not lent but loaded. Nothing of it is verified.

        Not passed on by decorators that do not know of it: what delays or alters loads never lends.

        Raises:
            ValueError: an extent that no object has.
        """
        return None

    @abstractmethod
    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """Store whole objects, visible only when complete; results in the order given.

        An existing object of the same key is replaced atomically.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Remove objects; True where there was one. Reads already running still see old bytes."""

    @abstractmethod
    def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        """Every valid object in the store, in any order: how an index is rebuilt."""

    @abstractmethod
    async def used_bytes(self) -> int:
        """Bytes the stored objects take from the backend's capacity."""

    def distrust(self, keys: Sequence[ObjectKey]) -> None:
        """What :meth:`load` gave of these objects is not what was stored, says who verified it.

        For decorators that decide what is listed; a plain store has nothing to do, and a decorator
        without a use for it passes it on. Must not block.
        """
        return

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        """Most buffers of reads and writes will lie in ``memory``, until the answer is called.

        For backends that have to make memory known to hardware before it can be used: they do it
        here once and not for every buffer. Others have nothing to do; a decorator passes it on.
        Buffers that lie elsewhere must work too. Must not block.
        """
        return _nothing_registered

    def parts(self) -> Sequence[StorePart]:
        """The servers that the store is made of, for people and metrics; a decorator passes it on.

        Empty for a store that is one thing. Must not block.
        """
        return ()

    def hint(self, keys: Sequence[ChunkKey], priority: float, ttl: float) -> None:
        """For ``ttl`` seconds these chunks count ``priority`` times what they seem worth; fading.

        Advice, for decorators that evict: as :meth:`distrust`, others need not heed it.

        Raises:
            ValueError: one of the numbers is not positive.
        """
        return

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        """Let these chunks leave last for ``ttl`` seconds; returns how many bytes are pinned so.

        Advice like :meth:`hint`: 0 where nobody heeds it.
        """
        return 0

    @abstractmethod
    async def aclose(self) -> None:
        """Release everything, in bounded time even with I/O hung. Idempotent."""


def _nothing_registered() -> None:
    """The end of a registration that none was."""
