"""Which stores a chunk belongs to: rendezvous hashing (Thaler and Ravishankar, 1998).

Each store draws a number for the chunk and the highest ones have it. So a store that joins takes
its share from all others and one that leaves gives its share to all others; nothing else moves.
Pure, and the same on every host: names and digests in, names out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Placement"]


class Placement:
    """Over stores called ``names``, ``replicas`` of which have each chunk."""

    def __init__(self, names: Iterable[str], replicas: int) -> None:
        self.names = tuple(sorted(set(names)))
        self.replicas = replicas
        self._seeds = [(xxh3_64_intdigest(name.encode()), name) for name in self.names]

    def of(self, digest: bytes) -> tuple[str, ...]:
        """The stores of a chunk, the first one first; all there are if these are fewer."""
        if len(self._seeds) == 1:
            return self.names
        draws = [(xxh3_64_intdigest(digest, seed), name) for seed, name in self._seeds]
        if self.replicas == 1:
            return (max(draws)[1],)
        draws.sort(reverse=True)
        return tuple(name for _, name in draws[: self.replicas])
