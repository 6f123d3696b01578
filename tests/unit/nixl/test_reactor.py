"""The reactor over an agent that does as it is told."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import BackendError, ClosedError, ConfigError
from cacheflow.memory import InFlight
from cacheflow.storage_backends.nixl.flights import Flight
from cacheflow.storage_backends.nixl.pace import Service
from cacheflow.storage_backends.nixl.reactor import Reactor
from cacheflow.storage_backends.nixl.traffic import Traffic
from cacheflow.testing.storage_harness import idle
from tests.cancelling import Held, cancelled_during
from tests.unit.nixl.scripted import ScriptedAgent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.storage_backends.nixl.agent import Agent

pytestmark = pytest.mark.both_loops


class Asked:
    """A flight, the hold it has, and how its end was told."""

    def __init__(self, peer: str = "p") -> None:
        self.hold = InFlight()
        self.done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.flight = Flight("READ", peer, [(0, 8)], [(64, 8)], [self.hold], self.done.set_result)


@asynccontextmanager
async def running(agent: ScriptedAgent, depth: int = 16) -> AsyncIterator[Reactor]:
    reactor = Reactor(lambda: agent, depth=depth)
    await reactor.start()
    yield reactor
    for begun in agent.begun:
        begun.end = begun.end or True
    assert await reactor.aclose(5.0)
    assert reactor.in_flight == 0


async def turn(reactor: Reactor) -> None:
    """The thread has carried out what it was told, and has had a few turns since."""
    for _ in range(6):
        await reactor.call(lambda agent: None)


async def test_a_start_that_is_cancelled_leaves_no_thread() -> None:
    """An agent takes its time to be made; nobody would close it."""
    held = Held(ScriptedAgent)
    reactor = Reactor(held)
    await cancelled_during(reactor.start(), held)
    await asyncio.wait_for(reactor._ended.wait(), 20)


async def test_a_transfer_ends() -> None:
    """It is held until it has ended, its end is told, and all of it happens on one thread."""
    agent, asked = ScriptedAgent(), Asked()
    async with running(agent) as reactor:
        reactor.submit(asked.flight)
        await turn(reactor)
        assert asked.hold.in_flight == 1
        assert not asked.done.done()
        agent.begun[0].end = True
        assert await asked.done is None
        assert asked.hold.in_flight == 0
        assert agent.begun[0].is_released
    assert agent.threads.isdisjoint({threading.get_ident()})
    assert len(agent.threads) == 1


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_transfer_fails(at_once: bool) -> None:
    """Whether it is refused or fails on the way: the error is told and nothing is held."""
    agent, asked, error = ScriptedAgent(), Asked(), RuntimeError("no such peer")
    async with running(agent) as reactor:
        agent.refuse = error if at_once else None
        reactor.submit(asked.flight)
        await turn(reactor)
        if not at_once:
            agent.begun[0].end = error
        told = await asked.done
        assert isinstance(told, BackendError)
        assert "RuntimeError: no such peer" in str(told)
        assert [told.__traceback__, told.__cause__, told.__context__] == [None, None, None]
        assert asked.hold.in_flight == 0


async def test_an_owners_mistake_stops_nobody() -> None:
    """What an owner of memory does when it is let go may fail; the thread goes on."""
    agent, first, second = ScriptedAgent(), Asked(), Asked()

    def wrong() -> None:
        raise RuntimeError("the owner's loop is closed")

    async with running(agent) as reactor:
        for asked in (first, second):
            reactor.submit(asked.flight)
        await turn(reactor)
        first.hold.when_idle(wrong)
        for begun in agent.begun:
            begun.end = True
        assert await first.done is None
        assert await second.done is None
        assert first.hold.in_flight == second.hold.in_flight == 0


async def test_copies_happen_while_the_memory_is_held() -> None:
    """``before`` it begins and ``after`` it has ended well, on the thread; not after a failure."""
    agent, seen = ScriptedAgent(), []
    good, bad = Asked(), Asked()
    for asked in (good, bad):
        asked.flight.before = lambda: seen.append(("before", len(agent.begun)))
        asked.flight.after = lambda held=asked.hold: seen.append(("after", held.in_flight))
    async with running(agent) as reactor:
        reactor.submit(good.flight)
        reactor.submit(bad.flight)
        await turn(reactor)
        agent.begun[1].end = RuntimeError("broke")
        await bad.done
        agent.begun[0].end = True
        await good.done
    assert seen == [("before", 0), ("before", 1), ("after", 1)]


async def test_what_has_not_begun_is_taken_back() -> None:
    """Peers take turns, each with so many transfers at once; those that wait can be withdrawn,
    others not."""
    agent = ScriptedAgent()
    async with running(agent, depth=2) as reactor:
        asked = [Asked() for _ in range(4)]
        other = Asked("q")
        for each in (*asked, other):
            reactor.submit(each.flight)
        await turn(reactor)
        assert [begun.peer for begun in agent.begun] == ["p", "q", "p"]
        assert [reactor.withdraw(each.flight) for each in asked] == [False, False, True, True]
        assert [each.hold.in_flight for each in asked] == [1, 1, 0, 0]
        agent.begun[0].end = True
        await asked[0].done
        await turn(reactor)
        assert len(agent.begun) == 3
        late = Asked()
        reactor.submit(late.flight)
        await turn(reactor)
        assert len(agent.begun) == 4


async def test_parting_waits_for_what_is_in_flight() -> None:
    """A peer is removed only when nothing is in flight with it; what waits or comes then is
    refused."""
    agent, asked, waiting, late = ScriptedAgent(), Asked(), Asked(), Asked()
    async with running(agent, depth=1) as reactor:
        reactor.submit(asked.flight)
        reactor.submit(waiting.flight)
        await turn(reactor)
        parted = reactor.part("p")
        assert isinstance(await waiting.done, BackendError)
        reactor.submit(late.flight)
        await turn(reactor)
        assert not parted.done()
        assert agent.removed == []
        agent.begun[0].end = True
        await parted
        assert agent.removed == ["p"]
        assert isinstance(await late.done, BackendError)
        assert len(agent.begun) == 1


async def test_idle_means_no_looks() -> None:
    """The thread sleeps with nothing in flight, and serves peers only while it is told to."""
    agent, asked = ScriptedAgent(), Asked()
    async with running(agent) as reactor:
        reactor.submit(asked.flight)
        await turn(reactor)
        agent.begun[0].end = True
        await asked.done
        looks = agent.begun[0].looks
        await turn(reactor)
        assert (agent.begun[0].looks, agent.turns) == (looks, 0)
        reactor.serve(0.001)
        assert await asyncio.to_thread(agent.served.wait, 5)
        reactor.serve(None)
        await turn(reactor)
        turns = agent.turns
        await turn(reactor)
        assert agent.turns == turns


@pytest.mark.parametrize(("took", "found"), [(300e-6, False), (600e-6, True)])
def test_a_look_that_took_the_processor_found_something(took: float, found: bool) -> None:
    """NIXL does not say so; peers that move data are then looked after often again."""
    times = iter([1.0, 1.0 + took])
    traffic = Traffic(1, lambda flight, error: None, processor_time=lambda: next(times))
    traffic.service = Service(longest=0.008, last=-1.0)
    traffic.turn(ScriptedAgent())
    assert (traffic.service.last > -1.0) is found


async def test_orders_wait_for_transfers_of_their_memory() -> None:
    """What must not happen under a transfer happens when none of those that were accepted touches
    the memory any more; others do not count."""
    agent, asked, waiting = ScriptedAgent(), Asked(), Asked()
    done: list[str] = []
    async with running(agent, depth=1) as reactor:
        reactor.submit(asked.flight)  # both touch bytes 0 to 7
        reactor.submit(waiting.flight)
        reactor.order(lambda agent: done.append("touched"), after=(7, 8))
        reactor.order(lambda agent: done.append("beside"), after=(8, 8))
        await turn(reactor)
        assert done == ["beside"]
        agent.begun[0].end = True
        await asked.done
        await turn(reactor)
        assert done == ["beside"]
        agent.begun[1].end = True
        await waiting.done
        await turn(reactor)
        assert done == ["beside", "touched"]


async def test_closing_is_bounded() -> None:
    """With a transfer hung, closing tells everybody, holds what may be touched, and the thread
    goes on until it has ended."""
    agent = ScriptedAgent()
    reactor = Reactor(lambda: agent, depth=1)
    await reactor.start()
    hung, waiting = Asked(), Asked()
    reactor.submit(hung.flight)
    reactor.submit(waiting.flight)
    await turn(reactor)
    assert not await reactor.aclose(0.05)
    for asked in (hung, waiting):
        assert isinstance(await asked.done, ClosedError)
    assert (hung.hold.in_flight, waiting.hold.in_flight) == (1, 0)
    with pytest.raises(ClosedError):
        await reactor.call(lambda agent: None)
    with pytest.raises(ClosedError):
        reactor.submit((late := Asked()).flight)
    assert late.hold.in_flight == 0
    agent.begun[0].end = True
    await idle(hung.hold)
    assert await reactor.aclose(5.0)


async def test_calls_are_answered() -> None:
    """A call's result or error comes back; one that closing overtakes ends with ClosedError."""
    agent, gate = ScriptedAgent(), threading.Event()

    def wrong(agent: Agent) -> None:
        raise RuntimeError("wrong")

    def slow(agent: Agent) -> None:
        gate.wait(5)

    reactor = Reactor(lambda: agent)
    await reactor.start()
    assert await reactor.call(lambda agent: agent.metadata()) == b"metadata"
    with pytest.raises(BackendError, match="RuntimeError: wrong"):
        await reactor.call(wrong)
    calls = [asyncio.ensure_future(reactor.call(slow)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not await reactor.aclose(0.05)
    for call in calls:
        with pytest.raises(ClosedError):
            await call
    gate.set()
    assert await reactor.aclose(5.0)


async def test_the_agent_dies_on_its_thread() -> None:
    """Whoever keeps an error of a transfer or a call keeps nothing of NIXL alive by it."""

    class Refusing(ScriptedAgent):
        def begin(self, *args: object) -> object:
            raise RuntimeError("no such peer")

        def metadata(self) -> bytes:
            raise RuntimeError("none")

    made: list[weakref.ref[ScriptedAgent]] = []

    def make() -> Agent:
        agent = Refusing()
        made.append(weakref.ref(agent, lambda ref: died.append(threading.get_ident())))
        return agent

    died: list[int] = []
    reactor, asked = Reactor(make), Asked()
    await reactor.start()
    reactor.submit(asked.flight)
    told = await asked.done
    with pytest.raises(BackendError, match="none") as caught:
        await reactor.call(lambda agent: agent.metadata())
    gc.disable()  # or else it could hide the fault
    try:
        assert await reactor.aclose(5.0)
    finally:
        gc.enable()
    assert isinstance(told, BackendError)
    assert "no such peer" in str(told)
    assert caught.value.is_temporary
    assert made[0]() is None
    assert died != [threading.get_ident()]


async def test_no_agent() -> None:
    """What keeps the agent from being made is what starting raises."""

    def cannot() -> Agent:
        raise ConfigError("not here")

    with pytest.raises(ConfigError, match="not here"):
        await Reactor(cannot).start()
