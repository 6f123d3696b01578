"""Who goes first: every resource's queue of the requests that it may turn to.

The objective (or a policy's own order) ranks them; what changed about a request puts it back into
its queues. Hands out no work.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.order import COMPUTE, load_objective
from cacheflow.scheduling.outlook import Outlook
from cacheflow.scheduling.queue import Queue

if TYPE_CHECKING:
    from cacheflow.clock import Clock
    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.scheduling.frontier import Frontier
    from cacheflow.scheduling.queue import Rank

__all__ = ["Ranking"]

_MAX_LOAD_BYTES: Final = 16 << 20
_INFINITE: Final = float("inf")
_LEAST_WAIT: Final = 1e-3
_MOST_WAIT: Final = 1.0
_SAME_SPEED: Final = 1.5
"""Up to this factor, the order of requests is left as it was ranked."""


class Ranking:
    """All active requests, in a queue for compute and one for each channel.

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
        if not frontier.led:
            return
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
