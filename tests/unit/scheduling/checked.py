"""A scheduler under watch: passes every call on and asserts what its answers promise.

Keeps its own picture of the KV cache (who wrote which cell, which parts of it landed, where every
tile's hidden state is) from nothing but the calls, so it fits any scheduler with this contract.
Knows no costs and no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cacheflow.types import Claim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.scheduling import BatchScheduler, Policy
    from cacheflow.types import ComputeBatch, ComputeDone, Coverage, Load, RequestSpec, TileWork

__all__ = ["Checked"]


class Checked:
    """Stands in for a :class:`~cacheflow.scheduling.BatchScheduler` in a ``VirtualRun``."""

    def __init__(self, scheduler: BatchScheduler) -> None:
        self.inner = scheduler
        self.specs: dict[str, RequestSpec] = {}
        self.written: dict[tuple[str, int, int], str] = {}
        """Who made each cell ready: ``(request, tile, layer)`` to ``recompute`` or a channel."""
        self.cancelled: set[str] = set()
        self.removed: set[str] = set()
        self.flying: dict[int, Load] = {}
        self._passed: set[int] = set()
        """Loads under way that a later one of their channel has passed."""
        self.most_inside = self.most_tokens = 0
        """Of what was under way at once; tokens where it was more than one request."""
        self.late_loads = 0
        """Loads that landed to find some of their cells computed."""
        self._stored: dict[tuple[str, str, int], int] = {}
        self._strides: dict[tuple[str, str], int] = {}
        self._parts: set[tuple[str, int, int]] = set()
        self._granted: dict[int, int] = {}
        self._hidden: dict[tuple[str, int], int] = {}
        self._homes: dict[tuple[str, int], str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    # -- requests ------------------------------------------------------------------------------

    def admit(
        self, request: RequestSpec, policy: Policy, *, tiles: int = 0, leader: str | None = None
    ) -> None:
        self.specs[request.id] = request
        if leader is not None:
            self._live(leader)
            for tile in request.tiles[:tiles]:
                self._homes[request.id, tile.index] = self.home(leader, tile.index)
        self.inner.admit(request, policy, tiles=tiles, leader=leader)

    def home(self, request_id: str, tile: int) -> str:
        """The request under whose name the cells of this tile are written down: one name for all
        that share them."""
        return self._homes.get((request_id, tile), request_id)

    def _place(self, request_id: str, start: int) -> tuple[str, int]:
        """Where the hidden state of the tile that begins at ``start`` is."""
        for tile in self.specs[request_id].tiles:
            if tile.start == start:
                return self.home(request_id, tile.index), start
        return request_id, start

    def extend_coverage(self, request_id: str, coverage: Coverage) -> None:
        self._strides[request_id, coverage.channel] = coverage.stride
        for chunk, mask in enumerate(coverage.layers):
            self._stored[request_id, coverage.channel, chunk] = mask
        self.inner.extend_coverage(request_id, coverage)

    def cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)
        self.inner.cancel(request_id)

    def remove(self, request_id: str) -> None:
        assert not any(load.request_id == request_id for load in self.flying.values())
        self.removed.add(request_id)
        self.inner.remove(request_id)

    def restored(self, request_id: str) -> bool:
        answer = self.inner.restored(request_id)
        assert not answer or self.missing(request_id) == 0, "restored with cells missing"
        return answer

    def finished(self, request_id: str) -> bool:
        answer = self.inner.finished(request_id)
        if answer:
            spec = self.specs[request_id]
            assert self.missing(request_id) == 0, "finished with cells missing"
            ends = [self._hidden.get((request_id, piece.start), 0) for piece in spec.suffix]
            assert ends == [spec.num_layers] * len(ends), "finished without its suffix"
        return answer

    def missing(self, request_id: str) -> int:
        """Cells of the prefix that nobody has made ready."""
        spec = self.specs[request_id]
        cells = ((t.index, layer) for t in spec.tiles for layer in range(spec.num_layers))
        home = self.home
        return sum((home(request_id, t), t, layer) not in self.written for t, layer in cells)

    def paused_tiles(self, request_id: str) -> list[int]:
        named = self.inner.paused_tiles(request_id)
        assert len(named) == len(set(named)), "a tile's hidden state is dropped twice"
        for start in named:
            assert self._hidden.pop(self._place(request_id, start), 0), "no hidden state to drop"
        return named

    # -- compute -------------------------------------------------------------------------------

    def next_compute(self, now: float) -> ComputeBatch | None:
        batch = self.inner.next_compute(now)
        self._check_caps()
        for work in batch.work if batch is not None else ():
            self._live(work.request_id)
            held = self._hidden.get(self._place(work.request_id, work.tile.start), 0)
            assert held == work.first_layer, "the hidden state is at another layer"
        return batch

    def claim(self, work: TileWork, layer: int) -> Claim:
        answer = self.inner.claim(work, layer)
        if answer is not Claim.REFUSED:
            self._live(work.request_id)
            self._check_attention(work, layer)
            place = self._place(work.request_id, work.tile.start)
            assert self._hidden.get(place, 0) == layer, "no hidden state to go on from"
            self._hidden[place] = layer + 1
            if not work.is_suffix:
                self._check_write(work, layer, answer)
        return answer

    def _check_attention(self, work: TileWork, layer: int) -> None:
        spec = self.specs[work.request_id]
        for tile in spec.tiles:
            if tile.start < work.tile.start:
                cell = (self.home(spec.id, tile.index), tile.index, layer)
                assert cell in self.written, "attention would read an unready cell"
        for piece in spec.suffix:
            if work.is_suffix and piece.start < work.tile.start:
                assert self._hidden.get((spec.id, piece.start), 0) > layer, "suffix out of order"

    def _check_write(self, work: TileWork, layer: int, answer: Claim) -> None:
        cell = (self.home(work.request_id, work.tile.index), work.tile.index, layer)
        if answer is Claim.THROUGH:
            assert cell in self.written, "passed through a cell that is not ready"
            return
        assert cell not in self.written, "a cell is written twice"
        for load_id, granted in self._granted.items():
            load = self.flying[load_id]
            same = (self.home(load.request_id, load.tile), load.tile) == cell[:2]
            assert not (same and granted >> layer & 1), "written under a copy"
        self.written[cell] = "recompute"

    def computed(self, done: ComputeDone) -> None:
        work = done.work
        held = self._hidden.get(self._place(work.request_id, work.tile.start), 0)
        assert held == done.next_layer
        self.inner.computed(done)

    # -- loads ---------------------------------------------------------------------------------

    def next_load(self, channel: str, now: float) -> Load | None:
        load = self.inner.next_load(channel, now)
        self._check_caps()
        if load is not None:
            self._live(load.request_id)
            assert load.channel == channel
            assert load.id not in self.flying
            self._check_load(load)
            self.flying[load.id] = load
        return load

    def _check_load(self, load: Load) -> None:
        spec = self.specs[load.request_id]
        tile = next(tile for tile in spec.tiles if tile.index == load.tile)
        stride = self._strides[load.request_id, load.channel]
        assert load.nbytes == len(load.layers) * len(load.chunks) * stride > 0
        home = self.home(spec.id, load.tile)
        others = [o for o in self.flying.values() if self.home(o.request_id, o.tile) == home]
        for layer in load.layers:
            assert (home, load.tile, layer) not in self.written, "loads what is ready"
            for chunk in load.chunks:
                assert tile.start <= chunk * spec.chunk_tokens < tile.stop
                stored = self._stored.get((spec.id, load.channel, chunk), 0)
                assert stored >> layer & 1, "asks for what the channel does not have"
                assert (home, chunk, layer) not in self._parts, "loads a part twice"
                twice = any(chunk in o.chunks and layer in o.layers for o in others)
                assert not twice, "asks for a part that is on its way"

    def commit(self, load: Load) -> int:
        granted = self.inner.commit(load)
        for layer in load.layers:
            if granted >> layer & 1:
                cell = (self.home(load.request_id, load.tile), load.tile, layer)
                assert cell not in self.written, "a load would overwrite a cell"
        mask = sum(1 << layer for layer in load.layers)
        assert granted & ~mask == 0, "granted what was not loaded"
        assert load.request_id not in self.cancelled or not granted
        self.late_loads += granted != mask
        self._granted[load.id] = granted
        return granted

    def loaded(self, load: Load, layers: int, now: float) -> None:
        del self.flying[load.id]
        assert self._granted.pop(load.id) == layers
        self._land(load, layers)
        self._passed |= {
            each.id
            for each in self.flying.values()
            if each.channel == load.channel and each.id < load.id
        }
        self.inner.loaded(load, layers, now)

    def _land(self, load: Load, layers: int) -> None:
        spec = self.specs[load.request_id]
        tile = next(tile for tile in spec.tiles if tile.index == load.tile)
        chunks = range(tile.start // spec.chunk_tokens, -(-tile.stop // spec.chunk_tokens))
        home = self.home(spec.id, load.tile)
        for layer in (layer for layer in load.layers if layers >> layer & 1):
            self._parts.update((home, chunk, layer) for chunk in load.chunks)
            if all((home, chunk, layer) in self._parts for chunk in chunks):
                cell = (home, load.tile, layer)
                assert cell not in self.written, "a cell is written twice"
                self.written[cell] = load.channel

    def failed(self, load: Load, now: float, *, chunks: Sequence[int], late: bool = False) -> None:
        del self.flying[load.id]
        self._granted.pop(load.id, None)
        for chunk in chunks:
            mask = sum(1 << layer for layer in load.layers)
            self._stored[load.request_id, load.channel, chunk] &= ~mask
        if late and load.id not in self._passed:
            for key in self._stored:
                if key[:2] == (load.request_id, load.channel):
                    self._stored[key] = 0
        self.inner.failed(load, now, chunks=chunks, late=late)

    def _check_caps(self) -> None:
        """No more inside than there may be, and nobody waits while there is nobody inside."""
        inside, tokens = self.inner.inside
        assert inside <= self.inner._max_requests
        assert inside or not self.inner.outside, "nobody is inside, somebody outside"
        assert tokens >= inside, "somebody inside has no tokens"
        self.most_inside = max(self.most_inside, inside)
        self.most_tokens = max(self.most_tokens, tokens if inside > 1 else 0)

    def _live(self, request_id: str) -> None:
        assert request_id in self.specs, "works for a request that was never admitted"
        assert request_id not in self.cancelled, "works for a cancelled request"
        assert request_id not in self.removed, "works for a request that is gone"
