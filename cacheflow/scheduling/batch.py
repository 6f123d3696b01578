"""The decision core: what the compute worker and every channel should do next.

Synchronous and free of I/O: it is told what ended and asked what to begin; the awaits live in
``cacheflow.restore``. Runs the same in virtual time. Every resource has a priority queue of the
requests it may turn to; the objective (or the policy's own order) ranks them. A resource asks the
most urgent request first, and what that one leaves idle goes to the next.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.frontier import Frontier
from cacheflow.scheduling.granting import LEAST_TOKENS, Granting
from cacheflow.scheduling.paced import Paced
from cacheflow.scheduling.policies.token_wise import TokenWise
from cacheflow.scheduling.queue import Queue
from cacheflow.types import Claim

if TYPE_CHECKING:
    from cacheflow.scheduling.policies import Policy
    from cacheflow.types import ComputeBatch, ComputeDone, Coverage, RequestSpec, TileGrid, TileWork

__all__ = ["BatchScheduler"]

_INFINITE: Final = float("inf")
_FAMILY_BITS: Final = 20
"""Between the numbers of two requests there is room for one rank a tile."""


class BatchScheduler(Granting):
    """Claims of all requests of one engine. Loop-owned, except :meth:`claim` (compute thread)."""

    # -- requests ------------------------------------------------------------------------------

    def admit(
        self,
        request: RequestSpec,
        policy: Policy,
        *,
        tiles: int = 0,
        leader: str | None = None,
        paced: bool = False,
    ) -> None:
        """Nothing known yet of what is stored: compute may start.

        ``tiles``: so many leading tiles have their KV where ``leader``, an admitted request that
        is not cancelled, has it: one of the two restores them for both. Without a ``leader`` they
        are in the KV cache already. ``paced``: the engine schedules compute itself, whole tokens at
        a time: see :meth:`grant_compute`.
        """
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already admitted")
        with self._gate:
            now = self._clock.now()
            frontier = self._frontier(request, policy, paced=paced)
            self._requests[request.id] = frontier
            self._numbers[request.id] = next(self._ids) << _FAMILY_BITS
            if leader is not None:
                frontier.join(self._requests[leader], tiles)
            else:
                frontier.fill(tiles)
            frontier.held = True
            self._changed(frontier, now)
            self._let_in(now)
            self.held_back += frontier.held

    def _frontier(self, request: RequestSpec, policy: Policy, *, paced: bool) -> Frontier:
        pools = (policy.order or self._order).pools
        if paced:
            return Paced(request, TokenWise(policy), self._outlook, pools=pools)
        return Frontier(request, policy, self._outlook, pools=pools)

    def family(self, request_id: str) -> list[str]:
        """The request and all that share tiles with it."""
        frontier = self._requests.get(request_id)
        return [] if frontier is None else [member.spec.id for member in frontier.family]

    def extend_coverage(self, request_id: str, coverage: Coverage) -> None:
        """A tier answered: its channel can deliver these cells."""
        frontier = self._requests.get(request_id)
        if frontier is not None:
            with self._gate:
                frontier.extend(coverage)
                self._channels.setdefault(coverage.channel, Queue())
                if frontier.policy.plans:
                    frontier.plan(*self._backlog(frontier))
                now = self._clock.now()
                self._lead_if_more_urgent(frontier, now)
                self._changed(frontier, now)

    def raise_priority(self, request_id: str, priority: int) -> None:
        """Somebody waits for a request that was admitted at a lower priority."""
        frontier = self._requests.get(request_id)
        if frontier is not None and priority > frontier.spec.priority:
            with self._gate:
                now = self._clock.now()
                frontier.spec = replace(frontier.spec, priority=priority)
                self._lead_if_more_urgent(frontier, now)
                self._changed(frontier, now)

    def lengthen(self, request_id: str, total_tokens: int, grid: TileGrid) -> RequestSpec:
        """The prompt of an admitted request goes on, to ``total_tokens`` in all. What is new is
        suffix, in one piece with what of the suffix has not been begun.

        Raises:
            KeyError: there is no such request.
            ValueError: it gets what it begins with from elsewhere: stages agree on their pieces.
        """
        frontier = self._requests[request_id]
        if frontier.spec.fed:
            raise ValueError(f"request {request_id!r} is fed: its prompt cannot be lengthened")
        with self._gate:
            frontier.lengthen(total_tokens, grid)
            self._changed(frontier, self._clock.now())
        return frontier.spec

    def cancel(self, request_id: str) -> None:
        """Claim nothing more for the request; claims in progress end on their own."""
        frontier = self._requests.get(request_id)
        if frontier is not None:
            with self._gate:
                own = not frontier.owns_shared
                frontier.cancelled = True
                self._forget(frontier)
                self._changed(frontier, self._clock.now(), own=own)

    def remove(self, request_id: str) -> None:
        """Forget a request whose work has all ended."""
        self.cancel(request_id)
        with self._gate:
            frontier = self._requests.pop(request_id, None)
            self._numbers.pop(request_id, None)
            if frontier is not None:
                frontier.part()

    def complete_tokens(self, request_id: str) -> int:
        """Leading tokens of the prefix whose KV is complete: whole tiles that nothing works on."""
        frontier = self._requests.get(request_id)
        if frontier is None:
            return 0
        with self._gate:
            return frontier.complete_tokens

    def restored(self, request_id: str) -> bool:
        """Whether every cell of the prefix is ready."""
        return self._requests[request_id].restored

    def finished(self, request_id: str) -> bool:
        """Whether the prefix is restored and the suffix computed."""
        return self._requests[request_id].finished

    def expected_seconds(self, request_id: str) -> float:
        """Until the suffix is computed, with all resources to itself; 0 if nothing is known."""
        with self._gate:
            return self._requests[request_id].remaining(self._clock.now())

    def paused_tiles(self, request_id: str) -> list[int]:
        """First tokens of tiles whose hidden state the engine may drop; each is named once."""
        frontier = self._requests.get(request_id)
        if frontier is None:
            return []
        with self._gate:
            return frontier.paused()

    # -- compute -------------------------------------------------------------------------------

    def next_compute(self, now: float) -> ComputeBatch | None:
        """Work for the compute worker, or None until something ends or :meth:`wake_at`."""
        with self._gate:
            self._wake_up(now)
            parked, waiting = self._compute.parked(), self._compute.waiting()
            if parked is not None and (waiting is None or parked < waiting):
                work = self._ask_compute(parked[1], now, is_first=True)
                if work is not None:
                    return self._filled(work, now)
                parked, waiting = self._compute.parked(), self._compute.waiting()
            while waiting is not None:
                is_first = parked is None or waiting < parked
                work = self._ask_compute(waiting[1], now, is_first=is_first)
                if work is not None:
                    return self._filled(work, now)
                asked = waiting
                parked, waiting = self._compute.parked(), self._compute.waiting()
                if waiting == asked:
                    return None  # Nothing is begun before somebody's suffix goes on.
        return None

    def feed(self, request_id: str, start: int) -> None:
        """The hidden state that the tile or suffix piece at token ``start`` begins with has come
        from the stage before."""
        frontier = self._requests.get(request_id)
        if frontier is not None:
            with self._gate:
                frontier.feed(start)
                self._changed(frontier, self._clock.now())

    def pass_on(self, request_id: str, start: int) -> None:
        """The stage behind cannot do without what comes out of the last layer for the tile at
        token ``start``: compute it, or go through it once more."""
        frontier = self._requests.get(request_id)
        if frontier is not None:
            with self._gate:
                frontier.pass_on(start)
                self._changed(frontier, self._clock.now())

    def starving(self, request_id: str) -> list[int]:
        """First tokens of tiles that have to be recomputed and that no channel can feed: the stage
        before has to."""
        frontier = self._requests.get(request_id)
        if frontier is None:
            return []
        with self._gate:
            return frontier.starving()

    def wake_at(self, now: float) -> float:
        """When to ask :meth:`next_compute` again although nothing ended (may be infinite)."""
        with self._gate:
            while self._timers:
                when, request_id = self._timers[0]
                if self._wake.get(request_id) == when:
                    return when
                heappop(self._timers)
        return _INFINITE

    def claim(self, work: TileWork, layer: int) -> Claim:
        """May the compute thread push ``work`` through ``layer``? Thread-safe, microseconds."""
        with self._gate:
            now = self._clock.now()
            joins = self._joins_pass(work, layer)
            if not joins:
                self._outlook.layer_ended(now)
            frontier = self._requests.get(work.request_id)
            answer = Claim.REFUSED
            begins = layer == work.first_layer
            if frontier is not None and (begins or not self._gives_way(frontier, now)):
                answer = frontier.claim(work, layer, now)
            # What a few tokens take says nothing about tiles.
            wide = not work.is_suffix or work.tile.width >= LEAST_TOKENS
            learn = answer is not Claim.REFUSED and wide
            self._outlook.claimed(work.tile if learn else None, now, joins=joins)
        return answer

    def computed(self, done: ComputeDone) -> None:
        """The compute worker returned from ``done.work``."""
        now = self._clock.now()
        with self._gate:
            self._outlook.claimed(None, now)
            frontier = self._requests.get(done.work.request_id)
            if frontier is not None:
                own = frontier.is_own(None if done.work.is_suffix else frontier.index(done.work))
                frontier.returned(done.work, done.next_layer)
                frontier.computing = False
                self._changed(frontier, now, own=own)
            self._rank_again(now)

    def aborted(self, work: TileWork) -> None:
        """The engine raised in ``work``: nothing that it claimed there counts as computed. Its
        request is to be cancelled; those that share its tiles go on."""
        with self._gate:
            self._outlook.claimed(None, self._clock.now())
            frontier = self._requests.get(work.request_id)
            if frontier is not None:
                frontier.aborted(work)
