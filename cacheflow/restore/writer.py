"""One tier's side of saving: what it needs, its queue, and the tasks that write.

Writes take turns key by key (:mod:`cacheflow.restore.turns`). A tier that is slow, hung, full or
broken holds up nobody but itself: each of its writes has a deadline, and a late one ends that save
in that tier. Does not know where copies come from.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from cacheflow.restore.tasks import on_loop_when_idle
from cacheflow.restore.writes import Chunk, WriteQueue
from cacheflow.seldom import Seldom
from cacheflow.tasks import no_strays
from cacheflow.tiers.ranks import rank_here, rank_stored
from cacheflow.tiers.traffic import StoreGate
from cacheflow.tiers.write_behind import MAX_QUEUED, stores_at_once
from cacheflow.types import Codec, LoadOutcome, StoreEnded, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.restore.pace import Pace
    from cacheflow.restore.turns import Turns
    from cacheflow.restore.writes import Save
    from cacheflow.tasks import Pulse
    from cacheflow.tiers.ranks import Rank
    from cacheflow.tiers.staged import Copy, StagedCopies
    from cacheflow.tiers.traffic import Traffic
    from cacheflow.types import Observer, Shard

__all__ = ["Dropped", "Shared", "TierWriter"]

_log = logging.getLogger(__name__)
_KEPT: Final = "kept"
"""Another save stored a copy at least as good while this one waited."""
_LATE: Final = LoadOutcome.LATE.value
_ASIDE: Final = frozenset({_LATE, LoadOutcome.REFUSED.value})
"""The tier hangs, or is set aside as sick: a save gives it nothing more."""
_DEFINITE: Final = (TransferStatus.OK.value, _KEPT)
"""Ends after which nothing of the tier's touches the copy."""


class Dropped(StrEnum):
    """Why a chunk never got as far as being written."""

    CROWDED = "crowded"
    """The tier's queue is full."""
    FORGOTTEN = "forgotten"
    """Its request was closed before there was room for a copy."""
    CLOSED = "closed"
    """CacheFlow was closed first."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the writers of all tiers have in common."""

    shard: Shard
    """What of the model's KV is stored here."""
    staged: StagedCopies
    turns: Turns
    pace: Pace
    traffic: Traffic
    pulse: Pulse
    clock: Clock
    observer: Observer
    deadline: float
    """Seconds after which a tier that has not answered gets nothing more in that save."""


