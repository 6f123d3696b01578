"""One agent at work: its thread, our memory as it knows it, and the stores that it knows.

A transfer that never ends cannot be taken back, and as long as it hangs its store cannot be greeted
anew by the same agent. :meth:`Worker.hindrance` says so; what then is its owner's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from cacheflow.errors import BackendError
from cacheflow.storage_backends.nixl.link import NixlLink
from cacheflow.storage_backends.nixl.memory import start_agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.storage_backends.nixl.agent import Agent
    from cacheflow.storage_backends.nixl.hello import Hello
    from cacheflow.storage_backends.nixl.memory import OurMemory
    from cacheflow.storage_backends.nixl.reactor import Reactor
    from cacheflow.types import Buffer

__all__ = ["Worker", "connect_error"]

_CLOSE_SECONDS: Final = 1.0
_PART_SECONDS: Final = 1.0
"""How long what is in flight on a link that was given up has to end before it counts as hung."""
_STUCK_SECONDS: Final = 2.0
"""NIXL does not wait: a thread that is in it for so long may never come back."""


@dataclass(slots=True)
class _Parting:
    """From a store: done when nothing is in flight with it any more."""

    done: asyncio.Future[None]
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Known:
    """A store that the agent knows."""

    links: int = 0
    parting: _Parting | None = None


class Worker:
    """Use :meth:`start`. Belongs to the loop."""

    def __init__(self, reactor: Reactor, memory: OurMemory) -> None:
        self.reactor: Final = reactor
        self.memory: Final = memory
        self._known: dict[str, _Known] = {}
        self._links = 0
        self._loans: dict[object, Callable[[], None]] = {}

    @classmethod
    async def start(cls, make_agent: Callable[[], Agent], depth: int, slab_bytes: int) -> Self:
        """``depth``: most transfers with one store at once.

        Raises:
            ConfigError: there can be no agent here, or it takes no memory.
        """
        return cls(*await start_agent(make_agent, depth, slab_bytes))

    @property
    def is_idle(self) -> bool:
        """Whether nobody has a link, nothing can touch memory any more, and the thread is there."""
        return not (self._links or self.reactor.in_flight or self._is_stuck)

    @property
    def _is_stuck(self) -> bool:
        return self.reactor.stuck_seconds > _STUCK_SECONDS

    def register(self, token: object, memory: Buffer) -> None:
        """Transfer to and from ``memory`` as it lies, until :meth:`deregister`."""
        self._loans[token] = self.memory.register_memory(memory)

    def deregister(self, token: object) -> None:
        """No transfer that begins from now on uses it so."""
        self._loans.pop(token)()

    async def hindrance(self, agent: str) -> str:
        """Why a link to the store called ``agent`` cannot be made here; empty if it can.

        Waits for what is under way on a link that was closed a moment ago.
        """
        if self._is_stuck:
            return f"NIXL has not come back for {self.reactor.stuck_seconds:.0f} s"
        if self.memory.is_worn:
            return f"{self.memory.quarantined_bytes} bytes are held by transfers that hang"
        known = self._known.get(agent)
        if known is None or known.parting is None:
            return ""
        parting = known.parting
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, parting.since + _PART_SECONDS - time.monotonic())):
                await asyncio.shield(parting.done)
        if parting.done.done():
            return ""
        seconds = time.monotonic() - parting.since
        return f"transfers of an older connection have not ended for {seconds:.0f} s"

    async def connect(self, peer: str, hello: Hello) -> NixlLink:
        """A link to the store that said ``hello``; ``peer`` is its name in messages.

        Raises:
            BackendError: NIXL does not take it.
        """
        self._links += 1
        try:
            known = await self._get_to_know(peer, hello)
        except BaseException:
            self._links -= 1
            raise
        closed = partial(self._closed, hello.agent, known)
        return NixlLink(hello.agent, hello, self.reactor, self.memory, closed)

    async def aclose(self) -> bool:
        """Bounded; False if transfers go on, whose memory is left to them."""
        has_ended = await self.reactor.aclose(_CLOSE_SECONDS)
        await self.memory.aclose()
        return has_ended

    async def _get_to_know(self, peer: str, hello: Hello) -> _Known:
        known = self._known.get(hello.agent)
        if known is None or known.parting is not None:
            await self._add(peer, hello)
            known = self._known.get(hello.agent)
            if known is None or known.parting is not None:  # else somebody else was faster
                known = self._known[hello.agent] = _Known()
                self.memory.welcome(hello.agent)
        known.links += 1
        return known

    async def _add(self, peer: str, hello: Hello) -> None:
        try:
            name = await self.reactor.call(lambda agent: agent.add(hello.metadata))
        except BackendError as error:
            raise connect_error(peer, f"cannot be reached through NIXL ({error})") from None
        except asyncio.CancelledError:  # it may be added all the same, and nobody would part
            if hello.agent not in self._known:
                self.reactor.part(hello.agent)
            raise
        if name != hello.agent:
            self.reactor.part(name)
            raise connect_error(peer, f"calls itself {hello.agent!r}, and is {name!r}")

    def _closed(self, agent: str, known: _Known) -> None:
        """A link to ``agent`` was closed: the last one ends the acquaintance."""
        self._links -= 1
        known.links -= 1
        if known.links == 0:
            self.memory.dismiss(agent)
            known.parting = _Parting(self.reactor.part(agent))
            known.parting.done.add_done_callback(lambda done: self._forget(agent, known))

    def _forget(self, agent: str, known: _Known) -> None:
        if self._known.get(agent) is known:
            del self._known[agent]


def connect_error(peer: str, reason: str) -> BackendError:
    """For :meth:`cacheflow.pool.Transport.connect`."""
    return BackendError(reason, operation="connect", context=peer, is_temporary=True)
