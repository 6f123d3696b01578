"""Seconds to push one tile through one layer, learned from the layers that were pushed.

Knows the shape of the cost (a launch, linear work per token, attention work per token and key) from
the model's dimensions, and learns the three rates behind it. Knows nothing about devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.costs.checks import Ratios
from cacheflow.costs.fit import Fit
from cacheflow.costs.profile import ComputeProfile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import Tile

__all__ = ["ComputeModel"]

_SPREAD: Final = (0.09, 0.0, 0.0, 1.0, 0.5, 1.0)
"""Before anything is known: a launch is some 30 % of the first tile's layer at most, and both kinds
of work run at about the same rate, within a factor of two or so."""
_PRIMED: Final = (0.02, 0.0, 0.0, 0.25, 0.125, 0.25)
"""The same around a loaded profile: worth less than one observation made here."""
_GAIN: Final = 0.07
_FAR: Final = (0.15, 0.5)
_PATIENCE: Final = 4
"""Layers far off in a row that are a new speed."""
_FEW: Final = 6
_LATE_START: Final = 0.05
_LATE_MEMORY: Final = 0.05


class ComputeModel:
    """``k0 + k1 * linear * w + k2 * attention * w * (start + w / 2)`` seconds for ``w`` tokens.

    ``linear`` (> 0) and ``attention`` are FLOPs per token, and per token and key position, of one
    layer. ``k0`` is the launch of a tile-layer in seconds, which makes narrow tiles dearer a token;
    ``k1`` and ``k2`` are seconds per FLOP. Before the first observation (or a loaded profile) every
    prediction is ``None``.
    """

    __slots__ = ("_attention", "_checks", "_fit", "_late", "_linear", "_typical", "rates")

    def __init__(self, linear: float, attention: float) -> None:
        if not (linear > 0.0 and attention >= 0.0):
            raise ValueError(f"FLOPs a layer: linear {linear!r} > 0, attention {attention!r} >= 0")
        self._linear = linear
        self._attention = attention
        self._fit = Fit(_SPREAD, gain=_GAIN, far=_FAR, patience=_PATIENCE)
        self._late = _LATE_START
        self._typical = 0.0
        self._checks = Ratios()
        self.rates: tuple[float, float, float] | None = None
        """``(k0, k1, k2)``: seconds a tile-layer, a unit of each part of :meth:`work`; or None.

        The cost of any set of ``n`` cells is ``k0 * n + k1 * A + k2 * B`` with the sums of their
        work. Replaced as a whole, so that another thread always reads three that belong together.
        """

    @property
    def known(self) -> bool:
        """Whether anything was observed, or loaded, yet."""
        return self.rates is not None

    @property
    def is_guess(self) -> bool:
        """Little was observed since the start, or since what was known was doubted."""
        return self._fit.seen < _FEW

    def work(self, tile: Tile) -> tuple[float, float]:
        """FLOPs of one layer of ``tile``: linear, and attention over all keys before its tokens."""
        start, stop = tile.start, tile.stop
        width = stop - start
        return self._linear * width, self._attention * width * (start + stop) * 0.5

    def layer_seconds(self, tile: Tile) -> float | None:
        """Predicted seconds of one layer of ``tile``, or None when nothing is known."""
        rates = self.rates
        if rates is None:
            return None
        start, stop = tile.start, tile.stop
        per_token = rates[1] * self._linear + rates[2] * self._attention * 0.5 * (start + stop)
        return rates[0] + per_token * (stop - start)

    @property
    def lateness(self) -> float:
        """By what share layers have lately taken longer than predicted, on average."""
        return self._late

    def pass_seconds(self, tiles: Sequence[Tile]) -> float | None:
        """Predicted seconds of one layer of several tiles in one pass, with one launch."""
        if len(tiles) == 1:
            return self.layer_seconds(tiles[0])
        seconds = [self.layer_seconds(tile) for tile in tiles]
        rates = self.rates
        if rates is None:
            return None
        return sum(each or 0.0 for each in seconds) - rates[0] * (len(tiles) - 1)

    def observe(self, tile: Tile, seconds: float) -> None:
        """One layer of ``tile`` took ``seconds``; what is no positive number is ignored."""
        self.observe_pass((tile,), seconds)

    def observe_pass(self, tiles: Sequence[Tile], seconds: float) -> None:
        """As :meth:`observe`, of tiles that went through the layer in one pass."""
        if not 0.0 < seconds < float("inf") or any(tile.stop <= tile.start for tile in tiles):
            return
        work = [self.work(tile) for tile in tiles]
        a, b = map(sum, zip(*work, strict=True))
        if self.rates is None:
            # All of it is work at one rate; the update says how little one observation knows.
            rate = seconds / (a + b)
            self._fit.start((seconds, rate, rate), (0.0, 1.0, 1.0))
            self._fit.observe(1.0, a, b, seconds)
            self.rates, self._typical = self._fit.rates, seconds
            return
        ratio = self._fit.observe(1.0, a, b, seconds)
        self.rates = self._fit.rates
        self._late += _LATE_MEMORY * (min(max(ratio - 1.0, 0.0), 1.0) - self._late)
        self._typical = seconds
        self._checks.append(ratio)

    def take_checks(self) -> list[float]:
        """What layers took over what was predicted: the latest few hundred since the last call."""
        return self._checks.take()

    # -- from one process to the next ----------------------------------------------------------

    def profile(self) -> ComputeProfile | None:
        """What is known, to be kept; None when nothing is."""
        rates = self.rates
        return None if rates is None else ComputeProfile(*rates, typical=self._typical)

    def doubt(self) -> None:
        """Trust what is known no more than if it had been kept from another process."""
        if (profile := self.profile()) is not None:
            self.prime(profile)

    def prime(self, profile: ComputeProfile) -> None:
        """Begin with what was known once. A handful of observations outweighs it."""
        launch = profile.launch / profile.typical
        self._typical = profile.typical
        units = (profile.typical, profile.linear, profile.attention)
        self._fit.start(units, (launch, 1.0, 1.0), _PRIMED)
        self.rates = self._fit.rates
