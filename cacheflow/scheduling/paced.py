"""A request whose compute an engine schedules itself: tokens instead of layers.

Engines such as vLLM decide each step how many tokens of which request they compute, and run them
through all layers. They are told how many they may take from where the request stands; what is
granted is theirs, tile by tile, and loads come from the back as ever. Knows no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.frontier import Frontier
from cacheflow.scheduling.glance import Glance
from cacheflow.types import Tile

if TYPE_CHECKING:
    from cacheflow.types import TileWork

__all__ = ["Paced"]

_INFINITE: Final = float("inf")


class Paced(Frontier):
    """Tokens ``[0, reached)`` are in place, ``[reached, granted)`` are the engine's to compute."""

    reached = 0
    granted = 0

    def next_work(self, glance: Glance) -> TileWork | None:
        """None: nobody computes for such a request but its engine."""
        return None

    def wake_at(self, glance: Glance) -> float:
        """Never: the engine asks at its next step anyway."""
        return _INFINITE

    def skip_loaded(self) -> int:
        """Go on behind tiles that loads have completed; the position then."""
        while self.reached < self.spec.prefix_tokens:
            state = self.tiles[self._tile_at(self.reached)]
            if not state.complete or state.running:
                break
            self.reached = state.tile.stop
        self.granted = max(self.granted, self.reached)
        return self.reached

    def grant(self, budget: int, now: float) -> int:
        """Tokens from the position on that compute should take now, ``budget`` at most."""
        if self.cancelled:
            return 0
        limit = min(self.skip_loaded() + budget, self.spec.total_tokens)
        while self.granted < limit:
            if self.granted >= self.spec.prefix_tokens:
                self.granted = limit  # All of the prefix is there, or is computed before.
                break
            t = self._tile_at(self.granted)
            tile = self.tiles[t].tile
            if self.granted == tile.start and not self._take(t, now):
                break
            self.granted = min(tile.stop, limit)
        return min(self.granted, limit) - self.reached

    def advance(self, tokens: int, seconds: float) -> None:
        """Of what was granted, so many tokens are computed."""
        start, stop = self.reached, self.reached + tokens
        if not start <= stop <= self.granted:
            raise ValueError(
                f"{self.spec.id!r} computed {tokens} tokens, was granted {self.granted - start}"
            )
        if seconds > 0.0:
            layer = seconds / self.spec.num_layers
            self._outlook.compute.observe(Tile(0, start, stop), layer)
        self.reached = stop
        for t, state in enumerate(self.tiles):
            if state.running and state.tile.stop <= stop:
                state.running = False
                self._refresh(t)
        for i, piece in enumerate(self.spec.suffix):
            if piece.stop <= stop and not self.suffix_low[i]:
                self._end_suffix(i)

    def _end_suffix(self, i: int) -> None:
        layers = self.spec.num_layers
        self.suffix_low[i] = layers
        self._add_work(self.todo, -layers, self._suffix_work[i])
        if not self._left:
            self._outlook.all_suffixes.add(-layers, self._suffix_work[i])

    def _take(self, t: int, now: float) -> bool:
        """Whether compute begins with a tile: all of it, through all layers."""
        state = self.tiles[t]
        if state.complete or state.committing:
            return False
        glance = Glance(self, now)
        if not (state.must or self._worth(state, self.spec.num_layers - 1, 0, glance)):
            return False
        state.low, state.ready, state.running = self.spec.num_layers, state.full, True
        self.begun = True
        self._refresh(t)
        return True

    def _tile_at(self, token: int) -> int:
        """Index of the prefix tile that holds ``token``: a bisection, their widths differ."""
        low, high = 0, len(self.tiles) - 1
        while low < high:
            middle = (low + high) // 2
            if self.tiles[middle].tile.stop <= token:
                low = middle + 1
            else:
                high = middle
        return low
