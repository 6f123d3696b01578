"""One stage of a model: the transformers engine with some of its layers, and neighbours.

Hidden states come from the stage before (or, as boundary activations, from a store) and go to the
stage behind; tokens come back from the last one. Every rank runs the same calls in the same order,
as under torchrun. Implements :class:`cacheflow.abc.Staged`; what is fed when is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import torch

from cacheflow.distributed import cut_layout
from cacheflow.errors import ConfigError, PeerError
from cacheflow.kv import boundary_shard
from cacheflow.plugins.pipeline.cutting import keep_layers, load_checked
from cacheflow.plugins.pipeline.links import Message
from cacheflow.plugins.pipeline.meeting import Meeting
from cacheflow.plugins.pipeline.talk import Talk
from cacheflow.plugins.ranks import join_ranks, leave_ranks, rank_device, refuse_fast
from cacheflow.plugins.transformers.copies import elements
from cacheflow.plugins.transformers.engine import TransformersEngine
from cacheflow.plugins.transformers.opening import Options, streams_of
from cacheflow.plugins.transformers.pages import Paused
from cacheflow.tasks import all_or_nothing, to_the_end
from cacheflow.types import Agreement, TileGrid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheflow.abc import StageListener
    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import Sampling, Shard, StagedPart, Tile

__all__ = ["PipelineEngine"]


class PipelineEngine(TransformersEngine):
    """Use :meth:`open_model` on every rank; close with :meth:`aclose`."""

    def __init__(
        self,
        model: Any,
        *,
        meeting: Meeting,
        **parts: Any,
    ) -> None:
        super().__init__(model, **parts)
        self._meeting = meeting
        self.rank = rank = meeting.joined.rank
        self.num_stages = meeting.joined.count
        self.is_last = rank == self.num_stages - 1
        self.boundary = self._boundary(model.config.hidden_size, model.dtype) if rank else None
        self._device = next(model.parameters()).device
        self._listener: StageListener | None = None
        self._unheard: list[Message] = []
        self._talk = Talk(meeting, self._told, self._failed, self._left)

    def _boundary(self, hidden_size: int, dtype: torch.dtype) -> Shard:
        name = str(dtype).removeprefix("torch.")
        return boundary_shard(self.shard.whole, hidden_size, name, self.shard.layers.start)

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
        """Load this rank's layers of the model in a folder, and meet the other ranks.

        ``rank`` of ``ranks``, each a stage: default to what torch.distributed was initialised with,
        else to what torchrun sets. ``device`` auto: the CUDA device of ``LOCAL_RANK``, else the
        CPU. ``deadline``: seconds after which a rank that says nothing counts as dead. The rest as
        for one process: ``grid_id`` is the same.

        Raises:
            ConfigError: as for one process; ``fast``; more stages than layers, nothing says which
                ranks there are, or others have another model.
            PeerError: other ranks did not come.
        """
        where = rank_device(device)
        refuse_fast(fast, "pipeline")
        options = Options(dtype, threads, kv_bytes, chunk_tokens, grid or TileGrid())
        loaded, parts = await load_checked(model, options, where)
        joining = asyncio.to_thread(join_ranks, rank, ranks, init_method, deadline)
        joined = await all_or_nothing(joining, lambda made: asyncio.to_thread(leave_ranks, made))
        try:
            shard = cut_layout(parts["layout"], stages=joined.count)[joined.rank][0]
            await asyncio.to_thread(keep_layers, loaded, shard, where)
            streams = streams_of(where)
            opening = asyncio.to_thread(
                Meeting.open, joined, parts["identity"], where, streams, deadline
            )
            meeting = await all_or_nothing(opening, lambda made: asyncio.to_thread(made.close))
        except BaseException:  # cancelled as well: the next attempt begins anew
            leave_ranks(joined)
            raise
        try:
            return cls(loaded, meeting=meeting, shard=shard, streams=streams, **parts)
        except BaseException:
            await to_the_end(asyncio.to_thread(meeting.close))
            raise

    # -- cacheflow.abc.Staged --------------------------------------------------------------------

    def listen(self, listener: StageListener) -> None:
        """See :meth:`cacheflow.abc.Staged.listen`."""
        self._listener = listener
        unheard, self._unheard = self._unheard, []
        for message in unheard:
            self._told(message)
        if self._talk.broken is not None:
            listener.failed(None, self._talk.broken)

    async def agree(
        self,
        request_id: str,
        stored: int | None,
        *,
        same: Sequence[int],
        lacks: Sequence[int],
        took: float,
    ) -> Agreement:
        """See :meth:`cacheflow.abc.Staged.agree`: up through the stages, and down again."""
        mine = {"stored": stored, "same": list(same), "lacks": list(lacks), "took": [took]}
        try:
            async with asyncio.timeout(self._meeting.deadline):
                return await self._agree(request_id, f"{request_id}\0", mine)
        except TimeoutError:
            within = f"{self._meeting.deadline:g} s"
            raise PeerError(
                f"request {request_id!r}: not all stages were asked for it in {within}"
            ) from None

    async def _agree(self, request_id: str, key: str, mine: dict[str, Any]) -> Agreement:
        talk, relayed = self._talk, frozenset[int]()
        if not self.is_last:
            theirs = (await talk.receive("agree", request_id, key)).body
            if theirs["same"] != mine["same"]:
                raise PeerError(
                    f"request {request_id!r}: stage {self.rank} was asked for {mine['same']} "
                    f"(tokens, resident, restorable, last key), those behind for {theirs['same']}"
                )
            relayed = frozenset(theirs["lacks"])
            known = [mine["stored"], theirs["stored"]]
            mine |= {"stored": None if None in known else max(known)}
            mine |= {"took": mine["took"] + theirs["took"]}
        talk.back(Message("agree", {"key": key, **mine}))
        if self.rank:
            mine |= (await talk.receive("agreed", request_id, key)).body
        talk.forward(
            Message("agreed", {"key": key, "stored": mine["stored"], "took": mine["took"]})
        )
        return Agreement(mine["stored"], relayed, tuple(mine["took"]))

    async def import_hidden(self, request_id: str, tile: Tile, parts: Sequence[StagedPart]) -> None:
        """See :meth:`cacheflow.abc.Staged.import_hidden`."""
        request = self._requests.get(request_id)
        page = request.page_at(tile.start)

        def work() -> None:
            with self._streams.copy():
                held = page.paused.get(tile.start)
                if held is None or held.layer:
                    room = self._room(tile.width)
                    self._streams.hand_to_compute(room)
                    held = page.paused[tile.start] = Paused(room, 0)
                for part in parts:
                    at = part.chunk * self.layout.chunk_tokens - tile.start
                    rows = self._activation(part)
                    held.hidden[0, at : at + len(rows)].copy_(rows, non_blocking=True)
                self._streams.mark().synchronize()

        await self._on(self._copy, [request], work)

    async def export_hidden(self, request_id: str, parts: Sequence[StagedPart]) -> None:
        """See :meth:`cacheflow.abc.Staged.export_hidden`."""
        request = self._requests.get(request_id)

        def work() -> None:
            with self._streams.copy():
                for part in parts:
                    token = part.chunk * self.layout.chunk_tokens
                    start = self.grid.start(self.grid.index_at(token))
                    at, rows = token - start, self._activation(part)
                    rows.copy_(request.inputs[start][at : at + len(rows)], non_blocking=True)
                self._streams.mark().synchronize()

        await self._on(self._copy, [request], work)

    def boundary_chunks(self, request_id: str) -> Sequence[int]:
        """See :meth:`cacheflow.abc.Staged.boundary_chunks`."""
        size, inputs = self.layout.chunk_tokens, self._requests.get(request_id).inputs
        return [
            chunk
            for start, hidden in sorted(inputs.items())
            for chunk in range(start // size, (start + len(hidden)) // size)
        ]

    async def hand_over(self, request_id: str, start: int) -> None:
        """See :meth:`cacheflow.abc.Staged.hand_over`."""
        request = self._requests.get(request_id)
        output = request.page_at(start).paused.pop(start)
        body = {"request": request_id, "start": start}
        self._talk.forward(Message("hidden", body, output.hidden[0]))

    def demand(self, request_id: str, start: int, *, again: bool) -> None:
        """See :meth:`cacheflow.abc.Staged.demand`."""
        body = {"request": request_id, "start": start, "again": again}
        self._talk.back(Message("demand", body))

    def settle(self, request_id: str) -> None:
        """See :meth:`cacheflow.abc.Staged.settle`."""
        self._talk.back(Message("settled", {"request": request_id}))

    def give_up(self, request_id: str, reason: str) -> None:
        """See :meth:`cacheflow.abc.Staged.give_up`."""
        self._talk.give_up(request_id, reason)

    # -- tokens --------------------------------------------------------------------------------

    async def first_token(self, request_id: str) -> int:
        """The last stage's, in every stage."""
        key = f"{request_id}\0{len(self._requests.get(request_id).tokens)}"
        own = [await super().first_token(request_id)] if self.is_last else None
        return (await self._pass_back(own, request_id, key))[0]

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """One step through all stages; the next tokens, in every stage."""
        requests, positions = self._requests.step(request_ids, tokens)
        key = "\0".join([*request_ids, str(positions)])
        fed = None
        if self.rank:
            fed = (await self._talk.receive("step", request_ids[0], key)).tensor

        def work() -> tuple[torch.Tensor, list[int] | None]:
            embedded = self._walker.embed(tokens) if fed is None else fed
            out = self._walker.last_logits if self.is_last else _hidden
            before, together = embedded.unsqueeze(1), self.decodes_together
            made = self._walker.rows(requests, before, positions, out, together=together)
            if self.is_last:
                return made, made.argmax(-1).tolist()
            self._streams.mark().synchronize()  # it is sent from another stream
            return made, None

        hidden, own = await self._decode(requests, positions, work)
        if not self.is_last:
            self._talk.forward(Message("step", {"key": key}, hidden))
        return await self._pass_back(own, request_ids[0], key)

    async def first_sample(self, request_id: str, sampling: Sampling) -> int:
        """Stages do not draw tokens."""
        raise ConfigError("an engine in stages always takes the likeliest token")

    async def _pass_back(self, tokens: list[int] | None, request_id: str, key: str) -> list[int]:
        """From the last stage, who has them, to the first."""
        if tokens is None:
            tokens = (await self._talk.receive("tokens", request_id, key)).body["tokens"]
        self._talk.back(Message("tokens", {"key": key, "tokens": tokens}))
        return tokens

    async def close(self, request_id: str) -> None:
        """As ever."""
        self._talk.forget(request_id)
        await super().close(request_id)

    async def aclose(self) -> None:
        """Says goodbye to the neighbours first; torch.distributed is left as it was found."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._talk.aclose()
        finally:
            await super().aclose()
            await asyncio.to_thread(self._meeting.close)

    # -- what neighbours say -------------------------------------------------------------------

    def _told(self, message: Message) -> bool:
        """Whether the message is for the listener, or for the engine itself."""
        body, listener = message.body, self._listener
        if message.kind not in ("hidden", "demand", "settled"):
            return False
        if listener is None:
            self._unheard.append(message)
        elif message.kind == "hidden":
            self._take_in(body["request"], body["start"], message.tensor)
        elif message.kind == "demand":
            listener.demanded(body["request"], body["start"], again=body["again"])
        else:
            listener.settled(body["request"])
        return True

    def _failed(self, request_id: str | None, error: PeerError) -> None:
        if self._listener is not None:
            self._listener.failed(request_id, error)

    def _left(self, error: PeerError, behind: bool) -> None:
        if self._listener is not None:
            self._listener.left(error, behind=behind)

    def _take_in(self, request_id: str, start: int, hidden: torch.Tensor | None) -> None:
        """What the stage before computed becomes the hidden state at layer 0."""
        if request_id not in self._requests or hidden is None:
            return  # it was closed meanwhile
        assert self._listener is not None, "somebody listens by now"
        request = self._requests.get(request_id)
        page = request.page_at(start)
        page.paused[start] = Paused(hidden.unsqueeze(0), 0)
        if start == page.start and len(hidden) == page.width:
            request.inputs[start] = hidden
            if hidden.device.type != "cpu":
                self._keep_on_host(request, start, hidden)
        self._listener.fed(request_id, start)

    def _keep_on_host(self, request: OpenRequest, start: int, hidden: torch.Tensor) -> None:
        """What may be stored later is not to take the device's memory until then."""

        def work() -> torch.Tensor:
            with self._streams.copy():
                kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
                kept.copy_(hidden, non_blocking=True)
                self._streams.mark().synchronize()
            return kept

        def ended(running: asyncio.Future[torch.Tensor]) -> None:
            request.busy.discard(running)
            failed = running.cancelled() or running.exception() is not None
            if not failed and request.inputs.get(start) is hidden:
                request.inputs[start] = running.result()

        running = self._copy.submit(work)
        request.busy.add(running)
        running.add_done_callback(ended)

    def _room(self, tokens: int) -> torch.Tensor:
        size = self._model.config.hidden_size
        return torch.empty((1, tokens, size), dtype=self._model.dtype, device=self._device)

    def _activation(self, part: StagedPart) -> torch.Tensor:
        """An activation in staging memory as ``[C, hidden]``."""
        tokens, size = self.layout.chunk_tokens, self._model.config.hidden_size
        flat = elements(part.view, self._model.dtype)
        return flat[: tokens * size].view(tokens, size)


def _hidden(hidden: torch.Tensor) -> torch.Tensor:
    """The only token of each row."""
    return hidden[:, 0]