class TierWriter:
    """Writes what its queue has ready. ``max_bytes``: of copies kept for this tier."""

    def __init__(self, tier: str, backend: StorageBackend, shared: Shared, max_bytes: int) -> None:
        self.tier = tier
        self.queue = WriteQueue(max_bytes)
        self.at_once = stores_at_once(backend.capabilities.suggested_depth)
        self._backend = backend
        self._shared = shared
        self._seldom = Seldom(shared.clock)
        self._gate = StoreGate(
            tier,
            shared.traffic,
            shared.pulse,
            shared.clock,
            # Requests wait for loads, and nobody for stores, unless somebody flushes.
            lambda: shared.pace.is_hurried,
        )

    async def run(self) -> None:
        """Write one after another until cancelled; :attr:`at_once` tasks may run this."""
        queue, task = self.queue, asyncio.current_task()
        # A third party's backend may answer its cancellation with an error, or a result.
        while task is not None and not task.cancelling():
            await self._shared.pulse.until(lambda: queue.ready)
            await self._gate.passed()
            if queue.ready:
                await self._write(queue.take())

    async def offer(self, save: Save, indices: Sequence[int]) -> None:
        """Queue the chunks ``indices`` of ``save`` that the tier needs, the last one first: it is
        the dearest to recompute."""
        keys, turns = [save.keys[index] for index in indices], self._shared.turns
        try:
            with turns.watch(self.tier, keys):
                wanted = await self._wanted(save, indices)
                saved = save.saved[self.tier]
                saved.kept += len(keys) - len(wanted)
                declined = {i for i in reversed(wanted) if self._is_declined(save, i)}
                wanted = [i for i in wanted if i not in declined]
                saved.skipped += len(declined)
                saved.pending -= len(keys) - len(wanted)
                self._enqueue(
                    [
                        Chunk(save, self.tier, index, turns.join(self.tier, save.keys[index]))
                        for index in reversed(wanted)
                    ]
                )
        except Exception as error:  # a third party's backend may raise anything: none is stored
            late = isinstance(error, TimeoutError)
            why = str(error) or type(error).__name__
            outcome = _LATE if late else TransferStatus.FAILED.value
            self.give_up(save, outcome, f"its lookup before storing failed: {why}")
        finally:
            save.asking -= 1
            self._shared.pulse.beat()

    def _enqueue(self, chunks: Sequence[Chunk]) -> None:
        room = max(MAX_QUEUED - len(self.queue), 0)
        self.queue.put(chunks)
        self.drop(chunks[room:], Dropped.CROWDED)
        if chunks and chunks[0].save.gone:
            self.drop(chunks[:room], Dropped.FORGOTTEN)

    async def _wanted(self, save: Save, indices: Sequence[int]) -> list[int]:
        """Chunks of which nothing as good as ours is stored."""
        with no_strays():
            async with asyncio.timeout(self._shared.deadline):
                found = await self._backend.survey(save.keys, indices)
        shard, stamp = self._shared.shard, save.stamp

        def better() -> list[int]:
            return [
                index
                for index, infos in zip(indices, found, strict=True)
                if rank_stored(infos, shard, stamp) < self._rank(save.rank(index))
            ]

        # Authentication hashes every header.
        return better() if stamp.auth is None else await asyncio.to_thread(better)

    def _is_declined(self, save: Save, index: int) -> bool:
        layout = self._shared.shard.layout
        first, size = index * layout.chunk_tokens, layout.chunk_tokens
        parts = [s for s in save.segments if s.start < first + size and s.stop > first]
        start, stop = (parts[0].start, parts[-1].stop) if parts else (first, first + size)
        cells = size * layout.num_layers
        return self._backend.declines(save.keys[index], start, stop, cells)

    def _rank(self, rank: Rank) -> Rank:
        """How good a copy is once it is stored here."""
        return rank_here(rank, self._backend.capabilities.codec)

    # -- writing -------------------------------------------------------------------------------

    async def _write(self, chunk: Chunk) -> None:
        outcome, reason, start = Dropped.CLOSED.value, "", self._shared.clock.now()
        try:
            outcome, reason = await self._write_in_turn(chunk)
        finally:
            assert chunk.copy is not None
            nbytes = chunk.copy.write.nbytes
            self._end(chunk, outcome)
            self._tell(1, nbytes, start, outcome, reason)
            if outcome in _ASIDE:
                self.drop(self.queue.of(chunk.save), LoadOutcome(outcome))

    async def _write_in_turn(self, chunk: Chunk) -> tuple[str, str]:
        """How it ended: a :class:`TransferStatus`, late or kept; and why."""
        copy, turn, turns = chunk.copy, chunk.turn, self._shared.turns
        assert copy is not None
        try:
            async with asyncio.timeout(self._shared.deadline):
                await turn.begin()
        except TimeoutError:
            return _LATE, "another save of it has not ended"
        outcome = ""
        try:
            if turn.is_kept(self._rank(copy.rank)):
                outcome = _KEPT
                return outcome, ""
            may_be_there = True
            try:
                outcome, reason = await self._store(copy)
                may_be_there = outcome in (TransferStatus.OK, _LATE)
            finally:
                if may_be_there:
                    turn.stored(self._rank(copy.rank))
            return outcome, reason
        finally:
            turns.end(self.tier, chunk.key, None if outcome in _DEFINITE else copy.lease.hold)

    async def _store(self, copy: Copy) -> tuple[str, str]:
        deadline = self._shared.deadline
        try:
            async with self._shared.pace.turn(), asyncio.timeout(deadline):
                start = self._shared.clock.now()
                with no_strays():
                    result = (await self._backend.store([copy.write]))[0]
                self._gate.took(self._shared.clock.now() - start)
        except TimeoutError:
            return _LATE, f"not there after {deadline:g} s (setting load_deadline)"
        except Exception as error:  # a third party's backend may raise anything: a dropped chunk
            return TransferStatus.FAILED.value, str(error) or type(error).__name__
        return result.status.value, str(result.error or "")

    def keep(self, chunk: Chunk) -> None:
        """End ``chunk``, which waits, if another save has stored one as good meanwhile."""
        if chunk.turn.is_kept(self._rank(chunk.save.rank(chunk.index))):
            self._end(chunk, _KEPT)

    # -- ends ----------------------------------------------------------------------------------

    def drop(self, chunks: Sequence[Chunk], why: StrEnum) -> None:
        """End ``chunks``, which are not being written, without having tried."""
        for chunk in chunks:
            self._end(chunk, why.value)
        if chunks:
            now = self._shared.clock.now()
            self._tell(len(chunks), len(chunks) * self._nbytes, now, why.value, "not tried")

    def _end(self, chunk: Chunk, outcome: str) -> None:
        self.queue.remove(chunk)
        if chunk.copy is not None:
            self._give_up(chunk.copy, outcome)
        self._shared.turns.leave(self.tier, chunk.key)
        saved = chunk.save.saved[self.tier]
        saved.pending -= 1
        saved.stored += outcome == TransferStatus.OK
        saved.kept += outcome == _KEPT
        saved.dropped += outcome not in _DEFINITE
        self._shared.pulse.beat()

    def _give_up(self, copy: Copy, outcome: str) -> None:
        """The copy is not needed here any more, and not counted once no I/O of ours touches it."""

        def freed() -> None:
            self.queue.held_bytes -= copy.lease.buffer.nbytes
            self._shared.pulse.beat()

        if outcome == TransferStatus.OK and self._backend.capabilities.codec is Codec.RAW:
            copy.tier = copy.tier or self.tier
        if outcome in _DEFINITE or not copy.lease.hold.in_flight:
            freed()
        else:
            on_loop_when_idle(copy.lease.hold, freed)
        self._shared.staged.leave(copy)

    def give_up(self, save: Save, outcome: str, reason: str) -> None:
        """What is pending of ``save`` and was never queued ends."""
        saved = save.saved[self.tier]
        chunks, saved.pending = saved.pending, 0
        saved.dropped += chunks
        if chunks:
            now = self._shared.clock.now()
            self._tell(chunks, chunks * self._nbytes, now, outcome, reason)

    def _tell(self, chunks: int, nbytes: int, start: float, outcome: str, reason: str) -> None:
        if outcome == _KEPT:
            return
        if outcome != TransferStatus.OK:
            self._warn(chunks, outcome, reason)
        stop = self._shared.clock.now()
        self._shared.observer(StoreEnded(self.tier, chunks, nbytes, start, stop, outcome))

    def _warn(self, chunks: int, outcome: str, reason: str) -> None:
        """A disk that is full is so for every chunk; that a tier is set aside its guard says."""
        told = 0 if outcome == LoadOutcome.REFUSED else self._seldom.add(outcome, chunks)
        if told:
            what = "%d chunks were not stored" if told > 1 else "%d chunk was not stored"
            _log.warning("tier %s: " + what + " (%s: %s)", self.tier, told, outcome, reason)

    @property
    def _nbytes(self) -> int:
        return self._shared.shard.layout.payload_bytes()
