"""What is under way for one request: when it lands, what racing it costs, whether to wait for it.

Decides nothing that is compute's or a channel's to take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.loading import Loading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cacheflow.scheduling.tiles import TileState
    from cacheflow.types import Load

__all__ = ["Racing"]

_RACE: Final = 3.0
_INFINITE: Final = float("inf")


class Racing(Loading):
    """A request with loads in flight."""

    __slots__ = ()

    @property
    def _price(self) -> float:
        """What a second of racing a load is worth: it is work done twice, so where others wait for
        compute it has to win clearly."""
        return _RACE if self._outlook.requests > 1 else 1.0

    def _until_suffix(self, layer: int) -> float:
        """Seconds before which the suffix would not get to ``layer`` anyway, begun now."""
        return max(layer - self.suffix_low[0], 0) * self._suffix_layer()

    def _flights_of(self, state: TileState, layer: int) -> list[Load]:
        """Loads under way that bring (a part of) this cell."""
        t = state.tile.index - self.spec.tiles[0].index
        return [
            load
            for load in self._flights.values()
            if load.tile == t and load.layers.start <= layer < load.layers.stop
        ]

    def _landing(self, state: TileState, layer: int, now: float) -> float | None:
        """Seconds until this cell's loads are there; None if they are late or somebody else's."""
        latest = None
        for flight in self._flights_of(state, layer):
            model = self._outlook.channels[flight.channel]
            if model.late_from() <= now or (model.was_passed and model.lag(flight.id, now)):
                return None
            seconds = model.left(model.ahead(flight.id), now) or 0.0
            latest = seconds if latest is None else max(latest, seconds)
        return latest

    def _race_at(self, flights: Iterable[Load], seconds: float, now: float) -> float:
        """When a cell that these loads bring should be raced, which takes ``seconds``."""
        times = [_INFINITE]
        for flight in flights:
            late = self._outlook.channels[flight.channel].late_from()
            times += [self._late_at(flight, seconds, now), max(late, now)]
        return min(times)

    def worth_waiting_for(self, cost: float, now: float) -> float:
        """Seconds for which compute should rather idle than begin ``cost`` seconds of another, less
        urgent request's: the suffix is about to go on, and would be late by more than all who wait
        lose by that (0: do not wait)."""
        due = self._suffix_due(now)
        if due is None or self._pools or not self.policy.overlaps:
            return 0.0
        left, rest = self.loads_left(now, alone=True) or 0.0, self.suffix_seconds
        last = left + self._suffix_layer()
        saved = max(last, cost + rest) - max(last, due + rest)
        return due if due * (self._outlook.requests - 1) < saved else 0.0

    def _suffix_due(self, now: float) -> float | None:
        """Seconds until the next layer of the suffix has all it needs; None if some of that is not
        even on its way."""
        i = next((i for i, low in enumerate(self.suffix_low) if low < self.spec.num_layers), None)
        if i is None or not self._flights or not self.suffix_fed[i]:
            return None
        layer, due, tiles = self.suffix_low[i], 0.0, self._open
        while tiles:
            state = self.tiles[(tiles & -tiles).bit_length() - 1]
            tiles &= tiles - 1
            if not state.ready >> layer & 1:
                if not state.in_flight >> layer & 1:
                    return None
                landing = self._landing(state, layer, now)
                if landing is None:
                    return None
                due = max(due, landing)
        return due
