"""A restore without a turn behind it, in a task of its own so that others can end it or join it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cacheflow.session.prompts import agreeing
from cacheflow.tasks import to_the_end

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
        self._joining: asyncio.Task[bool] | None = None
        """Of a turn whose prompt goes on from this one."""

    @property
    def joined(self) -> Turn | None:
        """What it did, if that is all that the turn which joined it wants."""
        task = self._joining
        done = task is not None and task.done() and not task.cancelled() and not task.exception()
        return self._turn if done and task is not None and task.result() else None

    async def run(self) -> None:
        """To its end; ends early, with what is complete kept, if it is cancelled or overtaken."""
        task = self._task = asyncio.create_task(self._restore())
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await to_the_end(asyncio.wait([task]))
            raise
        finally:
            if self._joining is not None:
                self._joining.cancel()  # unless it has ended, it came too late
                await to_the_end(asyncio.wait([self._joining]))
        if not task.cancelled():
            task.result()

    def overtaken(self, prompt: Sequence[int], priority: int) -> None:
        """A turn with ``prompt`` waits: this one hurries if most of it is of use, else it ends. If
        all of it is, it goes on to the end of ``prompt``: what is new begins under the last loads.
        """
        same = agreeing(self._prompt, prompt)
        if 2 * same >= len(self._prompt):
            self._turn.hurry(priority)
            if same == len(self._prompt) < len(prompt) and self._joining is None:
                self._joining = asyncio.create_task(self._turn.lengthen(prompt))
        elif self._task is not None and self._joining is None:
            self._task.cancel()

    async def _restore(self) -> None:
        try:
            await self._turn.restore()
            await self._turn.save()
        except BaseException as error:
            await self._turn.broke(error, save=False)
            raise
