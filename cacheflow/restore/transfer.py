"""One load: staging, reads, checks, decoding, publication. Every byte is checked off the loop.

Knows one load at a time; what to load, and what a failure means, is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_layers, verify, verify_heads
from cacheflow.types import PAGE, Codec, LoadOutcome, Read, Span, StagedPart, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.kv import ChunkAuth
    from cacheflow.memory import Lease
    from cacheflow.tiers import Located
    from cacheflow.tiers.cover import Take
    from cacheflow.types import ChunkInfo, Load

__all__ = [
    "LoadFailed",
    "Piece",
    "fetch",
    "lay_out",
    "published_parts",
    "staged_bytes",
    "verify_pieces",
]

_OUTCOMES = {
    TransferStatus.MISSING: LoadOutcome.MISSING,
    TransferStatus.SHORT: LoadOutcome.SHORT,
    TransferStatus.FULL: LoadOutcome.FAILED,
    TransferStatus.FAILED: LoadOutcome.FAILED,
    TransferStatus.LATE: LoadOutcome.LATE,
    TransferStatus.REFUSED: LoadOutcome.REFUSED,
}


class LoadFailed(Exception):
    """A load did not deliver: which chunks, how and why. Never leaves the restorer."""

    def __init__(self, outcome: LoadOutcome, chunks: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.chunks = tuple(chunks)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one object, where it lies in staging, and what it belongs to."""

    chunk: int
    take: Take
    layers: Span
    """As the rank counts them."""
    heads: Span
    reads: tuple[Read, ...]
    """One: whole layer blocks. Else K and V of the wanted heads, layer by layer."""
    stored: memoryview
    """The bytes that are read."""
    view: memoryview
    """Memory for what they stand for: the same, unless they are encoded."""

    @property
    def info(self) -> ChunkInfo:
        """The object."""
        return self.take.info

    @property
    def stride(self) -> int:
        """Bytes from one layer block to the next, once the piece is verified."""
        return self.info.layout.layer_stride(len(self.heads))


def staged_bytes(load: Load, located: Located) -> int:
    """Staging memory that ``load`` needs: for what is read, and for what is decoded from it."""
    return sum(
        sum(_sizes(take, located))
        for chunk in load.chunks
        for take in located.takes(chunk, load.layers)
    )


def _sizes(take: Take, located: Located) -> tuple[int, int]:
    """Bytes to read, and bytes that are decoded from them."""
    info = take.info
    if _is_sliced(take, located):
        return len(take.layers) * _sliced_stride(take), 0
    decoded = info.layout.payload_bytes(len(take.layers), len(info.key.heads))
    return info.layer_range(take.layers)[1], 0 if info.codec is Codec.RAW else decoded


def _is_sliced(take: Take, located: Located) -> bool:
    """Whether only the wanted heads are read: whole layers are where nothing less can be checked
    or decoded."""
    whole = take.heads == take.info.key.heads or located.whole_blocks
    return not whole and take.info.codec is Codec.RAW


def _sliced_stride(take: Take) -> int:
    """Room for one layer of some heads, and for the padding that the last head's checksum covers,
    in whole pages."""
    layout, heads = take.info.layout, len(take.info.key.heads)
    padding = layout.layer_stride(heads) - layout.layer_bytes(heads)
    return -(-(layout.layer_bytes(len(take.heads)) + padding) // PAGE) * PAGE


def lay_out(load: Load, located: Located, lease: Lease) -> list[Piece]:
    """Place every part of an object that ``load`` needs one after another in the lease."""
    pieces: list[Piece] = []
    shard, at = located.shard, 0
    for chunk in load.chunks:
        for take in located.takes(chunk, load.layers):
            nbytes, decoded = _sizes(take, located)
            stored = view = lease.view[at : at + nbytes]
            if _is_sliced(take, located):
                reads = tuple(_sliced_reads(take, lease, at))
            else:
                offset, _ = take.info.layer_range(take.layers)
                reads = (Read(take.info.key, offset, lease.part(at, nbytes)),)
            at += nbytes
            if decoded:
                view = lease.view[at : at + decoded]
                at += decoded
            layers = _seen_from(shard.layers, take.layers)
            heads = _seen_from(shard.heads, take.heads)
            pieces.append(Piece(chunk, take, layers, heads, reads, stored, view))
    return pieces


def _seen_from(origin: Span, span: Span) -> Span:
    return Span(span.start - origin.start, span.stop - origin.start)


def _sliced_reads(take: Take, lease: Lease, at: int) -> Iterator[Read]:
    """K, then V of the wanted heads, for each layer."""
    for layer in take.layers:
        for offset, nbytes, place in take.info.head_ranges(layer, take.heads):
            yield Read(take.info.key, offset, lease.part(at + place, nbytes))
        at += _sliced_stride(take)


async def fetch(backend: StorageBackend, pieces: Sequence[Piece]) -> None:
    """Run the reads; a short, missing or failed one fails the load for its chunk.

    Raises:
        LoadFailed: with every chunk that was not delivered.
    """
    by_read = {id(read): (piece.chunk, read) for piece in pieces for read in piece.reads}
    failed: dict[int, tuple[LoadOutcome, str]] = {}
    async for result in backend.load([read for _, read in by_read.values()]):
        chunk, read = by_read.pop(id(result.request))
        if result.status is not TransferStatus.OK:
            reason = str(result.error) if result.error else result.status.value
            failed[chunk] = (_OUTCOMES[result.status], reason)
        elif result.nbytes != read.buffer.nbytes:
            wrong = f"{result.nbytes} of {read.buffer.nbytes} bytes"
            failed[chunk] = (LoadOutcome.SHORT, wrong)
    for chunk, _ in by_read.values():
        failed.setdefault(chunk, (LoadOutcome.MISSING, "the backend gave no result"))
    if failed:
        outcome, reason = next(iter(failed.values()))
        raise LoadFailed(outcome, tuple(failed), reason)


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
            if piece.take.heads != piece.info.key.heads:
                _keep_heads(piece)
        except IntegrityError as error:
            corrupt[piece.chunk] = str(error)
    if corrupt:
        raise LoadFailed(LoadOutcome.CORRUPT, tuple(corrupt), next(iter(corrupt.values())))


def _verify_sliced(piece: Piece) -> None:
    take, room = piece.take, _sliced_stride(piece.take)
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
        for run in _runs(piece.layers, granted):
            first = (run.start - piece.layers.start) * piece.stride
            view = piece.view[first : first + len(run) * piece.stride]
            parts.append(StagedPart(piece.chunk, run, view, piece.heads))
    return parts


def _runs(layers: Span, granted: int) -> list[Span]:
    runs: list[Span] = []
    for layer in layers:
        if granted >> layer & 1:
            if runs and runs[-1].stop == layer:
                runs[-1] = Span(runs[-1].start, layer + 1)
            else:
                runs.append(Span(layer, layer + 1))
    return runs
