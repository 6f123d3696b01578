"""One request's frontier: which cells compute and loads may take next, and who may write them.

Compute walks cells forward (tile by tile, layer by layer), loads walk them backward, so wherever
they meet the recomputed set is a staircase and the meeting tile is split by layer. Holes (cells no
channel has) force their tile forward; loads then first fetch what the holes depend on.

Built up in steps: the ledger (amounts), the expectations (seconds), what tiles are fed with and
the load side; here is the compute side. Every method expects the caller to hold the scheduler's
gate: the compute thread claims layers while the event loop claims and commits loads. Knows no
engine, bytes or tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.glance import Glance
from cacheflow.scheduling.racing import Racing
from cacheflow.types import Claim, TileWork

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.scheduling.tiles import TileState

__all__ = ["Frontier"]

_INFINITE: Final = float("inf")


class Frontier(Racing):
    """Cells, claims and readiness of one request."""

    __slots__ = ()

    def next_work(self, glance: Glance) -> TileWork | None:
        """The lowest tile (then the suffix) whose next layer compute should take now."""
        for t in self._candidates():
            state = self.tiles[t]
            if self._decide(t, state.low, glance) is not Claim.REFUSED:
                return TileWork(self.spec.id, state.tile, state.low)
        for i, piece in enumerate(self.spec.suffix):
            low = self.suffix_low[i]
            if low < self.spec.num_layers:
                ready = self._advance_front(low) == len(self.tiles) and self.suffix_fed[i]
                return TileWork(self.spec.id, piece, low, is_suffix=True) if ready else None
        return None

    def followers(self, work: TileWork, now: float) -> Iterator[TileWork]:
        """What comes right behind ``work`` and stands at the same layer: pieces of the suffix, or
        tiles as far as compute is expected (or planned) to get."""
        layer = work.first_layer
        if work.is_suffix:
            for i in range(self.spec.suffix.index(work.tile) + 1, len(self.spec.suffix)):
                if self.suffix_low[i] != layer or not self.suffix_fed[i]:
                    return
                yield TileWork(self.spec.id, self.spec.suffix[i], layer, is_suffix=True)
            return
        for t in range(self.index(work) + 1, self._last_to_compute(self.index(work), now) + 1):
            state = self.tiles[t]
            begun = state.running or state.low != layer or state.committing
            if begun or not (layer or self.is_fed(t)) or not (state.full & ~state.ready) >> layer:
                return
            yield TileWork(self.spec.id, state.tile, layer)

    def _last_to_compute(self, t: int, now: float) -> int:
        """The highest tile that compute is expected to end before the loads do; at least ``t``."""
        if self.heights is not None:
            return max([t, *(i for i, height in enumerate(self.heights) if height)])
        meeting = self._outlook.meeting(self.free, self.loads_left(now), self._overlap())
        if self._by_layers or not self.policy.hedges or meeting is None:
            return t
        spent = 0.0
        for i in self._free_tiles():
            if i < t:
                continue
            state = self.tiles[i]
            spent += state.free.bit_count() * (self._outlook.layer_seconds(state.work) or 0.0)
            if spent > meeting:
                return max(t, i - 1)
        return len(self.tiles) - 1

    def begin(self, work: TileWork) -> None:
        """The compute worker takes ``work``."""
        if not work.is_suffix:
            t = self.index(work)
            self.tiles[t].running = True
            self._recount_all(t)

    def _candidates(self) -> Iterator[int]:
        """Tiles that compute could go on with, in its order."""
        rows = self._rows
        if self.led < rows.tiles:
            order, free = [], self._free_in_rows()
            for t in range(self.led, rows.tiles):
                state = self.tiles[t]
                row = rows.first(state.low)
                if not state.complete and (state.must > state.low or not free & ((1 << row) - 1)):
                    order.append((row, t))
            order.sort()
            yield from (t for _, t in order)
        first = max(self.led, rows.tiles)
        tiles = self._open >> first << first
        while tiles:
            t = (tiles & -tiles).bit_length() - 1
            yield t
            if not self.tiles[t].low and self._advance_front(0) < t:
                return  # No tile behind one that cannot begin was ever begun.
            tiles &= tiles - 1

    def claim(self, work: TileWork, layer: int, now: float) -> Claim:
        """Called by the compute thread before ``layer``; whatever is granted will be enqueued."""
        if self.cancelled or layer >= self.spec.num_layers:
            return Claim.REFUSED
        if work.is_suffix:
            return self._claim_suffix(work, layer)
        t = self.index(work)
        if self._waits(t, layer):
            return Claim.REFUSED
        answer = self._decide(t, layer, Glance(self, now))
        if answer is not Claim.REFUSED:
            state = self.tiles[t]
            state.low = layer + 1
            state.ready |= 1 << layer
            self.begun = self.begun or not self._outlook.compute_stale(now)
            self._refresh(t)
        return answer

    def _claim_suffix(self, work: TileWork, layer: int) -> Claim:
        # It is another piece now if the prompt was lengthened since it was handed out.
        i = next((i for i, p in enumerate(self.spec.suffix) if p == work.tile), None)
        if i is None or self._advance_front(layer) < len(self.tiles):
            return Claim.REFUSED
        if any(low <= layer for low in self.suffix_low[:i]):  # in one pass, but not as far
            return Claim.REFUSED
        self.suffix_low[i] = layer + 1
        self._count_suffix(-1, self._suffix_work[i])
        return Claim.WRITE

    def _waits(self, t: int, layer: int) -> bool:
        """Whether the tile is another's to restore, or others go first."""
        return t < self.led or (t < self._rows.tiles and self._behind(t, layer))

    def _behind(self, t: int, layer: int) -> bool:
        """Whether another tile has to catch up before ``t`` goes on to the row of ``layer``."""
        if self.tiles[t].must > layer:
            return False
        return self._free_in_rows() & ((1 << self._rows.first(layer)) - 1) > 0

    def _free_in_rows(self) -> int:
        """Layers in which any tile that goes row by row has a free cell."""
        free = 0
        for state in self.tiles[self.led : self._rows.tiles]:
            free |= state.free
        return free

    def returned(self, work: TileWork, next_layer: int) -> None:
        """The compute thread is out of ``work`` and holds its hidden state at ``next_layer``."""
        if not work.is_suffix:
            t = self.index(work)
            state = self.tiles[t]
            state.running = False
            state.low = next_layer
            if next_layer == self.spec.num_layers:
                state.passing = False
            self._refresh(t)
            self.settle_rows()

    def aborted(self, work: TileWork) -> None:
        """Compute broke off in ``work``: what it claimed since then may not be there, and the
        hidden state is lost. For the others that share the tile."""
        if work.is_suffix:
            for i, piece in enumerate(self.spec.suffix):
                if piece == work.tile:
                    self._count_suffix(self.suffix_low[i], self._suffix_work[i])
                    self.suffix_low[i] = 0
            return
        t = self.index(work)
        state = self.tiles[t]
        state.undo(work.first_layer)
        self.starve(t)
        for member in self.family:
            member._front = [min(front, t) for front in member._front]
        self._refresh(t)

    def wake_at(self, glance: Glance) -> float:
        """When compute should look again although nothing ended: loads will be too late then."""
        if not self.policy.hedges:
            return _INFINITE
        now = glance.now
        silent = max(self._silent_from(now), now)
        for t in self._candidates():
            state = self.tiles[t]
            target = self._target(t, state.low) if self.is_fed(t) else None
            if target is not None and not state.committing >> target & 1:
                cost = self._outlook.layer_bound(state.work) or 0.0
                seconds = cost * (target - state.low + 1)
                flights = self._flights_of(state, target)
                if flights:
                    seconds *= self._price
                    on_time = self._race_at(flights, seconds + self._until_suffix(target), now)
                    if on_time > now:
                        return min(on_time, silent)
                flip = self._flip(max(seconds + self._overlap(), self._patience(glance)), now)
                return min(flip, silent)
        return _INFINITE

    def paused(self) -> list[int]:
        """First tokens of tiles whose hidden state is of no more use, each named once.

        That is: complete tiles that stopped half way, and everything once the request is cancelled.
        """
        last, found = self.spec.num_layers, []
        for t in range(self.led, len(self.tiles)):
            state = self.tiles[t]
            idle = not state.running and 0 < state.low < last
            if idle and (state.complete or self.cancelled):
                state.low = last
                self._refresh(t)
                found.append(state.tile.start)
        for i, piece in enumerate(self.spec.suffix):
            if self.cancelled and 0 < self.suffix_low[i] < last:
                self.suffix_low[i] = last
                found.append(piece.start)
        return found

    def index(self, work: TileWork) -> int:
        """Position of the prefix tile ``work`` is about."""
        return work.tile.index - self.spec.tiles[0].index

    def _target(self, t: int, layer: int) -> int | None:
        """The lowest cell at or above ``layer`` that still has to become ready, if reachable."""
        state = self.tiles[t]
        open_cells = (state.full & ~state.ready) >> layer << layer
        if state.passing:
            open_cells |= 1 << (self.spec.num_layers - 1)
        if not open_cells or self._advance_front(layer) < t:
            return None
        return (open_cells & -open_cells).bit_length() - 1

    def _decide(self, t: int, layer: int, glance: Glance) -> Claim:
        target = self._target(t, layer)
        if target is None or not (layer or self.is_fed(t)):
            return Claim.REFUSED
        state = self.tiles[t]
        if state.committing >> target & 1:
            return Claim.REFUSED
        if state.must <= target and not self._worth(state, target, layer, glance):
            return Claim.REFUSED
        return Claim.THROUGH if state.ready >> layer & 1 else Claim.WRITE

    def _worth(self, state: TileState, target: int, layer: int, glance: Glance) -> bool:
        if not self.policy.hedges:
            free = self._may_take(state, target, layer) and self.policy.compute(None, None)
            return free or self._stalled(glance)
        left = glance.left
        patient = left is not None and left < self._patience(glance)
        if self._outlook.compute_stale(glance.now):
            # One layer tells what compute is worth now: nothing is lost if it ends before loads do.
            late = None if left is None else left * self._outlook.lateness(self._strides)
            self.leaves = not self.policy.compute(self._outlook.layer_bound(state.work), late)
        else:
            races = self._silent_from(glance.now) <= glance.now
            self.leaves = not races and (patient or not self._wins(state, target, layer, glance))
        return not self.leaves or self._stalled(glance)

    def _wins(self, state: TileState, target: int, layer: int, glance: Glance) -> bool:
        """Whether compute should go on to ``target``. Of a cell in flight, that is if it would be
        there before its load, or on the way to a free one behind it."""
        cost, left, now = self._outlook.layer_bound(state.work), glance.left, glance.now

        def compute(stop: int) -> float | None:
            return None if cost is None else cost * (stop - layer + 1)

        if not state.in_flight >> target & 1:
            ending = glance.ending
            return ending.computes() if ending else self._sooner(compute(target), left, now)
        raced, sure = compute(target), not self._outlook.compute.is_guess
        raced = None if raced is None else raced * self._price
        landing = self._landing(state, target, now) if sure else None
        if raced is None or landing is None:  # late, or nobody knows yet: if all were done sooner
            return self._sooner(raced, left, now)
        if self.policy.compute(raced + self._until_suffix(target), landing):
            return True
        behind = state.free >> target << target
        if not behind:
            return False
        return self._sooner(compute((behind & -behind).bit_length() - 1), left, now)

    def _sooner(self, compute: float | None, left: float | None, now: float) -> bool:
        """Whether all would be done sooner with one more cell, which takes ``compute``, recomputed
        than with all that is left, which takes ``left``, loaded."""
        if self._pools and compute is not None and self._outlook.requests > 1:
            suffixes = self._outlook.seconds(self._outlook.all_suffixes) or 0.0
            return self.policy.compute(compute + suffixes, self._outlook.all_loads(now))
        layer = self._suffix_layer()
        if compute is None or left is None or layer == 0.0 or compute >= left:
            return self.policy.compute(compute, left)
        compute += (self.spec.num_layers - self.suffix_low[0]) * layer
        if self.policy.compute(compute, left + layer):
            return True
        return self.policy.compute(compute, self._left_to_loads(left))

    def _may_take(self, state: TileState, target: int, layer: int) -> bool:
        """Without hedging, what a load has begun stays with it (a cell, or with ``whole_tiles`` the
        tile), and a plan is kept."""
        if self.heights is not None and target >= self.heights[state.tile.index]:
            return False
        if self._whole_tiles:
            return layer > 0 or not (state.in_flight or state.ready)
        return not state.in_flight >> target & 1

    def _stalled(self, glance: Glance) -> bool:
        """Nothing is on its way and no channel would start anything: either side's estimate says
        that the other is faster. Then compute goes on, or nobody ever would."""
        if any(self._loads.values()):
            return False
        return all(self.next_reach(channel, glance) is None for channel in self._strides)
