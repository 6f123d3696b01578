"""The compute driver: feeds the engine's one compute stream with what the scheduler says."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from cacheflow.types import Claim, LayersComputed, Span

if TYPE_CHECKING:
    from cacheflow.restore.job import Job
    from cacheflow.restore.restorer import Restorer
    from cacheflow.types import ComputeBatch, ComputeDone, TileWork

__all__ = ["ComputeDriver"]

_LEAST_WAIT: Final = 0.002
"""A timer that is due but changed nothing is not asked again sooner."""


class ComputeDriver:
    """Loop-owned, except :meth:`_claim`, which the compute thread calls."""

    def __init__(self, restorer: Restorer) -> None:
        self._restorer = restorer
        self._wake = asyncio.Event()
        self._returned = asyncio.Event()
        self._times: dict[TileWork, list[float]] = {}
        """When each layer of the running batch was claimed; the compute thread appends."""

    def kick(self) -> None:
        """Something changed: ask the scheduler again."""
        self._wake.set()

    async def idle(self, job: Job) -> None:
        """Until the compute stream has no work of ``job`` (its claims are refused by now)."""
        while job.computing:
            self._returned.clear()
            await self._returned.wait()

    async def run(self) -> None:
        """Until cancelled."""
        scheduler, clock = self._restorer.scheduler, self._restorer.clock
        while True:
            self._wake.clear()
            batch = scheduler.next_compute(clock.now())
            if batch is not None:
                await self._compute(batch)
                continue
            now = clock.now()
            wait = max(scheduler.wake_at(now) - now, _LEAST_WAIT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait == float("inf") else wait):
                    await self._wake.wait()

    async def _compute(self, batch: ComputeBatch) -> None:
        restorer = self._restorer
        jobs = [restorer.job(work.request_id) for work in batch.work]
        for job in jobs:
            if job is not None:
                job.computing = True
        self._times = {}
        try:
            for done in await restorer.recomputer.recompute(batch, self._claim):
                self._record(done)
        except Exception as error:  # whatever the engine raises ends its requests, not the driver
            for work in batch.work:
                restorer.scheduler.aborted(work)
                restorer.fail(work.request_id, error)
        except BaseException:  # cancelled, with all tasks of an event loop that ends
            for work in batch.work:
                restorer.scheduler.aborted(work)
            raise
        finally:
            for job in jobs:
                if job is not None:
                    job.computing = False
            self._returned.set()
            for work in batch.work:
                restorer.changed(work.request_id)

    def _claim(self, work: TileWork, layer: int) -> Claim:
        answer = self._restorer.scheduler.claim(work, layer)
        if answer is not Claim.REFUSED:
            self._times.setdefault(work, []).append(self._restorer.clock.now())
            job = self._restorer.job(work.request_id)
            if answer is Claim.WRITE and job is not None and not work.is_suffix:
                job.origins.wrote(work.tile.index, work.tile.width, layer)
                job.histories[work.tile.index].recomputed.add(layer)
        return answer

    def _record(self, done: ComputeDone) -> None:
        self._restorer.scheduler.computed(done)
        if self._restorer.stage is not None:
            self._restorer.stage.computed(done)
        work = done.work
        if times := self._times.get(work):
            self._restorer.emit(
                LayersComputed(
                    request_id=work.request_id,
                    tile=work.tile.index,
                    width=work.tile.width,
                    is_suffix=work.is_suffix,
                    layers=Span(work.first_layer, done.next_layer),
                    starts=tuple(times),
                    stop=self._restorer.clock.now(),
                )
            )
