"""The restorer: one compute driver, one driver a channel, any number of requests at once.

Asks the scheduler what to begin, begins it, and tells it what ended. Everything runs inside one
task group that lives as long as the ``async with``: nothing outlives it but buffers whose I/O is
still running, which belong to the staging pool's quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from cacheflow.abc import Staged, Together
from cacheflow.clock import SystemClock
from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.kv import Stamp
from cacheflow.restore.admission import Admission
from cacheflow.restore.compute import ComputeDriver
from cacheflow.restore.job import Job
from cacheflow.restore.loads import LoadDriver
from cacheflow.restore.lookups import Lookups
from cacheflow.restore.prefixes import Prefixes
from cacheflow.restore.sealing import shard_of
from cacheflow.restore.stage import StageDriver
from cacheflow.tasks import to_the_end
from cacheflow.tiers.traffic import Traffic
from cacheflow.types import tell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from cacheflow.abc import Recomputer, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.memory import StagingPool
    from cacheflow.restore.request import BrokeOff, Restoration, RestoreRequest
    from cacheflow.scheduling import BatchScheduler, Policy
    from cacheflow.types import ChunkKey, Event, Observer, Segment, StorePart

__all__ = ["Restorer"]

_log = logging.getLogger(__name__)
_VERIFIERS: Final = 2
_ANYBODY: Final = Stamp()
_OVER: Final = (
    "a task that restores has ended before its time (it was cancelled, or failed: see log)"
)


class Restorer:
    """Restores requests on one engine from any number of channels.

    ``load_deadline``: seconds after which a load counts as failed and its channel is not waited
    for again by that request. ``observer`` gets every event and cannot disturb anything.
    ``stamp``, ``allow_lossy``: which chunks are taken (:func:`cacheflow.tiers.locate`).
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
        stamp: Stamp = _ANYBODY,
        allow_lossy: bool = False,
    ) -> None:
        self.recomputer = recomputer
        self.shard = shard_of(recomputer)
        self.scheduler = scheduler
        self.channels = dict(channels)
        self.pool = pool
        self.clock = clock or SystemClock()
        self.load_deadline = load_deadline
        self.stamp = stamp
        self._observer = observer
        self._jobs: dict[str, Job] = {}
        self.peers = recomputer.peers if isinstance(recomputer, Together) else None
        self._prefixes = Prefixes(recomputer.grid, recomputer.layout.chunk_tokens)
        self._lookups = Lookups(self, allow_lossy=allow_lossy)
        self._admission = Admission(self, self._lookups, self._prefixes)
        self._group: asyncio.TaskGroup | None = None
        self._closed = False
        self._drivers: list[asyncio.Task[None]] = []
        self._is_over = False
        """A driver has ended before its time."""
        self.verifiers = ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="cacheflow-verify")
        self._compute = ComputeDriver(self)
        self.traffic = Traffic()
        self._loads = [LoadDriver(self, name) for name in self.channels]
        self.stage = StageDriver(self, recomputer) if isinstance(recomputer, Staged) else None

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        if self.peers is not None:
            self.peers.attach(self.scheduler, self._compute.kick, self.fail)
        runs = [self._compute.run(), *(driver.run() for driver in self._loads)]
        self._drivers = [self._group.create_task(run) for run in runs]
        for driver in self._drivers:
            driver.add_done_callback(self._stopped)
        return self

    def _stopped(self, driver: asyncio.Task[None]) -> None:
        """A driver has ended. Unless the restorer is closing, nobody goes on with its work: it was
        cancelled with all tasks of an event loop that ends, or has failed."""
        error = None if driver.cancelled() else driver.exception()
        if error is not None:
            _log.error("nothing more is restored: a driver has failed", exc_info=error)
        if self._group is not None and not self._is_over:
            self._is_over = True
            for job in list(self._jobs.values()):
                self.fail(job.spec.id, ClosedError(_OVER))

    async def __aexit__(self, *exc_info: object) -> None:
        group, self._group, self._closed = self._group, None, True
        jobs = list(self._jobs.values())
        for job in jobs:
            self.fail(job.spec.id, ClosedError("the restorer was closed during a restore"))
        try:
            if jobs:
                settled = asyncio.gather(*(job.settled.wait() for job in jobs))
                await to_the_end(settled)
        finally:
            for task in self._drivers:
                task.cancel()
            self.verifiers.shutdown(wait=False)
            if group is not None:
                await group.__aexit__(None, None, None)

    async def run(
        self, request: RestoreRequest, policy: Policy, broke_off: BrokeOff | None = None
    ) -> Restoration:
        """Restore the prefix and compute the suffix; the engine must have the request open.

        Cancelling takes the request back at once, whatever is in flight: on return nothing of it
        is left but quarantined staging memory.

        Raises:
            ClosedError: the restorer is not running.
            Exception: whatever the engine raised; storage failures become recompute instead.
        """
        if self._group is None:
            if self._closed:
                raise ClosedError("the restorer is closed")
            raise ClosedError("the restorer is not running; use it inside 'async with'")
        if self._is_over:
            raise ClosedError(_OVER)
        job = self._register(request)
        job.broke_off = broke_off
        outcome = "failed"
        try:
            stored = await self._lookups.ask(job, policy)
            if self.stage is not None:
                stored = await self.stage.agree(job, stored)
            self._admission.admit(job, policy, stored)
            await job.done
            outcome = "restored"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._take_back(job)  # now: the compute thread may be about to claim
            if self.stage is not None and outcome != "restored":
                self.stage.gave_up(job, outcome)
            if self.peers is not None:
                self.peers.leave(job.spec.id, finished=outcome == "restored")
            # Not in the group: it must also run while that is ending. Announced once no thread
            # adds to the job's figures any more.
            try:
                await to_the_end(self._settle(job))
            finally:
                balance = None if self.stage is None else self.stage.balance
                self.emit(job.ended(policy.name, outcome, self.clock.now(), balance))
        return job.result(policy.name, self.recomputer.grid_id, self.clock.now())

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
        for each in self.scheduler.family(request_id):
            if self.stage is not None:
                self.stage.look(each)
            self._check_done(each)
        self._kick()

    def _kick(self) -> None:
        self._compute.kick()
        for driver in self._loads:
            driver.kick()

    def _check_done(self, request_id: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.admitted and not job.done.done():
            if job.restored_at is None and self.scheduler.restored(request_id):
                job.restored_at = self.clock.now()
                job.ready.set()
            waits = job.computing or job.lengthening
            ended = not waits and self.scheduler.finished(request_id)
            if ended and (self.stage is None or self.stage.may_end(request_id)):
                job.done.set_result(None)

    def fail(self, request_id: str, error: BaseException) -> None:
        """End the request with ``error``; those that share its tiles go on."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._take_back(job)
            if not job.done.done():
                job.done.set_exception(error)

    def offer(self, request_id: str, keys: Sequence[ChunkKey], segments: Sequence[Segment]) -> None:
        """An open request keeps its KV, computed as ``segments`` say: prompts that begin with the
        same whole tiles share them from now on, until :meth:`withdraw`."""
        self._prefixes.offer_resident(request_id, keys, segments)

    def withdraw(self, request_id: str) -> None:
        """The request's KV is about to go: nobody new shares it."""
        self._prefixes.withdraw(request_id)

    def raise_priority(self, request_id: str, priority: int) -> None:
        """Somebody waits for a request that is restored at a lower priority, or not at all."""
        job = self._jobs.get(request_id)
        if job is not None and priority > job.spec.priority:
            job.request = replace(job.request, priority=priority)
            job.spec = replace(job.spec, priority=priority)
            self.scheduler.raise_priority(request_id, priority)
            self._kick()

    async def lengthen(
        self, request_id: str, tokens: Sequence[int], extend: Callable[[], Awaitable[None]]
    ) -> bool:
        """The prompt of a request that is being restored goes on: ``tokens``, all of them, begin
        with it. What is new joins its suffix. ``extend`` tells the engine. False, and nothing done,
        where the request has ended, several engines restore it, or there is no room."""
        job = self._jobs.get(request_id)
        if job is None or job.done.done() or not self.is_alone:
            return False
        job.lengthening = True
        try:
            await extend()
            if job.done.done():
                return False
            # What was looked up is what the shorter prompt could have restored.
            keys = job.request.keys[: job.spec.prefix_tokens // job.spec.chunk_tokens]
            job.request = replace(job.request, tokens=tokens, keys=keys)
            if job.admitted:
                job.spec = self.scheduler.lengthen(request_id, len(tokens), self.recomputer.grid)
            else:
                job.spec = self._admission.spec(job.request)
            return True
        except (CapacityError, ConfigError, ClosedError):
            return False
        finally:
            job.lengthening = False
            self.changed(request_id)

    def restoring(self, request_id: str) -> tuple[Sequence[ChunkKey], int]:
        """The keys of a prompt that is being restored, and how many of its leading tokens are;
        while tiers are asked what they have, how many may be."""
        job = self._jobs.get(request_id)
        if job is None or job.done.done():
            return (), 0
        return job.request.keys, job.spec.prefix_tokens

    async def restored(self, request_id: str) -> Sequence[Segment] | None:
        """Wait until the prefix of a request is restored, though its suffix may not be computed;
        how it was. None if it broke off."""
        job = self._jobs.get(request_id)
        if job is None:
            return None
        await job.ready.wait()
        return None if job.restored_at is None else job.provenance(self.recomputer.grid_id)

    def emit(self, event: Event) -> None:
        """Tell the observer; its failures are logged and never reach a request."""
        if self._observer is not None:
            tell(self._observer, event)

    @property
    def is_alone(self) -> bool:
        """Whether no other engine has a part in what is restored here."""
        return self.stage is None and self.peers is None

    # -- what is worth a gauge (see cacheflow.metrics.Live) -------------------------------------

    @property
    def active_restores(self) -> int:
        """Requests being restored."""
        return len(self._jobs)

    def pending_loads(self) -> dict[str, int]:
        """Loads in flight, by tier."""
        return {name: self.traffic.loads(name) for name in self.channels}

    def quarantined_bytes(self) -> dict[str, int]:
        """Staging memory that waits for given-up I/O to end, by tier."""
        return {name: self.pool.quarantined_bytes(name) for name in self.channels}

    def tier_parts(self) -> dict[str, Sequence[StorePart]]:
        """The servers that tiers are made of."""
        return {name: backend.parts() for name, backend in self.channels.items()}

    @property
    def staging_bytes(self) -> tuple[int, int]:
        """Staging memory in use, and in all."""
        return self.pool.leased_bytes, self.pool.capacity

    # -- one request ---------------------------------------------------------------------------

    def _register(self, request: RestoreRequest) -> Job:
        spec = self._admission.spec(request)
        if spec.id in self._jobs:
            raise ValueError(f"request {spec.id!r} is already being restored")
        job = Job(request, spec, asyncio.get_running_loop().create_future())
        self._jobs[spec.id] = job
        return job

    def _take_back(self, job: Job) -> None:
        """Nothing more is done for the request; what it was restoring for others is theirs now."""
        if job.spec.tiles:
            self._prefixes.withdraw(job.spec.id)
        self.scheduler.cancel(job.spec.id)
        self._kick()

    async def _settle(self, job: Job) -> None:
        """Take the request out: no task, claim or hidden state of it is left afterwards."""
        self._take_back(job)
        for task in list(job.loads):
            task.cancel()
        try:  # to its end even where this is cancelled, by an event loop that ends
            if job.loads:
                await asyncio.wait(list(job.loads))
            await self._compute.idle(job)
            broke_off, job.broke_off = job.broke_off, None
            if broke_off is not None and job.done.cancelled() and job.admitted:
                done = self.scheduler.complete_tokens(job.spec.id)
                known = job.provenance(self.recomputer.grid_id)
                broke_off(done, [s for s in known if s.stop <= done])
            for start in self.scheduler.paused_tiles(job.spec.id):
                await self.recomputer.discard(job.spec.id, start)
        finally:
            self.scheduler.remove(job.spec.id)
            self._jobs.pop(job.spec.id, None)
            if self.stage is not None:
                self.stage.forget(job)
            if not job.done.cancelled() and job.done.done():
                job.done.exception()  # whoever was cancelled meanwhile does not ask for it
            job.ready.set()
            job.settled.set()
