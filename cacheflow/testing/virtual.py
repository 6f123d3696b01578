"""A discrete-event run of the real scheduler in virtual time: modelled compute, modelled links.

Drives :class:`~cacheflow.scheduling.BatchScheduler` exactly as the restorer does (one compute
stream that claims layer by layer, serial links) but with costs that are plain functions, so a
schedule can be checked to the microsecond without torch, files or sleeping.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.types import Claim, ComputeDone, Coverage, RequestSpec, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.types import Load, Tile, TileWork

__all__ = ["Link", "VirtualRun", "make_spec"]


def make_spec(
    prefix: int,
    total: int,
    *,
    layers: int = 4,
    chunk: int = 256,
    grid: TileGrid | None = None,
    request_id: str = "r",
) -> RequestSpec:
    """A request of ``total`` tokens whose first ``prefix`` (whole chunks) may be restored."""
    grid = grid or TileGrid()
    return RequestSpec(
        id=request_id,
        arrival=0.0,
        prefix_tokens=prefix,
        total_tokens=total,
        chunk_tokens=chunk,
        num_layers=layers,
        tiles=grid.split(0, prefix),
        suffix=grid.split(prefix, total),
    )


@dataclass(slots=True)
class Link:
    """A serial link: a load of ``n`` bytes occupies it for ``n / bandwidth`` and takes ``latency``.

    ``outcome`` decides each load's fate: True delivers, False fails, None never answers.
    """

    bandwidth: float
    latency: float = 0.0
    outcome: Callable[[Load], bool | None] = field(default=lambda load: True)
    free_at: float = 0.0
    busy: float = 0.0

    def finish(self, nbytes: int, now: float) -> float:
        """When ``nbytes`` handed over now would be there."""
        start = max(now, self.free_at)
        seconds = nbytes / self.bandwidth
        self.free_at = start + seconds
        self.busy += seconds
        return self.free_at + self.latency


class VirtualRun:
    """One scheduler, one compute stream, named links; ``run`` until every request is finished.

    ``layer_seconds(tile)`` is the true cost of a layer, unknown to the scheduler.
    """

    def __init__(
        self,
        layer_seconds: Callable[[Tile], float],
        links: dict[str, Link],
        *,
        linear: float = 1.0,
        attention: float = 1e-4,
    ) -> None:
        self.clock = ManualClock()
        self.links = links
        self.scheduler = BatchScheduler(ComputeModel(linear, attention), self.clock)
        self.restored_at: dict[str, float] = {}
        self.finished_at: dict[str, float] = {}
        self.writes: list[tuple[str, int, int, str]] = []
        """Every cell written: ``(request, tile, layer, source)``."""
        self.compute_busy = 0.0
        self._layer_seconds = layer_seconds
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._computing = False

    def admit(
        self, spec: RequestSpec, coverage: Sequence[Coverage] = (), policy: str = "adaptive"
    ) -> None:
        """A request arrives now; its lookups answer at once."""
        self.scheduler.admit(spec, load_policy(policy))
        for each in coverage:
            self.scheduler.extend_coverage(spec.id, each)

    def run(self, *requests: str, limit: float = 1e9) -> None:
        """Until ``requests`` are finished; raises if nothing can happen any more."""
        while not all(request in self.finished_at for request in requests):
            self._begin_what_can_begin()
            self._note(requests)
            if all(request in self.finished_at for request in requests):
                return
            timer = self.scheduler.wake_at(self.clock.now()) if not self._computing else limit
            timer = max(timer, self.clock.now() + 1e-4)
            if not self._events and timer >= limit:
                raise RuntimeError(f"stuck at {self.clock.now()}")
            if self._events and self._events[0][0] <= timer:
                at, _, action = heapq.heappop(self._events)
                self._advance(at)
                action()
            else:
                self._advance(timer)

    def _note(self, requests: Sequence[str]) -> None:
        for request in requests:
            if request not in self.restored_at and self.scheduler.restored(request):
                self.restored_at[request] = self.clock.now()
            if not self._computing and self.scheduler.finished(request):
                self.finished_at.setdefault(request, self.clock.now())

    def _advance(self, to: float) -> None:
        self.clock.advance(max(0.0, to - self.clock.now()))

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _begin_what_can_begin(self) -> None:
        if not self._computing:
            batch = self.scheduler.next_compute(self.clock.now())
            if batch is not None:
                self._computing = True
                work = batch.work[0]
                self._next_layer(work, work.first_layer)
        for name in self.links:
            while (load := self.scheduler.next_load(name, self.clock.now())) is not None:
                self._start(load)

    def _next_layer(self, work: TileWork, layer: int) -> None:
        answer = self.scheduler.claim(work, layer)
        if answer is Claim.REFUSED:
            self._computing = False
            self.scheduler.computed(ComputeDone(work, layer, ()))
            return
        if answer is Claim.WRITE and not work.is_suffix:
            self.writes.append((work.request_id, work.tile.index, layer, "recompute"))
        seconds = self._layer_seconds(work.tile)
        self.compute_busy += seconds
        self._at(self.clock.now() + seconds, lambda: self._next_layer(work, layer + 1))

    def _start(self, load: Load) -> None:
        link = self.links[load.channel]
        outcome = link.outcome(load)
        if outcome is None:
            return
        done = link.finish(load.nbytes, self.clock.now())
        self._at(done, (lambda: self._land(load)) if outcome else (lambda: self._lose(load)))

    def _land(self, load: Load) -> None:
        granted = self.scheduler.commit(load)
        for layer in load.layers:
            if granted >> layer & 1:
                self.writes.append((load.request_id, load.tile, layer, load.channel))
        self.scheduler.loaded(load, granted, self.clock.now())

    def _lose(self, load: Load) -> None:
        self.scheduler.failed(load, self.clock.now(), chunks=load.chunks)
