"""Several tiles in one pass, side by side on the token axis: what fast mode computes small ones by.

One matrix product serves all of them, so its width, and with it the rounding, depends on who is
there: KV made here is equal within the dtype's tolerance, not bit for bit. Tiles that follow each
other in one request attend as one wide tile; others see nothing of each other. Runs on the compute
thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

from cacheflow.plugins.transformers.attention import Packed
from cacheflow.types import Claim, ComputeDone

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.abc import ClaimLayer
    from cacheflow.plugins.transformers.request import OpenRequest
    from cacheflow.plugins.transformers.walk import Walker
    from cacheflow.types import TileWork

__all__ = ["PACK_TOKENS", "walk_packed"]

PACK_TOKENS: Final = 2048
"""The widest pass: as wide as the widest tile of exact mode; wider ones would gain nothing."""


@dataclass(slots=True, eq=False)
class _Row:
    """One tile of the pass: ``hidden`` ``[1, n, hidden]`` at the layer that comes next."""

    request: OpenRequest
    work: TileWork
    claim: ClaimLayer
    hidden: torch.Tensor
    layer: int
    write: bool = False

    @property
    def start(self) -> int:
        return self.work.tile.start

    @property
    def stop(self) -> int:
        return self.work.tile.stop

    @property
    def width(self) -> int:
        return self.work.tile.width


class _PackedCache:
    """What a decoder layer sees as its cache: writes each tile's K and V to its page."""

    def __init__(self, rows: Sequence[_Row], first_layer: int) -> None:
        self._rows = rows
        self._first_layer = first_layer

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``key``, ``value``: ``[1, Hkv, n, D]`` of all tiles, which are given back as they are."""
        at = 0
        for row in self._rows:
            end = at + row.width
            if row.write:
                page = row.request.page_at(row.start)
                own = (layer - self._first_layer, row.start, row.stop)
                page.keys(*own).copy_(key[:, :, at:end])
                page.values(*own).copy_(value[:, :, at:end])
            at = end
        return key, value


def walk_packed(
    walker: Walker, requests: Sequence[OpenRequest], works: Sequence[TileWork],
    claims: Sequence[ClaimLayer],
) -> list[ComputeDone]:  # fmt: skip
    """Push tiles, all at the same layer, on together, until the claim of one is refused; those that
    were not refused pass that layer all the same. So whoever is cancelled waits for one layer.

    Tiles of one request in the order of their tokens.

    Raises:
        ValueError: they are at different layers.
        RuntimeError: a hidden state is not there.
    """
    if len({work.first_layer for work in works}) > 1:
        raise ValueError("tiles of one pass have to be at the same layer")
    rows = [
        _Row(request, work, claim, walker.begin(request, work), work.first_layer)
        for request, work, claim in zip(requests, works, claims, strict=True)
    ]
    layer, marks = works[0].first_layer, [walker.streams.mark()]
    going = rows
    while layer < walker.num_layers and len(going) == len(rows):
        walker.keep_pace(marks)
        going = _claimed(rows, layer)
        if not going:
            break
        _pass(walker, going, layer)
        marks.append(walker.streams.mark())
        layer += 1
    marks[-1].synchronize()
    for row in rows:
        # A copy of what is kept: it is a piece of the pass's own tensor, which would stay with it.
        kept = row.hidden if row.layer == walker.num_layers else row.hidden.clone()
        walker.end(row.request, row.work, kept, row.layer)
    passes = [after.seconds_since(before) for before, after in pairwise(marks)]
    return [
        ComputeDone(row.work, row.layer, tuple(passes[: row.layer - row.work.first_layer]))
        for row in rows
    ]


def _claimed(rows: Sequence[_Row], layer: int) -> list[_Row]:
    """Those that go on to ``layer``, asked in order: a tile needs the one before it."""
    going = []
    for row in rows:
        answer = row.claim(row.work, layer)
        if answer is not Claim.REFUSED:
            row.write = answer is Claim.WRITE
            going.append(row)
    return going


def _pass(walker: Walker, rows: Sequence[_Row], layer: int) -> None:
    """One layer of all ``rows``."""
    device = rows[0].hidden.device
    hidden = torch.cat([row.hidden for row in rows], dim=1)
    positions = torch.cat([torch.arange(row.start, row.stop, device=device) for row in rows])
    cache = _PackedCache(rows, walker.first_layer)
    places = walker.places(positions.unsqueeze(0), hidden)
    reach = Packed(list(_parts(rows, layer)))
    outs = walker.layer(layer, hidden, cache, reach, places).split([r.width for r in rows], dim=1)
    for row, out in zip(rows, outs, strict=True):
        row.hidden, row.layer = out, layer + 1


def _parts(
    rows: Sequence[_Row], layer: int
) -> Iterator[tuple[slice, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Runs of tiles that follow each other, with the KV before the first of each."""
    at = first = 0
    for i, row in enumerate(rows):
        end = at + row.width
        follower = rows[i + 1] if i + 1 < len(rows) else None
        if follower is None or follower.request is not row.request or follower.start != row.stop:
            head = row.stop - (end - first)
            past = row.request.past(head)
            yield slice(first, end), [page.part(layer, stop) for page, stop in past]
            first = end
        at = end
