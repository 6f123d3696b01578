"""The restorer: one compute driver, one driver a channel, any number of requests at once.

Asks the scheduler what to begin, begins it, and tells it what ended. Everything runs inside one
task group that lives as long as the ``async with``: nothing outlives it but buffers whose I/O is
still running, which belong to the staging pool's quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

from cacheflow.clock import SystemClock
from cacheflow.errors import ClosedError
from cacheflow.restore.compute import ComputeDriver
from cacheflow.restore.loads import LoadDriver
from cacheflow.restore.request import Job, Restoration, RestoreRequest
from cacheflow.restore.tasks import to_the_end
from cacheflow.tiers import locate
from cacheflow.types import LookedUp, RestoreEnded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheflow.abc import Recomputer, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.memory import StagingPool
    from cacheflow.scheduling import BatchScheduler, Policy
    from cacheflow.tiers import Located
    from cacheflow.types import Event, Observer

__all__ = ["Restorer"]

_log = logging.getLogger(__name__)

_LOOKUP_GRACE: Final = 0.01
"""Compute waits this long for lookups: a layer begun on nothing known cannot be taken back."""
_VERIFIERS: Final = 2


class Restorer:
    """Restores requests on one engine from any number of channels.

    ``load_deadline``: seconds after which a load counts as failed and its channel is not waited
    for again by that request. ``observer`` gets every event and cannot disturb anything.
    """

    def __init__(
        self,
        recomputer: Recomputer,
        scheduler: BatchScheduler,
        channels: Mapping[str, StorageBackend],
        pool: StagingPool,
        *,
        clock: Clock | None = None,
        load_deadline: float = 30.0,
        observer: Observer | None = None,
    ) -> None:
        self.recomputer = recomputer
        self.scheduler = scheduler
        self.channels = dict(channels)
        self.pool = pool
        self.clock = clock or SystemClock()
        self.load_deadline = load_deadline
        self._observer = observer
        self._jobs: dict[str, Job] = {}
        self._group: asyncio.TaskGroup | None = None
        self._drivers: list[asyncio.Task[None]] = []
        self.verifiers = ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="cacheflow-verify")
        self._compute = ComputeDriver(self)
        self._loads = [LoadDriver(self, name) for name in self.channels]

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        runs = [self._compute.run(), *(driver.run() for driver in self._loads)]
        self._drivers = [self._group.create_task(run) for run in runs]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        group, self._group = self._group, None
        jobs = list(self._jobs.values())
        for job in jobs:
            self.fail(job.spec.id, ClosedError("the restorer was closed during a restore"))
        try:
            if jobs:
                settled = asyncio.gather(*(job.settled.wait() for job in jobs))
                await to_the_end(asyncio.ensure_future(settled))
        finally:
            for task in self._drivers:
                task.cancel()
            self.verifiers.shutdown(wait=False)
            if group is not None:
                await group.__aexit__(None, None, None)

    async def run(self, request: RestoreRequest, policy: Policy) -> Restoration:
        """Restore the prefix and compute the suffix; the engine must have the request open.

        Cancelling takes the request back at once, whatever is in flight: on return nothing of it
        is left but quarantined staging memory.

        Raises:
            ClosedError: the restorer is not running.
            Exception: whatever the engine raised; storage failures become recompute instead.
        """
        if self._group is None:
            raise ClosedError("the restorer is not running; use it inside 'async with'")
        job = self._register(request)
        outcome = "failed"
        try:
            await self._look_up(job, policy)
            self._admit(job, policy)
            await job.done
            outcome = "restored"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.scheduler.cancel(job.spec.id)  # now: the compute thread may be about to claim
            # Not in the group: it must also run while that is ending. Announced once no thread
            # adds to the job's figures any more.
            try:
                await to_the_end(asyncio.ensure_future(self._settle(job)))
            finally:
                self._announce(job, policy, outcome)
        return self._result(job, policy)

    # -- what the drivers use ------------------------------------------------------------------

    def job(self, request_id: str) -> Job | None:
        """The request's bookkeeping while it runs."""
        return self._jobs.get(request_id)

    def spawn(self, job: Job, work: asyncio.Task[None]) -> None:
        """Tie a task to a request, so that cancelling the request ends it."""
        job.loads.add(work)
        work.add_done_callback(job.loads.discard)

    @property
    def group(self) -> asyncio.TaskGroup:
        """Where all tasks live."""
        if self._group is None:
            raise ClosedError("the restorer is closing")
        return self._group

    def changed(self, request_id: str) -> None:
        """Something ended: see whether the request is done, and let every driver look again."""
        job = self._jobs.get(request_id)
        if job is not None and job.admitted and not job.done.done():
            if job.restored_at is None and self.scheduler.restored(request_id):
                job.restored_at = self.clock.now()
            if not job.computing and self.scheduler.finished(request_id):
                job.done.set_result(None)
        self._compute.kick()
        for driver in self._loads:
            driver.kick()

    def fail(self, request_id: str, error: BaseException) -> None:
        """End the request with ``error``."""
        self.scheduler.cancel(request_id)
        job = self._jobs.get(request_id)
        if job is not None and not job.done.done():
            job.done.set_exception(error)

    def emit(self, event: Event) -> None:
        """Tell the observer; its failures are logged and never reach a request."""
        if self._observer is not None:
            try:
                self._observer(event)
            except Exception:  # an observer must not be able to break serving (promise 9)
                _log.exception("an observer failed on %s", type(event).__name__)

    # -- one request ---------------------------------------------------------------------------

    def _register(self, request: RestoreRequest) -> Job:
        spec = request.spec(self.recomputer.layout, self.recomputer.grid)
        if spec.id in self._jobs:
            raise ValueError(f"request {spec.id!r} is already being restored")
        job = Job(request, spec, asyncio.get_running_loop().create_future())
        self._jobs[spec.id] = job
        return job

    async def _look_up(self, job: Job, policy: Policy) -> None:
        """Ask every tier at once; give them a moment, the late ones are heard when they answer."""
        if not (self.channels and job.spec.prefix_tokens and policy.load(0.0, 1.0)):
            return
        asking = [self.group.create_task(self._ask(job, name)) for name in self.channels]
        for task in asking:
            self.spawn(job, task)
        _, late = await asyncio.wait(asking, timeout=_LOOKUP_GRACE)
        if not late:
            # What is stored nowhere is suffix: its last tile is then computed in one piece.
            stored = max((located.reach for located in job.located.values()), default=0)
            layout, grid = self.recomputer.layout, self.recomputer.grid
            job.spec = job.request.spec(layout, grid, stored)

    def _admit(self, job: Job, policy: Policy) -> None:
        self.scheduler.admit(job.spec, policy)
        job.admitted = True
        for located in job.located.values():
            self._extend(job, located)
        self.changed(job.spec.id)

    def _extend(self, job: Job, located: Located) -> None:
        coverage = located.coverage(self.recomputer.layout)
        self.scheduler.extend_coverage(job.spec.id, coverage)

    async def _ask(self, job: Job, name: str) -> None:
        """Coverage of one tier, as soon as it answers; a tier that fails has nothing."""
        chunks = job.spec.prefix_tokens // job.spec.chunk_tokens
        start, found, reason = self.clock.now(), 0, ""
        try:
            async with asyncio.timeout(self.load_deadline):
                layout = self.recomputer.layout
                keys = job.request.keys[:chunks]
                located = await locate(name, self.channels[name], keys, layout)
        except (
            Exception
        ) as error:  # a third party's backend may raise anything: it has nothing then
            reason = str(error) or type(error).__name__
            _log.warning("tier %s: lookup failed, going on without it: %s", name, reason)
        else:
            found = located.found
            job.located[name] = located
            if job.admitted:
                self._extend(job, located)
                self.changed(job.spec.id)
        stop = self.clock.now()
        self.emit(LookedUp(job.spec.id, name, chunks, found, start, stop, reason))

    async def _settle(self, job: Job) -> None:
        """Take the request out: no task, claim or hidden state of it is left afterwards."""
        self.scheduler.cancel(job.spec.id)
        for task in list(job.loads):
            task.cancel()
        if job.loads:
            await asyncio.wait(list(job.loads))
        await self._compute.idle(job)
        try:
            for start in self.scheduler.paused_tiles(job.spec.id):
                await self.recomputer.discard(job.spec.id, start)
        finally:
            self.scheduler.remove(job.spec.id)
            self._jobs.pop(job.spec.id, None)
            if not job.done.cancelled() and job.done.done():
                job.done.exception()  # whoever was cancelled meanwhile does not ask for it
            job.settled.set()

    def _result(self, job: Job, policy: Policy) -> Restoration:
        arrival = job.request.arrival
        restored = job.restored_at if job.restored_at is not None else self.clock.now()
        return Restoration(
            request_id=job.spec.id,
            policy=policy.name,
            prefix_tokens=job.spec.prefix_tokens,
            suffix_tokens=sum(piece.width for piece in job.spec.suffix),
            restored_seconds=restored - arrival,
            computed_seconds=self.clock.now() - arrival,
            recomputed_cells=job.recomputed_cells,
            loaded_cells=dict(job.loaded),
            failed_loads=job.failed,
            dropped_loads=job.dropped,
            stored_tokens=job.stored_tokens,
            segments=tuple(job.provenance(self.recomputer.grid_id)),
        )

    def _announce(self, job: Job, policy: Policy, outcome: str) -> None:
        now = self.clock.now()
        self.emit(
            RestoreEnded(
                request_id=job.spec.id,
                policy=policy.name,
                outcome=outcome,
                arrival=job.request.arrival,
                restored=job.restored_at if job.restored_at is not None else now,
                stop=now,
                prefix_tokens=job.spec.prefix_tokens,
                suffix_tokens=sum(piece.width for piece in job.spec.suffix),
                num_layers=job.spec.num_layers,
                cells={"recompute": job.recomputed_cells, **job.loaded},
            )
        )
