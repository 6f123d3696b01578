"""Seconds to push one tile through one layer, learned from the layers that were pushed.

Knows the shape of the cost (linear work per token plus attention work per token and key) from the
model's dimensions, and learns the two rates behind it. Knows nothing about devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cacheflow.types import Tile

__all__ = ["ComputeModel"]

_FORGET: Final = 0.97
"""Weight of the past at each observation: about 30 layers of memory."""
_PRIOR: Final = 0.05
"""Strength of the belief that both kinds of work run at the same rate."""
_LATE_START: Final = 0.05
_LATE_MEMORY: Final = 0.05
_OUTLIER: Final = 3.0
"""An observation beyond this factor of the prediction is clipped to it (and still moves it)."""


class ComputeModel:
    """``k1 * linear * w + k2 * attention * w * (start + w / 2)`` seconds for ``w`` tokens.

    ``linear`` and ``attention`` are FLOPs per token, and per token and key position, of one layer.
    ``k1`` and ``k2`` (seconds per FLOP) are fitted by exponentially forgetting least squares on
    relative errors. Before the first observation every prediction is ``None``.
    """

    __slots__ = ("_aa", "_ab", "_attention", "_bb", "_late", "_linear", "_rates", "_sa", "_sb")

    def __init__(self, linear: float, attention: float) -> None:
        self._linear = linear
        self._attention = attention
        self._aa = self._ab = self._bb = self._sa = self._sb = 0.0
        self._rates: tuple[float, float] | None = None
        self._late = _LATE_START

    @property
    def known(self) -> bool:
        """Whether anything was observed yet."""
        return self._rates is not None

    def layer_seconds(self, tile: Tile) -> float | None:
        """Predicted seconds of one layer of ``tile``, or None when nothing is known."""
        if self._rates is None:
            return None
        a, b = self._work(tile)
        return self._rates[0] * a + self._rates[1] * b

    @property
    def lateness(self) -> float:
        """By what share layers have lately taken longer than predicted, on average."""
        return self._late

    def observe(self, tile: Tile, seconds: float) -> None:
        """One layer of ``tile`` took ``seconds``."""
        if seconds <= 0.0 or tile.width == 0:
            return
        a, b = self._work(tile)
        expected = self.layer_seconds(tile)
        if expected is not None:
            late = min(max(seconds / expected - 1, 0.0), 1.0)
            self._late += _LATE_MEMORY * (late - self._late)
            seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        a, b = a / seconds, b / seconds
        self._aa = self._aa * _FORGET + a * a
        self._ab = self._ab * _FORGET + a * b
        self._bb = self._bb * _FORGET + b * b
        self._sa = self._sa * _FORGET + a
        self._sb = self._sb * _FORGET + b
        self._rates = self._solve()

    def _work(self, tile: Tile) -> tuple[float, float]:
        return (
            self._linear * tile.width,
            self._attention * tile.width * (tile.start + tile.width / 2),
        )

    def _solve(self) -> tuple[float, float]:
        """Minimise the squared relative errors plus ``ridge * (k1 - k2)**2``, both rates >= 0."""
        ridge = _PRIOR * (self._aa + self._bb)
        aa, ab, bb = self._aa + ridge, self._ab - ridge, self._bb + ridge
        determinant = aa * bb - ab * ab
        same = (self._sa + self._sb) / (self._aa + 2 * self._ab + self._bb)
        if determinant <= 1e-12 * aa * bb:
            return same, same
        k1 = (self._sa * bb - self._sb * ab) / determinant
        k2 = (self._sb * aa - self._sa * ab) / determinant
        return (k1, k2) if k1 > 0 and k2 > 0 else (same, same)
