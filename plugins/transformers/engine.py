"""The engine: open requests, one compute lane, one copy lane, one walked model.

Implements :class:`cacheflow.abc.Engine` for decoder-only causal LMs with ordinary full attention.
The event loop owns requests and pages; the compute thread owns the forward pass; the copy thread
moves verified bytes in and out. Nothing here decides what to compute.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from cacheflow.errors import ClosedError
from cacheflow.kv import make_grid_id
from cacheflow.plugins.transformers.attention import ATTENTION_NAME
from cacheflow.plugins.transformers.chat import chat_of
from cacheflow.plugins.transformers.check import check_walk
from cacheflow.plugins.transformers.copies import Copies, copies_in, copies_out, joined
from cacheflow.plugins.transformers.device import device_kind, pick_device
from cacheflow.plugins.transformers.lanes import Gathered, Lane, Streams
from cacheflow.plugins.transformers.model import layer_flops
from cacheflow.plugins.transformers.opening import Options, streams_of
from cacheflow.plugins.transformers.packed import PACK_TOKENS, walk_packed
from cacheflow.plugins.transformers.pages import PagePool
from cacheflow.plugins.transformers.sampling import choose, draw
from cacheflow.plugins.transformers.smollm2 import prepare_smollm2
from cacheflow.plugins.transformers.table import RequestTable
from cacheflow.plugins.transformers.walk import Walker
from cacheflow.types import Claim, ComputeBatch, Segment, Shard, Span, TileGrid, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from cacheflow.abc import ClaimLayer
    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import ComputeDone, KVLayout, Sampling, StagedPart

__all__ = ["TransformersEngine"]

T = TypeVar("T")

_PUBLISH_BYTES = 8 << 20
"""Loads of up to so much are copied together where they wait together: a millisecond."""
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
        shard: Shard | None = None,
        tensor_parallel: int = 1,
        pack_tokens: int = 0,
    ) -> None:
        device = next(model.parameters()).device
        self.shard = shard or Shard.of(layout)
        self.layout = layout = self.shard.layout
        self.grid = grid
        self.identity = dict(identity)
        self.layer_flops = layer_flops(model)
        self.max_tokens = int(model.config.max_position_embeddings)
        self.claim_ahead = streams.ahead
        self.tokenizer = tokenizer
        self.chat = chat_of(tokenizer, model)
        self.decodes_together = layout.dtype != "float32"
        """Whether one matrix product serves all rows of a decode step: it rounds otherwise than
        that of a row alone, and float32 promises the tokens of a row alone."""
        self.grid_id = make_grid_id(
            grid=grid,
            torch_version=torch.__version__,
            device=device_kind(device),
            attention=f"{ATTENTION_NAME}-1",
            threads=threads,
            tensor_parallel=tensor_parallel,
            packed=pack_tokens > 0,
        )
        self.pack_tokens = pack_tokens
        self._model = model
        self._streams = streams
        self._pool = PagePool(layout, grid, kv_bytes, device)
        self._walker = Walker(model, streams, self.shard)
        vocabulary = int(model.config.vocab_size)
        self._requests = RequestTable(
            self._pool, grid, self.max_tokens, vocabulary, packs=pack_tokens > 0
        )
        self._compute = self._compute_lane(threads)
        self._copy = Lane("cacheflow-copy", threads)
        self._publishing = Gathered(self._copy, self._publish, _PUBLISH_BYTES)
        self._decoding = 0
        """Decode steps that wait for the compute thread or are on it; loop-owned, read by it."""
        self._closed = False

    def _compute_lane(self, threads: int) -> Lane:
        """The thread that computes."""
        return Lane("cacheflow-compute", threads)

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
        fast: bool = False,
    ) -> Self:
        """Load the model in the folder ``model`` and check that the walk reproduces it.

        ``dtype`` auto: bfloat16 where the hardware is fast at it, else float32. ``threads``: torch
        threads of the compute thread (bits depend on it, so it is part of ``grid_id``). ``fast``:
        tiles are chunks, and up to 2,048 tokens of them, of one or several requests, go through a
        layer in one pass; KV is equal to exact mode's within the dtype's tolerance (setting
        ``mode``, docs/scheduling.md).

        Raises:
            ConfigError: no such model, one that cannot be restored exactly (names the feature), or
                an option that cannot be.
        """
        where = pick_device(device)
        grid = grid or (TileGrid((), chunk_tokens) if fast else TileGrid())
        options = Options(dtype, threads, kv_bytes, chunk_tokens, grid)
        loaded, parts = await asyncio.to_thread(options.load, model, where)
        pack_tokens = max(PACK_TOKENS, grid.tail) if fast else 0
        engine = cls(loaded, streams=streams_of(where), pack_tokens=pack_tokens, **parts)
        try:
            await check_walk(engine, loaded)
        except BaseException:  # cancelled as well: its threads must not stay
            await engine.aclose()
            raise
        return engine

    @staticmethod
    def small_model(
        cache_dir: Path | None = None, progress: Callable[[str, float], None] | None = None
    ) -> Path:
        """Folder of a small trained model, made on first use: see :func:`prepare_smollm2`."""
        return prepare_smollm2(cache_dir, progress)

    # -- requests ------------------------------------------------------------------------------

    async def open(self, request_id: str, tokens: Sequence[int]) -> None:
        """See :meth:`cacheflow.abc.Recomputer.open`."""
        if self._closed:
            raise ClosedError("the engine is closed")
        self._requests.open(request_id, tokens)

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See :meth:`cacheflow.abc.Engine.extend`."""
        self._requests.append([self._requests.get(request_id)], [tokens])

    async def fork(self, source_id: str, request_id: str, tokens: int) -> None:
        """Open ``request_id`` with the first ``tokens`` tokens of ``source_id``, KV included.

        Whole pages are shared, the last one is copied. The KV of those tokens must be complete;
        :meth:`extend` goes on from there.

        Raises:
            CapacityError: no KV memory is left for the copy.
        """
        source = self._requests.get(source_id)
        made = self._requests.fork(source, request_id, tokens)
        if made.pages[-1].users == 1:
            try:
                await self._on(self._compute, [made, source], lambda: self._copy_tail(source, made))
            except BaseException:  # cancelled as well: nobody would know of the request
                await self.close(request_id)
                raise

    async def truncate(self, request_id: str, tokens: int) -> None:
        """See :meth:`cacheflow.abc.Engine.truncate`."""
        while (request := self._requests.get(request_id)).busy:
            await asyncio.wait(list(request.busy))
        if not self._requests.cut(request, tokens):
            twin = f"{request_id}/cut"
            await self.fork(request_id, twin, tokens)
            try:
                self._requests.swap(request_id, twin)
            finally:
                self._requests.close(twin)  # not awaited: cancelled now, it would be half done

    def _copy_tail(self, source: OpenRequest, made: OpenRequest) -> None:
        last = made.pages[-1]
        used = len(made.tokens) - last.start
        with self._streams.compute():
            data = source.pages[len(made.pages) - 1].data
            last.data[..., :used, :].copy_(data[..., :used, :])
            self._streams.mark().synchronize()

    async def close(self, request_id: str) -> None:
        """See :meth:`cacheflow.abc.Recomputer.close`. Also frees the KV if it is cancelled."""
        request = self._requests.close(request_id)
        while request is not None and request.busy:
            await asyncio.wait(list(request.busy))

    def share(self, source_id: str, request_id: str, tokens: int) -> None:
        """See :meth:`cacheflow.abc.Recomputer.share`."""
        self._requests.share(source_id, request_id, tokens)

    # -- compute -------------------------------------------------------------------------------

    async def recompute(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        """See :meth:`cacheflow.abc.Recomputer.recompute`."""
        requests = [self._requests.get(work.request_id) for work in batch.work]

        def ask(request: OpenRequest) -> ClaimLayer:
            def answer(work: TileWork, layer: int) -> Claim:
                # A decode step goes between two layers, at least one of which is done each time. A
                # closed request's memory is waited for: do not make it long.
                if request.closing or (self._decoding and layer > work.first_layer):
                    return Claim.REFUSED
                return claim(work, layer)

            return answer

        def compute() -> list[ComputeDone]:
            with self._streams.compute():
                if self.pack_tokens and len(requests) > 1:
                    asks = [ask(request) for request in requests]
                    return walk_packed(self._walker, requests, batch.work, asks)
                return [
                    self._walker.tile(request, work, ask(request))
                    for request, work in zip(requests, batch.work, strict=True)
                ]

        results = await self._on(self._compute, requests, compute)
        for request, done in zip(requests, results, strict=True):
            if done.work.is_suffix and done.next_layer == self.layout.num_layers:
                request.computed(done.work.tile.start, done.work.tile.stop)
        return results

    async def prefill(self, request_id: str, start: int = 0, stop: int | None = None) -> None:
        """Compute tokens ``[start, stop)`` (default: all), tile by tile, asking nobody."""
        total = len(self._requests.get(request_id).tokens)
        for tile in self.grid.split(start, total if stop is None else stop):
            layer = 0
            while layer < self.layout.num_layers:  # Decode steps may interrupt it.
                work = TileWork(request_id, tile, layer, is_suffix=True)
                batch = ComputeBatch((work,))
                (done,) = await self.recompute(batch, lambda _work, _layer: Claim.WRITE)
                layer = done.next_layer

    async def discard(self, request_id: str, start: int) -> None:
        """See :meth:`cacheflow.abc.Recomputer.discard`."""
        if request_id in self._requests:
            self._requests.get(request_id).page_at(start).paused.pop(start, None)

    async def first_token(self, request_id: str) -> int:
        """See :meth:`cacheflow.abc.Engine.first_token`."""
        return int((await self.last_logits(request_id)).argmax())

    async def first_sample(self, request_id: str, sampling: Sampling) -> int:
        """See :meth:`cacheflow.abc.Sampler.first_sample`."""
        position = len(self._requests.get(request_id).tokens)
        return draw(await self.last_logits(request_id), sampling, position)

    async def last_logits(self, request_id: str) -> torch.Tensor:
        """Logits ``[vocabulary]`` (fp32, on the CPU) after the last prompt token."""
        last = self._requests.get(request_id).last
        if last is None:
            raise RuntimeError(f"request {request_id!r}: its last token was not computed")
        return last

    async def reference_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The same from the model's own forward pass, cold and in one piece."""
        device = next(self._model.parameters()).device

        def work() -> torch.Tensor:
            ids = torch.tensor([list(tokens)], device=device)
            logits: torch.Tensor = self._model(ids, use_cache=False).logits
            return logits[0, -1].float().cpu()

        return await self._on(self._compute, [], work)

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """See :meth:`cacheflow.abc.Engine.decode`."""
        return await self._step(request_ids, tokens, lambda logits: logits.argmax(-1).tolist())

    async def decode_sampled(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[int],
        sampling: Sequence[Sampling | None],
    ) -> list[int]:
        """See :meth:`cacheflow.abc.Sampler.decode_sampled`."""
        places = [len(self._requests.get(name).tokens) + 1 for name in request_ids]
        return await self._step(request_ids, tokens, lambda rows: choose(rows, sampling, places))

    async def decode_logits(
        self, request_ids: Sequence[str], tokens: Sequence[int]
    ) -> torch.Tensor:
        """The same step, for its logits ``[requests, vocabulary]`` (fp32, on the CPU)."""
        return await self._step(request_ids, tokens, lambda logits: logits.float().cpu())

    @property
    def is_decoding(self) -> bool:
        """See :class:`cacheflow.abc.Decoder`."""
        return self._decoding > 0

    async def _step(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[int],
        chosen: Callable[[torch.Tensor], T],
    ) -> T:
        """Append one token to each request; ``chosen`` of the logits after it."""
        requests, positions = self._requests.step(request_ids, tokens)

        def work() -> T:
            hidden = self._walker.embed(tokens).unsqueeze(1)
            together = self.decodes_together
            logits = self._walker.last_logits
            return chosen(self._walker.rows(requests, hidden, positions, logits, together=together))

        return await self._decode(requests, positions, work)

    async def _decode(
        self, requests: Sequence[OpenRequest], positions: Sequence[int], step: Callable[[], T]
    ) -> T:
        """Run ``step``, before whatever else waits for the compute thread."""

        def work() -> T:
            with self._streams.compute():
                return step()

        self._decoding += 1
        try:
            made = await self._on(self._compute, requests, work)
        finally:
            self._decoding -= 1
        for request, position in zip(requests, positions, strict=True):
            request.computed(position, position + 1)
        return made

    # -- copies --------------------------------------------------------------------------------

    async def publish(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """See :meth:`cacheflow.abc.Recomputer.publish`."""
        request = self._requests.get(request_id)
        copies = copies_in(self.layout, request, parts)

        if self._closed:
            raise ClosedError("the engine is closed")
        nbytes = sum(len(part.view) for part in parts)
        await self._ended(self._publishing.submit(copies, nbytes), [request])

    def _publish(self, waiting: Sequence[Copies]) -> None:
        with self._streams.copy():
            joined(waiting)()
            self._streams.mark().synchronize()

    async def capture(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """See :meth:`cacheflow.abc.Recomputer.capture`."""
        request = self._requests.get(request_id)
        copies = copies_out(self.layout, request, parts)
        with self._streams.compute():
            computed = self._streams.mark()

        def work() -> None:
            with self._streams.copy():
                self._streams.wait(computed)
                copies()
                self._streams.mark().synchronize()

        await self._on(self._copy, [request], work)

    # -- provenance and inspection -------------------------------------------------------------

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        """See :meth:`cacheflow.abc.Engine.segments`."""
        return tuple(self._requests.get(request_id).segments)

    def set_segments(self, request_id: str, tokens: Span, segments: Sequence[Segment]) -> None:
        """See :meth:`cacheflow.abc.Engine.set_segments`."""
        self._requests.get(request_id).loaded(tokens, segments)

    def kv(
        self, request_id: str, layer: int, tokens: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V ``[Hkv, tokens, D]`` of the first ``tokens`` tokens (default: all)."""
        return self._requests.get(request_id).kv(layer, tokens)

    @property
    def open_requests(self) -> list[str]:
        """Requests that hold KV memory."""
        return self._requests.ids

    @property
    def kv_used_bytes(self) -> int:
        """KV memory that open requests hold."""
        return self._pool.used_bytes

    async def aclose(self) -> None:
        """See :meth:`cacheflow.abc.Engine.aclose`."""
        self._closed = True
        self._requests.stop()
        for request_id in self._requests.ids:
            await self.close(request_id)
        await asyncio.gather(self._compute.stop(_CLOSE_SECONDS), self._copy.stop(_CLOSE_SECONDS))

    async def _on(self, lane: Lane, requests: Sequence[OpenRequest], work: Callable[[], T]) -> T:
        """Run ``work`` on a lane; its requests keep their pages until it has ended."""
        if self._closed:
            raise ClosedError("the engine is closed")
        return await self._ended(lane.submit(work), requests)

    async def _ended(self, running: asyncio.Future[T], requests: Sequence[OpenRequest]) -> T:
        """Wait for work on a lane that touches the pages of ``requests``."""
        waiter: asyncio.Future[None] = running.get_loop().create_future()
        for request in requests:
            request.busy.add(running)

        def ended(_: object) -> None:
            for request in requests:
                request.busy.discard(running)
            if not waiter.done():
                waiter.set_result(None)

        running.add_done_callback(ended)
        # Waited for, not awaited: cancelling the caller leaves the future to the lane.
        await waiter
        return running.result()
