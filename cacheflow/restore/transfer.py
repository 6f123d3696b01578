"""What a load has fetched: checked, decoded, and cut into what is published. Off the loop.

Knows one load at a time; what to load, and what a failure means, is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_layers, verify, verify_heads
from cacheflow.types import PAGE, LoadOutcome, Span, StagedPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.kv import ChunkAuth
    from cacheflow.tiers.covering import Take
    from cacheflow.types import ChunkInfo, Read

__all__ = ["LoadFailed", "Piece", "published_parts", "sliced_stride", "verify_pieces"]


class LoadFailed(Exception):
    """A load did not deliver: which chunks, how and why. Never leaves the restorer."""

    def __init__(self, outcome: LoadOutcome, chunks: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.chunks = tuple(chunks)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one object, where it lies in memory, and what it belongs to."""

    chunk: int
    take: Take
    layers: Span
    """As the rank counts them."""
    heads: Span
    reads: tuple[Read, ...]
    """One: whole layer blocks. None: the same, lent by the tier. Else K and V of the wanted heads,
    layer by layer."""
    stored: memoryview
    """The bytes as the tier has them; read-only where it lends them."""
    view: memoryview
    """Memory for what they stand for: the same, unless they are encoded."""

    @property
    def info(self) -> ChunkInfo:
        """The object."""
        return self.take.info

    @property
    def is_lent(self) -> bool:
        """Whether it is whole layer blocks, used where the tier has them."""
        return not self.reads and self.view is self.stored

    @property
    def stride(self) -> int:
        """Bytes from one layer block to the next, once the piece is verified."""
        return self.info.layout.layer_stride(len(self.heads))


def sliced_stride(take: Take) -> int:
    """Room for one layer of some heads, and for the padding that the last head's checksum covers,
    in whole pages."""
    layout, heads = take.info.layout, len(take.info.key.heads)
    padding = layout.layer_stride(heads) - layout.layer_bytes(heads)
    return -(-(layout.layer_bytes(len(take.heads)) + padding) // PAGE) * PAGE


def verify_pieces(pieces: Sequence[Piece], auth: ChunkAuth | None = None) -> None:
    """Check every run of every piece against its object's table (its tags, with ``auth``), then
    decode what is encoded and close up what is only some heads; runs in a verifier thread.

    Raises:
        LoadFailed: with the chunks whose bytes are not what was stored.
    """
    corrupt: dict[int, str] = {}
    for piece in pieces:
        try:
            if len(piece.reads) > 1:
                _verify_sliced(piece)
                continue
            verify(piece.info, piece.take.layers, piece.stored, auth)
            if piece.view is not piece.stored:
                decode_layers(piece.info, piece.take.layers, piece.stored, piece.view)
            if not piece.take.is_whole:
                _keep_heads(piece)
        except IntegrityError as error:
            corrupt[piece.chunk] = str(error)
    if corrupt:
        raise LoadFailed(LoadOutcome.CORRUPT, tuple(corrupt), next(iter(corrupt.values())))


def _verify_sliced(piece: Piece) -> None:
    take, room = piece.take, sliced_stride(piece.take)
    for number, layer in enumerate(take.layers):
        block = piece.stored[number * room : (number + 1) * room]
        verify_heads(take.info, layer, take.heads, block)
        if room != piece.stride:
            at = number * piece.stride
            piece.stored[at : at + piece.stride] = block[: piece.stride]


def _keep_heads(piece: Piece) -> None:
    """Of blocks with all heads of their object, the wanted ones, moved together."""
    take, layout = piece.take, piece.info.layout
    theirs = len(take.info.key.heads)
    before, used = layout.layer_stride(theirs), len(take.heads) * layout.head_bytes
    first = (take.heads.start - take.info.key.heads.start) * layout.head_bytes
    for number in range(len(take.layers)):
        for half in range(2):
            source = number * before + half * theirs * layout.head_bytes + first
            target = number * piece.stride + half * used
            piece.view[target : target + used] = piece.view[source : source + used]


def published_parts(pieces: Sequence[Piece], granted: int) -> list[StagedPart]:
    """The parts of ``pieces`` inside the granted layers (bitmap), as contiguous runs."""
    parts: list[StagedPart] = []
    for piece in pieces:
        if not _lacks(piece.layers, granted) and piece.is_lent:  # the usual case from memory
            parts.append(StagedPart(piece.chunk, piece.layers, piece.view, piece.heads))
            continue
        stride = piece.stride
        for run in _runs(piece.layers, granted):
            first = (run.start - piece.layers.start) * stride
            view = piece.view[first : first + len(run) * stride]
            parts.append(StagedPart(piece.chunk, run, view, piece.heads))
    return parts


def _lacks(layers: Span, granted: int) -> int:
    """Which of ``layers``, from bit 0 on, are not granted."""
    return ~(granted >> layers.start) & ((1 << (layers.stop - layers.start)) - 1)


def _runs(layers: Span, granted: int) -> list[Span]:
    if not _lacks(layers, granted):
        return [layers]  # the usual case
    runs: list[Span] = []
    for layer in layers:
        if granted >> layer & 1:
            if runs and runs[-1].stop == layer:
                runs[-1] = Span(runs[-1].start, layer + 1)
            else:
                runs.append(Span(layer, layer + 1))
    return runs
