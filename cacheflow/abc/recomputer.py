"""``Recomputer``: the half of an engine that restoration needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from cacheflow.types import Claim, TileWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import (
        ComputeBatch,
        ComputeDone,
        KVLayout,
        StagedPart,
        TileGrid,
    )

__all__ = ["ClaimLayer", "Recomputer"]


ClaimLayer: TypeAlias = Callable[[TileWork, int], Claim]
"""Asked by the compute thread right before each layer; answers within microseconds."""


class Recomputer(Protocol):
    """The engine's side of a restore: owns the KV cache and the hidden states.

    Requests are addressed by id. All methods are called on the event loop and must not block it.
    """

    @property
    def layout(self) -> KVLayout: ...

    @property
    def grid(self) -> TileGrid: ...

    @property
    def grid_id(self) -> str:
        """Names everything that decides bits: grid, torch, device, attention, threads, TP."""
        ...

    @property
    def claim_ahead(self) -> int:
        """Layers claimed ahead of the device: 0 where the compute thread works itself."""
        ...

    async def open(self, request_id: str, tokens: Sequence[int]) -> None:
        """Make room for ``tokens`` (the whole prompt) and remember them.

        Nothing of them is in the KV cache yet. If it is cancelled or fails, nothing is open.

        Raises:
            CapacityError: no KV memory is left.
            ConfigError: the prompt is empty or longer than the model's context.
            ValueError: a request of this id is open; it stays as it is.
        """
        ...

    def share(self, source_id: str, request_id: str, tokens: int) -> None:
        """Let ``request_id``, of which nothing is in the KV cache yet, hold the memory of
        ``source_id`` for its first ``tokens`` tokens: the same tokens, whole tiles of the grid.

        From now on cells, and hidden states of paused tiles, of either are those of both; they
        last as long as one of the two is open. Does not block.

        Raises:
            ClosedError: one of them is not open.
        """
        ...

    async def recompute(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        """Push tiles through layers, asking ``claim`` before each; stop where it refuses, or where
        something of the engine's own goes first (a decode step between two layers).

        A tile stopped before its last layer stays paused with its hidden state. On a GPU "claimed"
        means enqueued: claims run at most two layers ahead of the device.
        """
        ...

    async def publish(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """Copy verified bytes into the KV cache. On return the memory that they were in may be
        reused and any compute enqueued later sees the cells."""
        ...

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """Copy cells out of the KV cache into writable staging views (the way back)."""
        ...

    async def discard(self, request_id: str, start: int) -> None:
        """Drop the hidden state of the paused tile whose first token is ``start``.

        The first token names a tile, not its index: the last tile of a prefix and the suffix behind
        it can be parts of the same grid tile, both paused.
        """
        ...

    async def close(self, request_id: str) -> None:
        """Forget the request and free its KV. Waits for compute that still writes it. Nothing to do
        for a request that is not open."""
        ...
