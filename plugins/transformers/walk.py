"""A forward pass walked layer by layer from outside the model, so that it can stop anywhere.

Embedding, rotary positions, then each decoder layer with a cache object of ours that writes the
layer's K and V into the request's page. Runs on the compute thread only. Knows no scheduling: it
asks a callback before every layer.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

from cacheflow.plugins.transformers.attention import Packed, RowBlock, Rows, Tile, current_reach
from cacheflow.plugins.transformers.pages import Paused
from cacheflow.types import Claim, ComputeDone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheflow.abc import ClaimLayer
    from cacheflow.plugins.transformers.lanes import Mark, Streams
    from cacheflow.plugins.transformers.pages import Page
    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import Shard, TileWork

__all__ = ["Walker"]

_NAMES_OF_THE_CACHE: Final = ("cache", "past_key_values", "past_key_value")
"""A decoder layer's parameter for it, newest first: giving an old name to a new one warns."""


class _PageCache:
    """What a decoder layer sees as its cache: ``update`` is the only method it calls.

    Row ``i`` of a batch has its own tokens ``spans[i]``, whose K and V go to ``pages[i]`` (or come
    from there, when ``write`` is off).
    """

    def __init__(
        self, pages: Sequence[Page], spans: Sequence[tuple[int, int]], first_layer: int
    ) -> None:
        self._rows = list(zip(pages, spans, strict=True))
        self._first_layer = first_layer
        self.write = True

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``key``, ``value``: ``[B, Hkv, n, D]``; a tile gets its own block of the page back.
        ``layer`` is counted by the model."""
        layer -= self._first_layer
        for i, (page, (start, stop)) in enumerate(self._rows):
            own = page.keys(layer, start, stop), page.values(layer, start, stop)
            if self.write:
                own[0].copy_(key[i : i + 1])
                own[1].copy_(value[i : i + 1])
        # A decode step reads its blocks from the pages; only their shape matters to the layer.
        return own if len(self._rows) == 1 else (key, value)


class Walker:
    """Walks one model. ``model`` is a loaded causal LM whose config names our attention.

    ``shard``: which of the model's layers are walked, counted from 0 here; the model has no others.
    """

    def __init__(self, model: Any, streams: Streams, shard: Shard) -> None:
        self._model = model
        self._body = model.model
        self.streams = streams
        self.first_layer = shard.layers.start
        self._embeds = shard.layers.start == 0
        self._answers = shard.layers.stop == shard.whole.num_layers
        self._device = next(model.parameters()).device
        self._layers = list(self._body.layers)
        known = inspect.signature(self._layers[0].forward).parameters
        self._cache_name = next((n for n in _NAMES_OF_THE_CACHE if n in known), "past_key_values")

    @property
    def num_layers(self) -> int:
        """Decoder layers that are walked."""
        return len(self._layers)

    def tile(self, request: OpenRequest, work: TileWork, claim: ClaimLayer) -> ComputeDone:
        """Push one tile from ``work.first_layer`` on as far as ``claim`` lets it.

        Raises:
            RuntimeError: the hidden state at ``first_layer`` is not there.
        """
        start, stop = work.tile.start, work.tile.stop
        hidden = self.begin(request, work)
        past = request.past(start)
        cache = _PageCache([request.page_at(start)], [(start, stop)], self.first_layer)
        positions = torch.arange(start, stop, device=self._device).unsqueeze(0)
        places = self.places(positions, hidden)
        marks = [self.streams.mark()]
        layer = work.first_layer
        while layer < self.num_layers:
            self.keep_pace(marks)
            answer = claim(work, layer)
            if answer is Claim.REFUSED:
                break
            cache.write = answer is Claim.WRITE
            reach = Tile([page.part(layer, end) for page, end in past])
            hidden = self.layer(layer, hidden, cache, reach, places)
            marks.append(self.streams.mark())
            layer += 1
        marks[-1].synchronize()
        self.end(request, work, hidden, layer)
        seconds = tuple(after.seconds_since(before) for before, after in pairwise(marks))
        return ComputeDone(work, layer, seconds)

    def keep_pace(self, marks: Sequence[Mark]) -> None:
        """Before a layer is claimed: wait until the device is as many layers behind as it may be.
        ``marks``: one before the first layer, and one behind each."""
        if len(marks) > self.streams.ahead:
            marks[-max(self.streams.ahead, 1)].synchronize()

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states ``[n, hidden]`` at the model's first layer."""
        embedded: torch.Tensor = self._body.embed_tokens(self.streams.upload(tokens))
        return embedded

    def step(
        self, requests: Sequence[OpenRequest], hidden: torch.Tensor, positions: Sequence[int]
    ) -> torch.Tensor:
        """One decode step: a token each at its position, ``[B, 1, hidden]`` before and after."""
        pages = [r.page_at(p) for r, p in zip(requests, positions, strict=True)]
        cache = _PageCache(pages, [(p, p + 1) for p in positions], self.first_layer)
        places = self.places(self.streams.upload(positions).unsqueeze(1), hidden)
        held = self._held(r.past(p + 1) for r, p in zip(requests, positions, strict=True))
        for layer in range(self.num_layers):
            reach = Rows([RowBlock(rows, *page.part(layer, end)) for rows, page, end in held])
            hidden = self.layer(layer, hidden, cache, reach, places)
        return hidden

    def rows(
        self,
        requests: Sequence[OpenRequest],
        hidden: torch.Tensor,
        positions: Sequence[int],
        out: Callable[[torch.Tensor], torch.Tensor],
        *,
        together: bool,
    ) -> torch.Tensor:
        """``out`` of the hidden states after a decode step, all rows in one product or, where bits
        must not depend on who decodes beside, one by one."""
        size = len(requests) if together else 1
        some = [slice(at, at + size) for at in range(0, len(requests), size)]
        return torch.cat([out(self.step(requests[s], hidden[s], positions[s])) for s in some])

    def last_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states ``[B, n, hidden]`` to the last token's logits ``[B, vocabulary]``."""
        return self.logits(hidden)[:, -1]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states ``[B, n, hidden]`` to logits ``[B, n, vocabulary]``."""
        logits: torch.Tensor = self._model.lm_head(self._body.norm(hidden))
        return logits

    def begin(self, request: OpenRequest, work: TileWork) -> torch.Tensor:
        """The hidden state ``[1, n, hidden]`` at ``work.first_layer``, taken from where it lies.

        Raises:
            RuntimeError: it is not there.
        """
        paused = request.page_at(work.tile.start).paused.pop(work.tile.start, None)
        if work.first_layer == 0 and self._embeds:
            return self.embed(request.tokens[work.tile.start : work.tile.stop]).unsqueeze(0)
        if paused is None or paused.layer != work.first_layer:
            at = "nowhere" if paused is None else f"at layer {paused.layer}"
            raise RuntimeError(
                f"tile at token {work.tile.start} of {request.id!r}: its hidden state is {at}, "
                f"not at layer {work.first_layer}"
            )
        return paused.hidden

    def end(self, request: OpenRequest, work: TileWork, hidden: torch.Tensor, layer: int) -> None:
        """Keep a hidden state that somebody goes on with; logits behind the last token."""
        kept = layer < self.num_layers or not self._answers  # at its end: for the stage behind
        if kept:
            if layer or not self._embeds:
                page = request.page_at(work.tile.start)
                page.paused[work.tile.start] = Paused(hidden, layer)
        elif work.tile.stop == len(request.tokens):
            # Here and now: on its own it would queue behind the next request's tile.
            request.last = self.logits(hidden[:, -1:])[0, -1].float().cpu()

    def _held(
        self, reaches: Iterable[Sequence[tuple[Page, int]]]
    ) -> list[tuple[slice | torch.Tensor, Page, int]]:
        """Every different part of a page that some rows see, with those rows."""
        rows: dict[tuple[int, int], list[int]] = {}
        pages: dict[tuple[int, int], Page] = {}
        for row, reach in enumerate(reaches):
            for page, stop in reach:
                rows.setdefault((id(page), stop), []).append(row)
                pages[id(page), stop] = page
        return [(self._some(who), pages[part], part[1]) for part, who in rows.items()]

    def _some(self, rows: Sequence[int]) -> slice | torch.Tensor:
        if rows[-1] - rows[0] + 1 == len(rows):
            return slice(rows[0], rows[-1] + 1)
        return self.streams.upload(rows)

    def places(self, positions: torch.Tensor, hidden: torch.Tensor) -> dict[str, Any]:
        """A layer's arguments about positions ``[1, n]`` (``[B, 1]`` in a decode step)."""
        rotary = self._body.rotary_emb(hidden, position_ids=positions)
        return {"position_ids": positions, "position_embeddings": rotary}

    def layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        cache: Any,
        reach: Tile | Packed | Rows,
        places: dict[str, Any],
    ) -> torch.Tensor:
        """``hidden`` behind layer ``layer``, whose K and V go to ``cache``."""
        current_reach.reach = reach
        try:
            out = self._layers[layer](
                hidden,
                attention_mask=None,
                use_cache=True,
                **{self._cache_name: cache},
                **places,
            )
        finally:
            current_reach.reach = None
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result
