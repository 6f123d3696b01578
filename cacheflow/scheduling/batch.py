"""The decision core: what the compute worker and every channel should do next.

Synchronous and free of I/O: it is told what ended and asked what to begin; the awaits live in
``cacheflow.restore``. Runs the same in virtual time. Every resource has a priority queue of the
requests it may turn to; the objective (or the policy's own order) ranks them. A resource asks the
most urgent request first, and what that one leaves idle goes to the next.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.frontier import Frontier
from cacheflow.scheduling.order import COMPUTE, load_objective
from cacheflow.scheduling.outlook import Outlook
from cacheflow.scheduling.queue import Queue
from cacheflow.types import Claim, ComputeBatch, Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.clock import Clock
    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.scheduling.loading import Reach
    from cacheflow.scheduling.policies import Policy
    from cacheflow.scheduling.queue import Rank
    from cacheflow.types import ComputeDone, Coverage, RequestSpec, TileWork

__all__ = ["BatchScheduler"]

_MAX_LOAD_BYTES: Final = 16 << 20
_INFINITE: Final = float("inf")
_LEAST_WAIT: Final = 1e-3
_MOST_WAIT: Final = 1.0
_LEAST_TOKENS: Final = 64
"""Suffixes from this width on are learned from."""
_SAME_SPEED: Final = 1.5
"""Up to this factor, the order of requests is left as it was ranked."""


class BatchScheduler:
    """Claims of all requests of one engine. Loop-owned, except :meth:`claim` (compute thread).

    ``objective``: what the order of requests is for (``tail``, ``mean``, ``deadline``,
    ``makespan``), unless a request's policy brings an order of its own.

    Raises:
        ConfigError: there is no such objective.
    """

    def __init__(
        self,
        compute: ComputeModel,
        clock: Clock,
        *,
        objective: str = "tail",
        max_load_bytes: int = _MAX_LOAD_BYTES,
        claim_ahead: int = 0,
    ) -> None:
        self._clock = clock
        self._order = load_objective(objective)
        self._outlook = Outlook(compute, max_load_bytes=max_load_bytes, claim_ahead=claim_ahead)
        self._gate = self._outlook.gate
        self._requests: dict[str, Frontier] = {}
        self._numbers: dict[str, int] = {}
        self._ids = count(1)
        self._compute = Queue()
        self._channels: dict[str, Queue] = {}
        self._speeds: tuple[float, ...] = ()
        self._timers: list[tuple[float, str]] = []
        self._wake: dict[str, float] = {}

    def channel(self, name: str) -> ChannelModel:
        """The cost model of a channel (made on first use)."""
        return self._outlook.channel(name)

    # -- requests ------------------------------------------------------------------------------

    def admit(
        self, request: RequestSpec, policy: Policy, *, tiles: int = 0, leader: str | None = None
    ) -> None:
        """Nothing known yet of what is stored: compute may start.

        ``tiles``: so many leading tiles have their KV where ``leader``, an admitted request that
        is not cancelled, has it: one of the two restores them for both. Without a ``leader`` they
        are in the KV cache already.
        """
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already admitted")
        with self._gate:
            now = self._clock.now()
            order = policy.order or self._order
            frontier = Frontier(request, policy, self._outlook, pools=order.pools)
            self._requests[request.id] = frontier
            self._numbers[request.id] = 2 * next(self._ids)
            if leader is not None:
                frontier.join(self._requests[leader], tiles)
            else:
                frontier.fill(tiles)
            self._changed(frontier, now)

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

    def cancel(self, request_id: str) -> None:
        """Claim nothing more for the request; claims in progress end on their own."""
        frontier = self._requests.get(request_id)
        if frontier is not None:
            with self._gate:
                frontier.cancelled = True
                self._forget(frontier)
                self._changed(frontier, self._clock.now())

    def remove(self, request_id: str) -> None:
        """Forget a request whose work has all ended."""
        self.cancel(request_id)
        with self._gate:
            frontier = self._requests.pop(request_id, None)
            self._numbers.pop(request_id, None)
            if frontier is not None:
                frontier.part()

    def restored(self, request_id: str) -> bool:
        """Whether every cell of the prefix is ready."""
        return self._requests[request_id].restored

    def finished(self, request_id: str) -> bool:
        """Whether the prefix is restored and the suffix computed."""
        return self._requests[request_id].finished

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
                    return work
            while (waiting := self._compute.waiting()) is not None:
                parked = self._compute.parked()
                work = self._ask_compute(
                    waiting[1], now, is_first=parked is None or waiting < parked
                )
                if work is not None:
                    return work
        return None

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
            frontier = self._requests.get(work.request_id)
            answer = Claim.REFUSED
            begins = layer == work.first_layer
            if frontier is not None and (begins or not self._overtaken(frontier, now)):
                answer = frontier.claim(work, layer, now)
            # What a few tokens take says nothing about tiles.
            wide = not work.is_suffix or work.tile.width >= _LEAST_TOKENS
            learn = answer is not Claim.REFUSED and wide
            self._outlook.claimed(work.tile if learn else None, now)
        return answer

    def computed(self, done: ComputeDone) -> None:
        """The compute worker returned from ``done.work``."""
        now = self._clock.now()
        with self._gate:
            self._outlook.claimed(None, now)
            frontier = self._requests.get(done.work.request_id)
            if frontier is not None:
                frontier.returned(done.work, done.next_layer)
                frontier.computing = False
                self._changed(frontier, now)
            self._rank_again(now)

    def aborted(self, work: TileWork) -> None:
        """The engine raised in ``work``: nothing that it claimed there counts as computed. Its
        request is to be cancelled; those that share its tiles go on."""
        with self._gate:
            self._outlook.claimed(None, self._clock.now())
            frontier = self._requests.get(work.request_id)
            if frontier is not None:
                frontier.aborted(work)

    def _ask_compute(self, request_id: str, now: float, *, is_first: bool) -> ComputeBatch | None:
        frontier = self._requests[request_id]
        frontier.is_first_to_compute = is_first
        work = frontier.next_work(now)
        if work is None:
            self._park_compute(frontier, now)
            return None
        frontier.begin(work)
        frontier.computing = True
        frontier.taken_at = self._rank(frontier, COMPUTE, now)
        frontier.turn_compute_away(False)
        self._compute.drop(request_id)
        self._wake.pop(request_id, None)
        return ComputeBatch((work,))

    def _park_compute(self, frontier: Frontier, now: float) -> None:
        self._compute.park(frontier.spec.id, self._rank(frontier, COMPUTE, now))
        frontier.turn_compute_away(True)
        when = frontier.wake_at(now)
        if when <= now:  # It was just asked, in vain: each time wait longer to ask again.
            wait = max(frontier.vain_wait, frontier.layer_cost, _LEAST_WAIT)
            when, frontier.vain_wait = now + wait, min(2 * wait, _MOST_WAIT)
        if when < _INFINITE:
            self._wake[frontier.spec.id] = when
            heappush(self._timers, (when, frontier.spec.id))
        else:
            self._wake.pop(frontier.spec.id, None)

    def _wake_up(self, now: float) -> None:
        """Requests whose loads are late by now wait for compute again."""
        while self._timers and self._timers[0][0] <= now:
            when, request_id = heappop(self._timers)
            if self._wake.get(request_id) == when:
                del self._wake[request_id]
                frontier = self._requests[request_id]
                self._compute.put(request_id, self._rank(frontier, COMPUTE, now))

    def _overtaken(self, frontier: Frontier, now: float) -> bool:
        """Whether a request that waits for compute is more urgent than the one computing, by more
        than the layer about to be computed: turning back and forth has a price."""
        waiting = self._compute.waiting()
        if waiting is None:
            return False
        (priority, key, _), _ = waiting
        if (priority, key) >= frontier.taken_at[:2]:
            return False  # Its rank only got better since.
        own_priority, own_key, _ = self._rank(frontier, COMPUTE, now)
        if priority != own_priority:
            return priority < own_priority
        return key + frontier.layer_cost < own_key

    # -- loads ---------------------------------------------------------------------------------

    def next_load(self, channel: str, now: float) -> Load | None:
        """The load to start on ``channel`` now, claimed; None until something ends."""
        queue = self._channels.get(channel)
        if queue is None:
            return None
        with self._gate:
            if not self._outlook.has_room(channel, None):
                return None
            parked, waiting = queue.parked(), queue.waiting()
            if parked is not None and (waiting is None or parked < waiting):
                load = self._ask_channel(channel, queue, parked, now, is_first=True)
                if load is not None:
                    return load
            while (waiting := queue.waiting()) is not None:
                parked = queue.parked()
                left = self._requests[waiting[1]].loads_left(now)
                if not self._outlook.has_room(channel, left):
                    return None
                is_first = parked is None or waiting < parked
                load = self._ask_channel(channel, queue, waiting, now, is_first=is_first)
                if load is not None:
                    return load
        return None

    def commit(self, load: Load) -> int:
        """Layers (bitmap) of a verified load to publish; compute has begun to write the others."""
        frontier = self._requests.get(load.request_id)
        if frontier is None:
            return 0
        with self._gate:
            return frontier.commit(load)

    def loaded(self, load: Load, layers: int, now: float) -> None:
        """The load was published (``layers``: what :meth:`commit` granted)."""
        with self._gate:
            self._outlook.channel(load.channel).ended(load.id, now, delivered=True)
            frontier = self._requests.get(load.request_id)
            if frontier is not None:
                frontier.landed(load, layers)
                self._changed(frontier, now)
            self._rank_again(now)

    def failed(self, load: Load, now: float, *, chunks: Sequence[int], late: bool = False) -> None:
        """The load failed for ``chunks``; ``late``: its channel is not to be waited for again."""
        with self._gate:
            self._outlook.channel(load.channel).ended(load.id, now, delivered=False)
            frontier = self._requests.get(load.request_id)
            if frontier is not None:
                frontier.lost(load, chunks)
                if late:
                    frontier.drop_channel(load.channel)
                self._changed(frontier, now)

    def _ask_channel(
        self, channel: str, queue: Queue, entry: tuple[Rank, str], now: float, *, is_first: bool
    ) -> Load | None:
        rank, request_id = entry
        frontier = self._requests[request_id]
        frontier.is_first_to_load = is_first
        reach = frontier.next_reach(channel, now)
        if reach is None:
            queue.park(request_id, rank)
            frontier.turn_away(channel, True)
            return None
        frontier.turn_away(channel, False)
        queue.put(request_id, rank)
        return self._start(frontier, channel, reach, now)

    def _start(self, frontier: Frontier, channel: str, reach: Reach, now: float) -> Load:
        load = Load(
            id=next(self._ids),
            request_id=frontier.spec.id,
            channel=channel,
            tile=reach.tile,
            layers=reach.layers,
            chunks=reach.chunks,
            nbytes=reach.nbytes,
        )
        frontier.start(load)
        self._outlook.channel(channel).started(load.id, load.nbytes, now)
        return load

    # -- queues --------------------------------------------------------------------------------

    def _rank(self, frontier: Frontier, resource: str, now: float) -> Rank:
        """As urgent as the most urgent of those that wait for its cells, and right before it."""
        rank = self._own_rank(frontier, resource, now)
        for member in frontier.family if len(frontier.family) > 1 else ():
            if not member.cancelled and member.leans_on(frontier):
                priority, key, number = self._own_rank(member, resource, now)
                rank = min(rank, (priority, key, number - 1))
        return rank

    def _own_rank(self, frontier: Frontier, resource: str, now: float) -> Rank:
        order = frontier.policy.order or self._order
        key = order.key(frontier, resource, now)
        return -frontier.spec.priority, key, self._numbers[frontier.spec.id]

    def _lead_if_more_urgent(self, frontier: Frontier, now: float) -> None:
        """The more urgent of two restores what they share, from both of its own ends."""
        rank = self._own_rank(frontier, COMPUTE, now)
        while (leader := frontier.leader) is not None:
            if rank >= self._own_rank(leader, COMPUTE, now):
                return
            frontier.take_over()

    def _hand_over(self, frontier: Frontier, now: float) -> None:
        """Others restore what they shared with a request that goes."""
        waiting = [m for m in frontier.family if not m.cancelled and m.leader is frontier]
        if waiting:
            # Only who shares most with it can go on from there; the others lean on that one then.
            max(waiting, key=lambda member: member.led).take_over()
            for member in waiting:
                self._lead_if_more_urgent(member, now)

    def _changed(self, frontier: Frontier, now: float) -> None:
        """Something of the request ended or became known: every resource may want it again, and
        those that wait for its cells."""
        for member in frontier.family:
            if not member.cancelled:
                self._put_back(member, now)

    def _put_back(self, frontier: Frontier, now: float) -> None:
        frontier.vain_wait = 0.0
        request_id = frontier.spec.id
        if not frontier.computing:
            if self._compute.is_parked(request_id) and frontier.next_work(now) is None:
                # Putting it back to be asked in vain would only interrupt whoever computes.
                self._park_compute(frontier, now)
            else:
                frontier.turn_compute_away(False)
                self._compute.put(request_id, self._rank(frontier, COMPUTE, now))
        for channel in frontier.channels:
            frontier.turn_away(channel, False)
            self._channels[channel].put(request_id, self._rank(frontier, channel, now))

    def _rank_again(self, now: float) -> None:
        """Rank everybody anew once costs are known, or are not what they were."""
        speeds = self._outlook.speeds()
        if all(
            old / _SAME_SPEED < new < old * _SAME_SPEED
            for old, new in zip(self._speeds, speeds, strict=False)
        ) and len(self._speeds) == len(speeds):
            return
        self._speeds = speeds
        for frontier in self._requests.values():
            self._changed(frontier, now)

    def _backlog(self, frontier: Frontier) -> tuple[float, float]:
        """Seconds of compute and of loads planned for all requests but ``frontier``."""
        others = [f.planned() for f in self._requests.values() if f is not frontier]
        return sum(compute for compute, _ in others), sum(load for _, load in others)

    def _forget(self, frontier: Frontier) -> None:
        self._hand_over(frontier, self._clock.now())
        frontier.leave()
        frontier.turn_compute_away(False)
        self._compute.drop(frontier.spec.id)
        self._wake.pop(frontier.spec.id, None)
        for channel in frontier.channels:
            frontier.turn_away(channel, False)
            self._channels[channel].drop(frontier.spec.id)
