"""Getting the bytes of one load: lent by a tier where they lie, or read into staging memory.

What is encoded has room to be decoded into as well. Verifies nothing: see
:mod:`cacheflow.restore.transfer`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from cacheflow.restore.transfer import LoadFailed, Piece, sliced_stride
from cacheflow.types import Codec, Extent, LoadOutcome, Read, Span, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.errors import CacheFlowError
    from cacheflow.memory import Lease, StagingPool
    from cacheflow.tiers import Located
    from cacheflow.tiers.covering import Take
    from cacheflow.types import Load, Loan

__all__ = ["fetched"]

_Wanted: TypeAlias = "Sequence[tuple[int, Take]]"
"""Chunks, and what to take of their objects."""
_Failed: TypeAlias = dict[int, tuple[LoadOutcome, str]]
"""Chunks that were not delivered, and why."""

_OUTCOMES = {
    TransferStatus.MISSING: LoadOutcome.MISSING,
    TransferStatus.SHORT: LoadOutcome.SHORT,
    TransferStatus.FULL: LoadOutcome.FAILED,
    TransferStatus.FAILED: LoadOutcome.FAILED,
    TransferStatus.LATE: LoadOutcome.LATE,
    TransferStatus.REFUSED: LoadOutcome.REFUSED,
}


@asynccontextmanager
async def fetched(
    backend: StorageBackend, load: Load, located: Located, pool: StagingPool
) -> AsyncIterator[list[Piece]]:
    """What ``load`` wants, there but unverified. On leaving its memory is given back: by then no
    thread may use it any more.

    Raises:
        LoadFailed: with every chunk that was not delivered.
    """
    wanted = [(chunk, take) for chunk in load.chunks for take in located.takes(chunk, load.layers)]
    if (loan := _borrow(backend, wanted)) is not None:
        with loan:
            stored = _lent(wanted, loan)
            nbytes = sum(_decoded_bytes(take) for _, take in wanted)
            if not nbytes:  # the usual case
                yield list(_lent_pieces(wanted, stored, located))
                return
            with await pool.lease(nbytes, load.channel) as lease:
                yield list(_decoded_pieces(wanted, stored, located, lease))
    else:
        nbytes = sum(_staged_bytes(take, located) for _, take in wanted)
        with await pool.lease(nbytes, load.channel) as lease:
            pieces = list(_staged_pieces(wanted, located, lease))
            await _read(backend, pieces)
            yield pieces


# -- lent --------------------------------------------------------------------------------------


def _borrow(backend: StorageBackend, wanted: _Wanted) -> Loan | None:
    """Whole layer blocks only: of some heads of them a copy has to be made anyway."""
    extents = []
    for _, take in wanted:
        if not take.is_whole:
            return None
        extents.append(Extent(take.info.key, *take.info.layer_range(take.layers)))
    return backend.borrow(extents)


def _lent(wanted: _Wanted, loan: Loan) -> list[memoryview]:
    failed: _Failed = {}
    views = []
    for (chunk, _), part in zip(wanted, loan.parts, strict=True):
        if part.status is TransferStatus.OK and part.buffer is not None:
            assert part.buffer.view is not None, "lent memory is the host's"
            views.append(part.buffer.view)
        else:
            failed[chunk] = _why(part.status, part.error)
    _check(failed)
    return views


def _lent_pieces(
    wanted: _Wanted, stored: Sequence[memoryview], located: Located
) -> Iterator[Piece]:
    """To be used as they are."""
    for (chunk, take), view in zip(wanted, stored, strict=True):
        yield _piece(chunk, take, located, (), view, view)


def _decoded_pieces(
    wanted: _Wanted, stored: Sequence[memoryview], located: Located, lease: Lease
) -> Iterator[Piece]:
    """What is encoded has a place in ``lease`` to be decoded into."""
    at = 0
    for (chunk, take), view in zip(wanted, stored, strict=True):
        decoded = _decoded_bytes(take)
        target = lease.view[at : at + decoded] if decoded else view
        at += decoded
        yield _piece(chunk, take, located, (), view, target)


# -- staged ------------------------------------------------------------------------------------


def _staged_bytes(take: Take, located: Located) -> int:
    """Staging memory for what is read, and for what is decoded from it."""
    return _read_bytes(take, located) + _decoded_bytes(take)


def _read_bytes(take: Take, located: Located) -> int:
    if _is_sliced(take, located):
        return len(take.layers) * sliced_stride(take)
    return take.info.layer_range(take.layers)[1]


def _decoded_bytes(take: Take) -> int:
    """What comes out of it; 0 where it is used as it is."""
    if take.info.codec is Codec.RAW:
        return 0
    return take.info.layout.payload_bytes(len(take.layers), len(take.info.key.heads))


def _is_sliced(take: Take, located: Located) -> bool:
    """Whether only the wanted heads are read: whole layers are where nothing less can be checked
    or decoded."""
    whole = take.is_whole or located.whole_blocks
    return not whole and take.info.codec is Codec.RAW


def _staged_pieces(wanted: _Wanted, located: Located, lease: Lease) -> Iterator[Piece]:
    """Every part of an object that is wanted, one after another in the lease."""
    at = 0
    for chunk, take in wanted:
        nbytes, decoded = _read_bytes(take, located), _decoded_bytes(take)
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
        yield _piece(chunk, take, located, reads, stored, view)


def _sliced_reads(take: Take, lease: Lease, at: int) -> Iterator[Read]:
    """K, then V of the wanted heads, for each layer."""
    for layer in take.layers:
        for offset, nbytes, place in take.info.head_ranges(layer, take.heads):
            yield Read(take.info.key, offset, lease.part(at + place, nbytes))
        at += sliced_stride(take)


async def _read(backend: StorageBackend, pieces: Sequence[Piece]) -> None:
    """Run the reads; a short, missing or failed one fails the load for its chunk."""
    by_read = {id(read): (piece.chunk, read) for piece in pieces for read in piece.reads}
    failed: _Failed = {}
    async for result in backend.load([read for _, read in by_read.values()]):
        chunk, read = by_read.pop(id(result.request))
        if result.status is not TransferStatus.OK:
            failed[chunk] = _why(result.status, result.error)
        elif result.nbytes != read.buffer.nbytes:
            wrong = f"{result.nbytes} of {read.buffer.nbytes} bytes"
            failed[chunk] = (LoadOutcome.SHORT, wrong)
    for chunk, _ in by_read.values():
        failed.setdefault(chunk, (LoadOutcome.MISSING, "the backend gave no result"))
    _check(failed)


# -- either ------------------------------------------------------------------------------------


def _piece(
    chunk: int,
    take: Take,
    located: Located,
    reads: tuple[Read, ...],
    stored: memoryview,
    view: memoryview,
) -> Piece:
    shard = located.shard
    layers = _seen_from(shard.layers, take.layers)
    return Piece(chunk, take, layers, _seen_from(shard.heads, take.heads), reads, stored, view)


def _seen_from(origin: Span, span: Span) -> Span:
    if not origin.start:
        return span
    return Span(span.start - origin.start, span.stop - origin.start)


def _why(status: TransferStatus, error: CacheFlowError | None) -> tuple[LoadOutcome, str]:
    return _OUTCOMES[status], str(error or status.value)


def _check(failed: _Failed) -> None:
    if failed:
        outcome, reason = next(iter(failed.values()))
        raise LoadFailed(outcome, tuple(failed), reason)
