"""The contracts third parties implement: one concept each.

``StorageBackend`` is one tier's store, ``Recomputer`` the half of an engine that restoration needs,
``Engine`` the whole of it, ``ChatTemplate`` how its model reads messages. Nothing here does work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias, runtime_checkable

from cacheflow.types import Claim, TileWork

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cacheflow.types import (
        Agreement,
        Buffer,
        Capabilities,
        ChunkInfo,
        ChunkKey,
        ComputeBatch,
        ComputeDone,
        Extent,
        KVLayout,
        Loan,
        ObjectKey,
        Offering,
        Read,
        Sampling,
        Segment,
        Shard,
        Span,
        StagedPart,
        StorePart,
        Tile,
        TileGrid,
        TransferResult,
        Write,
    )

__all__ = [
    "ChatTemplate",
    "ClaimLayer",
    "Engine",
    "Peers",
    "Recomputer",
    "Sampler",
    "Sharded",
    "StageListener",
    "Staged",
    "StorageBackend",
    "Together",
]

ClaimLayer: TypeAlias = Callable[[TileWork, int], Claim]
"""Asked by the compute thread right before each layer; answers within microseconds."""


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


class ChatTemplate(Protocol):
    """How a model reads messages, and how its tokens are read. Called on threads: may take long."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The prompt that ``messages`` (with ``role``, ``content`` ...) are, as tokens.

        Raises:
            ConfigError: the model's template does not take them; says why.
        """

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text`` as it is, nothing added; ConfigError if it is not Unicode."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special tokens left out."""


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

        Nothing of them is in the KV cache yet.

        Raises:
            CapacityError: no KV memory is left.
            ConfigError: the prompt is empty or longer than the model's context.
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


@runtime_checkable
class Together(Protocol):
    """A recomputer that needs all of its ranks for every layer.

    Its :meth:`Recomputer.recompute` may return without having done anything, for something else
    came first.
    """

    @property
    def peers(self) -> Peers: ...


@runtime_checkable
class Sampler(Protocol):
    """What an engine that can draw tokens offers beside :class:`Engine`."""

    async def first_sample(self, request_id: str, sampling: Sampling) -> int:
        """As :meth:`Engine.first_token`, drawn."""

    async def decode_sampled(
        self, request_ids: Sequence[str], tokens: Sequence[int], sampling: Sequence[Sampling | None]
    ) -> list[int]:
        """As :meth:`Engine.decode`, drawn for each request whose ``sampling`` is not None."""


class Engine(Recomputer, Protocol):
    """A recomputer that also serves: it samples tokens and names its model."""

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What the key root binds: config, weights digest, adapter, KV dtype, layout, rope."""
        ...

    @property
    def layer_flops(self) -> tuple[float, float]:
        """``(linear, attention)`` FLOPs of one layer: per token, and per token and key position."""
        ...

    @property
    def max_tokens(self) -> int:
        """The model's context length in tokens."""
        ...

    @property
    def chat(self) -> ChatTemplate | None:
        """How the model reads messages; None where it comes without a template for them."""
        ...

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        """How the tokens that are in the KV cache were computed (or loaded), in order."""
        ...

    def set_segments(self, request_id: str, tokens: Span, segments: Sequence[Segment]) -> None:
        """Record the provenance of loaded tokens."""
        ...

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append prompt tokens to an open request whose KV so far stays; see :meth:`open`."""
        ...

    async def fork(self, source_id: str, request_id: str, tokens: int) -> None:
        """Open ``request_id`` with the first ``tokens`` tokens of ``source_id``, KV included, whose
        KV must be complete. Whole pages are shared, the last one is copied.

        Raises:
            CapacityError: no KV memory is left for the copy.
        """
        ...

    async def truncate(self, request_id: str, tokens: int) -> None:
        """Forget all but the first ``tokens`` tokens, whose KV must be complete (0 < ``tokens``).

        What others share with the request stays as it is. Waits for work that still touches the
        KV. If it is cancelled or fails, nothing has changed.

        Raises:
            CapacityError: the last page is shared, and no KV memory is left for a copy of it.
        """
        ...

    async def first_token(self, request_id: str) -> int:
        """Greedy token after the last prompt token; the suffix must have been computed."""
        ...

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """Append one token to each request and return the next greedy token of each.

        In float32 these are the tokens that each request would get alone. A call that is cancelled
        ends the step all the same.

        Raises:
            CapacityError: no KV memory is left; no request was given a token.
            ClosedError: one of them is not open; no request was given a token.
        """
        ...

    async def aclose(self) -> None:
        """Stop the compute thread and free the KV cache. Idempotent."""
        ...
