"""A channel that hangs, or becomes ten times slower, in virtual time: what a request loses.

The trained small model's shape on a small machine, one link, costs known. Knows no table: those are
``bench_sick``'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.ending import Ending
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import Tile

__all__ = ["SLOWER", "Slowed", "hung_ratio", "meeting_seconds", "slowed"]

SLOWER: Final = 10.0
LAYERS: Final = 30
CHUNK: Final = 256
STRIDE: Final = 1536 * CHUNK
LINEAR: Final = 2.1e-5
ATTENTION: Final = 1.5e-8
"""A layer of a token, and of a pair of tokens, in float32."""
LATENCY: Final = 0.0005
SUFFIX: Final = 16


def layer_seconds(tile: Tile) -> float:
    """What a layer of ``tile`` takes."""
    return 1e-3 + tile.width * (LINEAR + (tile.start + tile.width / 2) * ATTENTION)


def meeting_seconds(
    cells: Sequence[tuple[float, float]], bandwidth: float, when: float, busy: float = 0.0
) -> float:
    """Compute from the front, the rest over the link as it is before ``when`` and afterwards.

    A cell is ``(seconds, bytes)``; where both sides meet it may be shared. ``busy``: for so long
    loads may go on after compute has done its share.
    """
    left, spent, best = sum(nbytes for _, nbytes in cells), busy, inf
    for seconds, nbytes in cells:
        low, high = 0.0, 1.0
        for _ in range(30):
            share = (low + high) / 2
            if spent + share * seconds < _load(left - share * nbytes, bandwidth, when):
                low = share
            else:
                high = share
        load = _load(left - high * nbytes, bandwidth, when)
        best = min(best, max(spent + high * seconds, load))
        left, spent = left - nbytes, spent + seconds
    return min(best, spent)


def _load(nbytes: float, bandwidth: float, when: float) -> float:
    """Seconds for ``nbytes`` over the link that slows down at ``when``."""
    before = bandwidth * when
    if nbytes <= before:
        return nbytes / bandwidth
    return when + (nbytes - before) * SLOWER / bandwidth


@dataclass(slots=True)
class Slowing(Link):
    """From ``when`` on bytes flow at the bandwidth ``then``, those of loads handed over before
    included."""

    when: float = inf
    then: float = 0.0

    def finish(self, nbytes: int, now: float) -> float:
        start = max(now, self.free_at)
        before = min(float(nbytes), max(self.when - start, 0.0) * self.bandwidth)
        seconds = before / self.bandwidth
        if before < nbytes:
            seconds += (nbytes - before) / self.then
        self.free_at = start + seconds
        self.busy += seconds
        return self.free_at + self.latency


def hung(load: object) -> None:
    """No answer, ever."""


class Rig:
    """One request after another over one link, whose speed is known by then.

    ``compute_io``: recompute time by load time of the healthy link.
    """

    def __init__(self, tokens: int, compute_io: float) -> None:
        self.tokens = tokens
        self.tiles = TileGrid().split(0, tokens)
        self.restored = 0.0
        """Seconds until the prefix of the latest request was there."""
        self.recompute = self.seconds(VirtualRun(layer_seconds, {}), "recompute")
        nbytes = tokens // CHUNK * LAYERS * STRIDE
        self.bandwidth = nbytes * compute_io / self.recompute
        self.link = Slowing(self.bandwidth, LATENCY)
        self.run = VirtualRun(
            layer_seconds, {"link": self.link}, linear=LINEAR, attention=ATTENTION
        )
        for _ in range(4):
            self.healthy = self.seconds(self.run, "adaptive")

    def seconds(self, run: VirtualRun, policy: str) -> float:
        """To the first token of one more request."""
        name, start = self.next_name(run), run.clock.now()
        total = self.tokens + SUFFIX
        spec = make_spec(self.tokens, total, layers=LAYERS, request_id=name, arrival=start)
        whole = tuple([(1 << LAYERS) - 1] * (self.tokens // CHUNK))
        run.arrive(spec, [Coverage("link", whole, STRIDE)] if run.links else [], policy)
        run.run(name)
        self.restored = run.restored_at[name] - start
        if not run.links or run.links["link"].outcome is not hung:
            run.settle()
        return run.finished_at[name] - start

    @staticmethod
    def next_name(run: VirtualRun) -> str:
        """Of the request that comes next."""
        return f"r{len(run.finished_at)}"

    def cells(self) -> list[tuple[float, float]]:
        """Seconds and bytes of each, in the order of compute."""
        stride = [float(tile.width // CHUNK * STRIDE) for tile in self.tiles]
        costs = zip(self.tiles, stride, strict=True)
        return [(layer_seconds(tile), nbytes) for tile, nbytes in costs for _ in range(LAYERS)]

    def best_from_now(self, name: str) -> float:
        """Seconds in which the prefix could be there at best by now, at the link's speed from now
        on: over all meeting points, what is in flight waited for."""
        run, now = self.run, self.run.clock.now()
        frontier = run.scheduler._requests[name]
        compute: list[float] = []
        load: list[float] = []
        for t, first, stop, below in frontier._free_runs():
            cost, nbytes = layer_seconds(self.tiles[t]), self.tiles[t].width // CHUNK * STRIDE
            compute += [cost * (first + 1 - below), *[cost] * (stop - first - 1)]
            load += [nbytes / self.link.then] * (stop - first)
        flying = max(self.link.free_at + LATENCY - now, 0.0)
        ending = Ending(
            compute,
            load,
            [0.0] * len(load),
            compute_free=run.scheduler._outlook.current_left(now),
            channel_free=flying,
            landed=flying,
            suffix=0.0,
        )
        cells = ending.meeting()
        return max(ending._computed[cells], ending._loaded(cells))


def hung_ratio(tokens: int, compute_io: float, share: float) -> float:
    """Time to the first token over that of recompute alone, where the link hangs after ``share``
    of a healthy restore."""
    rig = Rig(tokens, compute_io)
    run, link = rig.run, rig.link
    if share:
        when = run.clock.now() + share * rig.healthy
        run.at(when, lambda: setattr(link, "outcome", hung))
    else:
        link.outcome = hung
    return rig.seconds(run, "adaptive") / rig.recompute


@dataclass(frozen=True, slots=True)
class Slowed:
    """A restore whose link became slower after half of its expected time. In seconds."""

    restored: float
    first_token: float
    bound: float
    """The fluid bound of the real speeds, for what restores: it knows the change beforehand."""
    first_token_bound: float
    """The same with loads hidden behind the suffix."""
    from_change: float
    """When the prefix could be there at best, everything up to the change being as it was."""
    layer: float
    """Of the widest tile: compute does not take one back that it has begun."""
    flying: float
    """What was in flight when the link became slower takes as long."""

    @property
    def undecided(self) -> float:
        """What no decision after the change can take back."""
        return self.layer + self.flying


def slowed(tokens: int, compute_io: float) -> Slowed:
    """One restore; the one before it was healthy."""
    rig = Rig(tokens, compute_io)
    run, link, when = rig.run, rig.link, rig.restored / 2
    start, name = run.clock.now(), rig.next_name(run)
    link.when, link.then = start + when, rig.bandwidth / SLOWER
    seen: list[float] = []

    def look() -> None:
        flying = max(link.free_at - run.clock.now(), 0.0)
        seen.extend((when + rig.best_from_now(name), flying))

    run.at(link.when, look)
    first_token = rig.seconds(run, "adaptive")
    cells = rig.cells()
    suffix = rig.recompute - sum(seconds for seconds, _ in cells)
    last = suffix / LAYERS
    hidden = meeting_seconds(cells, rig.bandwidth, when, busy=suffix - last) + last
    return Slowed(
        restored=rig.restored,
        first_token=first_token,
        bound=meeting_seconds(cells, rig.bandwidth, when),
        first_token_bound=hidden,
        from_change=seen[0],
        layer=max(seconds for seconds, _ in cells),
        flying=seen[1],
    )
