"""The decision core: what the compute worker and every channel should do next.

Synchronous and free of I/O: it is told what ended and asked what to begin; the awaits live in
``cacheflow.restore``. Runs the same in virtual time. Requests are served first come, first served,
compute and channels on the same request from its two ends; what one of them leaves idle goes to
the next request in order.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.frontier import Frontier
from cacheflow.scheduling.outlook import Outlook
from cacheflow.types import Claim, ComputeBatch, Load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.clock import Clock
    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.scheduling.policies import Policy
    from cacheflow.types import ComputeDone, Coverage, RequestSpec, TileWork

__all__ = ["BatchScheduler"]

_MAX_LOAD_BYTES: Final = 16 << 20


class BatchScheduler:
    """Claims of all requests of one engine. Loop-owned, except :meth:`claim` (compute thread)."""

    def __init__(
        self,
        compute: ComputeModel,
        clock: Clock,
        *,
        max_load_bytes: int = _MAX_LOAD_BYTES,
        claim_ahead: int = 0,
    ) -> None:
        self._clock = clock
        self._outlook = Outlook(compute, max_load_bytes=max_load_bytes, claim_ahead=claim_ahead)
        self._requests: dict[str, Frontier] = {}
        self._ids = count(1)

    def channel(self, name: str) -> ChannelModel:
        """The cost model of a channel (made on first use)."""
        return self._outlook.channel(name)

    # -- requests ------------------------------------------------------------------------------

    def admit(self, request: RequestSpec, policy: Policy) -> None:
        """Nothing known yet of what is stored: compute may start."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id!r} is already admitted")
        self._requests[request.id] = Frontier(request, policy, self._outlook)

    def extend_coverage(self, request_id: str, coverage: Coverage) -> None:
        """A tier answered: its channel can deliver these cells."""
        if request_id in self._requests:
            self._requests[request_id].extend(coverage)

    def cancel(self, request_id: str) -> None:
        """Claim nothing more for the request; claims in progress end on their own."""
        if request_id in self._requests:
            self._requests[request_id].cancelled = True

    def remove(self, request_id: str) -> None:
        """Forget a request whose work has all ended."""
        self._requests.pop(request_id, None)

    def restored(self, request_id: str) -> bool:
        """Whether every cell of the prefix is ready."""
        return self._requests[request_id].restored

    def finished(self, request_id: str) -> bool:
        """Whether the prefix is restored and the suffix computed."""
        return self._requests[request_id].finished

    def paused_tiles(self, request_id: str) -> list[int]:
        """First tokens of tiles whose hidden state the engine may drop; each is named once."""
        frontier = self._requests.get(request_id)
        return [] if frontier is None else frontier.paused()

    # -- compute -------------------------------------------------------------------------------

    def next_compute(self, now: float) -> ComputeBatch | None:
        """Work for the compute worker, or None until something ends or :meth:`wake_at`."""
        for frontier in self._requests.values():
            if not frontier.cancelled:
                work = frontier.next_work(now)
                if work is not None:
                    return ComputeBatch((work,))
        return None

    def wake_at(self, now: float) -> float:
        """When to ask :meth:`next_compute` again although nothing ended (may be infinite)."""
        live = (f for f in self._requests.values() if not f.cancelled)
        return min((f.wake_at(now) for f in live), default=float("inf"))

    def claim(self, work: TileWork, layer: int) -> Claim:
        """May the compute thread push ``work`` through ``layer``? Thread-safe, microseconds."""
        now = self._clock.now()
        frontier = self._requests.get(work.request_id)
        answer = Claim.REFUSED if frontier is None else frontier.claim(work, layer, now)
        learn = answer is not Claim.REFUSED and not work.is_suffix
        with self._outlook.gate:
            self._outlook.claimed(work.tile if learn else None, now)
        return answer

    def computed(self, done: ComputeDone) -> None:
        """The compute worker returned from ``done.work``."""
        with self._outlook.gate:
            self._outlook.claimed(None, self._clock.now())
        frontier = self._requests.get(done.work.request_id)
        if frontier is not None:
            frontier.returned(done.work, done.next_layer)

    # -- loads ---------------------------------------------------------------------------------

    def next_load(self, channel: str, now: float) -> Load | None:
        """The load to start on ``channel`` now, claimed; None until something ends."""
        if not self._outlook.has_room(channel):
            return None
        for request_id, frontier in self._requests.items():
            reach = frontier.next_reach(channel, now)
            if reach is not None:
                expected = self._outlook.load_seconds(channel, reach.nbytes, now)
                load = Load(
                    id=next(self._ids),
                    request_id=request_id,
                    channel=channel,
                    tile=reach.tile,
                    layers=reach.layers,
                    chunks=reach.chunks,
                    nbytes=reach.nbytes,
                    expected_seconds=float("inf") if expected is None else expected,
                )
                frontier.start(load)
                with self._outlook.gate:
                    self.channel(channel).started(load.id, load.nbytes, now)
                return load
        return None

    def commit(self, load: Load) -> int:
        """Layers (bitmap) of a verified load to publish; compute has begun to write the others."""
        frontier = self._requests.get(load.request_id)
        return 0 if frontier is None else frontier.commit(load)

    def loaded(self, load: Load, layers: int, now: float) -> None:
        """The load was published (``layers``: what :meth:`commit` granted)."""
        self._ended(load, now, delivered=True)
        frontier = self._requests.get(load.request_id)
        if frontier is not None:
            frontier.landed(load, layers)

    def failed(self, load: Load, now: float, *, chunks: Sequence[int], late: bool = False) -> None:
        """The load failed for ``chunks``; ``late``: its channel is not to be waited for again."""
        self._ended(load, now, delivered=False)
        frontier = self._requests.get(load.request_id)
        if frontier is not None:
            frontier.lost(load, chunks)
            if late:
                frontier.drop_channel(load.channel)

    def _ended(self, load: Load, now: float, *, delivered: bool) -> None:
        with self._outlook.gate:
            self.channel(load.channel).ended(load.id, now, delivered=delivered)
