"""The engine: open requests, one compute lane, one copy lane, one walked model.

Implements :class:`cacheflow.abc.Engine` for decoder-only causal LMs with ordinary full attention.
The event loop owns requests and pages; the compute thread owns the forward pass; the copy thread
moves verified bytes in and out. Nothing here decides what to compute.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from cacheflow.errors import ClosedError, ConfigError
from cacheflow.kv import make_grid_id
from cacheflow.plugins.transformers.attention import ATTENTION_NAME
from cacheflow.plugins.transformers.check import check_walk
from cacheflow.plugins.transformers.copies import copy_in, copy_out
from cacheflow.plugins.transformers.lanes import CpuStreams, CudaStreams, Lane, Streams
from cacheflow.plugins.transformers.model import identity_of, kv_layout, layer_flops, load_model
from cacheflow.plugins.transformers.pages import PagePool
from cacheflow.plugins.transformers.request import OpenRequest
from cacheflow.plugins.transformers.walk import Walker
from cacheflow.types import Claim, ComputeBatch, KVLayout, Segment, Span, TileGrid, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.abc import ClaimLayer
    from cacheflow.types import ComputeDone, StagedPart

__all__ = ["TransformersEngine"]

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
"""Closing waits this long for a layer that is still running."""


class TransformersEngine:
    """Use :meth:`open_model`; close with :meth:`aclose`."""

    def __init__(
        self,
        model: Any,
        *,
        identity: Mapping[str, str | int],
        layout: KVLayout,
        grid: TileGrid,
        kv_bytes: int,
        threads: int,
        streams: Streams,
        tokenizer: Any,
    ) -> None:
        device = next(model.parameters()).device
        self.layout = layout
        self.grid = grid
        self.identity = dict(identity)
        self.layer_flops = layer_flops(model)
        self.max_tokens = int(model.config.max_position_embeddings)
        self.claim_ahead = streams.ahead
        self.tokenizer = tokenizer
        self.grid_id = make_grid_id(
            grid=grid,
            torch_version=torch.__version__,
            device=_device_kind(device),
            attention=f"{ATTENTION_NAME}-1",
            threads=threads,
        )
        self._model = model
        self._streams = streams
        self._pool = PagePool(layout, grid, kv_bytes, device)
        self._walker = Walker(model, streams)
        self._requests: dict[str, OpenRequest] = {}
        self._compute = Lane("cacheflow-compute", threads)
        self._copy = Lane("cacheflow-copy", 1)
        self._closed = False

    @classmethod
    async def open_model(
        cls,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int = 1,
        kv_bytes: int = 4 << 30,
        chunk_tokens: int = 256,
        grid: TileGrid | None = None,
    ) -> Self:
        """Load the model in the folder ``model`` and check that the walk reproduces it.

        ``dtype`` auto: bfloat16 where the hardware is fast at it, else float32. ``threads``: torch
        threads of the compute thread (bits depend on it, so it is part of ``grid_id``).

        Raises:
            ConfigError: no such model, or one that cannot be restored exactly (names the feature).
        """
        path = Path(model).expanduser()
        grid = grid or TileGrid()
        where = torch.device(_pick_device(device))

        def load() -> tuple[Any, dict[str, str | int], KVLayout, Any]:
            loaded = load_model(path, dtype, where)
            layout = kv_layout(loaded.config, loaded.dtype, chunk_tokens)
            return loaded, identity_of(loaded, path, layout), layout, _tokenizer(path)

        try:
            grid.check(chunk_tokens)
        except ValueError as error:
            raise ConfigError(f"chunk_tokens={chunk_tokens}: {error}") from error
        loaded, identity, layout, tokenizer = await asyncio.to_thread(load)
        streams = CudaStreams(where) if where.type == "cuda" else CpuStreams()
        engine = cls(
            loaded,
            identity=identity,
            layout=layout,
            grid=grid,
            kv_bytes=kv_bytes,
            threads=threads,
            streams=streams,
            tokenizer=tokenizer,
        )
        try:
            await check_walk(engine, loaded)
        except BaseException:
            await engine.aclose()
            raise
        return engine

    # -- requests ------------------------------------------------------------------------------

    async def open(self, request_id: str, tokens: Sequence[int]) -> None:
        """See :meth:`cacheflow.abc.Recomputer.open`."""
        if self._closed:
            raise ClosedError("the engine is closed")
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already open")
        if not len(tokens):
            raise ConfigError("the prompt is empty: give at least one token")
        request = OpenRequest(request_id, self.grid, [])
        self._append(request, tokens)
        self._requests[request_id] = request

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See :meth:`cacheflow.abc.Engine.extend`."""
        self._append(self._requests[request_id], tokens)

    async def close(self, request_id: str) -> None:
        """See :meth:`cacheflow.abc.Recomputer.close`."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        while request.busy:
            await asyncio.wait(list(request.busy))
        request.paused.clear()
        for page in request.pages:
            self._pool.give(page)
        request.pages = []

    def _append(self, request: OpenRequest, tokens: Sequence[int]) -> None:
        total = len(request.tokens) + len(tokens)
        if total > self.max_tokens:
            raise ConfigError(
                f"{total} tokens are more than the model's context of {self.max_tokens}"
            )
        vocabulary = self._model.config.vocab_size
        for position, token in enumerate(tokens):
            if not 0 <= token < vocabulary:
                raise ConfigError(
                    f"token {token} at position {position} is not in the vocabulary "
                    f"of {vocabulary}"
                )
        request.grow(self._pool, total)
        request.tokens += tokens

    # -- compute -------------------------------------------------------------------------------

    async def recompute(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        """See :meth:`cacheflow.abc.Recomputer.recompute`."""

        def work() -> list[ComputeDone]:
            with self._streams.compute():
                return [
                    self._walker.tile(self._requests[w.request_id], w, claim) for w in batch.work
                ]

        results = await self._on(self._compute, [w.request_id for w in batch.work], work)
        for done in results:
            if done.work.is_suffix and done.next_layer == self.layout.num_layers:
                request = self._requests.get(done.work.request_id)
                if request is not None:
                    request.computed(done.work.tile.start, done.work.tile.stop)
        return results

    async def prefill(self, request_id: str, start: int = 0) -> None:
        """Compute everything from token ``start`` on, tile by tile, asking nobody."""
        total = len(self._requests[request_id].tokens)
        for tile in self.grid.split(start, total):
            work = TileWork(request_id, tile, 0, is_suffix=True)
            await self.recompute(ComputeBatch((work,)), lambda _work, _layer: Claim.WRITE)

    async def discard(self, request_id: str, start: int) -> None:
        """See :meth:`cacheflow.abc.Recomputer.discard`."""
        request = self._requests.get(request_id)
        if request is not None:
            request.paused.pop(start, None)

    async def first_token(self, request_id: str) -> int:
        """See :meth:`cacheflow.abc.Engine.first_token`."""
        return int((await self.last_logits(request_id)).argmax())

    async def last_logits(self, request_id: str) -> torch.Tensor:
        """Logits ``[vocabulary]`` (fp32, on the CPU) after the last prompt token."""
        last = self._requests[request_id].last
        if last is None:
            raise RuntimeError(f"request {request_id!r}: its last token was not computed")

        def work() -> torch.Tensor:
            with self._streams.compute():
                return self._walker.logits(last)[0, -1].float().cpu()

        return await self._on(self._compute, [request_id], work)

    async def reference_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The same from the model's own forward pass, cold and in one piece."""
        device = next(self._model.parameters()).device

        def work() -> torch.Tensor:
            ids = torch.tensor([list(tokens)], device=device)
            logits: torch.Tensor = self._model(ids, use_cache=False).logits
            return logits[0, -1].float().cpu()

        return await self._compute.run(work)

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """See :meth:`cacheflow.abc.Engine.decode`."""
        requests = [self._requests[request_id] for request_id in request_ids]
        for request, token in zip(requests, tokens, strict=True):
            self._append(request, [token])
        positions = [len(request.tokens) - 1 for request in requests]

        def work() -> list[int]:
            with self._streams.compute():
                hidden = self._walker.rows(requests, tokens, positions)
                chosen: list[int] = self._walker.logits(hidden)[:, -1].argmax(-1).tolist()
                return chosen

        chosen = await self._on(self._compute, request_ids, work)
        for request, position in zip(requests, positions, strict=True):
            request.computed(position, position + 1)
        return chosen

    # -- copies --------------------------------------------------------------------------------

    async def publish(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """See :meth:`cacheflow.abc.Recomputer.publish`."""
        request = self._requests[request_id]

        def work() -> None:
            with self._streams.copy():
                for part in parts:
                    copy_in(self.layout, request, part)
                self._streams.mark().synchronize()

        await self._on(self._copy, [request_id], work)

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """See :meth:`cacheflow.abc.Recomputer.capture`."""
        request = self._requests[request_id]
        with self._streams.compute():
            computed = self._streams.mark()

        def work() -> None:
            with self._streams.copy():
                self._streams.wait(computed)
                for part in parts:
                    copy_out(self.layout, request, part)
                self._streams.mark().synchronize()

        await self._on(self._copy, [request_id], work)

    # -- provenance and inspection -------------------------------------------------------------

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        """See :meth:`cacheflow.abc.Engine.segments`."""
        return tuple(self._requests[request_id].segments)

    def set_segments(self, request_id: str, tokens: Span, segments: Sequence[Segment]) -> None:
        """See :meth:`cacheflow.abc.Engine.set_segments`."""
        self._requests[request_id].loaded(tokens, segments)

    def kv(self, request_id: str, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[Hkv, tokens, D]`` of the first ``tokens`` tokens, copied together."""
        blocks = self._requests[request_id].past(layer, tokens)
        keys, values = zip(*blocks, strict=True)
        return torch.cat(keys, dim=2)[0], torch.cat(values, dim=2)[0]

    @property
    def kv_used_bytes(self) -> int:
        """KV memory that open requests hold."""
        return self._pool.used_bytes

    async def aclose(self) -> None:
        """See :meth:`cacheflow.abc.Engine.aclose`."""
        self._closed = True
        for request_id in list(self._requests):
            await self.close(request_id)
        await asyncio.gather(self._compute.stop(_CLOSE_SECONDS), self._copy.stop(_CLOSE_SECONDS))

    async def _on(self, lane: Lane, request_ids: Sequence[str], work: Callable[[], T]) -> T:
        """Run ``work`` on a lane; its requests keep their pages until it has ended."""
        running = asyncio.ensure_future(lane.run(work))
        for request_id in request_ids:
            busy = self._requests[request_id].busy
            busy.add(running)
            running.add_done_callback(busy.discard)
        return await asyncio.shield(running)


def _pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_kind(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda/{torch.cuda.get_device_name(device)}"
    return f"{device.type}/{torch.backends.cpu.get_cpu_capability()}"


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not any(path.glob("tokenizer*")):
        return None
    return AutoTokenizer.from_pretrained(path)
