"""The transformers engine on one rank of several: some heads of every layer, computed together.

Each rank runs the same program, with a CacheFlow of its own: it loads and stores the KV of its
heads by itself. Only compute is done together, in an order that all ranks agree upon
(:mod:`cacheflow.plugins.tensor_parallel.conductor`). Nothing here decides what to compute.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import torch

from cacheflow.distributed import cut_layout
from cacheflow.errors import ConfigError, PeerError
from cacheflow.plugins.ranks import rank_device, refuse_fast
from cacheflow.plugins.tensor_parallel.conductor import Conductor
from cacheflow.plugins.tensor_parallel.cut import cut_model
from cacheflow.plugins.tensor_parallel.group import Group
from cacheflow.plugins.transformers.check import check_walk
from cacheflow.plugins.transformers.engine import TransformersEngine
from cacheflow.plugins.transformers.opening import Options, streams_of
from cacheflow.tasks import all_or_nothing, to_the_end
from cacheflow.types import Claim, ComputeBatch, ComputeDone, TileGrid, TileWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cacheflow.abc import ClaimLayer
    from cacheflow.plugins.transformers.lanes import Lane
    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import Sampling

__all__ = ["TensorParallelEngine"]

T = TypeVar("T")

_CHECKED_TOKENS: Final = 24
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
"""Of the largest logit: what other summation orders make of it, and no wrong cut stays below."""
_CLAIM_PAUSE: Final = 0.0005
_GOODBYE_SECONDS: Final = 5.0


class TensorParallelEngine(TransformersEngine):
    """Use :meth:`open_model` on every rank; close with :meth:`aclose` on every rank.

    Requests have the same ids on all ranks, and what needs compute (restores, decode steps) is
    called on all of them; a call waits ``deadline`` seconds for the other ranks.
    """

    peers: Conductor
    """See :class:`cacheflow.abc.Together`."""

    def __init__(self, model: Any, *, group: Group, deadline: float, **parts: Any) -> None:
        self._group = group
        self._deadline = deadline
        shard = cut_layout(parts["layout"], ranks=group.size)[0][group.rank]
        super().__init__(model, shard=shard, tensor_parallel=group.size, **parts)
        linear, attention = self.layer_flops
        self.layer_flops = linear, attention / group.size
        self.decodes_together = False

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
        rank: int | None = None,
        ranks: int | None = None,
        init_method: str = "env://",
        deadline: float = 60.0,
    ) -> Self:
        """Load this rank's part of the model in the folder ``model``, and meet the other ranks.

        ``rank`` of ``ranks``: default to what torch.distributed was initialised with, else to what
        torchrun sets. ``device`` auto: the CUDA device of ``LOCAL_RANK``, else the CPU.
        ``deadline``: seconds to wait for other ranks. ``kv_bytes``: of this rank. The rest as for
        one process.

        Raises:
            ConfigError: as for one process; ``fast``; the model cannot be cut among so many ranks,
                nothing says which ranks there are, or others have another model.
            PeerError: other ranks did not come, or are gone.
        """
        where, host = rank_device(device), torch.device("cpu")
        refuse_fast(fast, "tensor-parallel")
        options = Options(dtype, threads, kv_bytes, chunk_tokens, grid or TileGrid())
        loaded, parts = await asyncio.to_thread(options.load, model, where, onto=host)
        meeting = asyncio.to_thread(Group.open, where, deadline, rank, ranks, init_method)
        group = await all_or_nothing(meeting, _left)
        try:
            await asyncio.to_thread(group.check_alike, parts["identity"])
            whole = await asyncio.to_thread(_cut, loaded, group, where)
            streams = streams_of(where)
            engine = cls(loaded, group=group, deadline=deadline, streams=streams, **parts)
        except BaseException:  # cancelled as well: the next attempt begins anew
            await to_the_end(_left(group))
            raise
        try:
            await engine._check(whole, loaded.dtype)
            await check_walk(engine, loaded)
        except BaseException:  # cancelled as well: its threads must not stay
            await engine.aclose()
            raise
        return engine

    async def _check(self, whole: torch.Tensor, dtype: torch.dtype) -> None:
        """All ranks' parts together are the model."""
        found = await self.reference_logits(_checked_tokens(self._model))
        off = float((whole - found).abs().max() / whole.abs().max().clamp_min(1e-6))
        if not off <= _TOLERANCE[dtype]:
            raise ConfigError(
                f"{type(self._model).__name__} cannot be cut over tensor-parallel ranks: its "
                f"logits are off by {off:.2g} then"
            )

    def _compute_lane(self, threads: int) -> Lane:
        self.peers = Conductor(threads, self._group, self._deadline)
        return self.peers

    # -- compute ---------------------------------------------------------------------------------

    async def recompute(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        """See :meth:`cacheflow.abc.Recomputer.recompute` and :class:`cacheflow.abc.Together`."""
        (work,) = batch.work
        request = self._requests.get(work.request_id)

        def compute(layers: int) -> ComputeDone:
            if not layers:
                return ComputeDone(work, work.first_layer, ())
            stop = work.first_layer + layers
            with self._streams.compute():
                return self._walker.tile(request, work, self._agreed(stop, claim))

        done = await self._ended(self.peers.propose(work, compute), [request])
        if work.is_suffix and done.next_layer == self.layout.num_layers:
            request.computed(work.tile.start, work.tile.stop)
        return [done]

    def _agreed(self, stop: int, claim: ClaimLayer) -> ClaimLayer:
        """Claims up to the layer agreed upon: the other ranks compute them, so this one does."""

        def answer(work: TileWork, layer: int) -> Claim:
            if layer >= stop:
                return Claim.REFUSED
            patience = time.monotonic() + self._deadline
            while (given := claim(work, layer)) is Claim.REFUSED:
                if not self.peers.restores(work):  # given up here; its pages are there until later
                    return Claim.WRITE
                # A load was verified since we voted, and is just being copied in.
                if time.monotonic() > patience:
                    raise PeerError(f"layer {layer} of {work!r} was agreed upon and is refused")
                time.sleep(_CLAIM_PAUSE)
            return given

        return answer

    async def prefill(self, request_id: str, start: int = 0, stop: int | None = None) -> None:
        """Compute tokens ``[start, stop)`` (default: all), tile by tile; called on all ranks."""
        request = self._requests.get(request_id)
        end = len(request.tokens) if stop is None else stop
        for tile in self.grid.split(start, end):
            work = TileWork(request_id, tile, 0, is_suffix=True)

            def compute(work: TileWork = work) -> ComputeDone:
                with self._streams.compute():
                    return self._walker.tile(request, work, lambda _work, _layer: Claim.WRITE)

            name = f"prefill {request_id} {tile.start} {tile.stop}"
            await self._ended(self.peers.call(name, compute), [request])
            request.computed(tile.start, tile.stop)

    async def reference_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """See :meth:`TransformersEngine.reference_logits`; called on all ranks."""
        name = f"reference {list(tokens)}"
        return await self._ended(self.peers.call(name, lambda: _logits(self._model, tokens)), ())

    async def first_sample(self, request_id: str, sampling: Sampling) -> int:
        """Ranks do not draw tokens."""
        raise ConfigError("an engine over several ranks always takes the likeliest token")

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """See :meth:`cacheflow.abc.Engine.decode`; called on all ranks, but the requests of one
        step need not be the same."""
        return await self._each(request_ids, tokens, lambda logits: int(logits.argmax()))

    async def decode_logits(
        self, request_ids: Sequence[str], tokens: Sequence[int]
    ) -> torch.Tensor:
        """See :meth:`TransformersEngine.decode_logits`."""
        rows = await self._each(request_ids, tokens, lambda logits: logits.float().cpu())
        return torch.cat(rows)

    async def _each(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[int],
        chosen: Callable[[torch.Tensor], T],
    ) -> list[T]:
        requests, positions = self._requests.step(request_ids, tokens)
        steps = [
            self._ended(self._row(request, token, position, chosen), [request])
            for request, token, position in zip(requests, tokens, positions, strict=True)
        ]
        made = await asyncio.gather(*steps)
        for request, position in zip(requests, positions, strict=True):
            request.computed(position, position + 1)
        return list(made)

    def _row(
        self,
        request: OpenRequest,
        token: int,
        position: int,
        chosen: Callable[[torch.Tensor], T],
    ) -> asyncio.Future[T]:
        def step() -> T:
            with self._streams.compute():
                hidden = self._walker.embed([token]).unsqueeze(1)
                return chosen(
                    self._walker.last_logits(self._walker.step([request], hidden, [position]))
                )

        # With the token: ranks that disagree about it must not go on.
        return self.peers.call(f"decode {self.peers.name(request.id)} {position} {token}", step)

    async def close(self, request_id: str) -> None:
        """See :meth:`cacheflow.abc.Recomputer.close`."""
        self.peers.forget(request_id)
        await super().close(request_id)

    async def aclose(self) -> None:
        """See :meth:`cacheflow.abc.Engine.aclose`. Waits a moment for the other ranks to close."""
        if not self._closed:
            goodbye = self.peers.call("goodbye", lambda: None)
            await asyncio.wait([goodbye], timeout=_GOODBYE_SECONDS)
        await self.peers.stop(_GOODBYE_SECONDS)
        await super().aclose()
        await _left(self._group)


def _checked_tokens(model: Any) -> list[int]:
    return [(7 * i + 3) % model.config.vocab_size for i in range(_CHECKED_TOKENS)]


def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Last logits ``[vocabulary]`` of the model's own forward pass (fp32, on the CPU)."""
    device = next(model.parameters()).device
    ids = torch.tensor([list(tokens)], device=device)
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits[0, -1].float().cpu()


def _cut(model: Any, group: Group, device: torch.device) -> torch.Tensor:
    """Cut the model and move it; what it gave while it was whole. Blocking."""
    with torch.inference_mode():
        whole = _logits(model, _checked_tokens(model))
    cut_model(model, group.rank, group.size, group.add_up)
    model.to(device)
    return whole


async def _left(group: Group) -> None:
    await asyncio.to_thread(group.close)
