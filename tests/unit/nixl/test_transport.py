"""The client's half over an agent that does as it is told."""

from __future__ import annotations

import asyncio

import pytest

from cacheflow.storage_backends.nixl import NixlTransport
from cacheflow.storage_backends.nixl.hello import Hello
from cacheflow.storage_backends.nixl.memory import OurMemory
from cacheflow.storage_backends.nixl.reactor import Reactor
from tests.cancelling import Held, cancelled_during
from tests.unit.nixl.scripted import ScriptedAgent


@pytest.mark.both_loops
async def test_a_peer_that_is_added_for_nobody_is_parted_from() -> None:
    """The thread adds it all the same after who wanted to connect was cancelled."""
    agent = ScriptedAgent()
    held = Held(agent.add)
    agent.add = held  # type: ignore[method-assign]
    reactor = Reactor(lambda: agent)
    await reactor.start()
    memory = await OurMemory.open(reactor, asyncio.get_running_loop(), 1 << 16)
    transport = NixlTransport(reactor, memory)
    answer = Hello("store", 4096, 4096, b"store").encode()
    await cancelled_during(transport.connect("peer", "host", answer), held)
    await reactor.call(lambda agent: None)
    assert agent.removed == ["store"]
    await transport.aclose()
