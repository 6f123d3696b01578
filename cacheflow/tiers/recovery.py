"""The health of one tier and what goes with it: events, and the task that probes it.

Reads and writes are judged apart. A tier whose reads are sick is left alone altogether and probed
by a task; one whose writes are sick is tried again with a write that is wanted anyway.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from cacheflow.tasks import no_strays
from cacheflow.tiers.health import Ailment, Health, HealthLimits
from cacheflow.types import TierDown, TierUp, tell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cacheflow.clock import Clock
    from cacheflow.types import Event, Observer

__all__ = ["Recovery"]

_log = logging.getLogger(__name__)
_LEAST_SLEEP: Final = 0.001
_PROBE_SECONDS: Final = 4.0


class Recovery:
    """Loop-owned. ``probe`` ends well or raises; one is under way at a time."""

    def __init__(
        self,
        channel: str,
        probe: Callable[[], Awaitable[None]],
        clock: Clock,
        limits: HealthLimits | None = None,
        observer: Observer | None = None,
        *,
        longest_probe: float = _PROBE_SECONDS,
    ) -> None:
        self.reading = Health(limits)
        self.writing = Health(limits)
        self._channel = channel
        self._probe = probe
        self._clock = clock
        self._observer = observer
        self._task: asyncio.Task[None] | None = None
        self._longest_probe = min(longest_probe, _PROBE_SECONDS)
        self._closed = False

    def reading_failed(self, ailment: Ailment) -> None:
        """A read, or a lookup, went wrong."""
        now = self._clock.now()
        if self.reading.failed(ailment, now):
            self._down("load", self.reading, ailment, now)
            if not self._closed:
                self._task = asyncio.get_running_loop().create_task(self._recover())

    def may_write(self) -> bool:
        """Whether to try a write now; if :attr:`writing` is not well, it is the probe."""
        return self.reading.well and (
            self.writing.well or self.writing.begin_probe(self._clock.now())
        )

    def written(self, ailment: Ailment | None) -> None:
        """How a store ended that was allowed."""
        now = self._clock.now()
        if ailment is None:
            self.writing.succeeded()
        elif self.writing.failed(ailment, now):
            self._down("store", self.writing, ailment, now)

    def write_probed(self, ailment: Ailment | None) -> None:
        """The same of the one that was a probe."""
        now = self._clock.now()
        seconds = self.writing.seconds(now)
        if ailment is not None:
            self.writing.counts[ailment] += 1
        self.writing.probed(ailment is None, now)
        if ailment is None:
            self._up("store", seconds, now)

    async def aclose(self) -> None:
        """No probes from now on."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _recover(self) -> None:
        health, clock = self.reading, self._clock
        since = clock.now()
        while not health.well:
            await asyncio.sleep(max(health.retry_at - clock.now(), _LEAST_SLEEP))
            if health.begin_probe(clock.now()):
                health.probed(await self._is_well(), clock.now())
        now = clock.now()
        self._up("load", now - since, now)

    async def _is_well(self) -> bool:
        try:
            async with asyncio.timeout(self._longest_probe):
                with no_strays():
                    await self._probe()
        except Exception as error:  # whatever a third party's backend raises: it is not well
            _log.debug("tier %s: still set aside: %s", self._channel, error)
            return False
        return True

    def _down(self, direction: str, health: Health, ailment: Ailment, now: float) -> None:
        _log.warning(
            "tier %s is set aside for %s (%s); next try in %g s",
            self._channel,
            direction,
            ailment.value,
            health.wait,
        )
        self._tell(TierDown(self._channel, direction, ailment.value, now))

    def _up(self, direction: str, seconds: float, now: float) -> None:
        _log.warning("tier %s is used for %s again after %.1f s", self._channel, direction, seconds)
        self._tell(TierUp(self._channel, direction, seconds, now))

    def _tell(self, event: Event) -> None:
        if self._observer is not None:
            tell(self._observer, event)
