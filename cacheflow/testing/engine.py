"""An engine without a model: KV bytes are a digest of (token prefix, layer), so that any wrong or
missing byte shows. Obeys the :class:`~cacheflow.abc.Recomputer` contract strictly and checks that
its caller does too: attention over unready cells, double writes and lost hidden states raise.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheflow.errors import ClosedError
from cacheflow.tasks import to_the_end
from cacheflow.types import Claim, ComputeDone, KVLayout, Shard, Span, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.abc import ClaimLayer
    from cacheflow.types import ComputeBatch, StagedPart, Tile, TileWork

__all__ = ["FakeEngine"]


@dataclass(slots=True)
class _Page:
    """What the requests that share a tile have in common."""

    cells: dict[tuple[int, int], bytes] = field(default_factory=dict)
    begun: dict[tuple[int, int], tuple[bytearray, set[int]]] = field(default_factory=dict)
    """Cells of which some heads were published, and which heads."""
    computed: set[tuple[int, int]] = field(default_factory=set)
    hidden: dict[int, int] = field(default_factory=dict)


class FakeEngine:
    """``layer_seconds(tile)``: how long the compute thread takes for a layer (default: nothing).

    ``before_layer`` is called on the compute thread before each layer: tests block there.
    ``shard``: the part of ``layout`` that it holds (default: all).
    """

    def __init__(
        self,
        layout: KVLayout | None = None,
        grid: TileGrid | None = None,
        *,
        layer_seconds: Callable[[Tile], float] = lambda tile: 0.0,
        shard: Shard | None = None,
    ) -> None:
        self.shard = shard or Shard.of(layout or KVLayout(4, 2, 8, "float32", chunk_tokens=16))
        self.layout = self.shard.layout
        self.grid = grid or TileGrid((32, 32, 64), 128)
        self.grid_id = f"grid={self.grid.name};fake"
        self.before_layer: Callable[[TileWork, int], None] = lambda work, layer: None
        self.claim_ahead = 0
        self.published = self.recomputed = 0
        """Layer blocks of chunks, by loads and by compute."""
        self._layer_seconds = layer_seconds
        self._tokens: dict[str, list[int]] = {}
        self._pages: dict[str, dict[int, _Page]] = {}
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="fake-compute")
        self._copy = ThreadPoolExecutor(1, thread_name_prefix="fake-copy")
        self._running: dict[str, int] = {}

    # -- contract ------------------------------------------------------------------------------

    async def open(self, request_id: str, tokens: Sequence[int]) -> None:
        if request_id in self._tokens:
            raise ValueError(f"request {request_id!r} is already open")
        self._tokens[request_id] = list(tokens)
        self._pages[request_id] = {}

    def share(self, source_id: str, request_id: str, tokens: int) -> None:
        for name in (source_id, request_id):
            if name not in self._tokens:
                raise ClosedError(f"request {name!r} is not open")
        assert self._tokens[source_id][:tokens] == self._tokens[request_id][:tokens]
        for tile in self.grid.split(0, tokens):
            assert tile == self.grid.tile(tile.index), "shares a part of a tile"
            mine = self._page(request_id, tile.start)
            assert mine == _Page(), "has something of its own already"
            self._pages[request_id][tile.index] = self._page(source_id, tile.start)

    async def recompute(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        loop = asyncio.get_running_loop()
        walking = loop.run_in_executor(self._compute, self._walk, batch, claim)
        return await to_the_end(walking)  # until then the thread writes

    async def publish(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._copy, self._write_back, request_id, parts)

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        stride = self.layout.layer_stride()
        for part in parts:
            page = self._page(request_id, part.chunk * self.layout.chunk_tokens)
            for i, layer in enumerate(part.layers):
                part.view[i * stride : (i + 1) * stride] = page.cells[part.chunk, layer]

    async def discard(self, request_id: str, start: int) -> None:
        paused = self._page(request_id, start).hidden.pop(start, None)
        assert paused is not None, "nothing was paused"

    async def close(self, request_id: str) -> None:
        assert not self._running.get(request_id), "closed under running compute"
        del self._tokens[request_id], self._pages[request_id]

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        self._tokens[request_id] += tokens

    # -- for tests -----------------------------------------------------------------------------

    async def prefill(self, request_id: str, start: int = 0, stop: int | None = None) -> None:
        """All whole chunks of tokens ``[start, stop)`` (default: all), asking nobody."""
        tokens, size = self._tokens[request_id], self.layout.chunk_tokens
        for chunk in range(start // size, (len(tokens) if stop is None else stop) // size):
            page = self._page(request_id, chunk * size)
            for layer in range(self.layout.num_layers):
                page.cells[chunk, layer] = self.expected(tokens, chunk, layer)

    @property
    def paused(self) -> list[tuple[str, int]]:
        """Tiles stopped half way, by request and first token."""
        pages = [(name, page) for name, held in self._pages.items() for page in held.values()]
        return [(name, start) for name, page in pages for start in page.hidden]

    @property
    def open_requests(self) -> list[str]:
        """Requests that hold KV memory."""
        return list(self._tokens)

    def expected(self, tokens: Sequence[int], chunk: int, layer: int) -> bytes:
        """The bytes a layer block of ``chunk`` must have after ``tokens``."""
        size, whole = self.layout.chunk_tokens, self.shard.whole
        prefix = b"".join(t.to_bytes(8, "little") for t in tokens[: (chunk + 1) * size])
        absolute = self.shard.layers.start + layer
        seed = hashlib.sha256(prefix + absolute.to_bytes(4, "little")).digest()
        body = hashlib.shake_128(seed).digest(whole.layer_bytes())
        block = b"".join(
            body[half + self.shard.heads.start * whole.head_bytes :][
                : self.layout.layer_bytes() // 2
            ]
            for half in (0, whole.layer_bytes() // 2)
        )
        return block.ljust(self.layout.layer_stride(), b"\0")

    def wrong_cells(self, request_id: str, tokens: int) -> list[tuple[int, int]]:
        """Cells ``(chunk, layer)`` of the first ``tokens`` that are missing or wrong."""
        size, prompt = self.layout.chunk_tokens, self._tokens[request_id]
        return [
            (chunk, layer)
            for chunk in range(tokens // size)
            for layer in range(self.layout.num_layers)
            if self._page(request_id, chunk * size).cells.get((chunk, layer))
            != self.expected(prompt, chunk, layer)
        ]

    def _page(self, request_id: str, token: int) -> _Page:
        return self._pages[request_id].setdefault(self.grid.index_at(token), _Page())

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
        hidden = self._page(work.request_id, work.tile.start).hidden
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
        for chunk in range(work.tile.start // size):
            cells = self._page(work.request_id, chunk * size).cells
            assert (chunk, layer) in cells, f"attention over unready cell {chunk, layer}"
        page = self._page(work.request_id, work.tile.start)
        if answer is Claim.THROUGH:
            for chunk in range(work.tile.start // size, work.tile.stop // size):
                assert (chunk, layer) in page.cells, "went through a layer that is not there"
            return
        for chunk in range(work.tile.start // size, work.tile.stop // size):
            page.cells[chunk, layer] = self.expected(self._tokens[work.request_id], chunk, layer)
            page.computed.add((chunk, layer))
            self.recomputed += 1

    def _write_back(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        for part in parts:
            heads = part.heads or Span(0, self.layout.num_kv_heads)
            stride = self.layout.layer_stride(len(heads))
            page = self._page(request_id, part.chunk * self.layout.chunk_tokens)
            for i, layer in enumerate(part.layers):
                computed = (part.chunk, layer) in page.computed
                assert not computed, f"published over a computed cell {part.chunk, layer}"
                block = bytes(part.view[i * stride : (i + 1) * stride])
                self._write_heads(page, (part.chunk, layer), heads, block)

    def _write_heads(self, page: _Page, cell: tuple[int, int], heads: Span, block: bytes) -> None:
        """A cell is there once all its heads are."""
        run, half = self.layout.head_bytes, self.layout.layer_bytes() // 2
        made, there = page.begun.setdefault(cell, (bytearray(self.layout.layer_stride()), set()))
        for number in range(2):
            at, used = number * half + heads.start * run, len(heads) * run
            made[at : at + used] = block[number * used : (number + 1) * used]
        there.update(heads)
        if len(there) == self.layout.num_kv_heads:
            page.cells[cell] = bytes(made)
            del page.begun[cell]
            self.published += 1
