"""The compute thread of a rank, of which there is one here: what it does when work breaks off."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from cacheflow.errors import ClosedError, PeerError
from cacheflow.plugins.tensor_parallel.conductor import Conductor
from cacheflow.types import Offering

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.plugins.tensor_parallel.group import Group


class Alone:
    """A group of one. ``fails``: from now on exchanges do."""

    rank, size = 0, 1
    broken = fails = False

    def exchange(self, data: bytes) -> list[bytes]:
        if self.fails:
            self.broken = True
            raise PeerError("another rank is gone")
        return [data]

    exchange_any = exchange

    def check(self) -> None:
        if self.broken:
            raise PeerError("a sum was not done in 60 s")


@pytest.fixture
async def group() -> Alone:
    return Alone()


@pytest.fixture
async def conductor(group: Alone) -> AsyncIterator[Conductor]:
    made = Conductor(1, cast("Group", group), deadline=30.0)
    yield made
    await made.stop(5.0)


def broken_off() -> Any:
    raise MemoryError("no room on the device")


async def test_calls_are_made_and_answered(conductor: Conductor) -> None:
    made = await asyncio.gather(*(conductor.call(f"call {i}", partial(int, i)) for i in range(40)))
    assert made == list(range(40))


async def test_what_breaks_off_here_ends_everything(conductor: Conductor) -> None:
    """Other ranks may be in the middle of it: who asked gets the error, and nothing is exchanged
    any more, or an exchange could be taken for what they wait for."""
    with pytest.raises(MemoryError, match="no room"):
        await conductor.call("decode", broken_off)
    with pytest.raises(PeerError, match="broke off what all ranks were doing"):
        await conductor.call("another", lambda: 1)
    with pytest.raises(PeerError, match="broke off"):
        await conductor.meet("r/1", Offering(()))


async def test_what_was_not_added_up_is_not_an_answer(conductor: Conductor, group: Alone) -> None:
    """On a GPU a layer ends also where its sums were given up: with whatever was in memory."""

    def give_up() -> int:
        group.broken = True
        return 7

    with pytest.raises(PeerError, match="a sum was not done"):
        await conductor.call("decode", give_up)
    with pytest.raises(PeerError, match="a sum was not done"):
        await conductor.call("another", lambda: 1)


async def test_what_all_ranks_refuse_ends_nothing(conductor: Conductor) -> None:
    """An error that every rank raises by the same rule leaves them in step."""

    def refused() -> None:
        raise PeerError("they have to forget the same")

    with pytest.raises(PeerError, match="forget the same"):
        await conductor.call("meet", refused)
    assert await conductor.call("another", lambda: 1) == 1


async def test_a_rank_that_is_gone_is_told_to_everybody(conductor: Conductor, group: Alone) -> None:
    assert await conductor.meet("r/1", Offering((), strange=3)) == Offering((), strange=3)
    group.fails = True
    with pytest.raises(PeerError, match="another rank is gone"):
        await conductor.call("decode", lambda: 1)
    with pytest.raises(PeerError, match="another rank is gone"):
        await conductor.call("decode", lambda: 1)
    assert await conductor.submit(lambda: 2) == 2, "what needs no other rank goes on"


async def test_who_waits_when_it_is_stopped_is_told(conductor: Conductor, group: Alone) -> None:
    await conductor.stop(5.0)
    with pytest.raises(ClosedError):
        await conductor.call("decode", lambda: 1)
