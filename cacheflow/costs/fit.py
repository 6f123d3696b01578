"""Costs that are sums of a few rates, learned from what things took, one observation at a time.

``seconds = k0 * f0 + k1 * f1 + k2 * f2`` with rates ``k >= 0``. Recursive least squares (a Kalman
filter on the rates) over *relative* errors, so that cheap and dear things count alike. What is
specific to the use here:

- It forgets in proportion to what it could have learned: the uncertainty of a rate that nothing
  informs grows back towards the prior, its value stays. Plain exponential forgetting would lose
  what wide tiles cost while only narrow ones are seen.
- Common drift (a clock, a busy neighbour) is a direction of its own: all rates move together.
- An observation far off a confident prediction teaches nothing; several in a row, all off to the
  same side, are not outliers but a new speed, and rescale everything at once.

Knows neither tiles nor loads.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

__all__ = ["Fit"]

_UNSURE: Final = 10.0
"""An observation beyond this factor of what was little more than a guess counts as this far off."""
_SURE: Final = 0.05
"""Variance of a prediction's relative error below which it is no guess."""
_SHAKEN: Final = 0.03
"""Share of the prior's uncertainty that comes back with a new speed: not all may have changed."""
_LEAST: Final = 1e-3
"""Of a rate's unit: where work stays positive, predictions must."""
_SETTLED: Final = 24
_TOGETHER: Final = 8
"""Once settled, this many observations that surprise nobody are learned from as one."""
_NOISE_START: Final = 0.01
_NOISE_LEAST: Final = 1e-4
_NOISE_MOST: Final = 0.09
_NOISE_MEMORY: Final = 0.03
_RELAX: Final = 3e-4
"""Of the noise, times the prior's spread: how fast what nothing informs becomes uncertain again."""

Three = tuple[float, float, float]
Six = tuple[float, float, float, float, float, float]


