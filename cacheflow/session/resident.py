"""What of one session is in the engine: its request there, and the tokens whose KV is complete.

Goes on from that for a new prompt where it can, and knows how far KV is complete when a turn breaks
off. Neither restores nor decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from cacheflow.errors import CapacityError, ClosedError
from cacheflow.session.prompts import agreeing
from cacheflow.tasks import to_the_end
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cacheflow.restore import RestoreRequest
    from cacheflow.session.flow import CacheFlow
    from cacheflow.session.session import Session
    from cacheflow.types import ChunkKey, Segment

__all__ = ["Resident"]

T = TypeVar("T")


class Resident:
    """KV of ``owner``. For one task at a time, except :meth:`drop`: who else is at it then gets a
    ClosedError from whatever it does next."""

    def __init__(self, flow: CacheFlow, owner: Session) -> None:
        self.request: str | None = None
        self.tokens: list[int] = []
        """Tokens whose KV is complete."""
        self.keys: Sequence[ChunkKey] = ()
        """Of leading chunks of these tokens: the next turn goes on from them."""
        self.name = f"session {owner.id!r}"
        self._flow = flow
        self._owner = owner
        self._rest: Sequence[int] = ()
        """Tokens that the request has behind them."""
        self._rest_keys: Sequence[ChunkKey] = ()
        """Of leading chunks of all these tokens together."""
        self._salvaged = 0
        """How many of the rest a restore that was cancelled has restored."""
        self._is_part = False
        """Whether what is here was left by one: what follows may be stored, too."""
        self.copied = 0
        """How many leading tokens are what is stored, restored here or copied from who did."""
        self._former: str | None = None
        """The request before this one, whose :attr:`tokens` are: until its tiles are shared."""
        self._opening: str | None = None
        """The request, while the engine has not said that it is open: not to be closed, for the id
        may be somebody else's there."""

    @property
    def requests(self) -> list[str]:
        """All that is open for it in the engine."""
        return [each for each in (self.request, self._former) if each is not None]

    @property
    def holder(self) -> str:
        """The request that the KV of its :attr:`tokens` is in; ClosedError if it was forgotten."""
        return self._former or self.opened()

    @property
    def is_contended(self) -> bool:
        """Whether memory that there is none of is held by others, or waited for."""
        return self._flow.room.is_contended(self._owner)

    def known_keys(self, prompt: Sequence[int]) -> Sequence[ChunkKey]:
        """Keys of leading chunks of ``prompt``."""
        size = self._flow.engine.layout.chunk_tokens
        return self.keys[: agreeing(self.tokens, prompt) // size]

    async def take(self, prompt: Sequence[int], keys: Sequence[ChunkKey]) -> int:
        """Make room for ``prompt``; returns how many of its tokens are there, the last never.
        ``keys``: of its whole chunks.

        Raises:
            CapacityError: there is no KV memory for it; what was there is there still.
            ConfigError: the engine refuses a token.
        """
        same = agreeing(self.tokens, prompt)
        kept = min(same, len(prompt) - 1)
        # What comes behind a divergence may be stored: to be looked for if it is the longer part.
        goes_on = same == len(self.tokens) or len(prompt) - kept <= kept
        self._rest_keys = keys
        if kept and goes_on and not self._is_part:
            try:
                await self._go_on(prompt, kept)
            except CapacityError:
                if not self.is_contended:
                    raise
                await self.drop()  # what is held while waiting could be what others wait for
                same = 0
            else:
                return kept
        await self._begin(prompt, same)
        return 0

    async def _go_on(self, prompt: Sequence[int], kept: int) -> None:
        await self.cut(kept)
        request = self.opened()
        await self.with_room(lambda: self._flow.engine.extend(request, prompt[kept:]))
        self._rest = prompt[kept:]

    async def cut(self, tokens: int, patience: float = 0.0) -> None:
        """Forget all but the first ``tokens`` tokens; ``patience``: see :meth:`Saver.release`."""
        if tokens >= len(self.tokens):
            return
        if not tokens:
            await self.drop(patience)
            return
        request = self.opened()
        self._flow.restorer.withdraw(request)  # or somebody would begin to share what is going
        await self._flow.saver.release([request], patience)
        await self.with_room(lambda: self._flow.engine.truncate(request, tokens))
        self._check(request)
        self.tokens = self.tokens[:tokens]
        self.copied = min(self.copied, tokens)
        self.keys = self.keys[: tokens // self._flow.engine.layout.chunk_tokens]
        self._offer()

    async def _begin(self, prompt: Sequence[int], same: int) -> None:
        """A new request. The old one stays until whole tiles of it are shared, if there are any."""
        if same < self._flow.engine.grid.tile(0).stop or self._flow.room.is_crowded:
            await self.drop()
        request = self._flow.new_request(self._owner.id)
        self._former, self.request, self._opening = self.request, request, request
        self._rest = prompt
        self._flow.changed(self._owner)

        async def open_it() -> None:
            try:
                await self._flow.engine.open(request, prompt)
            except CapacityError:
                if self._former is None:
                    raise
                former, self._former = self._former, None
                self.tokens, self.keys = [], ()
                await self._end([former])
                await self._flow.engine.open(request, prompt)

        try:
            await self._flow.room.wait_for(open_it, self._owner)
        except BaseException:
            if self.request == request:
                self.request, self._former, self._rest = self._former, None, ()
                self._flow.changed(self._owner)
            raise
        finally:
            self._opening = None
        if self.request != request:
            await self._flow.engine.close(request)
        self._check(request)

    def lengthened(self, tokens: Sequence[int], keys: Sequence[ChunkKey]) -> None:
        """The request has ``tokens`` behind it as well now; ``keys``: of all its whole chunks."""
        self._rest, self._rest_keys = [*self._rest, *tokens], keys

    async def restored(self, asked: RestoreRequest, prefix: int = 0) -> None:
        """The prompt that was taken is complete; so many leading tokens of it are restored."""
        self._check(asked.id)
        self.copied = max(prefix, min(self.copied, asked.resident))
        self.tokens, self.keys, self._rest = list(asked.tokens), asked.keys, ()
        self._is_part = False
        former, self._former = self._former, None
        self._offer()
        if former is not None:
            await self._end([former])

    def appends(self, token: int) -> None:
        """The request is about to get another token."""
        self._rest, self._rest_keys = [token], ()

    def appended(self) -> None:
        """Its KV is complete."""
        self.tokens += self._rest
        self._rest = ()

    def salvage(self, tokens: int, segments: Sequence[Segment]) -> None:
        """The restore of the prompt was cancelled; so many leading tokens of it are restored."""
        if self.request is not None and self._former is None and tokens > len(self.tokens):
            self._flow.engine.set_segments(self.request, Span(0, tokens), segments)
            self._salvaged = tokens

    async def settle(self) -> None:
        """A turn broke off, nothing is under way: keep the KV that is complete."""
        request, engine = self.request, self._flow.engine
        if request is None:
            return
        if self._former is not None:
            self.request, self._former, self._rest = self._former, None, ()
            await self._end([request])
            return
        if not self._rest:
            return
        done, self._salvaged = max(len(self.tokens), self._salvaged), 0
        self._is_part = self._is_part or done > len(self.tokens)
        try:
            for segment in sorted(engine.segments(request), key=lambda s: s.start):
                if segment.start <= done < segment.stop:
                    done = segment.stop
            if not done:
                raise CapacityError("nothing is complete")
            await engine.truncate(request, done)
            self._check(request)
        except (CapacityError, ClosedError):  # not worth forgetting others for
            if self.request == request:
                await self.drop()
            return
        self.tokens += self._rest[: done - len(self.tokens)]
        self._rest = ()
        self.keys = self._rest_keys[: done // engine.layout.chunk_tokens] or self.keys
        self._offer()

    async def drop(self, patience: float = 0.0) -> None:
        """Forget all; ``patience``: seconds for what is still to be stored to find room."""
        held = self.requests
        requests = [each for each in held if each != self._opening]
        self.request = self._former = None
        self.tokens, self.keys, self._rest = [], (), ()
        self._salvaged, self.copied, self._is_part = 0, 0, False
        if held:
            with self._flow.room.giving_back():
                self._flow.changed(self._owner)
                await self._end(requests, patience)

    async def adopt(self, source: Resident) -> None:
        """Hold what ``source`` holds as well, sharing its whole pages."""
        await self.copy(source.opened(), source.tokens[:], source.keys)
        self._is_part, self.copied = source._is_part, source.copied

    async def copy(self, request: str, tokens: Sequence[int], keys: Sequence[ChunkKey]) -> None:
        """Hold ``tokens``, whole chunks of which are ``keys``: those that ``request``, another
        session's, begins with, and whose KV is complete there."""
        count = len(tokens)
        self.request = self._opening = mine = self._flow.new_request(self._owner.id)
        try:
            await self.with_room(lambda: self._flow.engine.fork(request, mine, count))
        except BaseException:
            self.request = None
            raise
        finally:
            self._opening = None
        if self.request != mine:
            await self._flow.engine.close(mine)
        self._check(mine)
        self.tokens, self.keys = list(tokens), keys
        self.copied = count
        self._flow.changed(self._owner)
        self._offer()

    async def with_room(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, with idle sessions forgotten where KV memory is short."""
        return await self._flow.room.to(work, self._owner)

    async def _end(self, requests: Sequence[str], patience: float = 0.0) -> None:
        for request in requests:
            self._flow.restorer.withdraw(request)
        with self._flow.room.giving_back():
            try:
                await self._flow.saver.release(requests, patience)
            finally:
                await to_the_end(self._close(requests))

    async def _close(self, requests: Sequence[str]) -> None:
        for request in requests:
            await self._flow.engine.close(request)

    def _offer(self) -> None:
        request = self.opened()
        self._flow.restorer.offer(request, self.keys, self._flow.engine.segments(request))

    def _check(self, request: str) -> None:
        """After an await: it may have been forgotten, or used anew since then."""
        if self.request != request:
            raise ClosedError(f"{self.name} was forgotten meanwhile")

    def opened(self) -> str:
        """Its request; ClosedError if it was forgotten."""
        if self.request is None:
            raise ClosedError(f"{self.name} was forgotten meanwhile")
        return self.request
