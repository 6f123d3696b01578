"""What a recomputer offers beside that if it is one of several: it holds a part of the model's KV,
is a stage of a pipeline, or computes together with others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.types import (
        Agreement,
        Offering,
        Shard,
        StagedPart,
        Tile,
    )

__all__ = ["Peers", "Sharded", "StageListener", "Staged", "Together"]


@runtime_checkable
class Sharded(Protocol):
    """A recomputer that holds a part of the model's KV: its ``layout`` is that of ``shard``.

    Layers and heads that it is asked for are its own, counted from 0; stored objects are named by
    those of the whole model. A recomputer without this holds everything.
    """

    @property
    def shard(self) -> Shard: ...


class StageListener(Protocol):
    """What a stage hears from its neighbours; called on the event loop, must not block."""

    def fed(self, request_id: str, start: int) -> None:
        """The hidden state of the tile at token ``start`` has come from the stage before."""
        ...

    def demanded(self, request_id: str, start: int, *, again: bool) -> None:
        """The stage behind cannot do without the hidden state of the tile at ``start``; ``again``:
        it was given it, but has to compute the tile once more."""
        ...

    def settled(self, request_id: str) -> None:
        """The stage behind, and all behind it, will demand nothing more."""
        ...

    def failed(self, request_id: str | None, error: BaseException) -> None:
        """Another stage gave the request up; None: a rank is gone, and with it all requests."""
        ...

    def left(self, error: BaseException, *, behind: bool) -> None:
        """The stage behind (else the one before) has closed, and says nothing more: requests that
        still need it end with ``error``."""
        ...


@runtime_checkable
class Staged(Sharded, Protocol):
    """A recomputer that is one stage of a pipeline: consecutive layers, in a process of its own.

    All stages are asked the same things in the same order, by whoever runs each of them. Methods
    that wait for another stage raise PeerError when it is gone, or gave the request up.
    """

    @property
    def boundary(self) -> Shard | None:
        """Hidden states at its first layer, as objects to store; None in the first stage."""
        ...

    @property
    def num_stages(self) -> int: ...

    @property
    def is_last(self) -> bool: ...

    def listen(self, listener: StageListener) -> None:
        """Tell ``listener`` from now on; what came before is told now."""
        ...

    async def agree(
        self,
        request_id: str,
        stored: int | None,
        *,
        same: Sequence[int],
        lacks: Sequence[int],
        took: float,
    ) -> Agreement:
        """Exchange with all stages before a request is restored. ``stored``: how many leading
        chunks can matter here. ``same``: numbers that must not differ between stages. ``lacks``:
        tiles, by first token, that this stage wants to be fed with by the one before if that
        computes them. ``took``: seconds of its latest restore.

        Raises:
            PeerError: the stages are not asked the same.
        """
        ...

    async def import_hidden(self, request_id: str, tile: Tile, parts: Sequence[StagedPart]) -> None:
        """Verified boundary activations of chunks of ``tile`` become its hidden state at layer 0;
        once all chunks are there it can be computed. Staging as in :meth:`Recomputer.publish`."""
        ...

    async def export_hidden(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """Copy the boundary activations of chunks into writable staging views."""
        ...

    def boundary_chunks(self, request_id: str) -> Sequence[int]:
        """Chunks whose boundary activation can be exported: those that were fed by the stage before
        in whole tiles of the grid."""
        ...

    async def hand_over(self, request_id: str, start: int) -> None:
        """Send what came out of the last layer for the tile at ``start`` to the stage behind."""
        ...

    def demand(self, request_id: str, start: int, *, again: bool) -> None:
        """Have the stage before feed the tile at ``start``: see :meth:`StageListener.demanded`."""
        ...

    def settle(self, request_id: str) -> None:
        """Tell the stage before that nothing more will be demanded."""
        ...

    def give_up(self, request_id: str, reason: str) -> None:
        """Tell all stages that the request has ended here without success."""
        ...


class Peers(Protocol):
    """The other ranks that compute together with this one, as the restorer sees them.

    Each rank runs the same program and restores the same requests, loading its own part.
    """

    def attach(
        self, scheduler: Any, kick: Callable[[], None], fail: Callable[[str, Exception], None]
    ) -> None:
        """``scheduler``: a :class:`cacheflow.scheduling.JointScheduler`. ``kick`` has it asked for
        work again, ``fail`` ends a request; both are called on the event loop."""
        ...

    async def meet(self, request_id: str, found: Offering) -> Offering:
        """Wait until every rank is about to restore the same; what counts of what this one found
        stored. Requests are the same whose prompts are, and whose ids are up to the last ``/``.

        Raises:
            PeerError: another rank is gone, did not come in time, or has not the same in memory.
        """
        ...

    def leave(self, request_id: str, *, finished: bool) -> None:
        """The request was restored, or is not going to be. Idempotent."""
        ...


@runtime_checkable
class Together(Protocol):
    """A recomputer that needs all of its ranks for every layer.

    Its :meth:`Recomputer.recompute` may return without having done anything, for something else
    came first.
    """

    @property
    def peers(self) -> Peers: ...
