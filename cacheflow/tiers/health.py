"""Whether a tier is well, from how its operations end: a circuit breaker as a pure state machine.

Well, it is used and each failure counts against it. Sick, it is left alone for a while, each time
longer. Then one probe at a time finds out whether it is well again. Time is an argument; who
probes, and what with, is the caller's business.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["Ailment", "Health", "HealthLimits", "State"]


class State(StrEnum):
    """closed, open and half-open, as a breaker's states are mostly called."""

    WELL = "well"
    SICK = "sick"
    PROBING = "probing"


class Ailment(StrEnum):
    """How an operation went wrong."""

    FAILED = "failed"
    """A result, or a value where one was due, that says so."""
    RAISED = "raised"
    SHORT = "short"
    CORRUPT = "corrupt"
    LATE = "late"
    """Its deadline passed."""
    OVERTAKEN = "overtaken"
    """Its caller gave it up when it was long overdue: nothing else may ever show that it hangs."""


_WEIGHTS: Final = {Ailment.LATE: 1.0, Ailment.OVERTAKEN: 1.0}
"""Share of the tolerance that one takes: waiting in vain is what costs most."""
_MAKES_UP: Final = 0.5
"""A success makes up for this share of a failure: up to a third of failures is borne."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When a tier is set aside, and for how long."""

    failures: int = 3
    """So many in a row (or a few more among successes)."""
    first_wait: float = 0.25
    """Seconds until the first probe; twice as long after each that fails."""
    longest_wait: float = 30.0
    """And never longer. Sick again sooner than this, it begins where it was before."""


class Health:
    """One direction of one tier. Operations that were begun before it fell sick may still end."""

    __slots__ = ("_limits", "_score", "_since", "_wait", "counts", "retry_at", "state")

    def __init__(self, limits: HealthLimits | None = None) -> None:
        self._limits = limits or HealthLimits()
        self.state = State.WELL
        self.counts: Counter[Ailment] = Counter()
        """Failures of all time, by kind."""
        self.retry_at = 0.0
        """When a sick tier may be probed."""
        self._score = 0.0
        self._since = float("-inf")
        """Of the present state; probing belongs to being sick."""
        self._wait = 0.0

    @property
    def well(self) -> bool:
        """Whether it may be used."""
        return self.state is State.WELL

    @property
    def wait(self) -> float:
        """Seconds for which it is left alone between probes (0 before it was ever sick)."""
        return self._wait

    def seconds(self, now: float) -> float:
        """For how long it has been well, or not."""
        return now - self._since

    def succeeded(self) -> None:
        """An operation ended well."""
        if self._score and self.well:
            self._score = max(0.0, self._score - _MAKES_UP)

    def failed(self, ailment: Ailment, now: float) -> bool:
        """An operation went wrong. True if the tier is sick from now on."""
        self.counts[ailment] += 1
        if not self.well:
            return False
        self._score += _WEIGHTS.get(ailment, 1.0 / self._limits.failures) * self._limits.failures
        if self._score < self._limits.failures:
            return False
        again = self.seconds(now) < self._limits.longest_wait
        self._wait = self._longer() if again and self._wait else self._limits.first_wait
        self._enter(State.SICK, now)
        self.retry_at = now + self._wait
        return True

    def begin_probe(self, now: float) -> bool:
        """Whether the caller is to probe it now; whoever is, must say how that ended."""
        if self.state is not State.SICK or now < self.retry_at:
            return False
        self.state = State.PROBING
        return True

    def probed(self, well: bool, now: float) -> None:
        """How the probe ended."""
        self._check_probing()
        if well:
            self._enter(State.WELL, now)
            self._score = 0.0
        else:
            self.state = State.SICK
            self._wait = self._longer()
            self.retry_at = now + self._wait

    def probe_abandoned(self) -> None:
        """Nobody knows how it would have ended: the next one may try at once."""
        self._check_probing()
        self.state = State.SICK

    def _longer(self) -> float:
        return min(2 * self._wait, self._limits.longest_wait)

    def _enter(self, state: State, now: float) -> None:
        self.state, self._since = state, now

    def _check_probing(self) -> None:
        if self.state is not State.PROBING:
            raise RuntimeError("no probe was begun")
