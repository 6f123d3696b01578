"""Blocks of vLLM's pool that must not be given to others while storage reads or writes them.

A pin is a reference of our own beside the request's, so finishing, aborting and preempting a
request need no special case: the block returns to the pool with the last of the two. Belongs to
the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Pins", "Pool"]


class Pool(Protocol):
    """The part of vLLM's BlockPool that pins need."""

    num_gpu_blocks: int

    @property
    def blocks(self) -> Sequence[Any]: ...

    def touch(self, blocks: Any) -> None: ...

    def free_blocks(self, ordered_blocks: Any) -> None: ...


class Pins:
    """Counted pins on blocks of one pool, by block id."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._pinned: Counter[int] = Counter()

    @property
    def held(self) -> int:
        """Blocks with at least one pin."""
        return len(self._pinned)

    @property
    def size(self) -> int:
        """Blocks of the pool."""
        return self._pool.num_gpu_blocks

    def pin(self, ids: Iterable[int]) -> None:
        """Hold blocks that a request holds now."""
        for block_id in ids:
            self._pool.touch([self._pool.blocks[block_id]])
            self._pinned[block_id] += 1

    def unpin(self, ids: Iterable[int]) -> None:
        """Let go; what nobody else holds is free."""
        for block_id in ids:
            self._pinned[block_id] -= 1
            if not self._pinned[block_id]:
                del self._pinned[block_id]
            self._pool.free_blocks([self._pool.blocks[block_id]])

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """No pins for a moment in which nothing is allocated: the pool refuses to reset its prefix
        cache while any block is held."""
        held = [block_id for block_id, count in self._pinned.items() for _ in range(count)]
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in held])
        try:
            yield
        finally:
            for block_id in held:
                self._pool.touch([self._pool.blocks[block_id]])
