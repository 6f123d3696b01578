"""One turn of a session: its prompt restored and its suffix computed, then a token at a time.

Runs while the session is locked. Knows how a turn ends well, and what is left of one that breaks
off.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cacheflow.abc import Sampler
from cacheflow.errors import CapacityError, ClosedError, ConfigError
from cacheflow.restore import RestoreRequest
from cacheflow.restore.answered import first_token
from cacheflow.scheduling import load_policy
from cacheflow.session.beside import copy_beside
from cacheflow.session.prompts import agreeing
from cacheflow.tasks import to_the_end
from cacheflow.tiers.promotion import promotions
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.restore import Restoration
    from cacheflow.session.flow import CacheFlow
    from cacheflow.session.report import Generation
    from cacheflow.session.resident import Resident
    from cacheflow.session.tenants import Tenant
    from cacheflow.types import Sampling

__all__ = ["Ask", "Turn"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a turn is to do; times on the flow's clock."""

    tokens: Sequence[int]
    arrival: float
    policy: str | None
    priority: int
    deadline: float | None = None
    """When the first token is wanted."""
    sampling: Sampling | None = None
    """None: the likeliest token, always."""


class Turn:
    """``ask`` of a tenant's session whose KV is ``kv``; what comes of it is told to ``report``.
    ``known``: how many leading tokens the session had before, so that they may be stored."""

    def __init__(
        self,
        flow: CacheFlow,
        kv: Resident,
        tenant: Tenant,
        ask: Ask,
        report: Generation,
        known: int = 0,
    ) -> None:
        self.restored = False
        """Whether the whole prompt is in memory."""
        self._flow = flow
        self._kv = kv
        self._tenant = tenant
        self._ask = ask
        self._report = report
        self._known = known
        self._opened = asyncio.Event()
        """It is known what is restored, which may be added to from then on."""
        self._policy = load_policy(flow.settings.policy if ask.policy is None else ask.policy)
        self._request: str | None = None
        self._asked: RestoreRequest | None = None
        """What is restored, or was last."""
        report.usage.prompt_tokens = len(ask.tokens)

    async def restore(self, before: Turn | None = None) -> None:
        """Have the whole prompt in the engine. ``before``: a turn whose restore this one has
        lengthened, nothing having been done since then."""
        if before is not None and before.has(self._ask.tokens):
            self._request, self._asked = before._request, before._asked
            self._report.restoration = before._report.restoration
        else:
            self._report.restoration = await self._fetch(self._ask.tokens)
        assert self._asked is not None, "it is known what was restored"
        assert self._report.restoration is not None, "it is known how"
        layers = self._flow.engine.layout.num_layers
        self._report.usage.restored(self._asked.resident, self._report.restoration, layers)
        self.restored = True

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens``, and nothing else, are in memory as this turn restored them."""
        kept = self.restored and self._request is not None and self._kv.request == self._request
        return kept and len(self._kv.tokens) == len(tokens) == agreeing(self._kv.tokens, tokens)

    async def lengthen(self, tokens: Sequence[int]) -> bool:
        """While it is being restored: go on to the end of ``tokens``, which begin with the prompt.
        False, and nothing done, where that cannot be."""
        await self._opened.wait()
        flow, asked = self._flow, self._asked
        assert asked is not None, "it is open"
        keys = await flow.keys_in_pieces(self._tenant.root, tokens, asked.keys)
        more = list(tokens[len(asked.tokens) :])

        async def extend() -> None:
            await flow.engine.extend(asked.id, more)

        if not await flow.restorer.lengthen(asked.id, tokens, extend):
            return False
        self._asked = replace(asked, tokens=tokens, keys=keys)
        self._kv.lengthened(more, keys)
        return True

    async def _fetch(self, tokens: Sequence[int]) -> Restoration:
        flow, kv, ask = self._flow, self._kv, self._ask
        keys = await flow.keys_in_pieces(self._tenant.root, tokens, kv.known_keys(tokens))
        if self._policy.shares and kv.request is None:
            await copy_beside(flow, kv, keys, tokens, self._known, ask.priority)
        resident = await kv.take(tokens, keys)
        self._request = kv.opened()
        self._asked = request = RestoreRequest(
            self._request,
            tokens,
            keys,
            ask.arrival,
            resident,
            self._ask.priority,  # it may have been raised meanwhile
            ask.deadline,
            self._tenant.stamp,
            had=max(self._known - 1, 0),  # the last token of an answer never had any
        )
        self._opened.set()
        restoration = await flow.restorer.run(request, self._policy, kv.salvage)
        if restoration.prefix_tokens:
            span = Span(0, restoration.prefix_tokens)
            flow.engine.set_segments(request.id, span, restoration.segments)
        await kv.restored(self._asked, restoration.prefix_tokens)
        return restoration

    def hurry(self, priority: int) -> None:
        """Somebody more urgent waits for the restore."""
        if priority > self._ask.priority:
            self._ask = replace(self._ask, priority=priority)
            if self._request is not None:
                self._flow.restorer.raise_priority(self._request, priority)

    async def first(self) -> int:
        """The first token; what slow tiers delivered is copied to the faster ones from now on."""
        asked, restoration = self._asked, self._report.restoration
        assert asked is not None, "it was restored"
        assert restoration is not None, "it was restored"
        token = await self._first(asked.id)
        now = self._flow.clock.now()
        self._report.ttft_seconds = now - self._ask.arrival
        layout = self._flow.engine.layout
        self._flow.restorer.emit(first_token(asked, restoration, layout, now, self._tenant.name))
        self._promote(asked, restoration)
        return token

    async def _first(self, request: str) -> int:
        engine, sampling = self._flow.engine, self._ask.sampling
        if sampling is None:
            return await engine.first_token(request)
        assert isinstance(engine, Sampler), "it was asked before the turn began"
        return await engine.first_sample(request, sampling)

    def _promote(self, asked: RestoreRequest, restoration: Restoration) -> None:
        wanted = promotions(tuple(self._flow.backends), restoration.loaded_chunks)
        if wanted:
            self._flow.saver.promote(asked.id, asked.keys, wanted, self._tenant.stamp)

    async def next(self, token: int) -> int:
        """The token after ``token``."""
        request = self._current()
        self._kv.appends(token)
        sampling, decoding = self._ask.sampling, self._flow.decoding
        try:
            made = await self._kv.with_room(lambda: decoding.next(request, token, sampling))
        except CapacityError:
            if not self._kv.is_contended:
                raise
            return await self._come_back(token)
        self._current()
        self._kv.appended()
        return made

    async def _come_back(self, token: int) -> int:
        """There is no memory for ``token``: give up all, and restore it when others have ended."""
        tokens = [*self._kv.tokens, token]
        await self.save()
        await self._kv.drop()
        self._request = None
        await self._fetch(tokens)
        return await self._first(self._current())

    async def save(self) -> None:
        """Have the whole chunks of what is in memory stored, behind the session."""
        kv, request = self._kv, self._current()
        keys = await self._flow.keys_in_pieces(self._tenant.root, kv.tokens, kv.keys)
        self._current()
        kv.keys = keys
        self._report.saved = self._flow.saver.save(request, keys, self._tenant.stamp)
        await asyncio.sleep(0)  # what comes next does not share a turn of the loop with the keys

    async def broke(self, error: BaseException, *, save: bool) -> None:
        """The turn broke off with ``error``: keep what is complete, or nothing if nobody knows.

        Raises:
            ClosedError: because the session was forgotten meanwhile.
        """
        gone = self._request is not None and self._kv.request != self._request
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._report.finish_reason = "cancelled"
            await to_the_end(self._keep(save=save))
        elif gone:
            raise ClosedError(f"{self._kv.name} was forgotten, or closed, meanwhile") from error
        elif isinstance(error, CapacityError | ConfigError):
            await to_the_end(self._keep(save=False))
        else:
            await self._kv.drop()

    async def _keep(self, *, save: bool) -> None:
        await self._kv.settle()
        if save and self._kv.request is not None:
            self._request = self._kv.request
            with suppress(ClosedError):  # CacheFlow is closing
                await self.save()

    def _current(self) -> str:
        """The request of this turn; ClosedError if it is not the session's any more."""
        if self._request is None or self._kv.request != self._request:
            raise ClosedError(f"{self._kv.name} was forgotten meanwhile")
        return self._request
