"""A request that several ranks compute together while each loads a part of its own.

No rank can push a tile through a layer alone, and what one has not (or cannot load) all compute.
So other ranks *ask*: compute then passes the layers asked for, writing those cells that are not
there and leaving those that are. Everything else is as ever: this rank's loads come from the back
at their own speed, and what it would like to compute is decided by its own expectations. How far
any piece of work really goes is agreed upon elsewhere (``cacheflow.distributed``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.batch import BatchScheduler
from cacheflow.scheduling.frontier import Frontier
from cacheflow.scheduling.order import COMPUTE
from cacheflow.types import Claim, ComputeBatch, TileWork

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.scheduling.glance import Glance
    from cacheflow.scheduling.policies import Policy
    from cacheflow.scheduling.queue import Rank
    from cacheflow.scheduling.tiles import TileState
    from cacheflow.types import RequestSpec, Tile

__all__ = ["Joint", "JointScheduler"]

_MOST_LAYERS: Final = 8
"""Layers of a tile that are computed without asking the other ranks again."""


class Joint(Frontier):
    """One request on one of several ranks. Work is named by its first token."""

    aside: frozenset[int] = frozenset()
    """Work that another rank cannot do yet."""
    _suffixes: frozenset[int] = frozenset()
    """Suffix pieces that another rank waits for."""

    def settle_rows(self) -> None:
        """Never: what ranks compute together is agreed upon tile by tile."""

    def ask(self, start: int, layers: int) -> None:
        """Compute has to pass the first ``layers`` layers of the tile, or of the suffix piece."""
        t = self._tile_of(start)
        if t is None:
            self._suffixes |= {start}
            return
        state = self.tiles[t]
        if layers > state.asked:
            state.asked = layers
            self._refresh(t)

    def asked_work(self, first: int = -1) -> TileWork | None:
        """The lowest tile that is asked for and can go on here and now; ``first`` before all."""
        suffix = self._suffix_at(first)
        if suffix is not None and first not in self.aside and self._suffix_reach(suffix):
            return suffix
        able = [state for t, state in self._asked_tiles() if self._passable(t, state.low)]
        able = [state for state in able if state.tile.start not in self.aside]
        able.sort(key=lambda state: state.tile.start != first)
        return TileWork(self.spec.id, able[0].tile, able[0].low) if able else None

    def next_work(self, glance: Glance) -> TileWork | None:
        """What is asked for before what this rank would like."""
        work = self.asked_work() or super().next_work(glance)
        return None if work is not None and work.tile.start in self.aside else work

    def blocked(self) -> list[int]:
        """What was asked for and cannot go on yet: what it depends on is being loaded."""
        tiles = [s.tile.start for t, s in self._asked_tiles() if not self._passable(t, s.low)]
        pieces = [(start, self._suffix_at(start)) for start in sorted(self._suffixes)]
        return tiles + [at for at, work in pieces if work and not self._suffix_reach(work)]

    def needs(self) -> list[tuple[int, int]]:
        """``(first token, layers)`` of tiles that compute has to pass here and that nobody asked
        for yet."""
        return [(s.tile.start, s.must) for s in self.tiles if s.must > s.asked]

    def reach(self, work: TileWork) -> tuple[int, int]:
        """How many layers of ``work`` this rank wants at once, and how many it could go along with.

        Where loads are far, many; in the tile where the two meet, one.
        """
        if work.is_suffix:
            able = self._suffix_reach(work)
            return min(able, _MOST_LAYERS), able
        t = self.index(work)
        state, first = self.tiles[t], work.first_layer
        stop = first
        while stop < self.spec.num_layers and self._passable(t, stop):
            stop += 1
        if state.must > first:
            want = state.must - first
        elif self._has_free >> (t + 1):
            taken = ~(state.free >> first)
            want = (taken & -taken).bit_length() - 1  # free cells in a row
        else:
            want = 1
        return max(1, min(want, _MOST_LAYERS)), stop - first

    def _suffix_reach(self, work: TileWork) -> int:
        layer = work.first_layer
        while layer < self.spec.num_layers and self._advance_front(layer) == len(self.tiles):
            layer += 1
        return layer - work.first_layer

    def _suffix_at(self, start: int) -> TileWork | None:
        """What is left of the suffix piece that begins there, if its turn has come."""
        for piece, low in zip(self.spec.suffix, self.suffix_low, strict=True):
            if low < self.spec.num_layers:
                work = TileWork(self.spec.id, piece, low, is_suffix=True)
                return work if piece.start == start else None
        return None

    def _tile_of(self, start: int) -> int | None:
        found = (t for t, tile in enumerate(self.spec.tiles) if tile.start == start)
        return next(found, None)

    def _asked_tiles(self) -> Iterator[tuple[int, TileState]]:
        for t, state in enumerate(self.tiles):
            if state.asked > state.low and not state.running:
                yield t, state

    def _candidates(self) -> Iterator[int]:
        for t in super()._candidates():
            if self.spec.tiles[t].start not in self.aside:
                yield t

    def _passable(self, t: int, layer: int) -> bool:
        """Whether compute could push tile ``t`` through ``layer`` now."""
        return self._advance_front(layer) >= t and not self.tiles[t].committing >> layer & 1

    def _waits(self, t: int, layer: int) -> bool:
        return layer >= self.tiles[t].asked and super()._waits(t, layer)

    def _decide(self, t: int, layer: int, glance: Glance) -> Claim:
        state = self.tiles[t]
        if layer >= state.asked:
            return super()._decide(t, layer, glance)
        if not self._passable(t, layer):
            return Claim.REFUSED
        return Claim.THROUGH if state.ready >> layer & 1 else Claim.WRITE


class JointScheduler(BatchScheduler):
    """The decision core of one of several ranks. Loop-owned; what is not in
    :class:`BatchScheduler` may be called from any thread."""

    _next: tuple[str, int] = ("", -1)
    """The request and the work that the other ranks wait for."""

    def ask(self, request_id: str, start: int, layers: int, *, now: bool = False) -> None:
        """Compute has to pass ``layers`` layers of the work that begins at token ``start``;
        ``now``: the other ranks wait for that. A request that is not here is nobody's."""
        with self._gate:
            frontier = self._joint(request_id)
            if frontier is not None:
                if now:
                    self._next = (request_id, start)
                frontier.ask(start, layers)
                self._changed(frontier, self._clock.now())

    def set_aside(self, request_id: str, starts: frozenset[int]) -> bool:
        """All that other ranks cannot do yet of this request: none of it is handed out. Whether
        that is news."""
        with self._gate:
            frontier = self._joint(request_id)
            if frontier is None or frontier.aside == starts:
                return False
            frontier.aside = starts
            self._changed(frontier, self._clock.now())
            return True

    def reach(self, work: TileWork) -> tuple[int, int]:
        """See :meth:`Joint.reach`; nothing of a request that is over."""
        with self._gate:
            frontier = self._joint(work.request_id)
            return (0, 0) if frontier is None else frontier.reach(work)

    def needs(self, request_id: str) -> list[tuple[int, int]]:
        """See :meth:`Joint.needs`."""
        with self._gate:
            frontier = self._joint(request_id)
            return [] if frontier is None else frontier.needs()

    def blocked(self, request_id: str) -> list[int]:
        """See :meth:`Joint.blocked`."""
        with self._gate:
            frontier = self._joint(request_id)
            return [] if frontier is None else frontier.blocked()

    def next_compute(self, now: float) -> ComputeBatch | None:
        """What other ranks wait for first, whatever the order of requests here."""
        with self._gate:
            request_id, start = self._next
            for each in (request_id, *self._requests):
                frontier = self._joint(each)
                if frontier is None or frontier.computing:
                    continue
                work = frontier.asked_work(start if each == request_id else -1)
                if work is not None:
                    rank = self._rank(frontier, COMPUTE, now)
                    return ComputeBatch((self._hand_out(frontier, work, rank),))
        return super().next_compute(now)

    def _overtaken(self, frontier: Frontier, now: float) -> bool:
        """Never: how far work goes was agreed upon before it began."""
        return False

    def _waits_for_first(
        self, frontier: Frontier, rank: Rank, tile: Tile | None, now: float
    ) -> bool:
        """Never: the other ranks would wait too, without knowing what for."""
        return False

    def _joint(self, request_id: str) -> Joint | None:
        frontier = self._requests.get(request_id)
        if isinstance(frontier, Joint) and not frontier.cancelled:
            return frontier
        return None

    def _frontier(self, request: RequestSpec, policy: Policy, *, paced: bool) -> Frontier:
        if paced:
            raise ValueError("an engine that paces itself does not compute with other ranks")
        pools = (policy.order or self._order).pools
        return Joint(request, policy, self._outlook, pools=pools)
