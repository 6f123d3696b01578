"""A forward pass walked layer by layer from outside the model, so that it can stop anywhere.

Embedding, rotary positions, then each decoder layer with a cache object of ours that writes the
layer's K and V into the request's page. Runs on the compute thread only. Knows no scheduling: it
asks a callback before every layer.
"""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import torch

from cacheflow.plugins.transformers.attention import Past, current_past
from cacheflow.plugins.transformers.request import Paused
from cacheflow.types import Claim, ComputeDone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import ClaimLayer
    from cacheflow.plugins.transformers.lanes import Mark, Streams
    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.types import TileWork

__all__ = ["Walker"]


class _PageCache:
    """What a decoder layer sees as its cache: ``update`` is the only method it calls.

    One row per request; a row's K and V go to (or come from) the page of its own tokens.
    """

    def __init__(self, rows: Sequence[tuple[OpenRequest, int, int]]) -> None:
        self._rows = rows
        self.write = True

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``key``, ``value``: ``[B, Hkv, n, D]``; returns what attention uses as its own block."""
        keys, values = [], []
        for i, (request, start, stop) in enumerate(self._rows):
            page = request.page_at(start)
            own_key, own_value = page.keys(layer, start, stop), page.values(layer, start, stop)
            if self.write:
                own_key.copy_(key[i : i + 1])
                own_value.copy_(value[i : i + 1])
            keys.append(own_key)
            values.append(own_value)
        if len(keys) == 1:
            return keys[0], values[0]
        return torch.cat(keys), torch.cat(values)


class Walker:
    """Walks one model. ``model`` is a loaded causal LM whose config names our attention."""

    def __init__(self, model: Any, streams: Streams) -> None:
        self._model = model
        self._body = model.model
        self._streams = streams
        self._device = next(model.parameters()).device
        self._layers = list(self._body.layers)
        parameters = inspect.signature(self._layers[0].forward).parameters
        # Renamed in transformers 5.2x; giving both would warn, so look which one it is.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def tile(self, request: OpenRequest, work: TileWork, claim: ClaimLayer) -> ComputeDone:
        """Push one tile from ``work.first_layer`` on as far as ``claim`` lets it.

        Raises:
            RuntimeError: the hidden state at ``first_layer`` is not there.
        """
        start, stop = work.tile.start, work.tile.stop
        hidden = self._begin(request, work)
        rows = [(request, start, stop)]
        cache = _PageCache(rows)
        places = self._places([range(start, stop)], hidden)
        times = [time.perf_counter()]
        marks: list[Mark] = []
        layer = work.first_layer
        while layer < self.num_layers:
            if len(marks) >= max(self._streams.ahead, 1):
                marks[-max(self._streams.ahead, 1)].synchronize()
            answer = claim(work, layer)
            if answer is Claim.REFUSED:
                break
            cache.write = answer is Claim.WRITE
            hidden = self._layer(layer, hidden, cache, rows, places)
            marks.append(self._streams.mark())
            times.append(time.perf_counter())
            layer += 1
        if marks:
            marks[-1].synchronize()
            times[-1] = time.perf_counter()
        self._end(request, work, hidden, layer)
        seconds = tuple(b - a for a, b in zip(times, times[1:], strict=False))
        return ComputeDone(work, layer, seconds)

    def rows(
        self, requests: Sequence[OpenRequest], tokens: Sequence[int], positions: Sequence[int]
    ) -> torch.Tensor:
        """One decode step: a token each at its position; final hidden ``[B, 1, hidden]``."""
        ids = torch.tensor(tokens, device=self._device).unsqueeze(1)
        hidden = self._body.embed_tokens(ids)
        rows = [(r, p, p + 1) for r, p in zip(requests, positions, strict=True)]
        places = self._places([range(p, p + 1) for p in positions], hidden)
        cache = _PageCache(rows)
        for layer in range(self.num_layers):
            hidden = self._layer(layer, hidden, cache, rows, places)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states ``[B, n, hidden]`` to logits ``[B, n, vocabulary]``."""
        logits: torch.Tensor = self._model.lm_head(self._body.norm(hidden))
        return logits

    def _begin(self, request: OpenRequest, work: TileWork) -> torch.Tensor:
        if work.first_layer == 0:
            request.paused.pop(work.tile.start, None)
            ids = request.tokens[work.tile.start : work.tile.stop]
            embedded: torch.Tensor = self._body.embed_tokens(
                torch.tensor([ids], device=self._device)
            )
            return embedded
        paused = request.paused.pop(work.tile.start, None)
        if paused is None or paused.layer != work.first_layer:
            at = "nowhere" if paused is None else f"layer {paused.layer}"
            raise RuntimeError(f"tile at {work.tile.start}: hidden state is {at}, not at layer "
                               f"{work.first_layer}")
        return paused.hidden

    def _end(
        self, request: OpenRequest, work: TileWork, hidden: torch.Tensor, layer: int
    ) -> None:
        if layer < self.num_layers:
            if layer > 0:
                request.paused[work.tile.start] = Paused(hidden, layer)
        elif work.is_suffix and work.tile.stop == len(request.tokens):
            request.last = hidden[:, -1:]

    def _places(self, spans: Sequence[range], hidden: torch.Tensor) -> dict[str, Any]:
        ids = torch.tensor([list(span) for span in spans], device=self._device)
        rotary = self._body.rotary_emb(hidden, position_ids=ids)
        return {"position_ids": ids, "position_embeddings": rotary}

    def _layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        cache: _PageCache,
        rows: Sequence[tuple[OpenRequest, int, int]],
        places: dict[str, Any],
    ) -> torch.Tensor:
        current_past.past = Past([request.past(layer, start) for request, start, _ in rows])
        try:
            out = self._layers[layer](
                hidden,
                attention_mask=None,
                use_cache=True,
                **{self._cache_name: cache},
                **places,
            )
        finally:
            current_past.past = None
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result
