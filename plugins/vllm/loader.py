"""The worker's loads: each restore's blocks from the last one down, verified, then put in place.

Lives on the depot's event loop. Which piece is next on which tier, and what becomes of a load; the
bytes are the fetcher's business, and who may write a block the restore's. A load that fails, is
late or missing ends its restore there: compute takes what is below.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.costs import ChannelModel
from cacheflow.errors import ClosedError
from cacheflow.plugins.vllm.fetcher import Fetcher, LoadFailed
from cacheflow.plugins.vllm.finder import longest_run
from cacheflow.plugins.vllm.pieces import Piece, arranged
from cacheflow.plugins.vllm.records import Found, Progress
from cacheflow.plugins.vllm.restoring import Restoring
from cacheflow.types import Span

if TYPE_CHECKING:
    from cacheflow.plugins.vllm.fetcher import Held
    from cacheflow.plugins.vllm.finder import Finder
    from cacheflow.plugins.vllm.means import Means
    from cacheflow.plugins.vllm.records import Opened

__all__ = ["INSIDE", "OUTSIDE", "Loader"]

_log = logging.getLogger(__name__)

INSIDE: Final = "loads"
OUTSIDE: Final = "loads ahead"
"""Owners of staging memory: restores that have blocks, and those that wait outside the batch."""
_LEAST_DEPTH: Final = 2
"""Loads asked for at a time, so that the next one is on its way while one is checked."""


class Loader:
    """All restores of one worker, served first come first, over all tiers."""

    def __init__(self, means: Means, finder: Finder) -> None:
        self._means = means
        self._finder = finder
        self.restores: dict[int, Restoring] = {}
        self.ended: deque[int] = deque()
        """Restores that are over, until they are told."""
        self.missed: deque[bytes] = deque()
        """Keys of blocks that could not be had, until they are told."""
        self.channels = {name: ChannelModel() for name in means.tiers}
        self._fetcher = Fetcher(means, self.channels)
        self._flying: dict[str, dict[int, int]] = {name: {} for name in means.tiers}
        """Loads on their way, and of how many layers."""
        self._numbers = count(1)
        self.starved = False
        """Some load found no staging memory: ask again."""

    # -- on the event loop ---------------------------------------------------------------------

    def open(self, order: Opened) -> None:
        """Begin to look for the blocks of a restore, and to load what is found."""
        layers = self._means.memory.layout.num_layers
        now = self._means.clock.now()
        restore = Restoring(order.restore, order.first, order.keys, now, layers)
        self.restores[order.restore] = restore
        restore.lookup = asyncio.create_task(self._look_up(restore))

    def close(self, restore_id: int) -> None:
        """End a restore, whatever it is doing; told as ended when nothing of it can write."""
        restore = self.restores.pop(restore_id, None)
        self.ended.append(restore_id)
        if restore is None:  # it ended before
            return
        for task in [*restore.tasks, *([restore.lookup] if restore.lookup else ())]:
            task.cancel()
        restore.end()
        self.pump()

    def arrange(self, restore_id: int, blocks: int) -> None:
        """Have the lowest ``blocks`` blocks that are still to be loaded come by bands of layers."""
        if restore := self.restores.get(restore_id):
            stop = restore.floor + blocks
            for tier, waiting in restore.waiting.items():
                restore.waiting[tier] = arranged(waiting, stop, restore.layers)

    def pump(self) -> None:
        """Start the loads that are due: on every tier the oldest restore's next piece."""
        self.starved = False
        layers = self._means.memory.layout.num_layers
        for tier, flying in self._flying.items():
            while sum(flying.values()) < layers * max(self.channels[tier].depth, _LEAST_DEPTH):
                chosen = self._next(tier)
                if chosen is None:
                    break
                restore, piece, held = chosen
                number = next(self._numbers)
                flying[number] = len(piece.layers)
                restore.whole += len(piece.layers) == layers
                task = asyncio.create_task(self._load(restore, piece, tier, held, number))
                restore.tasks.add(task)
                task.add_done_callback(partial(self._done, restore, piece, tier, held, number))

    def _next(self, tier: str) -> tuple[Restoring, Piece, Held] | None:
        """What to load next over ``tier``, and where to; a restore that finds no staging memory is
        passed over, for memory of requests that are outside the batch comes back late."""
        for restore in self.restores.values():
            waiting = restore.waiting.get(tier)
            while waiting:
                piece = waiting[-1]
                if not restore.wants(piece.block):
                    waiting.pop()
                    continue
                owner = OUTSIDE if restore.targets is None else INSIDE
                source = restore.stored[piece.block]
                try:
                    held = self._fetcher.hold(source, piece.layers, owner)
                except ClosedError:
                    return None
                except LoadFailed as error:
                    self._failed(restore, waiting.pop().block, tier, error)
                    continue
                if held is not None:
                    return restore, waiting.pop(), held
                self.starved = True
                break
        return None

    def _left(self, tier: str, number: int) -> None:
        """A load has left the tier: the next one may begin."""
        self._flying[tier].pop(number, None)
        self.pump()

    def _done(
        self,
        restore: Restoring,
        piece: Piece,
        tier: str,
        held: Held,
        number: int,
        task: asyncio.Task[None],
    ) -> None:
        restore.tasks.discard(task)
        restore.whole -= len(piece.layers) == restore.layers
        self._flying[tier].pop(number, None)
        if task.cancelled():  # perhaps before it began: then nobody else gives its memory back
            held.release()
        else:  # when one is cancelled nothing new should begin: the loop may be ending
            if (error := task.exception()) is not None:
                _log.error("a load ended unexpectedly", exc_info=error)
                restore.fail(piece.block)
            self.pump()
        if restore.is_over:
            self._means.changed()  # complete, or over: the scheduler should know at once

    async def _look_up(self, restore: Restoring) -> None:
        restore.stored = await self._finder.find(restore.first, restore.keys)
        bottom, top = longest_run(restore.stored)
        whole = Span(0, restore.layers)
        for block in range(bottom, top):
            restore.waiting.setdefault(restore.stored[block].tier, []).append(Piece(block, whole))
        restore.low, restore.stop = top, bottom
        restore.since = self._means.clock.now()
        restore.found = Found(bottom, top)
        self.pump()
        self._means.changed()

    async def _load(
        self, restore: Restoring, piece: Piece, tier: str, held: Held, number: int
    ) -> None:
        try:
            left = partial(self._left, tier, number)
            await self._fetcher.fetch(restore.stored[piece.block], piece.layers, held, left)
        except LoadFailed as error:
            held.release()
            self._failed(restore, piece.block, tier, error)
            return
        except BaseException:
            held.release()
            raise
        nbytes = held.buffer.nbytes
        await self._land(restore, piece, held)
        self._means.counts.add("transfer_bytes", tier, "load", amount=nbytes)

    def _failed(self, restore: Restoring, block: int, tier: str, error: LoadFailed) -> None:
        """Compute takes the block and those below it; it is stored again when it is there."""
        _log.warning("tier %s: block %d is recomputed: %s", tier, block, error)
        self._means.counts.add("load_failures", tier, error.reason)
        self.missed.append(restore.keys[block - restore.first])
        restore.fail(block)
        self._means.landed()

    async def _land(self, restore: Restoring, piece: Piece, held: Held) -> None:
        """Keep what is verified, or put it in place where its target is known."""
        if restore.land(piece, held):
            loop, means = asyncio.get_running_loop(), self._means
            copy = loop.run_in_executor(means.threads, restore.place, means.memory, piece.block)
            await asyncio.shield(copy)  # a copy that has begun ends; close() waits at the lock
        restore.since = self._means.clock.now()
        restore.settle()
        self._means.landed()

    # -- from any thread -----------------------------------------------------------------------

    def abandon(self) -> None:
        """The event loop is gone: no copy that is still under way may reach the cache."""
        for restore in list(self.restores.values()):
            with restore.lock:
                restore.closed = True

    def progress(self, restore: Restoring) -> Progress:
        """How far it is; from any thread, exact enough for a decision."""
        now, tier = self._means.clock.now(), self._tier_of(restore)
        seconds, latency = self._speed(tier)
        ahead = self._ahead(restore, tier) * (seconds or 0.0)
        nothing_yet = restore.found is not None and restore.low == restore.found.top
        part, row = restore.partial()
        return Progress(
            low=restore.low,
            waited=now - restore.since,
            block_seconds=seconds,
            first_seconds=ahead + (latency if nothing_yet and not part else 0.0),
            dead=restore.is_over,
            part=part,
            row=row,
            whole=restore.whole,
        )

    def _tier_of(self, restore: Restoring) -> str:
        at = restore.stored.get(restore.low - 1) or restore.stored.get(restore.low)
        return at.tier if at else next(iter(self._means.tiers))

    def _speed(self, tier: str) -> tuple[float | None, float]:
        """Seconds a block in a stream of loads, and what the first one waits more."""
        channel = self.channels[tier]
        if channel.bandwidth is None:
            return None, 0.0
        alone = self._means.memory.nbytes / channel.bandwidth
        return max(alone, (alone + channel.latency) / channel.depth), channel.latency

    def _ahead(self, restore: Restoring, tier: str) -> int:
        """Blocks of older restores still to come over ``tier``; half where compute helps."""
        blocks = 0
        for other in list(self.restores.values()):
            if other.id < restore.id and other.found is not None and self._tier_of(other) == tier:
                left = max(other.low - max(other.stop, other.claim), 0)
                blocks += left // 2 if other.targets else left
        return blocks