class Fit:
    """Three rates. ``spread``: the prior's covariance (00, 01, 02, 11, 12, 22) of the rates in
    units of what the first observation makes of them; ``gain``: how much of a lasting small change
    of speed is followed at once; ``far``: off by more than five standard deviations is far off, but
    always within these two shares; ``patience``: how many far-off observations are
    a new speed.
    """

    __slots__ = (
        "_cov",
        "_drift",
        "_far",
        "_least_far",
        "_mild",
        "_most_far",
        "_noise",
        "_patience",
        "_quiet",
        "_run",
        "_share",
        "_side",
        "_spread",
        "_sums",
        "_unit",
        "rates",
        "seen",
    )

    def __init__(
        self, spread: Six, *, gain: float, far: tuple[float, float], patience: int
    ) -> None:
        self._spread = self._cov = spread
        self._drift = gain * gain
        self._patience = patience
        self._noise = _NOISE_START
        self._least_far, self._most_far = far
        self._far = self._most_far
        self._quiet = 0.0
        self._unit: Three = (0.0, 0.0, 0.0)
        self._share: Three = (0.0, 0.0, 0.0)
        self.rates: Three | None = None
        """Replaced as a whole, so that another thread always reads three that belong together."""
        self._sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Observations set aside: count, features, seconds, age."""
        self._run = self._side = self.seen = 0
        self._mild = 1.0

    def start(self, unit: Three, share: Three, cov: Six | None = None) -> None:
        """Begin at rates ``unit * share``, as uncertain as the prior (or as ``cov``) says."""
        self._unit, self._share = unit, share
        self._cov = self._spread if cov is None else cov
        self._sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._run = self.seen = 0
        self.rates = (unit[0] * share[0], unit[1] * share[1], unit[2] * share[2])

    def observe(self, f0: float, f1: float, f2: float, seconds: float, age: float = 1.0) -> float:
        """``seconds`` (> 0) for these features; returns the ratio to what was expected.

        ``age``: how many observations' worth of drift may have passed since the last one.
        """
        rates = self.rates
        assert rates is not None, "start() comes first"
        expected = rates[0] * f0 + rates[1] * f1 + rates[2] * f2
        ratio = seconds / expected
        if self.seen < _SETTLED:
            self.seen += 1
            self._update(f0, f1, f2, expected, ratio, 1, age)
        elif -self._quiet < ratio - 1.0 < self._quiet:
            # Costs are linear, so sums of observations are observations.
            count, g0, g1, g2, total, old = self._sums
            sums = (count + 1, g0 + f0, g1 + f1, g2 + f2, total + seconds, old + age)
            self._sums = sums
            self._run = 0
            if count + 1 >= _TOGETHER:
                self._flush()
        else:
            self._update(f0, f1, f2, expected, ratio, 1, age)
        return ratio

    def _flush(self) -> None:
        count, f0, f1, f2, seconds, age = self._sums
        self._sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0)
        rates = self.rates
        assert rates is not None
        expected = rates[0] * f0 + rates[1] * f1 + rates[2] * f2
        self._update(f0, f1, f2, expected, seconds / expected, count, age)

    def _update(
        self, f0: float, f1: float, f2: float, expected: float, ratio: float, count: int, age: float
    ) -> None:
        """One step of the filter, in relative errors and in units of ``_unit``."""
        u0, u1, u2 = self._unit
        h0, h1, h2 = f0 * u0 / expected, f1 * u1 / expected, f2 * u2 / expected
        s0, s1, s2 = self._share
        c00, c01, c02, c11, c12, c22 = self._aged(age)
        g0 = c00 * h0 + c01 * h1 + c02 * h2
        g1 = c01 * h0 + c11 * h1 + c12 * h2
        g2 = c02 * h0 + c12 * h1 + c22 * h2
        doubt = max(h0 * g0 + h1 * g1 + h2 * g2, 0.0)
        sure = doubt < _SURE
        if sure and self._is_outlier(ratio):
            return
        error = min(max(ratio, 1.0 / _UNSURE), _UNSURE) - 1.0
        total = doubt + self._noise / count
        step = error / total
        self._cov = (
            max(c00 - g0 * g0 / total, 0.0),
            c01 - g0 * g1 / total,
            c02 - g0 * g2 / total,
            max(c11 - g1 * g1 / total, 0.0),
            c12 - g1 * g2 / total,
            max(c22 - g2 * g2 / total, 0.0),
        )
        self._bound(s0 + g0 * step, s1 + g1 * step, s2 + g2 * step)
        if sure:
            self._hear(error * error * count)
        u0, u1, u2 = self._unit
        s0, s1, s2 = self._share
        self.rates = (s0 * u0, s1 * u1, s2 * u2)

    def _bound(self, s0: float, s1: float, s2: float) -> None:
        """Keep rates from falling below nothing: what one cannot give is taken from the others, as
        the covariance says they go together. Where a unit is zero the feature does not exist."""
        c00, c01, c02, c11, c12, c22 = self._cov
        if s0 < 0.0:
            if c00 > 0.0:
                s1, s2 = s1 - s0 * c01 / c00, s2 - s0 * c02 / c00
            s0 = 0.0
        if s1 < _LEAST and c11 > 0.0:
            s0, s2 = s0 + (_LEAST - s1) * c01 / c11, s2 + (_LEAST - s1) * c12 / c11
        elif s2 < _LEAST and c22 > 0.0:
            s0, s1 = s0 + (_LEAST - s2) * c02 / c22, s1 + (_LEAST - s2) * c12 / c22
        self._share = (max(s0, 0.0), max(s1, _LEAST), max(s2, _LEAST))

    def _aged(self, age: float) -> Six:
        """The covariance after what may have happened since: common drift, and the prior's pull."""
        s0, s1, s2 = self._share
        c00, c01, c02, c11, c12, c22 = self._cov
        p00, p01, p02, p11, p12, p22 = self._spread
        drift = self._noise * self._drift * age
        relax = min(self._noise * _RELAX * age, 1.0)
        return (
            c00 + drift * s0 * s0 + relax * (p00 - c00),
            c01 + drift * s0 * s1 + relax * (p01 - c01),
            c02 + drift * s0 * s2 + relax * (p02 - c02),
            c11 + drift * s1 * s1 + relax * (p11 - c11),
            c12 + drift * s1 * s2 + relax * (p12 - c12),
            c22 + drift * s2 * s2 + relax * (p22 - c22),
        )

    def _hear(self, square: float) -> None:
        """Learn how noisy observations are; one surprise says little about that."""
        noise = self._noise
        noise += _NOISE_MEMORY * (min(square, 9.0 * noise) - noise)
        self._noise = noise = min(max(noise, _NOISE_LEAST), _NOISE_MOST)
        deviation = sqrt(noise)
        self._far = far = min(max(5.0 * deviation, self._least_far), self._most_far)
        self._quiet = min(3.0 * deviation, far)

    def _is_outlier(self, ratio: float) -> bool:
        """Whether to leave an observation out; adopts a new speed when enough of them agree."""
        far = 1.0 + self._far
        side = (ratio > far) - (ratio * far < 1.0)
        if not side:
            self._run = 0
            return False
        if side != self._side or not self._run:
            self._run, self._side, self._mild = 0, side, ratio
        self._run += 1
        self._mild = min(self._mild, ratio) if side > 0 else max(self._mild, ratio)
        self._hear((ratio - 1.0) ** 2)
        if self._run == self._patience:
            self.rescale(self._mild)
        return True

    def rescale(self, speed: float) -> None:
        """All rates are ``speed`` times what they were; what was set aside is of the old ones."""
        self._run = 0
        self._sums = (0, 0.0, 0.0, 0.0, 0.0, 0.0)
        u0, u1, u2 = self._unit
        self._unit = u0, u1, u2 = u0 * speed, u1 * speed, u2 * speed
        s0, s1, s2 = self._share
        self.rates = (s0 * u0, s1 * u1, s2 * u2)
        c00, c01, c02, c11, c12, c22 = self._cov
        p00, p01, p02, p11, p12, p22 = self._spread
        more = _SHAKEN
        self._cov = (
            c00 + more * p00,
            c01 + more * p01,
            c02 + more * p02,
            c11 + more * p11,
            c12 + more * p12,
            c22 + more * p22,
        )
