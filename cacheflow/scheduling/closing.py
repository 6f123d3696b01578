"""The end of one request's restore, planned cell by cell once few cells are left.

Both pointers then go by one plan: compute takes its first cells, the channel fetches the others in
the order in which the suffix needs them. Asks what is known and leaves the search to
:mod:`cacheflow.scheduling.ending`.
"""

from __future__ import annotations

from typing import Final

from cacheflow.scheduling.ending import Ending
from cacheflow.scheduling.feeding import Feeding
from cacheflow.scheduling.tiles import bits

__all__ = ["Closing", "Plan"]

_FEW: Final = 16
"""From so many free cells on the end is planned cell by cell."""


class Plan:
    """Where both ends of one request meet: its free cells in the order of compute, as runs of
    layers (tile, first, behind the last), and what is expected of them."""

    __slots__ = ("_ending", "_runs")

    def __init__(self, runs: list[tuple[int, int, int]], ending: Ending) -> None:
        self._runs = runs
        self._ending = ending

    def computes(self) -> bool:
        """Whether compute takes the next free cell."""
        return self._ending.computes()

    def loads(self) -> dict[int, int]:
        """The layers (bitmap) of each tile that are the channel's."""
        loads: dict[int, int] = {}
        ahead = self._ending.meeting()
        for t, first, stop in self._runs:
            if (low := first + ahead) < stop:
                loads[t] = loads.get(t, 0) | (1 << stop) - (1 << low)
            ahead = max(low - stop, 0)
        return loads


class Closing(Feeding):
    """A request that can be near its end."""

    __slots__ = ()

    def ending(self, now: float) -> Plan | None:
        """Where both ends should meet; None while many cells are left, or while the fluid balance
        knows as much: costs are not known, several channels or requests decide, or there is no
        suffix to hide loads behind."""
        if not 0 < self.free.count <= _FEW or not self._decides_alone:
            return None
        channels = [channel for channel, nbytes in self.free_bytes.items() if nbytes]
        if len(channels) != 1 or self._holes & self._has_free:
            return None
        model, suffix_layer = self._outlook.channels[channels[0]], self._suffix_layer()
        if (
            not (model.bandwidth and suffix_layer)
            or not (model.is_known or channels[0] in self._outlook.agreeing)
            or self._outlook.compute.is_guess
            or self._outlook.is_on_trial(channels[0])
        ):
            return None
        runs: list[tuple[int, int, int]] = []
        compute: list[float] = []
        load: list[float] = []
        rest: list[float] = []
        chunk_seconds = self._strides[channels[0]] / model.bandwidth
        layers = self.spec.num_layers
        for t, first, stop, below in self._free_runs():
            state = self.tiles[t]
            cost = self._outlook.layer_seconds(state.work) or 0.0
            load += [state.tile.width // self.spec.chunk_tokens * chunk_seconds] * (stop - first)
            runs.append((t, first, stop))
            # To its first cell compute has to pass the layers below; the others come next.
            compute.append(cost * (first + 1 - below))
            compute += [cost] * (stop - first - 1)
            rest += [(layers - layer) * suffix_layer for layer in range(first, stop)]
        ending = Ending(
            compute,
            load,
            rest,
            compute_free=self._outlook.current_left(now),
            channel_free=model.left(model.in_flight_bytes, now) or 0.0,
            landed=self._landed(suffix_layer, now),
            suffix=(layers - self.suffix_low[0]) * suffix_layer,
        )
        return Plan(runs, ending)

    def _free_runs(self) -> list[tuple[int, int, int, int]]:
        """Free cells in the order of compute: tile, first layer, behind the last, and the layer
        that compute passes on from."""
        rows = self._rows
        found: list[tuple[int, int, int, int, int]] = []
        for t in self._free_tiles():
            free, below = self.tiles[t].free, self.tiles[t].low
            while free:
                first = (free & -free).bit_length() - 1
                taken = ~(free >> first)
                stop = first + (taken & -taken).bit_length() - 1
                row = -1
                if t < rows.tiles:
                    row, stop = rows.first(first), min(stop, rows.behind(first))
                found.append((row, t, first, stop, below))
                free, below = free >> stop << stop, stop
        if rows.tiles:
            # All rows come before the tiles behind them.
            found.sort(key=lambda run: (run[1] >= rows.tiles, run[0], run[1]))
        return [run[1:] for run in found]

    def _landed(self, suffix_layer: float, now: float) -> float:
        """Seconds until the suffix would end if it waited for nothing but what is under way. Loads
        that compute has overtaken keep nobody waiting: they may hang for ever."""
        landed, flights = 0.0, {}
        low, layers = self.suffix_low[0], self.spec.num_layers
        for load_id, load in self._flights.items():
            if awaited := bits(load.layers) & ~self.tiles[load.tile].ready:
                flights[load_id] = max((awaited & -awaited).bit_length() - 1, low)
        for channel, loads in self._loads.items():
            if loads:
                for load_id, seconds in self._outlook.channels[channel].landings(flights, now):
                    landed = max(landed, seconds + (layers - flights[load_id]) * suffix_layer)
        return landed

    @property
    def _decides_alone(self) -> bool:
        """Whether no other request, nor stage, has a say in where this one's pointers meet."""
        if self.led or self.spec.fed or not self.policy.overlaps:
            return False
        if self._pools and self._outlook.requests > 1:
            return False
        return self.is_first_to_load and self.is_first_to_compute
