"""An engine without a model that serves: tokens are a digest of all tokens before them, and it
raises if any KV that they depend on is missing or wrong.

Obeys :class:`~cacheflow.abc.Engine` strictly, pages, forks and a cap on memory included.
"""

from __future__ import annotations

import asyncio
import hashlib
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.testing.engine import FakeEngine
from cacheflow.types import Claim, Segment

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cacheflow.abc import ChatTemplate, ClaimLayer
    from cacheflow.types import ComputeBatch, ComputeDone, Span, TileWork

__all__ = ["ServingEngine", "next_token"]

_VOCABULARY = 1000


def next_token(tokens: Sequence[int]) -> int:
    """What the engine says after ``tokens``."""
    text = b"".join(token.to_bytes(8, "little") for token in tokens)
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little") % _VOCABULARY


class ServingEngine(FakeEngine):
    """``kv_tokens``: how many tokens the pages of all requests may have room for.

    ``steps``: the requests of each decode step so far. ``before_step`` may be set to what
    every decode step then awaits first.
    """

    identity = {"model": "fake"}  # noqa: RUF012 (read only)
    layer_flops = (1.0, 1e-3)
    max_tokens = 100_000

    def __init__(self, *args: Any, kv_tokens: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.chat: ChatTemplate | None = None
        self.steps: list[list[str]] = []
        self.before_step: Callable[[], Awaitable[object]] | None = None
        self._kv_tokens = kv_tokens
        self._segments: dict[str, list[Segment]] = {}
        self._ended: dict[str, asyncio.Event] = {}
        """Of compute that is under way, by request."""
        self._closing: set[str] = set()
        """Requests that wait for it, and are not open any more."""
        self._fresh: set[str] = set()
        """Requests whose last token was computed last."""

    # -- requests ------------------------------------------------------------------------------

    @property
    def kv_used_tokens(self) -> int:
        """Room that the pages of all open requests take."""
        pages = {id(page): index for held in self._pages.values() for index, page in held.items()}
        return sum(self.grid.tile(index).width for index in pages.values())

    async def open(self, request_id: str, tokens: Sequence[int]) -> None:
        self._check(tokens)
        await super().open(request_id, tokens)
        self._segments[request_id] = []
        try:
            self._grow(request_id, len(tokens))
        except CapacityError:
            await self.close(request_id)
            raise

    async def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        self._check(tokens)
        self._grow(request_id, len(self._get(request_id)) + len(tokens))
        self._fresh.discard(request_id)
        await super().extend(request_id, tokens)

    async def close(self, request_id: str) -> None:
        if request_id not in self._tokens or request_id in self._closing:
            return
        self._closing.add(request_id)
        try:
            while (running := self._ended.get(request_id)) is not None:
                await running.wait()
            self._segments.pop(request_id, None)
            self._fresh.discard(request_id)
            await super().close(request_id)
        finally:
            self._closing.discard(request_id)

    async def fork(self, source_id: str, request_id: str, tokens: int) -> None:
        source = self._get(source_id)
        assert not self.wrong_cells(source_id, tokens), "forks KV that is not complete"
        while (running := self._ended.get(source_id)) is not None:
            await running.wait()  # its last page may be written to meanwhile
            source = self._get(source_id)
        await super().open(request_id, source[:tokens])
        pages = self._pages[source_id]
        whole = [i for i in pages if self.grid.tile(i).stop <= tokens]
        self._pages[request_id] = {index: pages[index] for index in whole}
        self._segments[request_id] = self._kept(source_id, tokens)
        try:
            self._grow(request_id, tokens)
        except CapacityError:
            await self.close(request_id)
            raise
        for index in set(self._pages[request_id]) - set(whole):
            self._pages[request_id][index] = deepcopy(pages[index])
        self._cut_page(request_id, tokens)

    async def truncate(self, request_id: str, tokens: int) -> None:
        held = self._get(request_id)
        assert 0 < tokens <= len(held), "there are not so many tokens"
        assert not self.wrong_cells(request_id, tokens), "keeps KV that is not complete"
        last = self.grid.index_at(tokens - 1)
        if self._is_shared(request_id, last) and self.grid.tile(last).stop > tokens:
            self._room_for(self.grid.tile(last).width)
            self._pages[request_id][last] = deepcopy(self._pages[request_id][last])
        for index in [index for index in self._pages[request_id] if index > last]:
            del self._pages[request_id][index]
        self._segments[request_id] = self._kept(request_id, tokens)
        self._fresh.discard(request_id)
        del held[tokens:]
        self._cut_page(request_id, tokens)

    # -- compute -------------------------------------------------------------------------------

    async def recompute(self, batch: ComputeBatch, claim: ClaimLayer) -> list[ComputeDone]:
        names = [work.request_id for work in batch.work]
        for name in names:
            self._get(name)
        self._ended |= {name: asyncio.Event() for name in names}

        def ask(work: TileWork, layer: int) -> Claim:
            closing = work.request_id in self._closing  # whoever closes it waits: do not go on
            return Claim.REFUSED if closing else claim(work, layer)

        try:
            ended = await super().recompute(batch, ask)
        finally:
            for name in names:
                self._ended.pop(name).set()
        for done in ended:
            name, tile = done.work.request_id, done.work.tile
            if done.next_layer < self.layout.num_layers or not self._is_open(name):
                continue
            if done.work.is_suffix:
                self._segments[name].append(Segment(tile.start, tile.stop, tile.width))
            if tile.stop == len(self._tokens[name]):
                self._fresh.add(name)
        return ended

    async def first_token(self, request_id: str) -> int:
        tokens = self._get(request_id)
        assert request_id in self._fresh, "its last token was not computed"
        wrong = self.wrong_cells(request_id, len(tokens))
        assert not wrong, f"{request_id}: wrong KV in {wrong[:3]}"
        return next_token(tokens)

    async def decode(self, request_ids: Sequence[str], tokens: Sequence[int]) -> list[int]:
        for name in request_ids:
            self._get(name)
        wanted = [name for name in request_ids if self._needs_page(name)]
        self._room_for(sum(self._next_width(name) for name in wanted))
        if self.before_step is not None:
            await self.before_step()
        self.steps.append(list(request_ids))
        return [self._append(name, token) for name, token in zip(request_ids, tokens, strict=True)]

    def _append(self, name: str, token: int) -> int:
        held, size = self._get(name), self.layout.chunk_tokens
        self._grow(name, len(held) + 1)
        held.append(token)
        at = len(held) - 1
        if not len(held) % size:
            page = self._page(name, at)
            for layer in range(self.layout.num_layers):
                page.cells[at // size, layer] = self.expected(held, at // size, layer)
        wrong = self.wrong_cells(name, len(held))
        assert not wrong, f"{name}: wrong KV in {wrong[:3]}"
        self._segments[name].append(Segment(at, at + 1, 1))
        return next_token(held)

    # -- provenance ----------------------------------------------------------------------------

    def segments(self, request_id: str) -> tuple[Segment, ...]:
        self._get(request_id)
        return tuple(self._segments[request_id])

    def set_segments(self, request_id: str, tokens: Span, segments: Sequence[Segment]) -> None:
        behind = [s for s in self._segments[request_id] if s.start >= tokens.stop]
        self._segments[request_id] = [*segments, *behind]

    async def aclose(self) -> None:
        self.shutdown()

    # -- pages ---------------------------------------------------------------------------------

    def _get(self, request_id: str) -> list[int]:
        if not self._is_open(request_id):
            raise ClosedError(f"request {request_id!r} is not open")
        return self._tokens[request_id]

    def _is_open(self, request_id: str) -> bool:
        return request_id in self._tokens and request_id not in self._closing

    def _check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < _VOCABULARY:
                raise ConfigError(f"token {token} is not in the vocabulary of {_VOCABULARY}")

    def _grow(self, name: str, tokens: int) -> None:
        last = self.grid.index_at(tokens - 1)
        missing = [index for index in range(last + 1) if index not in self._pages[name]]
        self._room_for(sum(self.grid.tile(index).width for index in missing))
        for index in missing:
            self._page(name, self.grid.start(index))

    def _room_for(self, tokens: int) -> None:
        if self._kv_tokens is not None and self.kv_used_tokens + tokens > self._kv_tokens:
            raise CapacityError(f"no KV memory for {tokens} tokens more")

    def _needs_page(self, name: str) -> bool:
        return self.grid.index_at(len(self._tokens[name])) not in self._pages[name]

    def _next_width(self, name: str) -> int:
        return self.grid.tile(self.grid.index_at(len(self._tokens[name]))).width

    def _is_shared(self, name: str, index: int) -> bool:
        page = self._pages[name][index]
        return sum(held.get(index) is page for held in self._pages.values()) > 1

    def _cut_page(self, name: str, tokens: int) -> None:
        """Take out of the last page what lies behind ``tokens``."""
        page, chunks = self._page(name, tokens - 1), tokens // self.layout.chunk_tokens
        if self.grid.tile(self.grid.index_at(tokens - 1)).stop > tokens:
            page.cells = {cell: data for cell, data in page.cells.items() if cell[0] < chunks}
            page.computed = {cell for cell in page.computed if cell[0] < chunks}
            page.begun.clear()
            page.hidden.clear()

    def _kept(self, name: str, tokens: int) -> list[Segment]:
        return [s for s in self._segments[name] if s.stop <= tokens]
