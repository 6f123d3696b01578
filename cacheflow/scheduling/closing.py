"""The end of one request's restore, planned cell by cell once few cells are left.

Both pointers then go by one plan: compute takes its first cells, the channel fetches the others in
the order in which the suffix needs them. Asks what is known and leaves the search to
:mod:`cacheflow.scheduling.ending`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.ending import Ending, best_meeting
from cacheflow.scheduling.feeding import Feeding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cacheflow.costs import ChannelModel
    from cacheflow.scheduling.ending import Cell

__all__ = ["Closing", "Plan"]

_FEW: Final = 16
"""From so many free cells on the end is planned cell by cell."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``computes``: whether compute takes the next free cell. ``loads``: the layers (bitmap) of
    each tile that are the channel's."""

    computes: bool
    loads: Mapping[int, int]


class Closing(Feeding):
    """A request that can be near its end."""

    def ending(self, now: float) -> Plan | None:
        """Where both ends should meet; None while many cells are left, or while the fluid balance
        knows as much: costs are not known, several channels or requests decide, or there is no
        suffix to hide loads behind."""
        if not 0 < self.free.count <= _FEW or not self._decides_alone:
            return None
        channels = [channel for channel, nbytes in self.free_bytes.items() if nbytes]
        if len(channels) != 1:
            return None
        stride = self._strides[channels[0]]
        model, suffix = self._outlook.channel(channels[0]), self._suffix_layer()
        if not (model.bandwidth and suffix and model.is_known) or self._outlook.compute.is_guess:
            return None
        if any(self.tiles[t].must > self.tiles[t].low for t in self._free_tiles()):
            return None
        chunk_seconds = stride / model.bandwidth
        names, cells = [], []
        for t, layer, cell in self._free_cells(chunk_seconds):
            names.append((t, layer))
            cells.append(cell)
        count = best_meeting(cells, self._known(model, suffix, now))
        loads: dict[int, int] = {}
        for t, layer in names[count:]:
            loads[t] = loads.get(t, 0) | 1 << layer
        return Plan(count > 0, loads)

    @property
    def _decides_alone(self) -> bool:
        """Whether no other request, nor stage, has a say in where this one's pointers meet."""
        if self.led or self.spec.fed or not self.policy.overlaps:
            return False
        if self._pools and self._outlook.requests > 1:
            return False
        return self.is_first_to_load and self.is_first_to_compute

    def _free_cells(self, chunk_seconds: float) -> Iterator[tuple[int, int, Cell]]:
        """Tile, layer and costs of every free cell, in the order of compute."""
        for t in self._free_tiles():
            state = self.tiles[t]
            cost = self._outlook.layer_seconds(state.work) or 0.0
            load = state.tile.width // self.spec.chunk_tokens * chunk_seconds
            free, below = state.free, state.low
            while free:
                layer = (free & -free).bit_length() - 1
                free &= free - 1
                yield t, layer, (cost * (layer + 1 - below), load, layer)
                below = layer + 1

    def _known(self, model: ChannelModel, suffix_layer: float, now: float) -> Ending:
        landing: dict[int, float] = {}
        for flight in self._flights.values():
            when = self._lands_in(flight, now)
            for layer in flight.layers:
                landing[layer] = max(landing.get(layer, 0.0), when)
        return Ending(
            compute_free=self._outlook.current_left(now),
            channel_free=model.left(model.in_flight_bytes, now) or 0.0,
            landing=landing,
            suffix_low=self.suffix_low[0],
            suffix_layers=self.spec.num_layers,
            suffix_layer=suffix_layer,
        )
