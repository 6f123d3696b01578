"""One conversation: its turns, what of it is in memory, and what each turn did."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError
from cacheflow.restore import Restoration, RestoreRequest
from cacheflow.restore.answered import first_token
from cacheflow.scheduling import load_policy
from cacheflow.tiers.promotion import promotions
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Sequence

    from cacheflow.restore.saver import Saved
    from cacheflow.session.flow import CacheFlow
    from cacheflow.types import ChunkKey

__all__ = ["FORGET_SECONDS", "Generation", "Session"]

FORGET_SECONDS: Final = 1.0
"""Forgetting waits this long for room to copy what is still to be stored."""


@dataclass(slots=True)
class Generation:
    """What a :meth:`Session.generate` did, filled in as it goes."""

    restoration: Restoration | None = None
    ttft_seconds: float | None = None
    """From arrival to the first token."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was resident or stored somewhere."""
    saved: dict[str, Saved] | None = None
    """By tier; counted on behind the request until nothing is ``pending``: see
    :meth:`CacheFlow.flush`."""


class Session:
    """One conversation. Its KV stays in memory between turns until :meth:`forget`."""

    def __init__(self, flow: CacheFlow, session_id: str) -> None:
        self.id = session_id
        self._flow = flow
        self._request: str | None = None
        self._tokens: list[int] = []
        """Tokens whose KV the engine holds."""
        self._keys: Sequence[ChunkKey] = ()
        """Keys of leading chunks of these tokens: the next turn goes on from them."""
        self._busy = asyncio.Lock()

    @property
    def resident_tokens(self) -> int:
        """Tokens of this session whose KV is in memory."""
        return len(self._tokens)

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        stop_tokens: Collection[int] = (),
        policy: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        save: bool = True,
        report: Generation | None = None,
    ) -> AsyncIterator[int]:
        """Greedy tokens after ``prompt`` (the whole history), as they are made.

        What is resident is used, what is stored is restored, the rest is computed; afterwards the
        whole chunks of the history are stored behind the request (``save``), where they are found
        at once. Abandoning the iterator (``aclose``, or the last reference to it dropped) keeps the
        session usable: it forgets its resident KV. Until then the next turn waits for it.

        ``policy``: instead of the setting's. ``priority``: higher goes before others, whatever the
        objective. ``deadline``: seconds from now in which the first token is wanted (objective
        ``deadline`` serves the earliest first).

        Raises:
            ConfigError: the prompt is empty, too long for the model, or holds an impossible token.
            CapacityError: the engine has no KV memory left.
        """
        report = report if report is not None else Generation()
        arrival = self._flow.clock.now()
        self._check(prompt, max_new_tokens)
        prompt = _as_it_is_now(prompt)  # the caller may go on with it while we wait
        async with self._busy:
            known = self._keys if self._is_extended_by(prompt) else ()
            keys = await self._flow._keys_in_pieces(prompt, known)
            try:
                request_id, resident = await self._open(prompt)
                request = RestoreRequest(
                    request_id,
                    prompt,
                    keys,
                    arrival,
                    resident,
                    priority,
                    None if deadline is None else arrival + deadline,
                )
                await self._restore(request, policy, report)
                token = await self._flow.engine.first_token(request_id)
                self._answered(request, report)
                self._promote(request, report)
                for made in range(1, max_new_tokens + 1):
                    yield token
                    if token in stop_tokens or made == max_new_tokens:
                        break
                    self._tokens.append(token)
                    token = (await self._flow.engine.decode([request_id], [token]))[0]
                if save:
                    report.saved = await self._save(request_id)
            except BaseException:
                # Half a turn is in the KV cache: what the engine holds is no longer known.
                await self._close()
                raise

    async def forget(self) -> None:
        """Drop the KV from memory; what is stored, or waits to be, stays.

        What is to be stored and finds no room to wait within a second is dropped, and counted:
        ``flush`` before, if all of it matters.
        """
        await self._close(FORGET_SECONDS)

    async def _close(self, patience: float = 0.0) -> None:
        request_id, self._request = self._request, None
        self._tokens, self._keys = [], ()
        self._flow._resident.discard(self)
        if request_id is None:
            return
        self._flow.restorer.withdraw(request_id)
        try:
            await self._flow._saver.release([request_id], patience)
        finally:
            await self._flow.engine.close(request_id)

    def _answered(self, request: RestoreRequest, report: Generation) -> None:
        now = self._flow.clock.now()
        report.ttft_seconds = now - request.arrival
        assert report.restoration is not None, "a restored request has a report"
        layout = self._flow.engine.layout
        self._flow.restorer.emit(first_token(request, report.restoration, layout, now))

    def _check(self, prompt: Sequence[int], max_new_tokens: int) -> None:
        if not len(prompt):
            raise ConfigError("the prompt is empty: give at least one token")
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        longest = self._flow.engine.max_tokens
        if len(prompt) + max_new_tokens - 1 > longest:
            raise ConfigError(
                f"prompt of {len(prompt)} tokens and max_new_tokens {max_new_tokens} do not fit "
                f"the model's context of {longest} tokens: shorten one of them"
            )

    async def _open(self, prompt: Sequence[int]) -> tuple[str, int]:
        """Continue the resident request if the prompt extends it, else open a new one."""
        if self._request and self._is_extended_by(prompt):
            held = len(self._tokens)
            await self._flow.engine.extend(self._request, prompt[held:])
            return self._request, held
        await self._close()
        self._request = f"{self.id}/{next(self._flow._turns)}"
        self._flow._resident.add(self)
        await self._flow.engine.open(self._request, prompt)
        return self._request, 0

    def _is_extended_by(self, prompt: Sequence[int]) -> bool:
        held = len(self._tokens)
        return 0 < held < len(prompt) and list(prompt[:held]) == self._tokens

    async def _restore(
        self, request: RestoreRequest, policy: str | None, report: Generation
    ) -> None:
        chosen = load_policy(policy or self._flow.settings.policy)
        restoration = await self._flow.restorer.run(request, chosen)
        if restoration.prefix_tokens:
            span = Span(0, restoration.prefix_tokens)
            self._flow.engine.set_segments(request.id, span, restoration.segments)
        self._tokens, self._keys = list(request.tokens), request.keys
        self._flow.restorer.offer(request.id, request.keys, self._flow.engine.segments(request.id))
        report.restoration = restoration
        report.cached_tokens = request.resident or restoration.stored_tokens

    def _promote(self, request: RestoreRequest, report: Generation) -> None:
        """What slow tiers delivered is copied to the faster ones, behind the request."""
        assert report.restoration is not None
        wanted = promotions(tuple(self._flow.backends), report.restoration.loaded_chunks)
        if wanted:
            self._flow._saver.promote(request.id, request.keys, wanted)

    async def _save(self, request_id: str) -> dict[str, Saved]:
        tokens = self._tokens
        keys = await self._flow._keys_in_pieces(tokens, self._keys)
        if self._tokens is tokens:  # not forgotten meanwhile
            self._keys = keys
        saved = self._flow._saver.save(request_id, keys)
        await asyncio.sleep(0)  # what comes next does not share a turn of the loop with the keys
        return saved


def _as_it_is_now(prompt: Sequence[int]) -> Sequence[int]:
    """A copy. Of an array or tensor the numbers: its slices are views, and ``+`` adds them up."""
    numbers = None if isinstance(prompt, memoryview) else getattr(prompt, "tolist", None)
    copied: Sequence[int] = prompt[:] if numbers is None else numbers()
    return copied
