"""What is stored where when a request arrives: fixed in advance, or what ran before left behind.

Knows block names, shares and capacities; no bytes and no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cacheflow.simulation.keeping import LRU, BlockStore
from cacheflow.tiers.restorable import restorable
from cacheflow.types import Coverage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cacheflow.simulation.jobs import Cut, Job
    from cacheflow.simulation.keeping import Keeping
    from cacheflow.types import RequestSpec

__all__ = ["FixedPlacement", "LearnedPlacement", "Placement", "Placed"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A request cut to what can be restored of it, and what each channel has."""

    spec: RequestSpec
    coverage: tuple[Coverage, ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """Bitmap of layer blocks a chunk that any channel has."""
        chunks = self.spec.prefix_tokens // self.spec.chunk_tokens
        masks = [0] * chunks
        for each in self.coverage:
            for chunk, mask in enumerate(each.layers[:chunks]):
                masks[chunk] |= mask
        return tuple(masks)


class Placement(Protocol):
    """Answers for the tiers when a request arrives at a node, and hears of what was served."""

    def place(self, job: Job, node: int) -> Placed:
        """What node ``node`` could load for ``job``."""
        ...

    def served(self, job: Job, node: int) -> Mapping[str, Sequence[int]]:
        """``job`` has run on ``node``: its blocks are stored now. Those that are written for it, by
        channel."""
        ...

    def lost(self, blocks: Sequence[int], channel: str, node: int) -> None:
        """``blocks`` that were to be written over ``channel`` found no room in the queue."""
        ...

    def nearby(self, job: Job, node: int) -> int:
        """How many leading blocks of ``job`` were left on ``node`` by earlier requests."""
        ...


class FixedPlacement:
    """Every prefix is stored in advance, on every node alike.

    ``shares[channel]`` is the part of a prefix's chunks that the channel has: all of them for 1.0;
    smaller shares are dealt out from the end of the prefix backward, in the order given.
    """

    def __init__(self, cut: Cut, stride: int, shares: Mapping[str, float]) -> None:
        self._cut = cut
        self._stride = stride
        self._shares = dict(shares)

    def place(self, job: Job, node: int) -> Placed:
        spec = self._cut.spec(job, job.prefix_tokens)
        chunks = spec.prefix_tokens // spec.chunk_tokens
        full, end = (1 << spec.num_layers) - 1, chunks
        coverage = []
        for channel, share in self._shares.items():
            first, stop = 0, chunks
            if share < 1.0:
                first, stop = max(0, end - round(share * chunks)), end
                end = first
            masks = tuple(
                full if first <= chunk < stop and chunk not in job.holes else 0
                for chunk in range(chunks)
            )
            coverage.append(Coverage(channel, masks, self._stride))
        return Placed(spec, tuple(coverage))

    def served(self, job: Job, node: int) -> Mapping[str, Sequence[int]]:
        """Nothing to learn, and nothing to write."""
        return {}

    def lost(self, blocks: Sequence[int], channel: str, node: int) -> None:
        """There are none."""

    def nearby(self, job: Job, node: int) -> int:
        return 0


class LearnedPlacement:
    """What earlier requests left: in one store for all nodes, and in one store a node.

    ``shared`` and ``local`` name the channels (None: there is no such tier); a block in both is
    offered by both, the local channel first. The node stores exist even without a local channel:
    routers ask :meth:`nearby`. ``keeping``: what is stored, and what leaves a full store.
    """

    def __init__(
        self,
        cut: Cut,
        stride: int,
        nodes: int,
        *,
        shared: str | None,
        local: str | None = None,
        shared_blocks: int | None = None,
        local_blocks: int | None = None,
        keeping: Keeping = LRU,
    ) -> None:
        self._cut = cut
        self._stride = stride
        self._shared = BlockStore(shared_blocks, keeping)
        self._local = [BlockStore(local_blocks, keeping) for _ in range(nodes)]
        self._names = (local, shared)

    def preload(self, blocks: Iterable[int]) -> None:
        """Put ``blocks`` into the shared store before anything runs."""
        self._shared.add(blocks)

    def place(self, job: Job, node: int) -> Placed:
        usable = min(len(job.hash_ids), (job.total_tokens - 1) // self._cut.chunk_tokens)
        blocks: Sequence[int] = job.hash_ids[:usable]
        full = (1 << self._cut.layer_blocks) - 1
        found = []
        for name, store in zip(self._names, (self._local[node], self._shared), strict=True):
            if name is not None:
                found.append((name, [full if there else 0 for there in store.look_up(blocks)]))
        reach = max(
            (i + 1 for _, masks in found for i, mask in enumerate(masks) if mask), default=0
        )
        reach = restorable(
            reach,
            usable,
            self._cut.grid,
            self._cut.chunk_tokens,
            lambda chunks: any(self._strange(blocks[chunk], node) for chunk in chunks),
        )
        spec = self._cut.spec(job, reach * self._cut.chunk_tokens)
        coverage = (Coverage(name, tuple(masks[:reach]), self._stride) for name, masks in found)
        return Placed(spec, tuple(coverage))

    def _strange(self, block: int, node: int) -> bool:
        stores = zip(self._names, (self._local[node], self._shared), strict=True)
        return any(store.is_piece(block) for name, store in stores if name is not None)

    def served(self, job: Job, node: int) -> Mapping[str, Sequence[int]]:
        local, shared = self._names
        written = {shared: self._shared.add(job.leaves), local: self._local[node].add(job.leaves)}
        return {name: blocks for name, blocks in written.items() if name is not None}

    def lost(self, blocks: Sequence[int], channel: str, node: int) -> None:
        store = self._shared if channel == self._names[1] else self._local[node]
        store.remove(blocks)

    def nearby(self, job: Job, node: int) -> int:
        store = self._local[node]
        for count, block in enumerate(job.hash_ids):
            if block not in store:
                return count
        return len(job.hash_ids)
