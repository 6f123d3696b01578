"""The engine's open requests: their tokens and pages, and what a prompt may hold.

Loop-owned. Knows no model, no threads and no KV bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.plugins.transformers.request import OpenRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.plugins.transformers.pages import PagePool
    from cacheflow.types import TileGrid

__all__ = ["RequestTable"]


class RequestTable:
    """Requests by id. ``max_tokens``: the model's context; ``vocabulary``: how many tokens;
    ``packs``: whether passes hold tiles of several."""

    def __init__(
        self,
        pool: PagePool,
        grid: TileGrid,
        max_tokens: int,
        vocabulary: int,
        *,
        packs: bool = False,
    ) -> None:
        self._packs = packs
        self._pool = pool
        self._grid = grid
        self._max_tokens = max_tokens
        self._vocabulary = vocabulary
        self._requests: dict[str, OpenRequest] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def ids(self) -> list[str]:
        """All that are open."""
        return list(self._requests)

    def get(self, request_id: str) -> OpenRequest:
        """The request.

        Raises:
            ClosedError: it is not open.
        """
        try:
            return self._requests[request_id]
        except KeyError:
            raise ClosedError(f"request {request_id!r} is not open") from None

    def open(self, request_id: str, tokens: Sequence[int]) -> None:
        """A new request with pages for ``tokens``: see :meth:`cacheflow.abc.Recomputer.open`."""
        self._is_new(request_id)
        if not len(tokens):
            raise ConfigError("the prompt is empty: give at least one token")
        request = OpenRequest(request_id, self._grid, [], packs=self._packs)
        self.append([request], [tokens])
        self._requests[request_id] = request

    def fork(self, source: OpenRequest, request_id: str, tokens: int) -> OpenRequest:
        """A new request with the first ``tokens`` tokens of ``source``: whole pages are shared, a
        page of its own, its contents undefined, holds the rest."""
        if not 0 < tokens <= len(source.tokens):
            raise ValueError(f"{source.id!r} has {len(source.tokens)} tokens, not {tokens}")
        self._is_new(request_id)
        made = OpenRequest(request_id, self._grid, source.tokens[:tokens], packs=self._packs)
        made.pages = [self._pool.share(p) for p in source.pages if p.stop <= tokens]
        try:
            made.grow(self._pool, tokens)
        except CapacityError:
            made.release(self._pool)
            raise
        made.segments = source.history(tokens)
        self._requests[request_id] = made
        return made

    def cut(self, request: OpenRequest, tokens: int) -> bool:
        """Forget all but the first ``tokens`` tokens; False, and nothing done, where others share
        the page that they end in. Nothing on the lanes may touch the request.

        Raises:
            ValueError: the request has fewer tokens, or none would be left.
        """
        if not 0 < tokens <= len(request.tokens):
            raise ValueError(f"{request.id!r} has {len(request.tokens)} tokens, not {tokens}")
        pages = self._grid.index_at(tokens - 1) + 1
        last = request.pages[pages - 1]
        if last.stop > tokens:
            if last.users > 1:
                return False
            last.paused.clear()
        request.shrink(self._pool, pages)
        request.segments = request.history(tokens)
        del request.tokens[tokens:]
        request.last = None
        return True

    def swap(self, request_id: str, other_id: str) -> None:
        """Let two open requests have each other's tokens and KV."""
        one, other = self.get(request_id), self.get(other_id)
        self._requests[request_id], self._requests[other_id] = other, one
        one.id, other.id = other_id, request_id

    def share(self, source_id: str, request_id: str, tokens: int) -> None:
        """Hold the source's pages: see :meth:`cacheflow.abc.Recomputer.share`."""
        source, request = self.get(source_id), self.get(request_id)
        if source.tokens[:tokens] != request.tokens[:tokens]:
            raise ValueError(
                f"{source_id!r} and {request_id!r} differ in the first {tokens} tokens"
            )
        pages = self._grid.index_at(tokens - 1) + 1
        if self._grid.start(pages) != tokens:
            raise ValueError(f"{tokens} tokens are no whole tiles")
        shared = [self._pool.share(page) for page in source.pages[:pages]]
        for page in request.pages[:pages]:
            self._pool.give(page)
        request.pages[:pages] = shared

    def append(self, requests: Sequence[OpenRequest], tokens: Sequence[Sequence[int]]) -> None:
        """Add tokens to each request, or to none."""
        for request, more in zip(requests, tokens, strict=True):
            self._check(len(request.tokens), more)
        had = [len(request.pages) for request in requests]
        try:
            for request, more in zip(requests, tokens, strict=True):
                request.grow(self._pool, len(request.tokens) + len(more))
        except CapacityError:
            for request, pages in zip(requests, had, strict=True):
                request.shrink(self._pool, pages)
            raise
        for request, more in zip(requests, tokens, strict=True):
            request.tokens.extend(more)  # += would add an array up
            request.last = None

    def step(
        self, request_ids: Sequence[str], tokens: Sequence[int]
    ) -> tuple[list[OpenRequest], list[int]]:
        """One token more for each of several requests; the requests, and where that token is.

        Raises:
            ValueError: a request is named twice, or as :meth:`append`.
        """
        if len(set(request_ids)) != len(request_ids):
            raise ValueError("a request cannot decode two tokens in one step")
        requests = [self.get(request_id) for request_id in request_ids]
        self.append(requests, [[token] for token in tokens])
        return requests, [len(request.tokens) - 1 for request in requests]

    def close(self, request_id: str) -> OpenRequest | None:
        """Forget the request; its pages go once nothing on the lanes touches them any more."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        request.closing = True
        for running in request.busy:
            # Runs after the callback that takes the future out of ``busy``.
            running.add_done_callback(lambda _: request.release(self._pool))
        request.release(self._pool)
        return request

    def stop(self) -> None:
        """Let compute of all requests stop at its next layer."""
        for request in self._requests.values():
            request.closing = True

    def _is_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already open")

    def _check(self, held: int, tokens: Sequence[int]) -> None:
        total = held + len(tokens)
        if total > self._max_tokens:
            raise ConfigError(
                f"{total} tokens are more than the model's context of {self._max_tokens}: "
                f"shorten the prompt"
            )
        # min and max in C: a long prompt must not hold the event loop.
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < self._vocabulary):
            wrong = next(i for i, t in enumerate(tokens) if not 0 <= t < self._vocabulary)
            raise ConfigError(
                f"token {tokens[wrong]} at position {held + wrong} is not in the vocabulary "
                f"of {self._vocabulary}"
            )
