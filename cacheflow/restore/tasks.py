"""Awaiting what must not be interrupted half way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from asyncio import Future

__all__ = ["to_the_end"]

T = TypeVar("T")


async def to_the_end(task: Future[T]) -> T:
    """Await ``task`` to its end even if cancelled meanwhile; cancellation is raised afterwards.

    For short, bounded steps of which a half is worse than a delay: clean-up, a copy that a thread
    is making out of memory about to be reused.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:  # the task's own error: re-raised by result() below
            break
    if cancelled is not None:
        raise cancelled
    return task.result()
