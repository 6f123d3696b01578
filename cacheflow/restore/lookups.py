"""What tiers have of a request: all are asked at once, and late ones heard when they answer.

Compute waits a moment for the answers, since a layer that was begun cannot be taken back. A tier
that fails has nothing. Decides nothing about who does what with it.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from cacheflow.restore.meeting import offering, reach, strange
from cacheflow.tasks import no_strays
from cacheflow.tiers import locate
from cacheflow.tiers.restorable import restorable
from cacheflow.types import LookedUp

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from collections.abc import Set as AbstractSet

    from cacheflow.restore.job import Job
    from cacheflow.restore.restorer import Restorer
    from cacheflow.scheduling import Policy
    from cacheflow.tiers import Located
    from cacheflow.types import Coverage

__all__ = ["Lookups"]

_log = logging.getLogger(__name__)

_GRACE: Final = 0.01
"""Compute waits this long for lookups: a layer begun on nothing known cannot be taken back. Not for
a tier that somebody has waited for in vain, until it answers again."""
_SHARE: Final = 0.02
"""... or for this share of what recompute alone would take, if that is longer: object stores answer
late, and a prompt that is worth their while is long."""
_PATIENCE: Final = 1.0
"""... and this long where the policy would not recompute what is stored."""


class Lookups:
    """Loop-owned. ``allow_lossy``: whether chunks of a codec that loses precision are taken."""

    def __init__(self, restorer: Restorer, *, allow_lossy: bool) -> None:
        self._restorer = restorer
        self._allow_lossy = allow_lossy
        self._owing: set[str] = set()
        """Tiers that have not answered since a request waited for them in vain."""

    async def ask(self, job: Job, policy: Policy) -> int | None:
        """Ask every tier at once; give them a moment.

        How many leading chunks can matter, by what is stored; None if unknown. Where some are late
        it is a guess, if there can be no more between that and the end of the prompt than a piece
        of a tile: for the missing end of that tile all of it would be computed.

        Ranks that restore together wait for the tiers, then for each other: only what all of them
        found counts.
        """
        peers, grid_id = self._restorer.peers, self._restorer.recomputer.grid_id
        if peers is not None:
            await self._wait(job, policy, _PATIENCE, ())
            found = offering(job.request, job.located, grid_id)
            job.agreed = agreed = await peers.meet(job.spec.id, found)
            return self._restorable(job, reach(agreed), agreed.is_strange)
        owing = self._owing if policy.begin(None) else ()
        late = await self._wait(job, policy, self._patience(job, policy), owing)
        if late is None:
            return None
        located = job.located.values()
        stored = max((each.reach for each in located), default=0)
        if late:
            return self._guessed(job, stored)
        return self._restorable(job, stored, partial(strange, located, grid_id))

    def _patience(self, job: Job, policy: Policy) -> float:
        """Seconds."""
        if not policy.begin(None):
            return _PATIENCE
        seconds = self._restorer.scheduler.recompute_seconds(job.spec)
        return max(_GRACE, min(_SHARE * seconds, _PATIENCE))

    def _guessed(self, job: Job, found: int) -> int | None:
        """By what its session had; ``found``: chunks up to the last that is known to be stored."""
        grid, size = self._restorer.recomputer.grid, job.spec.chunk_tokens
        stored = max(found, job.request.had // size)
        if not stored or stored * size <= grid.start(grid.index_at(job.spec.prefix_tokens - 1)):
            return None
        return stored

    def _restorable(self, job: Job, stored: int, is_strange: Callable[[range], bool]) -> int:
        grid, size = self._restorer.recomputer.grid, job.spec.chunk_tokens
        return restorable(stored, job.spec.prefix_tokens // size, grid, size, is_strange)

    def coverage(self, job: Job) -> Sequence[Coverage]:
        """What counts of what was found until now."""
        if job.agreed is not None:
            return job.agreed.coverage
        return [self._counted(job, located) for located in job.located.values()]

    def _counted(self, job: Job, located: Located) -> Coverage:
        coverage, stage = located.coverage(), self._restorer.stage
        return coverage if stage is None else stage.coverage(job, coverage)

    async def _wait(
        self, job: Job, policy: Policy, patience: float, owing: Container[str]
    ) -> AbstractSet[str] | None:
        """Tiers that have not answered after ``patience`` seconds, during which those that are
        ``owing`` are not waited for; None: there is nothing to ask."""
        restorer = self._restorer
        wanted = policy.load(0.0, 1.0) or job.spec.fed
        if not (restorer.channels and job.spec.prefix_tokens and wanted):
            return None
        asking = {
            restorer.group.create_task(self._ask(job, name)): name for name in restorer.channels
        }
        for task in asking:
            restorer.spawn(job, task)
        if awaited := [task for task, name in asking.items() if name not in owing]:
            await asyncio.wait(awaited, timeout=patience)
        late = {name for task, name in asking.items() if not task.done()}
        self._owing |= late
        return late

    async def _ask(self, job: Job, name: str) -> None:
        """One tier; what it has counts as soon as it answers."""
        restorer = self._restorer
        chunks = job.spec.prefix_tokens // job.spec.chunk_tokens
        start, found, reason = restorer.clock.now(), 0, ""
        try:
            async with asyncio.timeout(restorer.load_deadline):
                with no_strays():
                    located = await self._locate(job, name, chunks)
        except Exception as error:
            # A third party's backend may raise anything: it has nothing then.
            reason = str(error) or type(error).__name__
            _log.warning("tier %s: lookup failed, going on without it: %s", name, reason)
        else:
            found = located.found
            self._owing.discard(name)
            if job.agreed is not None:
                return  # too late: the ranks have agreed on what there is
            job.located[name] = located
            if job.admitted:
                restorer.scheduler.extend_coverage(job.spec.id, self._counted(job, located))
                restorer.changed(job.spec.id)
        stop = restorer.clock.now()
        restorer.emit(LookedUp(job.spec.id, name, chunks, found, start, stop, reason))

    async def _locate(self, job: Job, name: str, chunks: int) -> Located:
        restorer = self._restorer
        return await locate(
            name,
            restorer.channels[name],
            job.request.keys[:chunks],
            restorer.shard,
            job.request.stamp or restorer.stamp,
            allow_lossy=self._allow_lossy,
            boundary=None if restorer.stage is None else restorer.stage.engine.boundary,
            grid_id=restorer.recomputer.grid_id,
        )
