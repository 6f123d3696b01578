"""One decode loop for all sessions: whoever has a token to append takes part in the next step.

A session whose consumer is slow takes part in fewer steps and holds up nobody. Knows no sessions:
requests, tokens and the engine.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.abc import Sampler
from cacheflow.errors import CapacityError, ClosedError
from cacheflow.tasks import Lasting, to_the_end

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    from cacheflow.abc import Engine
    from cacheflow.types import Sampling

__all__ = ["DecodeLoop"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """What a request does in the next step."""

    token: int
    sampling: Sampling | None
    made: Future[int]


class DecodeLoop:
    """Runs while :meth:`running` lasts. ``steps`` and ``rows``: what was decoded so far."""

    def __init__(self, engine: Engine) -> None:
        self.steps = self.rows = 0
        self._engine = engine
        self._waiting: dict[str, _Row] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def running(self) -> AbstractAsyncContextManager[None]:
        """What waits when it ends fails with ClosedError; a step under way is waited for."""
        return Lasting(self._begin, self._end)

    async def _begin(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    async def _end(self) -> None:
        self._closed = True
        self._wake.set()
        if self._task is not None:
            await to_the_end(asyncio.wait([self._task]))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """However it has ended, even before it began: nobody waits for a step any more."""
        self._closed = True
        left, self._waiting = self._waiting, {}
        self._fail(left, _closed())
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the decode loop has failed", exc_info=error)

    async def next(self, request_id: str, token: int, sampling: Sampling | None = None) -> int:
        """Append ``token`` to the request; the token after it, the likeliest without ``sampling``.

        On return, however it returns, no step touches the request: cancelling takes it back, or
        waits for the end of the step that it is in.

        Raises:
            CapacityError: there is no KV memory for another token; none was appended.
            ClosedError: the request is not open, or CacheFlow is closing.
        """
        if self._closed:
            raise _closed()
        made: Future[int] = asyncio.get_running_loop().create_future()
        mine = self._waiting[request_id] = _Row(token, sampling, made)
        self._wake.set()
        try:
            await asyncio.wait([made])
        except asyncio.CancelledError:
            if self._waiting.get(request_id) is mine:
                del self._waiting[request_id]
            else:
                await to_the_end(asyncio.wait([made]))
                made.exception()  # nobody else will ask for it
            raise
        return made.result()

    async def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            while self._waiting and not self._closed:
                batch, self._waiting = self._waiting, {}
                try:
                    await self._step(batch)
                except BaseException:  # cancelled, with all tasks of an event loop that ends
                    self._fail(batch, _closed())
                    raise
                await asyncio.sleep(0)  # those who go on at once take part in the next step
            if not self._closed:
                await self._wake.wait()

    async def _step(self, batch: Mapping[str, _Row]) -> None:
        try:
            tokens = await self._decode(batch)
        except (CapacityError, ClosedError) as error:  # nobody was given a token
            if len(batch) > 1:
                for request_id, row in batch.items():
                    await self._step({request_id: row})
                return
            self._fail(batch, error)
        except Exception as error:  # whatever the engine raises ends these, not the loop
            self._fail(batch, error)
        else:
            self.steps += 1
            self.rows += len(batch)
            for row, token in zip(batch.values(), tokens, strict=True):
                row.made.set_result(token)

    async def _decode(self, batch: Mapping[str, _Row]) -> list[int]:
        appended = [row.token for row in batch.values()]
        sampling = [row.sampling for row in batch.values()]
        if any(sampling):
            assert isinstance(self._engine, Sampler), "it was asked before the turn began"
            return await self._engine.decode_sampled(list(batch), appended, sampling)
        return await self._engine.decode(list(batch), appended)

    def _fail(self, batch: Mapping[str, _Row], error: Exception) -> None:
        """Those who have not been told yet."""
        for row in batch.values():
            if not row.made.done():
                row.made.set_exception(error)


def _closed() -> ClosedError:
    return ClosedError("CacheFlow was closed during a generation")
