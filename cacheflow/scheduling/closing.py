"""The end of one request's restore, planned cell by cell once few cells are left.

Both pointers then go by one plan: compute takes its first cells, the channel fetches the others in
the order in which the suffix needs them. Asks what is known and leaves the search to
:mod:`cacheflow.scheduling.ending`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.ending import Ending
from cacheflow.scheduling.feeding import Feeding

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Closing", "Plan"]

_FEW: Final = 16
"""From so many free cells on the end is planned cell by cell."""


@lru_cache(maxsize=64)
def _rests(layers: int, low: int, suffix_layer: float) -> tuple[float, ...]:
    """What is left of a suffix that stands at layer ``low``, from each layer on: seconds."""
    ahead = [(layers - layer) * suffix_layer for layer in range(low, layers)]
    return (*[(layers - low) * suffix_layer] * low, *ahead)


class Plan:
    """Where both ends of one request meet: tile and layer of each free cell, in the order of
    compute, and what is expected of them."""

    __slots__ = ("_ending", "_places")

    def __init__(self, places: list[tuple[int, int]], ending: Ending) -> None:
        self._places = places
        self._ending = ending

    def computes(self) -> bool:
        """Whether compute takes the next free cell."""
        return self._ending.computes()

    def loads(self) -> dict[int, int]:
        """The layers (bitmap) of each tile that are the channel's."""
        loads: dict[int, int] = {}
        for t, layer in self._places[self._ending.meeting() :]:
            loads[t] = loads.get(t, 0) | 1 << layer
        return loads


class Closing(Feeding):
    """A request that can be near its end."""

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
            not (model.bandwidth and suffix_layer and model.is_known)
            or self._outlook.compute.is_guess
        ):
            return None
        places: list[tuple[int, int]] = []
        compute: list[float] = []
        load: list[float] = []
        chunk_seconds = self._strides[channels[0]] / model.bandwidth
        low, layers = self.suffix_low[0], self.spec.num_layers
        rests = _rests(layers, low, suffix_layer)
        for t in self._free_tiles():
            state = self.tiles[t]
            cost = self._outlook.layer_seconds(state.work) or 0.0
            free, below = state.free, state.low
            load += [state.tile.width // self.spec.chunk_tokens * chunk_seconds] * free.bit_count()
            while free:
                layer = (free & -free).bit_length() - 1
                free &= free - 1
                places.append((t, layer))
                compute.append(cost * (layer + 1 - below))
                below = layer + 1
        ending = Ending(
            compute,
            load,
            [rests[layer] for _, layer in places],
            compute_free=self._outlook.current_left(now),
            channel_free=model.left(model.in_flight_bytes, now) or 0.0,
            landed=self._landed(rests, now),
            suffix=rests[0],
        )
        return Plan(places, ending)

    def _landed(self, rests: Sequence[float], now: float) -> float:
        """Seconds until the suffix would end if it waited for nothing but what is under way.
        ``rests``: what is left of it from each layer on."""
        landed, flights = 0.0, self._flights
        for channel, loads in self._loads.items():
            if loads:
                for load_id, seconds in self._outlook.channels[channel].landings(flights, now):
                    landed = max(landed, seconds + rests[flights[load_id].layers.start])
        return landed

    @property
    def _decides_alone(self) -> bool:
        """Whether no other request, nor stage, has a say in where this one's pointers meet."""
        if self.led or self.spec.fed or not self.policy.overlaps:
            return False
        if self._pools and self._outlook.requests > 1:
            return False
        return self.is_first_to_load and self.is_first_to_compute
