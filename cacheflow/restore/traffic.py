"""Which tiers are being loaded from just now: whoever stores gives way. Knows no chunks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Traffic"]


class Traffic:
    """Loads under way, by tier. Belongs to one event loop."""

    def __init__(self) -> None:
        self._loads: Counter[str] = Counter()
        self._listeners: list[Callable[[], None]] = []

    def began(self, tier: str) -> None:
        """A load did."""
        self._loads[tier] += 1

    def ended(self, tier: str) -> None:
        """It has ended, one way or another."""
        self._loads[tier] -= 1
        if not self._loads[tier]:
            for listener in self._listeners:
                listener()

    def loads(self, tier: str) -> int:
        """How many loads of ``tier`` are under way."""
        return self._loads[tier]

    def is_loading(self, tier: str) -> bool:
        """Whether any is."""
        return self.loads(tier) > 0

    def when_quiet(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever the last load of a tier has ended."""
        self._listeners.append(listener)
