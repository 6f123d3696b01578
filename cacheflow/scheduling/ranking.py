"""Who goes first: every resource's queue of the requests that it may turn to.

The objective (or a policy's own order) ranks them; what changed about a request puts it back into
its queues. Hands out no work.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.glance import Glance
from cacheflow.scheduling.order import COMPUTE, load_objective
from cacheflow.scheduling.outlook import Outlook
from cacheflow.scheduling.queue import Queue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.clock import Clock
    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.scheduling.frontier import Frontier
    from cacheflow.scheduling.queue import Rank
    from cacheflow.types import RequestSpec, Tile, TileWork

__all__ = ["Ranking"]

_MAX_LOAD_BYTES: Final = 16 << 20
_INFINITE: Final = float("inf")
_LEAST_WAIT: Final = 1e-3
_MOST_WAIT: Final = 1.0
_SAME_SPEED: Final = 1.5
"""Up to this factor, the order of requests is left as it was ranked."""
_RANKED_AT_ONCE: Final = 32
"""Requests; some 20 us each."""
_TIDIED_AT_ONCE: Final = 256
"""After so many, what they left behind in the queues is cleared away: a multiple of those ranked at
once."""


class Ranking:
    """All active requests, in a queue for compute and one for each channel.

    ``objective``: what the order of requests is for (``tail``, ``mean``, ``deadline``,
    ``makespan``), unless a request's policy brings an order of its own. ``max_requests`` and
    ``max_tokens`` (of their prompts, without what they share) bound what is under way at once; the
    rest wait outside in the same order, none going in before its turn. ``pack_tokens``: the widest
    pass of several tiles (:class:`cacheflow.abc.Packer`); 0: each has its own.

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
        max_requests: int | None = None,
        max_tokens: int | None = None,
        pack_tokens: int = 0,
    ) -> None:
        self._clock = clock
        self._order = load_objective(objective)
        self._outlook = Outlook(compute, max_load_bytes=max_load_bytes, claim_ahead=claim_ahead)
        self._pack_tokens = pack_tokens
        self._pass: frozenset[TileWork] = frozenset()
        """What was handed out last to go through the layers together."""
        self._pass_layer = -1
        self._gate = self._outlook.gate
        self._requests: dict[str, Frontier] = {}
        self._numbers: dict[str, int] = {}
        self._ids = count(1)
        self._compute = Queue()
        self._channels: dict[str, Queue] = {}
        self._speeds: tuple[float, ...] = ()
        self._unranked: deque[str] = deque()
        """Requests that are to be ranked anew."""
        self._timers: list[tuple[float, str]] = []
        self._wake: dict[str, float] = {}
        self._max_requests = _INFINITE if max_requests is None else max_requests
        self._max_tokens = _INFINITE if max_tokens is None else max_tokens
        self._outside = Queue()
        self._inside: dict[str, int] = {}
        self._tokens_inside = 0
        self.held_back = 0
        """Requests that had to wait outside so far."""

    def channel(self, name: str) -> ChannelModel:
        """The cost model of a channel (made on first use)."""
        return self._outlook.channel(name)

    def costs(self, tiles: Sequence[Tile]) -> tuple[list[float], float] | None:
        """Seconds of one layer of each tile, and bytes a second of all channels together; None
        while one of them is unknown."""
        compute = self._outlook.compute
        seconds = [compute.layer_seconds(tile) for tile in tiles]
        known = [each for each in seconds if each is not None]
        speed = sum(model.bandwidth or 0.0 for model in self._outlook.channels.values())
        return (known, speed) if speed and len(known) == len(seconds) else None

    def recompute_seconds(self, request: RequestSpec) -> float:
        """What computing all of its prompt takes, nothing else being under way; 0 while unknown."""
        compute = self._outlook.compute
        tiles = (*request.tiles, *request.suffix)
        return request.num_layers * sum(compute.layer_seconds(tile) or 0.0 for tile in tiles)

    def _rank(self, frontier: Frontier, resource: str, now: float) -> Rank:
        """As urgent as the most urgent of those that wait for its cells, and right before it."""
        rank = self._own_rank(frontier, resource, now)
        if len(frontier.family) == 1 or not frontier.is_leant_on:
            return rank
        for member in frontier.family:
            if not member.cancelled and member.leans_on(frontier):
                priority, key, number = self._own_rank(member, resource, now)
                # Owners of earlier tiles first, where several inherit from one.
                rank = min(rank, (priority, key, number - (member.led - frontier.led)))
        return rank

    def _own_rank(self, frontier: Frontier, resource: str, now: float) -> Rank:
        order = frontier.policy.order or self._order
        key = order.key(frontier, resource, now)
        return -frontier.spec.priority, key, self._numbers[frontier.spec.id]

    def _lead_if_more_urgent(self, frontier: Frontier, now: float) -> None:
        """The more urgent of two restores what they share, from both of its own ends."""
        if not frontier.led or frontier.held or frontier.cancelled:
            return
        rank = self._own_rank(frontier, COMPUTE, now)
        while (leader := frontier.leader) is not None:
            if rank >= self._own_rank(leader, COMPUTE, now):
                return
            frontier.take_over()

    def _hand_over(self, frontier: Frontier, now: float) -> None:
        """Others restore what they shared with a request that goes."""
        if not frontier.owns_shared:
            return
        waiting = [m for m in frontier.family if not m.cancelled and m.leader is frontier]
        if waiting:
            # Only who shares most with it can go on from there; the others lean on that one then.
            heir = max(waiting, key=lambda member: (member.led, not member.held))
            heir.take_over()
            inside = [m for m in frontier.family if not (m.cancelled or m.held)]
            if heir.held and any(member.leans_on(heir) for member in inside):
                self._enter(heir, now)  # In the place that has just become free.
            for member in waiting:
                self._lead_if_more_urgent(member, now)

    def _changed(self, frontier: Frontier, now: float, *, own: bool | None = None) -> None:
        """Something of the request ended or became known: every resource may want it again, and
        those that wait for its cells. ``own``: it is nothing to those (None: nobody does), only to
        whom it waits for itself, who are as urgent as it is."""
        if own is None:
            own = not frontier.owns_shared
        changed = frontier.family
        if own:
            restoring = frontier.family if frontier.leans else ()
            changed = [frontier, *(m for m in restoring if frontier.leans_on(m))]
        for member in changed:
            if not member.cancelled:
                self._put_back(member, now)

    def _put_back(self, frontier: Frontier, now: float) -> None:
        if frontier.held:
            self._outside.put(frontier.spec.id, self._rank(frontier, COMPUTE, now))
            return
        frontier.vain_wait = 0.0
        request_id, rank = frontier.spec.id, None
        if not frontier.computing:
            parked = self._compute.is_parked(request_id)
            if parked and frontier.next_work(glance := Glance(frontier, now)) is None:
                # Putting it back to be asked in vain would only interrupt whoever computes.
                rank = self._park_compute(frontier, glance)
            else:
                frontier.turn_compute_away(False)
                rank = self._rank(frontier, COMPUTE, now)
                self._compute.put(request_id, rank)
        gang = (frontier.policy.order or self._order).gang
        for channel in frontier.channels:
            frontier.turn_away(channel, False)
            if rank is None or not gang:
                rank = self._rank(frontier, channel, now)
            self._channels[channel].put(request_id, rank)

    def _rank_again(self, now: float) -> None:
        """Rank everybody anew once costs are known, or are not what they were; where that is many,
        some at every call, so that none takes long."""
        speeds = self._outlook.speeds()
        if len(self._speeds) != len(speeds) or not all(
            old / _SAME_SPEED < new < old * _SAME_SPEED
            for old, new in zip(self._speeds, speeds, strict=True)
        ):
            self._speeds = speeds
            self._unranked = deque(self._requests)
        if not self._unranked:
            return
        for _ in range(min(_RANKED_AT_ONCE, len(self._unranked))):
            frontier = self._requests.get(self._unranked.popleft())
            if frontier is not None and not frontier.cancelled:
                self._put_back(frontier, now)
        if len(self._unranked) % _TIDIED_AT_ONCE < _RANKED_AT_ONCE:
            for queue in (self._compute, *self._channels.values()):
                queue.tidy()

    def _backlog(self, frontier: Frontier) -> tuple[float, float]:
        """Seconds of compute and of loads planned for all requests but ``frontier``."""
        others = [f.planned() for f in self._requests.values() if f is not frontier]
        return sum(compute for compute, _ in others), sum(load for _, load in others)

    # -- outside and inside --------------------------------------------------------------------

    @property
    def inside(self) -> tuple[int, int]:
        """Requests under way, and the tokens of their prompts that they do not share."""
        return len(self._inside), self._tokens_inside

    @property
    def outside(self) -> int:
        """Requests that wait to be let in."""
        return len(self._outside)

    def _let_in(self, now: float) -> None:
        """Those whose turn it is, as far as there is room; with nobody inside any one has room."""
        while (first := self._outside.waiting()) is not None:
            frontier = self._first_needed(self._requests[first[1]])
            tokens = self._tokens_inside + self._own_tokens(frontier)
            full = len(self._inside) >= self._max_requests or tokens > self._max_tokens
            if self._inside and full:
                return
            self._enter(frontier, now)

    def _first_needed(self, frontier: Frontier) -> Frontier:
        """The request, or who outside owns the first tile that it waits for: inside it would wait
        for ever."""
        needed = [m for m in frontier.family if m.held and frontier.leans_on(m)]
        return min(needed, key=lambda member: member.led, default=frontier)

    def _enter(self, frontier: Frontier, now: float) -> None:
        frontier.held = False
        self._outside.drop(frontier.spec.id)
        tokens = self._inside[frontier.spec.id] = self._own_tokens(frontier)
        self._tokens_inside += tokens
        self._lead_if_more_urgent(frontier, now)
        self._changed(frontier, now)

    def _own_tokens(self, frontier: Frontier) -> int:
        """Tokens of its prompt whose KV no other request holds."""
        spec, others = frontier.spec, max(frontier.led, frontier.filled)
        return spec.total_tokens - (spec.tiles[others - 1].stop if others else 0)

    def _forget(self, frontier: Frontier) -> None:
        now = self._clock.now()
        self._outside.drop(frontier.spec.id)
        self._tokens_inside -= self._inside.pop(frontier.spec.id, 0)
        self._hand_over(frontier, now)
        frontier.leave()
        frontier.turn_compute_away(False)
        self._compute.drop(frontier.spec.id)
        self._wake.pop(frontier.spec.id, None)
        for channel in frontier.channels:
            frontier.turn_away(channel, False)
            self._channels[channel].drop(frontier.spec.id)
        self._let_in(now)

    def _park_compute(self, frontier: Frontier, glance: Glance) -> Rank:
        """It has nothing for compute, as ``glance`` showed; its rank."""
        now = glance.now
        rank = self._rank(frontier, COMPUTE, now)
        self._compute.park(frontier.spec.id, rank)
        frontier.turn_compute_away(True)
        when = frontier.wake_at(glance)
        if when <= now:  # It was just asked, in vain: each time wait longer to ask again.
            wait = max(frontier.vain_wait, frontier.layer_cost, _LEAST_WAIT)
            when, frontier.vain_wait = now + wait, min(2 * wait, _MOST_WAIT)
        if when < _INFINITE:
            self._wake_compute(frontier.spec.id, when)
        else:
            self._wake.pop(frontier.spec.id, None)
        return rank

    def _wake_up(self, now: float) -> None:
        """Requests whose loads are late by now wait for compute again."""
        while self._timers and self._timers[0][0] <= now:
            when, request_id = heappop(self._timers)
            if self._wake.get(request_id) == when:
                del self._wake[request_id]
                frontier = self._requests[request_id]
                self._compute.put(request_id, self._rank(frontier, COMPUTE, now))

    def _gives_way(self, frontier: Frontier, now: float) -> bool:
        """Whether compute leaves off between two layers for somebody more urgent."""
        if self._overtaken(frontier, now):
            return True
        return self._waits_for_first(frontier, frontier.taken_at, None, now)

    def _waits_for_first(
        self, frontier: Frontier, rank: Rank, tile: Tile | None, now: float
    ) -> bool:
        """Whether the suffix of the most urgent request that compute has turned away from is so
        close that no layer of ``frontier``'s ``tile`` (of what it is at) is begun before it.
        ``rank``: of ``frontier``."""
        parked = self._compute.parked()
        if parked is None or parked[1] == frontier.spec.id or parked[0] >= rank:
            return False
        work = None if tile is None else self._outlook.compute.layer_seconds(tile)
        cost = frontier.layer_cost if work is None else work
        wait = self._requests[parked[1]].worth_waiting_for(cost, now)
        when = now + max(wait, _LEAST_WAIT)
        if wait > 0.0 and when < self._wake.get(parked[1], _INFINITE):
            self._wake_compute(parked[1], when)
        return wait > 0.0

    def _wake_compute(self, request_id: str, when: float) -> None:
        """Ask the request again at ``when``, whatever was set before."""
        self._wake[request_id] = when
        heappush(self._timers, (when, request_id))

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
