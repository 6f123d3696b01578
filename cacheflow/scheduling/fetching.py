"""What channels are handed: the next load of the most urgent request that has one for them.

A channel with room asks the most urgent request first, and what that one leaves idle goes to the
next. A load is claimed when it is handed out; whoever moves the bytes says how it ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.scheduling.glance import Glance
from cacheflow.scheduling.packing import Packing
from cacheflow.types import Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.scheduling.frontier import Frontier
    from cacheflow.scheduling.loading import Reach
    from cacheflow.scheduling.queue import Queue, Rank

__all__ = ["Fetching"]


class Fetching(Packing):
    """Hands out work to every channel."""

    def next_load(self, channel: str, now: float) -> Load | None:
        """The load to start on ``channel`` now, claimed; None until something ends."""
        queue = self._channels.get(channel)
        if queue is None:
            return None
        with self._gate:
            if not self._outlook.has_room(channel, None):
                return None
            parked, waiting = queue.parked(), queue.waiting()
            if parked is not None and (waiting is None or parked < waiting):
                glance = Glance(self._requests[parked[1]], now)
                load = self._ask_channel(channel, queue, parked, glance, is_first=True)
                if load is not None:
                    return load
            while waiting is not None:
                glance = Glance(self._requests[waiting[1]], now)
                if not self._outlook.has_room(channel, glance):
                    return None
                is_first = parked is None or waiting < parked
                load = self._ask_channel(channel, queue, waiting, glance, is_first=is_first)
                if load is not None:
                    return load
                parked, waiting = queue.parked(), queue.waiting()
        return None

    def commit(self, load: Load) -> int:
        """Layers (bitmap) of a verified load to publish; compute has begun to write the others."""
        frontier = self._requests.get(load.request_id)
        if frontier is None:
            return 0
        with self._gate:
            return frontier.commit(load)

    def loaded(self, load: Load, layers: int, now: float) -> None:
        """The load was published (``layers``: what :meth:`commit` granted)."""
        with self._gate:
            self._outlook.ended(load, now, delivered=True)
            frontier = self._requests.get(load.request_id)
            if frontier is not None:
                own = frontier.is_own(load.tile)
                frontier.landed(load, layers)
                self._changed(frontier, now, own=own)
            self._rank_again(now)

    def failed(self, load: Load, now: float, *, chunks: Sequence[int], late: bool = False) -> None:
        """The load failed for ``chunks``; ``late``: it was given up, and unless later loads have
        passed it, its channel is not to be waited for again."""
        with self._gate:
            hangs = late and not self._outlook.channel(load.channel).has_passed(load.id)
            self._outlook.ended(load, now, delivered=False)
            frontier = self._requests.get(load.request_id)
            if frontier is not None:
                frontier.lost(load, chunks)
                if hangs:
                    frontier.drop_channel(load.channel)
                self._changed(frontier, now)

    def _ask_channel(
        self,
        channel: str,
        queue: Queue,
        entry: tuple[Rank, str],
        glance: Glance,
        *,
        is_first: bool,
    ) -> Load | None:
        rank, request_id = entry
        frontier = self._requests[request_id]
        frontier.is_first_to_load = is_first
        reach = frontier.next_reach(channel, glance)
        if reach is None:
            queue.park(request_id, rank)
            frontier.turn_away(channel, True)
            return None
        frontier.turn_away(channel, False)
        queue.put(request_id, rank)
        return self._start(frontier, channel, reach, glance.now)

    def _start(self, frontier: Frontier, channel: str, reach: Reach, now: float) -> Load:
        load = Load(
            id=next(self._ids),
            request_id=frontier.spec.id,
            channel=channel,
            tile=reach.tile,
            layers=reach.layers,
            chunks=reach.chunks,
            nbytes=reach.nbytes,
            hidden=reach.hidden,
        )
        frontier.start(load)
        self._outlook.started(load, now)
        return load
