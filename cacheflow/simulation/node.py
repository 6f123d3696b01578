"""One simulated GPU: the real scheduler, one compute stream, named links, in virtual time.

Drives :class:`~cacheflow.scheduling.BatchScheduler` as the restorer does: compute claims layer by
layer, loads are asked for whenever something ended, a timer looks again where the scheduler says
so. What a layer costs and how fast a link is are functions the scheduler never sees. Knows neither
where requests come from nor how results are shown.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling import RECOMPUTE, Origins
from cacheflow.simulation.links import Transfer
from cacheflow.simulation.records import Record, Spans, Usage, Work
from cacheflow.simulation.telling import Teller
from cacheflow.types import Claim, ComputeDone, LoadOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from cacheflow.scheduling import BatchScheduler, Policy
    from cacheflow.simulation.events import EventLoop
    from cacheflow.simulation.links import Link
    from cacheflow.simulation.writing import WriteBehind
    from cacheflow.types import Coverage, Load, Observer, RequestSpec, Tile, TileWork

__all__ = ["Node"]

_LEAST_WAIT: Final = 1e-4
_LONGEST_WAIT: Final = 0.01
"""A timer that was due and changed nothing waits twice as long the next time, up to this."""
_TRIES: Final = 4
"""How often work whose first claim is refused is asked for again at the same moment."""


class Node:
    """A GPU with its scheduler. ``layer_seconds(tile, now)`` is the true cost of a layer (block).

    ``fate(load, now)`` decides loads: True delivers, False fails when its bytes have passed, None
    never answers (given up after ``load_deadline``). ``decode_share``: part of the compute that
    decode keeps for itself. ``record``: keep busy intervals; ``timeline``: keep every bar.
    ``observer`` is told what a restorer's is. ``writers``: what stores go through, by channel.
    """

    def __init__(
        self,
        loop: EventLoop,
        scheduler: BatchScheduler,
        layer_seconds: Callable[[Tile, float], float],
        links: Mapping[str, Link],
        *,
        index: int = 0,
        fate: Callable[[Load, float], bool | None] | None = None,
        load_deadline: float = inf,
        decode_share: float = 0.0,
        record: bool = False,
        timeline: bool = False,
        observer: Observer | None = None,
        finished: Callable[[Record], None] | None = None,
        writers: Mapping[str, WriteBehind] | None = None,
    ) -> None:
        if not 0 <= decode_share < 1:
            raise ValueError(f"decode_share must be in [0, 1), got {decode_share}")
        self.index = index
        self.scheduler = scheduler
        self.records: dict[str, Record] = {}
        self.compute = Usage()
        self.links = {name: Usage() for name in links}
        self.writers = dict(writers or {})
        self.timeline: list[Work] | None = [] if timeline else None
        self.unfinished = 0
        """Requests without a first token."""
        self._loop = loop
        self._layer_seconds = layer_seconds
        self._stretch = 1.0 / (1.0 - decode_share)
        self._links = dict(links)
        self._fate = fate
        self._load_deadline = load_deadline
        self._record = record
        self._finished = finished
        self._teller = None if observer is None else Teller(observer)
        self._specs: dict[str, RequestSpec] = {}
        self._origins: dict[str, Origins] = {}
        self._pending = Spans()
        self._busy = Spans()
        self._begin_running()

    def _begin_running(self) -> None:
        self._work: TileWork | None = None
        self._queue: list[TileWork] = []
        self._seconds: list[float] = []
        self._began = self._layer_began = self._pending_before = 0.0
        self._writes = False
        self._wake = inf
        self._wait = _LEAST_WAIT
        # Bound once: looking a method up makes an object, and these go into every event.
        self._on_layer, self._on_load, self._on_wake = self._layer_done, self._arrived, self._woken
        self._on_admitted = self._changed

    # -- outside -------------------------------------------------------------------------------

    def admit(self, spec: RequestSpec, policy: Policy, coverage: Iterable[Coverage] = ()) -> Record:
        """A request arrives now; its lookups have answered ``coverage``."""
        suffix = spec.total_tokens - spec.prefix_tokens
        record = Record(spec.id, self.index, spec.arrival, spec.prefix_tokens, suffix)
        self.scheduler.admit(spec, policy)
        coverage = tuple(coverage)
        for each in coverage:
            self.scheduler.extend_coverage(spec.id, each)
        if self._teller is not None:
            expected = self.scheduler.expected_seconds(spec.id)
            self._teller.admitted(spec, policy, coverage, self._loop.time, expected)
        self.records[spec.id] = record
        self._specs[spec.id] = spec
        self._origins[spec.id] = Origins()
        self.unfinished += 1
        self._busy.enter(self._loop.time)
        self._pending.enter(self._loop.time)
        self._check_restored(record)
        # Not at once: requests that arrive in the same moment are all there before one is chosen.
        self._loop.at(self._loop.time, self._on_admitted)
        return record

    @property
    def pending_seconds(self) -> float:
        """Virtual seconds during which some prefix was waiting to be restored."""
        return self._pending.total(self._loop.time)

    @property
    def busy_periods(self) -> list[tuple[float, float]]:
        """Spans ``(start, stop)`` during which some request had no first token, oldest first."""
        return list(self._busy.spans)

    # -- compute -------------------------------------------------------------------------------

    def _changed(self, _: object = None) -> None:
        """Something arrived or ended."""
        self._wait = _LEAST_WAIT
        self._ask()

    def _ask(self) -> None:
        """Ask the scheduler for all that idle resources could do."""
        now = self._loop.time
        tries = _TRIES if self._work is None else 0
        while tries and self._begin_compute(now) and self._work is None:
            tries -= 1
        next_load = self.scheduler.next_load
        for name in self._links:
            while (load := next_load(name, now)) is not None:
                self._begin_load(load, now)
        if self._work is None and self.unfinished:
            self._arm(now)

    def _begin_compute(self, now: float) -> bool:
        """Take the next work, if there is any; its first claim may still be refused."""
        if not self._queue:
            batch = self.scheduler.next_compute(now)
            if batch is None:
                return False
            self._queue.extend(batch.work)
        self._work = work = self._queue.pop(0)
        self._seconds = []
        self._began = now
        self._next_layer(work, work.first_layer)
        return True

    def _next_layer(self, work: TileWork, layer: int) -> bool:
        answer = self.scheduler.claim(work, layer)
        if answer is Claim.REFUSED:
            self._returned(work, layer)
            return False
        now = self._loop.time
        self._writes = answer is Claim.WRITE
        self._layer_began = now
        self._pending_before = self._pending.total(now)
        seconds = self._layer_seconds(work.tile, now) * self._stretch
        self._seconds.append(seconds)
        self._loop.at(now + seconds, self._on_layer, layer + 1)
        return True

    def _layer_done(self, layer: int) -> None:
        work = self._work
        assert work is not None
        now = self._loop.time
        usage = self.compute
        usage.busy += now - self._layer_began
        if self._writes:
            usage.useful += self._pending.total(now) - self._pending_before
            if not work.is_suffix:
                tile = work.tile
                self._origins[work.request_id].wrote(tile.index, tile.stop - tile.start, layer - 1)
        if not self._next_layer(work, layer):
            self._changed()

    def _returned(self, work: TileWork, layer: int) -> None:
        """The compute stream is out of ``work``."""
        self._work = None
        self.scheduler.computed(ComputeDone(work, layer, tuple(self._seconds)))
        now, record = self._loop.time, self.records[work.request_id]
        if layer > work.first_layer:
            if self._record:
                self.compute.intervals.extend((self._began, now))
            if self.timeline is not None:
                source = "suffix" if work.is_suffix else RECOMPUTE
                span = (work.tile.start, work.tile.stop, work.first_layer, layer)
                self.timeline.append(Work(work.request_id, source, *span, self._began, now))
            if self._teller is not None:
                self._teller.computed(work, layer, self._seconds, self._began, now)
        self._check_restored(record)
        if work.is_suffix and self.scheduler.finished(work.request_id):
            self._end(record)

    def _check_restored(self, record: Record) -> None:
        if record.restored == inf and self.scheduler.restored(record.request_id):
            record.restored = self._loop.time
            self._pending.leave(self._loop.time)

    def _end(self, record: Record) -> None:
        record.first_token = self._loop.time
        origins = self._origins.pop(record.request_id)
        cells = {RECOMPUTE: origins.recomputed, **origins.by_channel}
        record.cells = {source: count for source, count in cells.items() if count}
        self.unfinished -= 1
        self._busy.leave(self._loop.time)
        self.scheduler.cancel(record.request_id)
        self._forget(record)
        if self._teller is not None:
            self._teller.answered(record)
        if self._finished is not None:
            self._finished(record)

    def _forget(self, record: Record) -> None:
        """Once nothing of a finished request is in flight."""
        if record.first_token < inf and not record.in_flight:
            self.scheduler.paused_tiles(record.request_id)
            self.scheduler.remove(record.request_id)
            self._specs.pop(record.request_id, None)

    # -- the timer -----------------------------------------------------------------------------

    def _arm(self, now: float) -> None:
        wake = max(self.scheduler.wake_at(now), now + self._wait)
        if wake < self._wake:
            self._wake = wake
            self._loop.at(wake, self._on_wake, wake)

    def _woken(self, wake: float) -> None:
        if wake != self._wake:
            return  # an earlier timer took its place
        self._wake = inf
        if self._work is None and self.unfinished:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._ask()

    # -- loads ---------------------------------------------------------------------------------

    def _begin_load(self, load: Load, now: float) -> None:
        outcome = True if self._fate is None else self._fate(load, now)
        self.records[load.request_id].in_flight += 1
        transfer = Transfer(load, outcome is True)
        if outcome is not None:
            if (writer := self.writers.get(load.channel)) is not None:
                writer.load_began()
            self._links[load.channel].send(transfer, self._on_load)
        elif self._load_deadline < inf:
            self._loop.at(now + self._load_deadline, self._given_up, transfer)

    def _arrived(self, transfer: Transfer) -> None:
        load, now = transfer.load, self._loop.time
        record, usage = self.records[load.request_id], self.links[load.channel]
        seconds = transfer.stop - transfer.start
        usage.busy += seconds
        if self._record:
            usage.intervals.extend((transfer.start, transfer.stop))
        outcome = LoadOutcome.FAILED
        if transfer.ok:
            granted = self.scheduler.commit(load)
            outcome = LoadOutcome.PUBLISHED if granted else LoadOutcome.DROPPED
            self.scheduler.loaded(load, granted, now)
            self._count(load, granted, record, usage, seconds)
        else:
            record.failed_loads += 1
            self.scheduler.failed(load, now, chunks=load.chunks)
        if self._teller is not None:
            self._teller.loaded(load, transfer.start, transfer.stop, outcome)
        if self.timeline is not None:
            self._draw(transfer)
        self._settle(record)
        # Behind what was just asked for instead: as long as loads follow each other it is one time.
        if (writer := self.writers.get(load.channel)) is not None:
            writer.load_ended()

    def _count(
        self, load: Load, granted: int, record: Record, usage: Usage, seconds: float
    ) -> None:
        if not granted:
            record.dropped_loads += 1
            return
        layers = granted.bit_count()
        usage.useful += seconds * layers / (load.layers.stop - load.layers.start)
        tokens = len(load.chunks) * self._specs[load.request_id].chunk_tokens
        self._origins[load.request_id].loaded(load.channel, load.tile, granted, tokens)

    def _given_up(self, transfer: Transfer) -> None:
        load = transfer.load
        record = self.records[load.request_id]
        record.failed_loads += 1
        now = self._loop.time
        self.scheduler.failed(load, now, chunks=load.chunks, late=True)
        if self._teller is not None:
            self._teller.loaded(load, now - self._load_deadline, now, LoadOutcome.LATE)
        self._settle(record)

    def _settle(self, record: Record) -> None:
        record.in_flight -= 1
        if record.first_token == inf:
            self._check_restored(record)
        else:
            self._forget(record)
        self._changed()

    def _draw(self, transfer: Transfer) -> None:
        assert self.timeline is not None
        load = transfer.load
        size = self._specs[load.request_id].chunk_tokens
        tokens = (load.chunks[0] * size, (load.chunks[-1] + 1) * size)
        layers = (load.layers.start, load.layers.stop)
        times = (transfer.start, transfer.stop)
        self.timeline.append(Work(load.request_id, load.channel, *tokens, *layers, *times))
