"""What compute is handed: one tile; in fast mode as many as fit into one pass.

A pass costs its launch and reads the weights once however many tokens it has, so small tiles are
cheaper together: the next tiles of the same request as far as compute is expected to get, then
those of the requests behind it that are at the same layer. In exact mode every tile has a pass of
its own, always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.scheduling.glance import Glance
from cacheflow.scheduling.order import COMPUTE
from cacheflow.scheduling.ranking import Ranking
from cacheflow.types import ComputeBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.scheduling.frontier import Frontier
    from cacheflow.scheduling.queue import Rank
    from cacheflow.types import TileWork

__all__ = ["Packing"]


class Packing(Ranking):
    """Hands out work to the one compute stream."""

    def _ask_compute(self, request_id: str, now: float, *, is_first: bool) -> TileWork | None:
        frontier = self._requests[request_id]
        frontier.is_first_to_compute = is_first
        glance = Glance(frontier, now)
        work = frontier.next_work(glance)
        if work is None:
            self._park_compute(frontier, glance)
            return None
        rank = self._rank(frontier, COMPUTE, now)
        if not is_first and self._waits_for_first(frontier, rank, work.tile, now):
            return None
        return self._hand_out(frontier, work, rank)

    def _hand_out(self, frontier: Frontier, work: TileWork, rank: Rank) -> TileWork:
        request_id = frontier.spec.id
        frontier.begin(work)
        frontier.computing = True
        frontier.taken_at = rank
        frontier.turn_compute_away(False)
        self._compute.drop(request_id)
        self._wake.pop(request_id, None)
        return work

    def _filled(self, first: TileWork, now: float) -> ComputeBatch:
        """A pass with ``first``, which is handed out, and what else goes into it."""
        works = [first]
        if self._pack_tokens:
            self._follow(works, now)
            while (work := self._next_beside(works, now)) is not None:
                works.append(work)
                self._follow(works, now)
        self._pass = frozenset(works) if len(works) > 1 else frozenset()
        self._pass_layer = -1
        return ComputeBatch(tuple(works))

    def _room(self, works: Sequence[TileWork]) -> int:
        return self._pack_tokens - sum(work.tile.width for work in works)

    def _follow(self, works: list[TileWork], now: float) -> None:
        """Add what comes behind the last one in its own request."""
        frontier = self._requests[works[-1].request_id]
        for work in frontier.followers(works[-1], now):
            if work.tile.width > self._room(works):
                return
            frontier.begin(work)
            works.append(work)

    def _next_beside(self, works: Sequence[TileWork], now: float) -> TileWork | None:
        """Work of the next request, if it is at the same layer and there is room for it."""
        while self._room(works) > 0 and (waiting := self._compute.waiting()) is not None:
            frontier = self._requests[waiting[1]]
            frontier.is_first_to_compute = False
            glance = Glance(frontier, now)
            work = frontier.next_work(glance)
            if work is None:
                self._park_compute(frontier, glance)
            elif work.first_layer != works[0].first_layer or work.tile.width > self._room(works):
                return None
            else:
                return self._hand_out(frontier, work, self._rank(frontier, COMPUTE, now))
        return None

    def _joins_pass(self, work: TileWork, layer: int) -> bool:
        """Whether ``work`` is to go through ``layer`` in a pass that others were asked for just
        now: the time between the two claims is not what a layer takes."""
        if not self._pass or work not in self._pass:
            return False
        joins, self._pass_layer = layer == self._pass_layer, layer
        return joins
