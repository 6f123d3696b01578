"""Admission: from what was found stored to a request that the scheduler works on.

The request's prefix is cut to what can matter, its leading tiles are shared with whoever has them
in memory or restores them, and the rest is laid out for compute and loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.errors import ClosedError
from cacheflow.types import Admitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.restore.job import Job
    from cacheflow.restore.lookups import Lookups
    from cacheflow.restore.prefixes import Prefixes
    from cacheflow.restore.request import RestoreRequest
    from cacheflow.restore.restorer import Restorer
    from cacheflow.scheduling import Policy
    from cacheflow.types import RequestSpec, Tile

__all__ = ["Admission"]


class Admission:
    """Loop-owned; ``prefixes`` knows who has which tiles."""

    def __init__(self, restorer: Restorer, lookups: Lookups, prefixes: Prefixes) -> None:
        self._restorer = restorer
        self._lookups = lookups
        self._prefixes = prefixes

    def spec(self, request: RestoreRequest, stored: int | None = None) -> RequestSpec:
        """Its positions: see :meth:`RestoreRequest.spec`."""
        engine, stage = self._restorer.recomputer, self._restorer.stage
        fed = stage is not None and stage.engine.boundary is not None
        return request.spec(engine.layout, engine.grid, stored, fed=fed)

    def admit(self, job: Job, policy: Policy, stored: int | None) -> None:
        """Hand the request to the scheduler; ``stored``: leading chunks that can matter, None if
        that is not known."""
        restorer = self._restorer
        start = restorer.clock.now()
        self._lay_out(job, policy, stored)
        restorer.changed(job.spec.id)
        stop, expected = restorer.clock.now(), restorer.scheduler.expected_seconds(job.spec.id)
        if expected:
            job.expected = stop - job.request.arrival + expected
        known = job.stored_tokens
        restorer.emit(Admitted(job.spec.id, policy.name, start, stop, known, expected))

    def _lay_out(self, job: Job, policy: Policy, stored: int | None) -> None:
        # Without an await from where the holder was found up to here: it must not go meanwhile.
        # Stages and ranks do not share: whether another one still has the request is not known.
        restorer, scheduler = self._restorer, self._restorer.scheduler
        shares = policy.shares and restorer.is_alone
        holder, tiles = self._share(job) if shares else (None, ())
        if stored is not None:
            # What is stored nowhere is suffix: its last tile is then computed in one piece.
            held = tiles[-1].stop // job.spec.chunk_tokens if tiles else 0
            job.spec = self.spec(job.request, max(stored, held))
        job.lay_out(len(tiles), holder)
        leader = None if holder is None else holder.spec.id
        scheduler.admit(job.spec, policy, tiles=len(tiles), leader=leader)
        job.admitted = True
        if shares and job.spec.tiles:
            self._prefixes.offer(job.spec.id, job.request.keys, job.spec.tiles)
        for coverage in self._lookups.coverage(job):
            scheduler.extend_coverage(job.spec.id, coverage)
        if restorer.stage is not None:
            restorer.stage.admitted(job)

    def _share(self, job: Job) -> tuple[Job | None, Sequence[Tile]]:
        """Hold the KV memory of whoever has most of the prefix; who restores it, if it is not
        restored yet, and the tiles."""
        while found := self._prefixes.find(job.request.keys, job.spec.tiles):
            holder, tiles = found
            try:
                self._restorer.recomputer.share(holder, job.spec.id, tiles[-1].stop)
            except ClosedError:  # it was closed without a word to us
                self._prefixes.withdraw(holder)
                continue
            restoring = self._restorer.job(holder)
            # One that only goes on from its own KV restores nothing.
            return restoring if restoring is not None and restoring.spec.tiles else None, tiles
        return None, ()
