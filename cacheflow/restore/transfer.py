"""One load: staging, reads, checks, decoding, publication. Every byte is checked off the loop.

Knows one load at a time; what to load, and what a failure means, is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_layers, verify
from cacheflow.types import Codec, LoadOutcome, Read, Span, StagedPart, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.kv import ChunkAuth
    from cacheflow.memory import Lease
    from cacheflow.tiers import Located
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
    """A contiguous range of one object, where it lies in staging, and what it belongs to."""

    chunk: int
    info: ChunkInfo
    layers: Span
    read: Read
    stored: memoryview
    """The bytes that are read."""
    view: memoryview
    """What they stand for: the same memory, unless they are encoded."""


def staged_bytes(load: Load, located: Located) -> int:
    """Staging memory that ``load`` needs: for what is read, and for what is decoded from it."""
    return sum(
        info.layer_range(layers)[1] + _decoded_bytes(info, layers)
        for chunk in load.chunks
        for info, layers in located.pieces(chunk, load.layers)
    )


def _decoded_bytes(info: ChunkInfo, layers: Span) -> int:
    if info.codec is Codec.RAW:
        return 0
    return info.layout.payload_bytes(len(layers), len(info.key.heads))


def lay_out(load: Load, located: Located, lease: Lease) -> list[Piece]:
    """Place every object range of ``load`` one after another in the lease."""
    pieces: list[Piece] = []
    at = 0
    for chunk in load.chunks:
        for info, layers in located.pieces(chunk, load.layers):
            offset, nbytes = info.layer_range(layers)
            read = Read(info.key, offset, lease.part(at, nbytes))
            stored = view = lease.view[at : at + nbytes]
            at += nbytes
            if decoded := _decoded_bytes(info, layers):
                view = lease.view[at : at + decoded]
                at += decoded
            pieces.append(Piece(chunk, info, layers, read, stored, view))
    return pieces


async def fetch(backend: StorageBackend, pieces: Sequence[Piece]) -> None:
    """Run the reads; a short, missing or failed one fails the load for its chunk.

    Raises:
        LoadFailed: with every chunk that was not delivered.
    """
    by_read = {id(piece.read): piece for piece in pieces}
    failed: dict[int, tuple[LoadOutcome, str]] = {}
    async for result in backend.load([piece.read for piece in pieces]):
        piece = by_read.pop(id(result.request))
        if result.status is not TransferStatus.OK:
            reason = str(result.error) if result.error else result.status.value
            failed[piece.chunk] = (_OUTCOMES[result.status], reason)
        elif result.nbytes != len(piece.stored):
            wrong = f"{result.nbytes} of {len(piece.stored)} bytes"
            failed[piece.chunk] = (LoadOutcome.SHORT, wrong)
    for piece in by_read.values():
        failed.setdefault(piece.chunk, (LoadOutcome.MISSING, "the backend gave no result"))
    if failed:
        outcome, reason = next(iter(failed.values()))
        raise LoadFailed(outcome, tuple(failed), reason)


def verify_pieces(pieces: Sequence[Piece], auth: ChunkAuth | None = None) -> None:
    """Check every run of every piece against its object's table (its tags, with ``auth``), then
    decode what is encoded; runs in a verifier thread.

    Raises:
        LoadFailed: with the chunks whose bytes are not what was stored.
    """
    corrupt: dict[int, str] = {}
    for piece in pieces:
        try:
            verify(piece.info, piece.layers, piece.stored, auth)
            if piece.view is not piece.stored:
                decode_layers(piece.info, piece.layers, piece.stored, piece.view)
        except IntegrityError as error:
            corrupt[piece.chunk] = str(error)
    if corrupt:
        raise LoadFailed(LoadOutcome.CORRUPT, tuple(corrupt), next(iter(corrupt.values())))


def published_parts(pieces: Sequence[Piece], granted: int, stride: int) -> list[StagedPart]:
    """The parts of ``pieces`` inside the granted layers (bitmap), as contiguous runs."""
    parts: list[StagedPart] = []
    for piece in pieces:
        for run in _runs(piece.layers, granted):
            first = (run.start - piece.layers.start) * stride
            view = piece.view[first : first + len(run) * stride]
            parts.append(StagedPart(piece.chunk, run, view))
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
