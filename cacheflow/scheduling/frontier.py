"""One request's frontier: which cells compute and loads may take next, and who may write them.

Compute walks cells forward (tile by tile, layer by layer), loads walk them backward, so wherever
they meet the recomputed set is a staircase and the meeting tile is split by layer. Holes (cells no
channel has) force their tile forward; loads then first fetch what the holes depend on.

The compute thread asks :meth:`Frontier.claim` before every layer while the event loop claims and
commits loads: both go through ``gate``, the only lock, which also guards the cost models that all
requests share. Knows no engine, bytes, files or tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from cacheflow.scheduling.tiles import TileState, bits
from cacheflow.types import Claim, Span, TileWork

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from cacheflow.scheduling.outlook import Outlook
    from cacheflow.scheduling.policies import Policy
    from cacheflow.types import Coverage, Load, RequestSpec

__all__ = ["Frontier", "Reach"]

_UNITS: Final = 128
"""A load should take about this fraction of what is left, so that the last ones end together."""
_LEAST_UNIT_SECONDS: Final = 0.004
"""Below this the cost of a load's own steps would show."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Cells a channel could be asked for in one load."""

    tile: int
    layers: Span
    chunks: tuple[int, ...]
    nbytes: int


class Frontier:
    """Cells, claims and readiness of one request. Loop-owned except :meth:`claim`."""

    def __init__(self, spec: RequestSpec, policy: Policy, outlook: Outlook) -> None:
        self.spec = spec
        self.policy = policy
        self.gate = outlook.gate
        self.tiles = [TileState(t, spec.num_layers, spec.chunk_tokens) for t in spec.tiles]
        self.suffix_low = [0] * len(spec.suffix)
        self.cancelled = False
        self.begun = False
        """Whether optional recompute has started (or was found worth starting)."""
        self._outlook = outlook
        self._strides: dict[str, int] = {}
        self._front = [0] * spec.num_layers
        """Per layer: how many leading tiles are ready."""

    # -- what is known -------------------------------------------------------------------------

    def extend(self, coverage: Coverage) -> None:
        """A channel answered: it has these layers of these chunks."""
        with self.gate:
            self._strides[coverage.channel] = coverage.stride
            for tile in self.tiles:
                for i, chunk in enumerate(tile.chunks, tile.first_chunk):
                    mask = coverage.layers[i] if i < len(coverage.layers) else 0
                    if mask:
                        chunk.sources.append((coverage.channel, mask & tile.full))

    def drop_channel(self, channel: str) -> None:
        """Stop counting on a channel: it is late or broken."""
        with self.gate:
            for tile in self.tiles:
                for chunk in tile.chunks:
                    chunk.forget(channel, tile.full)

    @property
    def restored(self) -> bool:
        """Every cell of the prefix is ready, none merely enqueued on the compute stream."""
        return all(tile.complete and not tile.running for tile in self.tiles)

    @property
    def finished(self) -> bool:
        """Prefix restored and suffix computed."""
        return self.restored and all(low == self.spec.num_layers for low in self.suffix_low)

    def paused(self) -> list[int]:
        """First tokens of tiles whose hidden state is of no more use, each named once.

        That is: complete tiles that stopped half way, and everything once the request is cancelled.
        """
        last, found = self.spec.num_layers, []
        for state in self.tiles:
            idle = not state.running and 0 < state.low < last
            if idle and (state.complete or self.cancelled):
                state.low = last
                found.append(state.tile.start)
        for i, piece in enumerate(self.spec.suffix):
            if self.cancelled and 0 < self.suffix_low[i] < last:
                self.suffix_low[i] = last
                found.append(piece.start)
        return found

    # -- compute -------------------------------------------------------------------------------

    def next_work(self, now: float) -> TileWork | None:
        """The lowest tile (then the suffix) whose next layer compute should take now."""
        with self.gate:
            for t, state in enumerate(self.tiles):
                if self._decide(t, state.low, now) is not Claim.REFUSED:
                    state.running = True
                    return TileWork(self.spec.id, state.tile, state.low)
            for i, piece in enumerate(self.spec.suffix):
                low = self.suffix_low[i]
                if low < self.spec.num_layers:
                    ready = self._advance_front(low) == len(self.tiles)
                    return TileWork(self.spec.id, piece, low, is_suffix=True) if ready else None
        return None

    def claim(self, work: TileWork, layer: int, now: float) -> Claim:
        """Called by the compute thread before ``layer``; whatever is granted will be enqueued."""
        with self.gate:
            if self.cancelled or layer >= self.spec.num_layers:
                return Claim.REFUSED
            if work.is_suffix:
                granted = self._advance_front(layer) == len(self.tiles)
                if granted:
                    self.suffix_low[self.spec.suffix.index(work.tile)] = layer + 1
                return Claim.WRITE if granted else Claim.REFUSED
            t = self._index(work)
            answer = self._decide(t, layer, now)
            if answer is not Claim.REFUSED:
                state = self.tiles[t]
                state.low = layer + 1
                state.ready |= 1 << layer
                self.begun = True
            return answer

    def returned(self, work: TileWork, next_layer: int) -> None:
        """The compute thread is out of ``work`` and holds its hidden state at ``next_layer``."""
        with self.gate:
            if not work.is_suffix:
                state = self.tiles[self._index(work)]
                state.running = False
                state.low = next_layer

    def wake_at(self, now: float) -> float:
        """When compute should look again although nothing ended: loads will be too late then."""
        with self.gate:
            if not self.policy.compute(0.0, 1.0):
                return float("inf")
            for t, state in enumerate(self.tiles):
                target = self._target(t, state.low)
                if target is not None and not state.committing >> target & 1:
                    cost = self._outlook.layer_bound(state.tile) or 0.0
                    seconds = max(cost * (target - state.low + 1), self._patience(now))
                    return self._outlook.flip(self._on_channels(), seconds, now)
        return float("inf")

    def _patience(self, now: float) -> float:
        """How far loads may fall behind before a recompute that was not worth starting starts."""
        if self.begun or self.policy.begin(self._gain(now)):
            return 0.0
        return 2 * self._outlook.transfer_seconds(self._on_channels())

    def _index(self, work: TileWork) -> int:
        return self.spec.tiles.index(work.tile)

    def _advance_front(self, layer: int) -> int:
        front = self._front[layer]
        while front < len(self.tiles) and self.tiles[front].ready >> layer & 1:
            front += 1
        self._front[layer] = front
        return front

    def _target(self, t: int, layer: int) -> int | None:
        """The lowest cell at or above ``layer`` that still has to become ready, if reachable."""
        state = self.tiles[t]
        open_cells = (state.full & ~state.ready) >> layer << layer
        if not open_cells or self._advance_front(layer) < t:
            return None
        return (open_cells & -open_cells).bit_length() - 1

    def _decide(self, t: int, layer: int, now: float) -> Claim:
        target = self._target(t, layer)
        if target is None:
            return Claim.REFUSED
        state = self.tiles[t]
        step = Claim.WRITE if target == layer else Claim.THROUGH
        if state.must > target and not state.committing >> target & 1:
            return step
        if state.committing >> target & 1 or not self._worth(state, target, layer, now):
            return Claim.REFUSED
        return step

    def _worth(self, state: TileState, target: int, layer: int, now: float) -> bool:
        cost = self._outlook.layer_bound(state.tile)
        compute = None if cost is None else cost * (target - layer + 1)
        left = self._outlook.loads_left(self._on_channels(), now)
        patient = left is not None and left < self._patience(now)
        if not patient and self.policy.compute(compute, left):
            return True
        return self._stalled(now)

    def _stalled(self, now: float) -> bool:
        """Nothing is on its way and no channel would start anything: either side's estimate says
        that the other is faster. Then compute goes on, or nobody ever would."""
        if any(state.in_flight for state in self.tiles):
            return False
        return all(self._reach(channel, now) is None for channel in self._strides)

    # -- loads ---------------------------------------------------------------------------------

    def next_reach(self, channel: str, now: float) -> Reach | None:
        """The cells ``channel`` should be asked for next, from the back."""
        with self.gate:
            return None if self.cancelled else self._reach(channel, now)

    def _reach(self, channel: str, now: float) -> Reach | None:
        for t in self._load_order():
            mask = self.tiles[t].loads_for(channel)
            if mask:
                return self._cut(channel, t, mask, now)
        return None

    def _load_order(self) -> Iterator[int]:
        """Backward, but what a hole depends on before what lies behind it."""
        holes = [t for t, state in enumerate(self.tiles) if state.must > state.low]
        for first, stop in pairwise([0, *holes, len(self.tiles)]):
            yield from range(stop - 1, first - 1, -1)

    def _cut(self, channel: str, t: int, mask: int, now: float) -> Reach | None:
        """The topmost layers of ``mask`` with the same chunks, as many as one load should have."""
        state = self.tiles[t]
        top = mask.bit_length() - 1
        chunks = state.chunks_for(channel, top)
        stride = self._strides[channel] * len(chunks)
        low = top
        for size in (self._unit(channel, stride), 1):
            low = top
            while (
                top - low + 1 < size
                and low > 0
                and mask >> (low - 1) & 1
                and state.chunks_for(channel, low - 1) == chunks
            ):
                low -= 1
            nbytes = stride * (top - low + 1)
            load = self._outlook.load_seconds(channel, nbytes, now)
            if self.policy.load(load, self._compute_to(t, low, now)):
                return Reach(t, Span(low, top + 1), chunks, nbytes)
        return None

    def _unit(self, channel: str, stride: int) -> int:
        """How many layers one load should carry: a fraction of the time left, in whole layers."""
        return self._outlook.unit_layers(
            channel, stride, self._on_channels()[channel], _UNITS, _LEAST_UNIT_SECONDS
        )

    def _compute_to(self, t: int, layer: int, now: float) -> float | None:
        """Seconds until compute would have finished cell ``(t, layer)`` if loads left it alone."""
        total = self._outlook.current_left(now)
        for i, state in enumerate(self.tiles[: t + 1]):
            cost = self._outlook.layer_seconds(state.tile)
            if cost is None:
                return None
            cells = state.free & (bits(Span(0, layer + 1)) if i == t else state.full)
            total += cost * cells.bit_count()
        return total

    # -- loads that ended ----------------------------------------------------------------------

    def start(self, load: Load) -> None:
        """The load's cells are claimed from now on."""
        with self.gate:
            self.tiles[load.tile].claim(load)

    def commit(self, load: Load) -> int:
        """Layers (bitmap) of a verified load that may be published; compute took the others."""
        with self.gate:
            state = self.tiles[load.tile]
            layers = 0 if self.cancelled else bits(load.layers) & ~state.ready
            state.commit(load, layers)
            return layers

    def landed(self, load: Load, layers: int) -> None:
        """Published."""
        with self.gate:
            self.tiles[load.tile].landed(load, layers)

    def lost(self, load: Load, chunks: Sequence[int]) -> None:
        """Not delivered: other sources or recompute take over."""
        with self.gate:
            self.tiles[load.tile].lost(load, chunks)

    # -- outlook -------------------------------------------------------------------------------

    def _on_channels(self) -> Mapping[str, int]:
        """Bytes each channel is still free to be asked for."""
        totals = dict.fromkeys(self._strides, 0)
        for state in self.tiles:
            for channel, stride in self._strides.items():
                floor = state.loads_for(channel)
                if floor:
                    count = sum(
                        (chunk.wanted_from(channel) & floor).bit_count() for chunk in state.chunks
                    )
                    totals[channel] += count * stride
        return totals

    def _gain(self, now: float) -> float | None:
        """Share of the load-only time that both ends together would save, if all is known."""
        return self._outlook.gain(
            [(state.tile, state.free.bit_count()) for state in self.tiles],
            self._on_channels(),
            now,
        )
