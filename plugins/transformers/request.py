"""One open request inside the engine: its tokens, pages, paused tiles and provenance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cacheflow.types import Segment, Span

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from cacheflow.plugins.transformers.pages import Page, PagePool
    from cacheflow.types import TileGrid

__all__ = ["OpenRequest"]


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Loop-owned, except ``last`` (compute thread)."""

    id: str
    grid: TileGrid
    tokens: list[int]
    pages: list[Page] = field(default_factory=list)
    last: torch.Tensor | None = None
    """Logits ``[vocabulary]`` after the last token (fp32, on the CPU), once computed."""
    segments: list[Segment] = field(default_factory=list)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of a pipeline stage: what whole tiles began with as the stage before sent it, by first token:
    ``[width, hidden]``, on the host as soon as it has been copied there."""
    busy: set[asyncio.Future[Any]] = field(default_factory=set)
    """Work on the lanes that still touches the pages."""
    packs: bool = False
    """Whether its passes may hold tiles of others: what they compute is not repeated exactly."""
    closing: bool = False
    """Closed by its owner: compute that still runs stops before its next layer."""

    def grow(self, pool: PagePool, tokens: int) -> None:
        """Pages for ``tokens`` tokens in all; on CapacityError some may have been added."""
        while self.grid.start(len(self.pages)) < tokens:
            self.pages.append(pool.take(len(self.pages)))

    def shrink(self, pool: PagePool, pages: int) -> None:
        """Give back all but the first ``pages`` pages."""
        while len(self.pages) > pages:
            pool.give(self.pages.pop())

    def release(self, pool: PagePool) -> None:
        """Give the pages back, if nothing on the lanes touches them any more. Idempotent."""
        if self.busy:
            return
        self.last = None
        self.inputs.clear()
        self.shrink(pool, 0)

    def past(self, stop: int) -> list[tuple[Page, int]]:
        """The pages that hold the tokens before ``stop``, each with the end of its part."""
        return [(page, min(page.stop, stop)) for page in self.pages if page.start < stop]

    def page_at(self, token: int) -> Page:
        """The page that holds ``token``."""
        return self.pages[self.grid.index_at(token)]

    def kv(self, layer: int, tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V ``[Hkv, tokens, D]`` of the first ``tokens`` tokens (default: all)."""
        parts = self.past(len(self.tokens) if tokens is None else tokens)
        keys, values = zip(*(page.part(layer, stop) for page, stop in parts), strict=True)
        return torch.cat(keys, dim=2)[0], torch.cat(values, dim=2)[0]

    def computed(self, start: int, stop: int) -> None:
        """Record that a forward pass computed ``[start, stop)``; decode steps are joined."""
        last = self.segments[-1] if self.segments else None
        if stop - start == 1 and last and last.width == 1 and last.stop == start:
            self.segments[-1] = Segment(last.start, stop, 1, last.lossy)
        else:
            self.segments.append(Segment(start, stop, stop - start, self.packs))

    def history(self, tokens: int) -> list[Segment]:
        """What is recorded of the first ``tokens`` tokens. A segment that they cut is left out, for
        a piece would look like another one; unless it is lossy, which must not be forgotten."""
        whole = [s for s in self.segments if s.stop <= tokens]
        cut = [s for s in self.segments if s.lossy and s.start < tokens < s.stop]
        return [*whole, *(Segment(s.start, tokens, 0, s.lossy) for s in cut)]

    def loaded(self, tokens: Span, segments: Sequence[Segment]) -> None:
        """Replace what is recorded of ``tokens``."""
        before = [s for s in self.segments if s.stop <= tokens.start]
        behind = [s for s in self.segments if s.start >= tokens.stop]
        self.segments = [*before, *segments, *behind]
