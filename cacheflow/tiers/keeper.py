"""What a tier does in the background: rebuild its index, settle doubts, let things expire and fade.

One task, owned and awaited by whoever started it. A backend that fails is asked again later, ever
more seldom; serving does not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Final

from cacheflow.tiers.hints import Hints
from cacheflow.tiers.stock import heard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.tiers.entry import Entry
    from cacheflow.tiers.stock import Stock
    from cacheflow.types import ObjectKey

__all__ = ["Keeper"]

_log = logging.getLogger(__name__)

_IN_ONE_GO: Final = 64
"""Objects that are indexed before the event loop goes on: about 1 ms."""
_SOON: Final = 1.0
"""Doubts are settled so many seconds after they came up."""
_LEAST: Final = 0.25
"""What is due but still in use is tried again after so many seconds."""
_LATER: Final = 60.0
"""Between two scans for what others have deleted; also the longest pause after failures."""
_CLOSE_SECONDS: Final = 5.0


class Keeper:
    """``scanned`` says whether the index is whole."""

    def __init__(self, stock: Stock) -> None:
        self.scanned = False
        self._stock = stock
        self._hints = Hints()
        self._distrusted: set[ObjectKey] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._scanning: asyncio.Task[None] | None = None
        self._scanned_at = float("-inf")

    def start(self) -> None:
        """Begin; :meth:`aclose` must follow."""
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Stop. Idempotent."""
        tasks = [task for task in (self._task, self._scanning) if task is not None]
        self._task = self._scanning = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    def kick(self) -> None:
        """Something has come up."""
        self._wake.set()

    def hint(self, entry: Entry, priority: float, ttl: float) -> None:
        """Let ``entry`` count ``priority`` times; see :class:`Hints`."""
        self._stock.catalogue.hint(entry, priority)
        self._hints.add(entry, priority, ttl, self._stock.clock.now())
        self._wake.set()

    def distrust(self, keys: Sequence[ObjectKey]) -> None:
        """Delete these soon."""
        self._distrusted.update(keys)
        self._wake.set()

    async def settle(self) -> None:
        """Do now all that is due or in doubt; a scan that is under way is waited for.

        Raises:
            BackendError: the backend cannot be asked.
        """
        await self._stock.deleted()
        if not self.scanned or self._stock.suspects:
            await self.rescan()
        self._fade()
        await self._expire()
        await self._remove_distrusted()
        await self._decide()
        self._stock.tell_usage()

    # -- the index -----------------------------------------------------------------------------

    async def rescan(self) -> None:
        """Rebuild the index from a scan; all who ask at the same time wait for the same one."""
        if self._scanning is None or self._scanning.done():
            self._scanning = asyncio.create_task(self._scan())
            self._scanning.add_done_callback(heard)
        await asyncio.shield(self._scanning)

    def is_stale(self) -> bool:
        """Whether the last scan is so long ago that another one is in order."""
        return self._stock.clock.now() - self._scanned_at > _LATER

    async def _scan(self) -> None:
        stock = self._stock
        self._scanned_at = stock.clock.now()
        found = set()
        with stock.changes.look() as look:
            async with aclosing(stock.inner.scan()) as infos:
                async for info in infos:
                    stock.listed(info, look)
                    found.add(info.key)
                    if not len(found) % _IN_ONE_GO:
                        await asyncio.sleep(0)
            stock.keep_only(found, look)
        stock.catalogue.unknown = 0
        self.scanned = True
        _log.info("tier %s: %d objects, %d bytes", stock.channel, len(found), stock.catalogue.bytes)
        await stock.evict(stock.catalogue.take_surplus(stock.clock.now()))
        stock.tell_usage()

    # -- the rest ------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _SOON
        while True:
            self._wake.clear()
            try:
                await self._round()
            except Exception as error:  # a third party's backend may raise anything: ask later
                why = str(error) or type(error).__name__
                _log.warning("tier %s: upkeep failed, trying again: %s", self._stock.channel, why)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LATER)
                continue
            pause = _SOON
            with suppress(TimeoutError):
                async with asyncio.timeout(self._idle_seconds()):
                    await self._wake.wait()

    async def _round(self) -> None:
        if not self.scanned or (self._stock.suspects and self.is_stale()):
            await self.rescan()
        self._fade()
        await self._expire()
        await self._remove_distrusted()
        await self._decide()

    def _idle_seconds(self) -> float | None:
        """Until something is due; None: not before something happens."""
        due = [self._stock.catalogue.next_expiry(), self._hints.next_due()]
        now = self._stock.clock.now()
        waits = [max(when - now, _LEAST) for when in due if when is not None]
        if self._stock.has_doubts:
            waits.append(_SOON)
        if self._stock.suspects:
            waits.append(_LATER)
        return min(waits, default=None)

    def _fade(self) -> None:
        for entry, boost in self._hints.due(self._stock.clock.now()):
            self._stock.catalogue.hint(entry, boost)

    async def _expire(self) -> None:
        stock = self._stock
        while leaving := stock.catalogue.take_expired(stock.clock.now()):
            await stock.evict(leaving)
            stock.tell_usage()

    async def _remove_distrusted(self) -> None:
        keys = tuple(self._distrusted)
        if keys:
            await self._stock.delete(keys, "corrupt")
            self._distrusted.difference_update(keys)

    async def _decide(self) -> None:
        """Ask about what is in doubt. Listing nothing may also mean that the backend, or what
        guards it, does not answer: then the sum of its bytes is not to be had either."""
        stock = self._stock
        keys = stock.decidable()
        if not keys:
            return
        with stock.changes.look() as look:
            found = await stock.inner.lookup(list(dict.fromkeys(key.chunk for key in keys)))
            await stock.inner.used_bytes()
            stock.decide(keys, [info for infos in found for info in infos], look)
        stock.tell_usage()
