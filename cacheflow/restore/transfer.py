"""One load: staging, reads, verification, commit, publication. Every byte is checked off the loop.

Knows one load at a time; what to load, and what a failure means, is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import verify
from cacheflow.types import LoadOutcome, Read, Span, StagedPart, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.memory import Lease
    from cacheflow.tiers import Located
    from cacheflow.types import ChunkInfo, Load

__all__ = ["LoadFailed", "Piece", "fetch", "lay_out", "published_parts", "verify_pieces"]

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
    view: memoryview


def lay_out(load: Load, located: Located, lease: Lease) -> list[Piece]:
    """Place every object range of ``load`` one after another in the lease."""
    pieces: list[Piece] = []
    at = 0
    for chunk in load.chunks:
        for info, layers in located.pieces(chunk, load.layers):
            offset, nbytes = info.layer_range(layers)
            read = Read(info.key, offset, lease.part(at, nbytes))
            view = lease.view[at : at + nbytes]
            pieces.append(Piece(chunk, info, layers, read, view))
            at += nbytes
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
        elif result.nbytes != len(piece.view):
            wrong = f"{result.nbytes} of {len(piece.view)} bytes"
            failed[piece.chunk] = (LoadOutcome.SHORT, wrong)
    for piece in by_read.values():
        failed.setdefault(piece.chunk, (LoadOutcome.MISSING, "the backend gave no result"))
    if failed:
        outcome, reason = next(iter(failed.values()))
        raise LoadFailed(outcome, tuple(failed), reason)


def verify_pieces(pieces: Sequence[Piece]) -> None:
    """Check every run of every piece against its object's table; runs in a verifier thread.

    Raises:
        LoadFailed: with the chunks whose bytes are not what was stored.
    """
    corrupt: dict[int, str] = {}
    for piece in pieces:
        try:
            verify(piece.info, piece.layers, piece.view)
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
