"""What is made although its maker was cancelled is undone, and nothing interrupts that."""

from __future__ import annotations

import asyncio

import pytest

from cacheflow.tasks import Lasting, all_or_nothing, to_the_end

pytestmark = pytest.mark.both_loops


class Steps:
    """Makes and undoes something, each step when it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.undone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.told: list[str] = []
        self._error = error

    async def make(self) -> str:
        self.told.append(await self.made)
        if self._error is not None:
            raise self._error
        return "thing"

    async def undo(self, thing: str) -> None:
        self.told.append(f"undo {thing}")
        await self.undone
        self.told.append("undone")


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_made_is_the_callers() -> None:
    """Without a cancellation nothing is undone."""
    steps = Steps()
    steps.made.set_result("made")
    assert await all_or_nothing(steps.make(), steps.undo) == "thing"
    assert steps.told == ["made"]


async def test_cancelled_it_is_made_to_the_end_and_undone() -> None:
    """However often: the cancellation is raised when there is nothing left of it."""
    steps = Steps()
    task = asyncio.create_task(all_or_nothing(steps.make(), steps.undo))
    await some_turns()
    for step in (steps.made, steps.undone):
        for _ in range(2):
            task.cancel()
            await some_turns()
            assert not task.done()
        step.set_result("made")  # type: ignore[arg-type]  # nobody reads that of the second
        await some_turns()
    assert task.cancelled()
    assert steps.told == ["made", "undo thing", "undone"]


async def test_what_fails_while_cancelled_needs_no_undoing() -> None:
    """Its error is nobody's any more."""
    steps = Steps(OSError("no"))
    task = asyncio.create_task(all_or_nothing(steps.make(), steps.undo))
    await some_turns()
    task.cancel()
    await some_turns()
    steps.made.set_result("failed")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.told == ["failed"]


async def test_an_error_is_the_callers() -> None:
    """As it was raised, whichever of the two waits."""
    steps = Steps(OSError("no"))
    steps.made.set_result("failed")
    with pytest.raises(OSError, match="no"):
        await all_or_nothing(steps.make(), steps.undo)
    with pytest.raises(OSError, match="no"):
        await to_the_end(steps.make())


async def test_what_lasts_ends_once_it_has_begun() -> None:
    """Whatever happens inside; where it could not begin there is nothing to end."""
    told: list[str] = []

    async def begin() -> None:
        told.append("begin")

    async def end() -> None:
        told.append("end")

    async def fail() -> None:
        raise RuntimeError("cannot begin")

    with pytest.raises(ValueError, match="inside"):
        async with Lasting(begin, end):
            raise ValueError("inside")
    with pytest.raises(RuntimeError, match="cannot begin"):
        async with Lasting(fail, end):
            told.append("never")
    assert told == ["begin", "end"]
