"""Who loads from which tier just now, and when its next store may begin beside that.

Knows no chunks. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from cacheflow.tiers.write_behind import GivingWay

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.clock import Clock
    from cacheflow.tasks import Pulse

__all__ = ["StoreGate", "Traffic"]


class Traffic:
    """Loads under way, by tier."""

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


class StoreGate:
    """Lets one tier's stores by: freely, but few and far between while ``traffic`` says that it is
    loaded from, unless somebody waits for them (``is_urgent``). ``pulse`` beats whenever either of
    the two may have changed."""

    def __init__(
        self,
        tier: str,
        traffic: Traffic,
        pulse: Pulse,
        clock: Clock,
        is_urgent: Callable[[], bool],
    ) -> None:
        self._tier = tier
        self._traffic = traffic
        self._pulse = pulse
        self._clock = clock
        self._is_urgent = is_urgent
        self._giving_way = GivingWay()

    async def passed(self) -> None:
        """Wait until a store may begin; it counts as begun."""

        def is_shut() -> bool:
            return self._traffic.is_loading(self._tier) and not self._is_urgent()

        while is_shut() and (wait := self._giving_way.wait(self._clock.now())):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._pulse.until(lambda: not is_shut())
        self._giving_way.began(self._clock.now())

    def took(self, seconds: float) -> None:
        """A store has ended, so long after it began."""
        self._giving_way.took(seconds)
