"""One open request inside the engine: its tokens, pages, paused tiles and provenance."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheflow.types import Segment, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cacheflow.plugins.transformers.pages import Page, PagePool
    from cacheflow.types import TileGrid

__all__ = ["Paused", "OpenRequest"]


@dataclass(frozen=True, slots=True)
class Paused:
    """A tile that stopped before ``layer``: ``hidden [1, n, hidden_size]`` is that layer's input."""

    hidden: torch.Tensor
    layer: int


@dataclass(slots=True)
class OpenRequest:
    """Loop-owned, except ``paused`` and ``last`` (compute thread, one tile at a time)."""

    id: str
    grid: TileGrid
    tokens: list[int]
    pages: list[Page] = field(default_factory=list)
    paused: dict[int, Paused] = field(default_factory=dict)
    """By first token of the tile."""
    last: torch.Tensor | None = None
    """Final hidden state ``[1, 1, hidden_size]`` of the last token, once computed."""
    segments: list[Segment] = field(default_factory=list)
    busy: set[asyncio.Future[Any]] = field(default_factory=set)
    """Work on the lanes that still touches the pages."""

    def grow(self, pool: PagePool, tokens: int) -> None:
        """Pages for ``tokens`` tokens in all; on CapacityError nothing was added."""
        have = len(self.pages)
        try:
            while self.grid.start(len(self.pages)) < tokens:
                self.pages.append(pool.take(len(self.pages)))
        except BaseException:
            while len(self.pages) > have:
                pool.give(self.pages.pop())
            raise

    def past(self, layer: int, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of all tokens before ``start``, page by page."""
        blocks = []
        for page in self.pages:
            stop = min(page.start + page.width, start)
            if stop <= page.start:
                break
            keys = page.keys(layer, page.start, stop)
            blocks.append((keys, page.values(layer, page.start, stop)))
        return blocks

    def page_at(self, token: int) -> Page:
        """The page that holds ``token``."""
        return self.pages[self.grid.index_at(token)]

    def computed(self, start: int, stop: int) -> None:
        """Record that a forward pass computed ``[start, stop)``; decode steps are joined."""
        last = self.segments[-1] if self.segments else None
        if stop - start == 1 and last and last.width == 1 and last.stop == start:
            self.segments[-1] = Segment(last.start, stop, 1)
        else:
            self.segments.append(Segment(start, stop, stop - start))

    def loaded(self, tokens: Span, segments: Sequence[Segment]) -> None:
        """Replace what is recorded of ``tokens``."""
        behind = [s for s in self.segments if s.start >= tokens.stop]
        self.segments = [*segments, *behind]
