"""A discrete-event run of the real scheduler in virtual time: modelled compute, modelled links.

Drives :class:`~cacheflow.scheduling.BatchScheduler` exactly as the restorer does (one compute
stream that claims layer by layer, serial links) but with costs that are plain functions, so a
schedule can be checked to the microsecond without torch, files or sleeping.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.types import Claim, ComputeDone, Coverage, RequestSpec, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.types import Load, Tile, TileWork

__all__ = ["Link", "VirtualRun", "make_spec"]

_VAIN_ASKS: Final = 100
"""Work whose first claim is refused in the same instant: after so many, nothing will change."""
_VAIN_WAKES: Final = 1000
"""Timers in a row without an event between them: an event loop would spin."""


def make_spec(
    prefix: int,
    total: int,
    *,
    layers: int = 4,
    chunk: int = 256,
    grid: TileGrid | None = None,
    request_id: str = "r",
    arrival: float = 0.0,
) -> RequestSpec:
    """A request of ``total`` tokens whose first ``prefix`` (whole chunks) may be restored."""
    grid = grid or TileGrid()
    return RequestSpec(
        id=request_id,
        arrival=arrival,
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

    ``outcome`` decides each load's fate: True delivers, False fails, None never answers (whoever
    decides so may call :meth:`VirtualRun.lose` later).
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

    ``layer_seconds(tile)`` is the true cost of a layer, unknown to the scheduler; it may look at
    :attr:`clock`, and a link's ``bandwidth`` may change, so costs can drift. ``options`` are
    keywords of :class:`~cacheflow.scheduling.BatchScheduler`. Finished and cancelled requests are
    removed once their last load has ended.
    """

    def __init__(
        self,
        layer_seconds: Callable[[Tile], float],
        links: dict[str, Link],
        *,
        linear: float = 1.0,
        attention: float = 1e-4,
        **options: Any,
    ) -> None:
        self.clock = ManualClock()
        self.links = links
        self.compute = ComputeModel(linear, attention)
        self.scheduler = BatchScheduler(self.compute, self.clock, **options)
        self.restored_at: dict[str, float] = {}
        self.finished_at: dict[str, float] = {}
        self.writes: list[tuple[str, int, int, str]] = []
        """Every cell written: ``(request, tile, layer, source)``."""
        self.computed_at: dict[int, float] = {}
        """When compute came out of the last layer of a tile or suffix piece, by its first token."""
        self.loaded_bytes = {"kv": 0, "hidden": 0}
        """Delivered by links: KV, and boundary activations."""
        self.compute_busy = 0.0
        self._layer_seconds = layer_seconds
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._computing: TileWork | None = None
        self._pending: set[str] = set()
        self._flying: Counter[str] = Counter()
        self._admitted: set[str] = set()
        self._over: set[str] = set()
        self._wakes = 0
        self._layers: dict[str, int] = {}

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call ``action`` when the clock reads ``when`` (or at the next event, if that is past)."""
        heapq.heappush(self._events, (when, next(self._order), action))

    def arrive(
        self,
        spec: RequestSpec,
        coverage: Sequence[Coverage] = (),
        policy: str = "adaptive",
        alike: Sequence[tuple[str, int]] = (),
    ) -> None:
        """The request will be admitted at ``spec.arrival``; ``alike``: see :meth:`admit`."""
        self._pending.add(spec.id)
        self.at(spec.arrival, lambda: self.admit(spec, coverage, policy, alike))

    def cancel(self, request_id: str) -> None:
        """Cancel an admitted request now; it counts as over."""
        if request_id not in self._over:
            self.scheduler.cancel(request_id)
            self._over.add(request_id)
            self._retire(request_id)

    def admit(
        self,
        spec: RequestSpec,
        coverage: Sequence[Coverage] = (),
        policy: str = "adaptive",
        alike: Sequence[tuple[str, int]] = (),
    ) -> None:
        """A request arrives now; its lookups answer at once.

        ``alike``: requests with so many leading tiles like its own; of those that are under way
        the one with most shares them.
        """
        self._pending.discard(spec.id)
        live = [(tiles, name) for name, tiles in alike if self._is_live(name)]
        tiles, leader = max(live, default=(0, ""))
        if tiles:
            self.scheduler.admit(spec, load_policy(policy), tiles=tiles, leader=leader)
        else:
            self.scheduler.admit(spec, load_policy(policy))
        self._admitted.add(spec.id)
        self._layers[spec.id] = spec.num_layers
        for each in coverage:
            self.scheduler.extend_coverage(spec.id, each)

    def run(self, *requests: str, limit: float = 1e9) -> None:
        """Until ``requests`` are finished or cancelled; raises if nothing can happen any more."""
        while not self._over.issuperset(requests):
            self._begin_what_can_begin()
            over = len(self._over)
            self._note(requests)
            if self._over.issuperset(requests):
                return
            if len(self._over) > over:
                continue  # Who waited outside may be let in now.
            timer = self.scheduler.wake_at(self.clock.now()) if self._computing is None else limit
            timer = max(timer, self.clock.now() + 1e-4)
            if not self._events and timer >= limit:
                raise RuntimeError(f"stuck at {self.clock.now()}")
            if self._events and self._events[0][0] <= timer:
                at, _, action = heapq.heappop(self._events)
                self._advance(at)
                action()
                self._wakes = 0
            else:
                self._advance(timer)
                self._wakes += 1
                if self._wakes > _VAIN_WAKES:
                    raise RuntimeError(f"woken for nothing again and again at {timer}")

    def settle(self) -> None:
        """Let all that is under way end (loads that recompute has overtaken), begin nothing."""
        while self._events:
            at, _, action = heapq.heappop(self._events)
            self._advance(at)
            action()

    def _note(self, requests: Sequence[str]) -> None:
        for request in requests:
            if request in self._pending or request in self._over:
                continue
            if request not in self.restored_at and self.scheduler.restored(request):
                self.restored_at[request] = self.clock.now()
            if not self._works_on(request) and self.scheduler.finished(request):
                self.finished_at[request] = self.clock.now()
                self._over.add(request)
                self._retire(request)

    def _is_live(self, request_id: str) -> bool:
        return request_id in self._admitted and request_id not in self._over

    def _works_on(self, request_id: str) -> bool:
        return self._computing is not None and self._computing.request_id == request_id

    def _retire(self, request_id: str) -> None:
        over = request_id in self._over and not self._flying[request_id]
        if over and not self._works_on(request_id):
            self.scheduler.paused_tiles(request_id)
            self.scheduler.remove(request_id)

    def _advance(self, to: float) -> None:
        self.clock.advance(max(0.0, to - self.clock.now()))

    def _begin_what_can_begin(self) -> None:
        asked = 0
        while self._computing is None:
            batch = self.scheduler.next_compute(self.clock.now())
            if batch is None:
                break
            asked += 1
            if asked > _VAIN_ASKS:
                raise RuntimeError(f"{batch.work[0]} is handed out and refused for ever")
            self._computing = work = batch.work[0]
            self._next_layer(work, work.first_layer)
        for name in self.links:
            while (load := self.scheduler.next_load(name, self.clock.now())) is not None:
                self._start(load)

    def _next_layer(self, work: TileWork, layer: int) -> None:
        answer = self.scheduler.claim(work, layer)
        if answer is Claim.REFUSED:
            self._computing = None
            if layer == self._layers.get(work.request_id):
                self.computed_at[work.tile.start] = self.clock.now()
            self.scheduler.computed(ComputeDone(work, layer, ()))
            self._retire(work.request_id)
            return
        if answer is Claim.WRITE and not work.is_suffix:
            self.writes.append((work.request_id, work.tile.index, layer, "recompute"))
        seconds = self._layer_seconds(work.tile)
        self.compute_busy += seconds
        self.at(self.clock.now() + seconds, lambda: self._next_layer(work, layer + 1))

    def _start(self, load: Load) -> None:
        link = self.links[load.channel]
        self._flying[load.request_id] += 1
        outcome = link.outcome(load)
        if outcome is None:
            return
        done = link.finish(load.nbytes, self.clock.now())
        self.at(done, (lambda: self._land(load)) if outcome else (lambda: self.lose(load)))

    def _land(self, load: Load) -> None:
        self.loaded_bytes["hidden" if load.hidden else "kv"] += load.nbytes
        granted = self.scheduler.commit(load)
        for layer in () if load.hidden else load.layers:
            if granted >> layer & 1:
                self.writes.append((load.request_id, load.tile, layer, load.channel))
        self.scheduler.loaded(load, granted, self.clock.now())
        self._landed(load)

    def lose(self, load: Load, chunks: Sequence[int] | None = None, *, late: bool = False) -> None:
        """``load`` fails now, for all of its chunks or some; ``late``: its channel is given up."""
        lost = load.chunks if chunks is None else chunks
        self.scheduler.failed(load, self.clock.now(), chunks=lost, late=late)
        self._landed(load)

    def _landed(self, load: Load) -> None:
        self._flying[load.request_id] -= 1
        self._retire(load.request_id)
