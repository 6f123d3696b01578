"""Records of work: what the scheduler asks the engine and the channels to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheflow.types.geometry import Span, Tile

__all__ = [
    "Agreement",
    "Claim",
    "ComputeBatch",
    "ComputeDone",
    "Coverage",
    "Load",
    "Offering",
    "RequestSpec",
    "Source",
    "StagedPart",
    "TileWork",
]


class Source(StrEnum):
    """Who makes a cell ready."""

    RECOMPUTE = "recompute"
    LOAD = "load"


class Claim(Enum):
    """Answer to a compute worker that is about to push a tile through a layer."""

    REFUSED = "refused"
    """Stop before this layer, keep the hidden state: the layer is (being) loaded or not ready."""
    WRITE = "write"
    """Compute the layer and write its KV."""
    THROUGH = "through"
    """Compute the layer for its hidden state only: its KV is already there and stays."""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What the scheduler knows of a request: positions only, no tokens.

    ``tiles`` cut the restorable prefix ``[0, prefix_tokens)`` (whole chunks; the last tile may be
    partial); ``suffix`` are the pieces after it, always computed, at least one token in all.
    ``priority``: higher goes first whatever the objective. ``deadline``: when the first token is
    wanted, on the scheduler's clock.
    """

    id: str
    arrival: float
    prefix_tokens: int
    total_tokens: int
    chunk_tokens: int
    num_layers: int
    tiles: tuple[Tile, ...]
    suffix: tuple[Tile, ...]
    priority: int = 0
    deadline: float | None = None
    fed: bool = False
    """What a tile or suffix piece begins with, the hidden state at layer 0, comes from outside (a
    stored boundary activation, or the stage before): in all stages of a pipeline but the first."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What one channel can deliver for a request.

    ``layers[c]`` is a bitmap over layers (bit ``l`` set: layer ``l`` of chunk ``c`` is there);
    ``stride`` is the bytes of one layer of one chunk on that channel.
    """

    channel: str
    layers: tuple[int, ...]
    stride: int
    hidden: tuple[bool, ...] = ()
    """Whether the boundary activation of chunk ``c`` is there (none where it is too short)."""
    hidden_stride: int = 0
    """Bytes of the boundary activation of one chunk."""


@dataclass(frozen=True, slots=True)
class Offering:
    """What one rank found stored for a request, for the other ranks to hear.

    ``strange``, ``lossy``: bitmaps of chunks of which it found a copy that a cold run does not
    compute bit for bit here, or that went through a lossy codec.
    """

    coverage: tuple[Coverage, ...]
    strange: int = 0
    lossy: int = 0
    subject: str = ""
    """What prompt it is about."""
    resident: int = 0
    """Leading tokens whose KV is in memory: has to be the same on all ranks."""

    def is_strange(self, chunks: range) -> bool:
        """Whether any of ``chunks``, which follow one another, is strange."""
        return bool(self.strange & (1 << chunks.stop) - (1 << chunks.start))


@dataclass(frozen=True, slots=True)
class TileWork:
    """Push ``tile`` of one request through layers from ``first_layer`` on.

    The engine holds the hidden state when ``first_layer > 0`` (a paused tile).
    ``is_suffix``: tokens after the restorable prefix.
    """

    request_id: str
    tile: Tile
    first_layer: int
    is_suffix: bool = False


@dataclass(frozen=True, slots=True)
class ComputeBatch:
    """Tiles computed together (exact mode: always one)."""

    work: tuple[TileWork, ...]


@dataclass(frozen=True, slots=True)
class ComputeDone:
    """What a recompute did: layers ``[first_layer, next_layer)`` of ``work``.

    ``seconds[i]`` is the time layer ``first_layer + i`` took on the compute stream.
    """

    work: TileWork
    next_layer: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fetch layers of some chunks of one tile from a channel: the unit of claiming.

    ``hidden``: their boundary activations instead; ``layers`` then is the one that these have.
    """

    id: int
    request_id: str
    channel: str
    tile: int
    layers: Span
    chunks: tuple[int, ...]
    nbytes: int
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the stages of a pipeline know of a request before it is restored."""

    stored: int | None
    """How many leading chunks can matter: the most of any stage; None if one does not know."""
    relayed: frozenset[int] = frozenset()
    """Tiles, by first token, that the stage behind takes if they are computed here."""
    took: tuple[float, ...] = ()
    """Seconds that each stage's latest restore took."""


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Verified bytes of ``layers`` of chunk ``chunk``, in payload order, in host memory.

    ``view`` covers ``len(layers) * layer_stride(heads)`` bytes; it is read-only where a tier lends
    what is to be published. Layers and heads are those of the engine's own layout.
    """

    chunk: int
    layers: Span
    view: memoryview
    heads: Span | None = None
    """KV heads; None: all of the layout."""
