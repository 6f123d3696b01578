"""What goes wrong with storage, when and how often: faults and their seeded schedule.

Every fault draws from a generator of its own, so the same seed and the same operations give the
same strikes, whatever other faults there are. Time is the clock's: with a manual one a schedule is
exact. Knows no storage: who asks decides what a strike means.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheflow.clock import Clock

__all__ = ["Fault", "FaultKind", "Schedule"]


class FaultKind(StrEnum):
    """What goes wrong. Reads and writes are struck one by one, other operations as a whole."""

    SLOW = "slow"
    """It takes ``seconds`` longer, and so does what stands behind it in its batch."""
    HANG = "hang"
    """No answer until it is released; its buffers stay held until then."""
    SHORT = "short"
    """Half of the bytes, and says so."""
    TORN = "torn"
    """Half of the bytes, and says that it was all."""
    FLIP = "flip"
    """One bit is another."""
    STALE = "stale"
    """Bytes of an older version of the object (zeros, as of a page never written, without one)."""
    LOST = "lost"
    """A write is acknowledged and never there."""
    FULL = "full"
    """ENOSPC."""
    EIO = "eio"
    """An I/O error, as a result where the contract has results, raised elsewhere."""
    DISCONNECT = "disconnect"
    """The whole call raises."""
    PARTIAL = "partial"
    """There is no result, and no error: the batch ends early."""
    RAISE = "raise"
    """An error that is none of ours, in the middle of the batch."""


_EVERYWHERE: Final = ("lookup", "load", "store", "delete", "scan")
_OPERATIONS: Final[Mapping[FaultKind, tuple[str, ...]]] = {
    FaultKind.SLOW: _EVERYWHERE,
    FaultKind.HANG: _EVERYWHERE,
    FaultKind.SHORT: ("load",),
    FaultKind.TORN: ("load",),
    FaultKind.FLIP: ("load",),
    FaultKind.STALE: ("load",),
    FaultKind.LOST: ("store",),
    FaultKind.FULL: ("store",),
    FaultKind.EIO: _EVERYWHERE,
    FaultKind.DISCONNECT: _EVERYWHERE,
    FaultKind.PARTIAL: ("lookup", "load", "store"),
    FaultKind.RAISE: _EVERYWHERE,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, when and how often.

    Raises:
        ValueError: ``kind`` cannot happen to ``operation``.
    """

    kind: FaultKind
    operation: str = "*"
    """A verb of the storage contract; ``"*"``: all that the kind can happen to."""
    rate: float = 1.0
    """Probability that an operation is struck."""
    after: float = 0.0
    """Seconds from injection until it begins."""
    duration: float = inf
    """Seconds that it lasts."""
    seconds: float = 0.05
    """How long ``SLOW`` takes."""
    times: int | None = None
    """Strikes after which it is over."""

    def __post_init__(self) -> None:
        if self.operation != "*" and self.operation not in _OPERATIONS[self.kind]:
            allowed = ", ".join(_OPERATIONS[self.kind])
            raise ValueError(
                f"{self.kind} does not happen to {self.operation!r} (but to {allowed})"
            )

    def strikes_at(self, operation: str) -> bool:
        """Whether ``operation`` is one that this may happen to."""
        return operation in _OPERATIONS[self.kind] and self.operation in ("*", operation)


class _Armed:
    """A fault in place: since when, how often it has struck, its own chance."""

    def __init__(self, fault: Fault, since: float, chance: random.Random) -> None:
        self.fault = fault
        self.count = 0
        self._since = since
        self._chance = chance

    def strikes(self, operation: str, now: float) -> bool:
        fault, since = self.fault, now - self._since - self.fault.after
        if not fault.strikes_at(operation) or not 0.0 <= since < fault.duration:
            return False
        if fault.times is not None and self.count >= fault.times:
            return False
        struck = self._chance.random() < fault.rate
        self.count += struck
        return struck


class Schedule:
    """Faults in place; the first that strikes an operation is the one that happens."""

    def __init__(self, seed: int, clock: Clock) -> None:
        self.strikes: Counter[FaultKind] = Counter()
        """How often each kind has happened."""
        self._seed = seed
        self._clock = clock
        self._armed: list[_Armed] = []
        self._numbers = 0

    def __contains__(self, kind: FaultKind) -> bool:
        return any(armed.fault.kind is kind for armed in self._armed)

    def inject(self, fault: Fault) -> None:
        """Put ``fault`` in place, behind those that are; its times count from now."""
        chance = random.Random(f"{self._seed} {self._numbers}")
        self._armed.append(_Armed(fault, self._clock.now(), chance))
        self._numbers += 1

    def clear(self) -> None:
        """No faults from now on."""
        self._armed.clear()

    def strike(self, operation: str) -> Fault | None:
        """What happens to the next ``operation``."""
        now = self._clock.now()
        for armed in self._armed:
            if armed.strikes(operation, now):
                self.strikes[armed.fault.kind] += 1
                return armed.fault
        return None
