"""A restore without a turn behind it, in a task of its own so that others can end it or join it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cacheflow.restore.tasks import to_the_end
from cacheflow.session.prompts import agreeing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.session.turn import Turn

__all__ = ["Prefetch"]


class Prefetch:
    """Restores ``prompt`` by ``turn``, and stores what is new of it."""

    def __init__(self, turn: Turn, prompt: Sequence[int]) -> None:
        self._turn = turn
        self._prompt = prompt
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """To its end; ends early, with what is complete kept, if it is cancelled or overtaken."""
        task = self._task = asyncio.create_task(self._restore())
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await to_the_end(asyncio.ensure_future(asyncio.wait([task])))
            raise
        if not task.cancelled():
            task.result()

    def overtaken(self, prompt: Sequence[int], priority: int) -> None:
        """A turn with ``prompt`` waits: this one hurries if most of it is of use, else it ends."""
        if 2 * agreeing(self._prompt, prompt) >= len(self._prompt):
            self._turn.hurry(priority)
        elif self._task is not None:
            self._task.cancel()

    async def _restore(self) -> None:
        try:
            await self._turn.restore()
            await self._turn.save()
        except BaseException as error:
            await self._turn.broke(error, save=False)
            raise
