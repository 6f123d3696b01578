"""A restore from the outside: what is asked, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from cacheflow.types import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.kv import Stamp
    from cacheflow.types import ChunkKey, KVLayout, Segment, TileGrid

__all__ = ["BrokeOff", "Restoration", "RestoreRequest"]


BrokeOff: TypeAlias = "Callable[[int, Sequence[Segment]], None]"
"""Told, when a restore is cancelled, how many leading tokens are restored all the same (whole
tiles), and how they were computed."""


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Tokens whose KV is wanted, and the keys of the whole chunks among them."""

    id: str
    tokens: Sequence[int]
    keys: Sequence[ChunkKey]
    arrival: float
    resident: int = 0
    """Leading tokens whose KV the engine still has: only what follows is computed."""
    priority: int = 0
    """Higher goes first, whatever the objective."""
    deadline: float | None = None
    """When the first token is wanted, on the restorer's clock."""
    stamp: Stamp | None = None
    """Whose chunks are taken; None: the restorer's."""

    had: int = 0
    """Leading tokens of which its session had the KV once, so that they may be stored."""

    def spec(
        self, layout: KVLayout, grid: TileGrid, stored: int | None = None, *, fed: bool = False
    ) -> RequestSpec:
        """Positions only. At least the last token is always computed, so a prompt that is stored
        as a whole restores all chunks but the one with the last token.

        ``stored``: how many leading chunks can matter, see
        :func:`cacheflow.tiers.restorable.restorable`.
        """
        chunk = layout.chunk_tokens
        total = len(self.tokens)
        usable = 0 if self.resident else min(len(self.keys), (total - 1) // chunk)
        if stored is not None:
            usable = min(usable, stored)
        prefix = usable * chunk
        return RequestSpec(
            id=self.id,
            arrival=self.arrival,
            prefix_tokens=prefix,
            total_tokens=total,
            chunk_tokens=chunk,
            num_layers=layout.num_layers,
            tiles=grid.split(0, prefix),
            suffix=grid.split(max(prefix, self.resident), total),
            priority=self.priority,
            deadline=self.deadline,
            fed=fed,
        )


@dataclass(frozen=True, slots=True)
class Restoration:
    """What a restore did. Times are seconds since the request's arrival."""

    request_id: str
    policy: str
    prefix_tokens: int
    suffix_tokens: int
    restored_seconds: float
    """Until the last cell of the prefix was ready."""
    computed_seconds: float
    """Until the suffix was computed as well."""
    recomputed_cells: int
    """Token-layers of the prefix that were recomputed."""
    loaded_cells: dict[str, int]
    """Token-layers loaded, by channel; without those that recompute wrote all the same."""
    failed_loads: int
    dropped_loads: int
    """Verified loads whose cells recompute had taken first."""
    stored_tokens: int = 0
    """Tokens of the prefix that some tier had."""
    segments: tuple[Segment, ...] = ()
    """Provenance of the restored prefix."""
    shared_cells: int = 0
    """Token-layers of the prefix that other requests with the same beginning made ready."""
    loaded_chunks: dict[str, frozenset[int]] = field(default_factory=dict)
    """By channel: chunks of which it delivered anything that was used."""
    hidden_chunks: int = 0
    """Chunks whose boundary activation was loaded (in a stage of a pipeline)."""

    @property
    def recomputed_share(self) -> float:
        """Share of the prefix's token-layers that was recomputed (0 without a prefix)."""
        total = self.recomputed_cells + sum(self.loaded_cells.values())
        return self.recomputed_cells / total if total else 0.0
