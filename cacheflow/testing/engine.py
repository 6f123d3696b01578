"""An engine without a model: KV bytes are a digest of (token prefix, layer), so that any wrong or
missing byte shows. Obeys the :class:`~cacheflow.abc.Recomputer` contract strictly and checks that
its caller does too: attention over unready cells, double writes and lost hidden states raise.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cacheflow.types import Claim, ComputeDone, KVLayout, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.abc import ClaimLayer
    from cacheflow.types import ComputeBatch, StagedPart, Tile, TileWork

__all__ = ["FakeEngine"]


class FakeEngine:
    """``layer_seconds(tile)``: how long the compute thread takes for a layer (default: nothing).

    ``before_layer`` is called on the compute thread before each layer: tests block there.
    """

    def __init__(
        self,
        layout: KVLayout | None = None,
        grid: TileGrid | None = None,
        *,
        layer_seconds: Callable[[Tile], float] = lambda tile: 0.0,
    ) -> None:
        self.layout = layout or KVLayout(4, 2, 8, "float32", chunk_tokens=16)
        self.grid = grid or TileGrid((32, 32, 64), 128)
        self.grid_id = f"grid={self.grid.name};fake"
        self.before_layer: Callable[[TileWork, int], None] = lambda work, layer: None
        self.claim_ahead = 0
        self.published = 0
        self._layer_seconds = layer_seconds
        self._tokens: dict[str, list[int]] = {}
        self._cells: dict[str, dict[tuple[int, int], bytes]] = {}
        self._hidden: dict[str, dict[int, int]] = {}
        self._computed: dict[str, set[tuple[int, int]]] = {}
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="fake-compute")
        self._copy = ThreadPoolExecutor(1, thread_name_prefix="fake-copy")
        self._running: dict[str, int] = {}

    # -- contract ------------------------------------------------------------------------------

    async def open(self, request_id: str, tokens: Sequence[int]) -> None:
        assert request_id not in self._tokens, "opened twice"
        self._tokens[request_id] = list(tokens)
        self._cells[request_id] = {}
        self._hidden[request_id] = {}
        self._computed[request_id] = set()

    async def recompute(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._compute, self._walk, batch, claim))

    async def publish(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._copy, self._write_back, request_id, parts)

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        stride = self.layout.layer_stride()
        for part in parts:
            for i, layer in enumerate(part.layers):
                cell = self._cells[request_id][part.chunk, layer]
                part.view[i * stride : (i + 1) * stride] = cell

    async def discard(self, request_id: str, start: int) -> None:
        assert self._hidden[request_id].pop(start, None) is not None, "nothing was paused"

    async def close(self, request_id: str) -> None:
        assert not self._running.get(request_id), "closed under running compute"
        del self._tokens[request_id], self._cells[request_id], self._hidden[request_id]
        del self._computed[request_id]

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        self._tokens[request_id] += tokens

    # -- for tests -----------------------------------------------------------------------------

    @property
    def open_requests(self) -> list[str]:
        """Requests that hold KV memory."""
        return list(self._tokens)

    def expected(self, tokens: Sequence[int], chunk: int, layer: int) -> bytes:
        """The bytes a layer block of ``chunk`` must have after ``tokens``."""
        size = self.layout.chunk_tokens
        prefix = b"".join(t.to_bytes(8, "little") for t in tokens[: (chunk + 1) * size])
        seed = hashlib.sha256(prefix + layer.to_bytes(4, "little")).digest()
        used = self.layout.layer_bytes()
        body = hashlib.shake_128(seed).digest(used)
        return body.ljust(self.layout.layer_stride(), b"\0")

    def wrong_cells(self, request_id: str, tokens: int) -> list[tuple[int, int]]:
        """Cells ``(chunk, layer)`` of the first ``tokens`` that are missing or wrong."""
        cells, prompt = self._cells[request_id], self._tokens[request_id]
        return [
            (chunk, layer)
            for chunk in range(tokens // self.layout.chunk_tokens)
            for layer in range(self.layout.num_layers)
            if cells.get((chunk, layer)) != self.expected(prompt, chunk, layer)
        ]

    def shutdown(self) -> None:
        """Stop the threads."""
        self._compute.shutdown(wait=False)
        self._copy.shutdown(wait=False)

    # -- threads -------------------------------------------------------------------------------

    def _walk(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        (work,) = batch.work
        self._running[work.request_id] = 1
        try:
            return [self._walk_tile(work, claim)]
        finally:
            self._running[work.request_id] = 0

    def _walk_tile(self, work: TileWork, claim: ClaimLayer) -> ComputeDone:
        hidden = self._hidden[work.request_id]
        if work.first_layer:
            assert hidden.pop(work.tile.start) == work.first_layer, "hidden state is elsewhere"
        layer, seconds = work.first_layer, []
        while layer < self.layout.num_layers:
            self.before_layer(work, layer)
            answer = claim(work, layer)
            if answer is Claim.REFUSED:
                break
            start = time.perf_counter()
            self._layer(work, layer, answer)
            seconds.append(time.perf_counter() - start)
            layer += 1
        if 0 < layer < self.layout.num_layers:
            hidden[work.tile.start] = layer
        return ComputeDone(work, layer, tuple(seconds))

    def _layer(self, work: TileWork, layer: int, answer: Claim) -> None:
        pause = self._layer_seconds(work.tile)
        if pause:
            time.sleep(pause)
        size = self.layout.chunk_tokens
        cells = self._cells[work.request_id]
        for chunk in range(work.tile.start // size):
            assert (chunk, layer) in cells, f"attention over unready cell {chunk, layer}"
        if answer is Claim.THROUGH:
            for chunk in range(work.tile.start // size, work.tile.stop // size):
                assert (chunk, layer) in cells, "went through a layer that is not there"
            return
        for chunk in range(work.tile.start // size, work.tile.stop // size):
            cells[chunk, layer] = self.expected(self._tokens[work.request_id], chunk, layer)
            self._computed[work.request_id].add((chunk, layer))

    def _write_back(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        stride = self.layout.layer_stride()
        for part in parts:
            for i, layer in enumerate(part.layers):
                computed = (part.chunk, layer) in self._computed[request_id]
                assert not computed, f"published over a computed cell {part.chunk, layer}"
                block = bytes(part.view[i * stride : (i + 1) * stride])
                self._cells[request_id][part.chunk, layer] = block
                self.published += 1
