"""A restore's bookkeeping while it runs: what was found, what is under way, where cells came from.

Owned by the event loop but for what says otherwise. Knows neither tiers nor the scheduler.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheflow.kv import is_packed
from cacheflow.restore.request import Restoration
from cacheflow.scheduling import RECOMPUTE, Origins
from cacheflow.types import RestoreEnded, Segment

if TYPE_CHECKING:
    from cacheflow.restore.request import BrokeOff, RestoreRequest
    from cacheflow.tiers import Located
    from cacheflow.types import ChunkInfo, Offering, RequestSpec

__all__ = ["Job", "TileHistory"]


@dataclass(slots=True)
class TileHistory:
    """What was really put into a tile, by whichever of the requests that share it."""

    recomputed: set[int] = field(default_factory=set)
    """Layers; added to by the compute thread only."""
    copies: set[ChunkInfo] = field(default_factory=set)
    """The objects of which bytes were published."""


@dataclass(slots=True)
class Job:
    """A request in progress; owned by the loop."""

    request: RestoreRequest
    spec: RequestSpec
    done: asyncio.Future[None]
    broke_off: BrokeOff | None = None
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing of the request is left in the restorer."""
    located: dict[str, Located] = field(default_factory=dict)
    loads: set[asyncio.Task[None]] = field(default_factory=set)
    admitted: bool = False
    computing: bool = False
    lengthening: bool = False
    """Whether more tokens are about to come: until then it does not end."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Every cell of the prefix is there, or never will be."""
    restored_at: float | None = None
    origins: Origins = field(default_factory=Origins)
    """Told of what was computed by the compute thread only."""
    histories: list[TileHistory] = field(default_factory=list)
    """Of each tile of the prefix, from admission on."""
    shared_tiles: int = 0
    """Leading tiles that another request had, or was restoring, on arrival."""
    shares: bool = False
    """Whether any tile was ever shared, either way."""
    loaded_chunks: dict[str, set[int]] = field(default_factory=dict)
    failed: int = 0
    dropped: int = 0
    hidden_chunks: int = 0
    """Boundary activations loaded."""
    expected: float = 0.0
    """Seconds from arrival to the end that were expected on admission (0: nothing was known)."""
    agreed: Offering | None = None
    """What counts of what was found stored, where ranks restore the request together."""

    def lay_out(self, shared_tiles: int, holder: Job | None) -> None:
        """The tiles are known. The first ones are shared with ``holder``, which restores them; or,
        without one, are in the KV cache as the grid's own pass computes them."""
        every = range(self.spec.num_layers)
        self.shared_tiles = shared_tiles
        self.shares = shared_tiles > 0
        if holder is not None:
            holder.shares = True
            self.histories = holder.histories[:shared_tiles]
        else:
            self.histories = [TileHistory(set(every)) for _ in range(shared_tiles)]
        self.histories += [TileHistory() for _ in self.spec.tiles[shared_tiles:]]

    @property
    def stored_tokens(self) -> int:
        """Tokens of chunks of which some tier has at least a part, or another request all."""
        size = self.spec.chunk_tokens
        shared = self.shared_tokens // size
        return self.shared_tokens + size * sum(
            any(located.chunks[chunk] for located in self.located.values())
            for chunk in range(shared, self.spec.prefix_tokens // size)
        )

    @property
    def shared_tokens(self) -> int:
        """Tokens of the tiles that another request had on arrival."""
        return self.spec.tiles[self.shared_tiles - 1].stop if self.shared_tiles else 0

    @property
    def shared_cells(self) -> int:
        """Token-layers of the prefix that others made ready (0 if it shared none)."""
        if not self.shares:
            return 0
        mine = self.origins.recomputed + sum(self.origins.by_channel.values())
        return max(0, self.spec.prefix_tokens * self.spec.num_layers - mine)

    def result(self, policy: str, grid_id: str, now: float) -> Restoration:
        """What came of it, at ``now``."""
        restored = self.restored_at if self.restored_at is not None else now
        return Restoration(
            request_id=self.spec.id,
            policy=policy,
            prefix_tokens=self.spec.prefix_tokens,
            suffix_tokens=sum(piece.width for piece in self.spec.suffix),
            restored_seconds=restored - self.request.arrival,
            computed_seconds=now - self.request.arrival,
            recomputed_cells=self.origins.recomputed,
            loaded_cells=self.origins.by_channel,
            failed_loads=self.failed,
            dropped_loads=self.dropped,
            stored_tokens=self.stored_tokens,
            segments=tuple(self.provenance(grid_id)),
            shared_cells=self.shared_cells,
            loaded_chunks={name: frozenset(each) for name, each in self.loaded_chunks.items()},
            hidden_chunks=self.hidden_chunks,
        )

    def ended(
        self, policy: str, outcome: str, now: float, stage_balance: float | None
    ) -> RestoreEnded:
        """The last event of the request, which ends at ``now``."""
        cells = {RECOMPUTE: self.origins.recomputed, **self.origins.by_channel}
        if self.shared_cells:
            cells["shared"] = self.shared_cells
        return RestoreEnded(
            request_id=self.spec.id,
            policy=policy,
            outcome=outcome,
            arrival=self.request.arrival,
            restored=self.restored_at if self.restored_at is not None else now,
            stop=now,
            prefix_tokens=self.spec.prefix_tokens,
            suffix_tokens=sum(piece.width for piece in self.spec.suffix),
            num_layers=self.spec.num_layers,
            cells=cells,
            stored_tokens=self.stored_tokens,
            stage_balance=stage_balance,
            expected=self.expected,
        )

    def provenance(self, grid_id: str) -> list[Segment]:
        """How the restored prefix was computed, tile by tile, by what was really put in place.

        A tile counts as one pass of the grid if recompute wrote all of it, or if every copy that
        was loaded into it is canonical under ``grid_id``; else it is of another history (width 0),
        whatever its copies record: what stood before them may have been replaced since. What fast
        mode has recomputed counts as lossy.
        """
        segments = []
        for tile, history in zip(self.spec.tiles, self.histories, strict=True):
            layers, copies = len(history.recomputed), history.copies
            ours = all(info.is_repeated(grid_id) for info in copies)
            known = layers == self.spec.num_layers or (bool(copies) and ours)
            packed = bool(layers) and is_packed(grid_id)
            lossy = packed or any(info.lossy for info in copies)
            if self.agreed is not None:  # what other ranks have loaded counts as well
                size = self.spec.chunk_tokens
                inside = (1 << tile.stop // size) - (1 << tile.start // size)
                known = not self.agreed.is_strange(range(tile.start // size, tile.stop // size))
                lossy = packed or bool(self.agreed.lossy & inside)
            segments.append(Segment(tile.start, tile.stop, tile.width if known else 0, lossy))
        return segments
