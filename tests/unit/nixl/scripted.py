"""An agent that does as it is told: transfers end, fail or hang when the test says so."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.storage_backends.nixl.agent import Range, Way
    from cacheflow.types import MemoryKind


async def until(reached: Callable[[], bool]) -> None:
    """Look again and again: threads tell tests nothing."""
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@dataclass(eq=False)
class Begun:
    """A transfer, until :attr:`end` says that it has ended (or how it failed)."""

    way: Way
    peer: str
    ours: Sequence[Range]
    kind: MemoryKind
    theirs: Sequence[Range]
    end: bool | Exception = False
    looks: int = 0
    is_released: bool = False


@dataclass
class ScriptedAgent:
    """Belongs to the reactor's thread, but for what tests look at."""

    begun: list[Begun] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    regions: list[object] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    turns: int = 0
    served: threading.Event = field(default_factory=threading.Event)
    refuse: Exception | None = None

    def register(self, address: int, nbytes: int, kind: MemoryKind) -> object:
        self.threads.add(threading.get_ident())
        region = (address, nbytes, kind)
        self.regions.append(region)
        return region

    def deregister(self, registered: object) -> None:
        self.regions.remove(registered)

    def metadata(self) -> bytes:
        return b"metadata"

    def add(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove(self, peer: str) -> None:
        assert not [each for each in self.begun if each.peer == peer and not each.is_released]
        self.removed.append(peer)

    def begin(
        self, way: Way, peer: str, ours: Sequence[Range], kind: MemoryKind, theirs: Sequence[Range]
    ) -> object:
        self.threads.add(threading.get_ident())
        if self.refuse is not None:
            raise self.refuse
        self.begun.append(Begun(way, peer, ours, kind, theirs))
        return self.begun[-1]

    def has_ended(self, transfer: object) -> bool:
        assert isinstance(transfer, Begun)
        transfer.looks += 1
        if isinstance(transfer.end, Exception):
            raise transfer.end
        return transfer.end

    def release(self, transfer: object) -> None:
        assert isinstance(transfer, Begun)
        assert transfer.end
        transfer.is_released = True

    def progress(self) -> None:
        self.turns += 1
        self.served.set()
