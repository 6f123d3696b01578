"""What the conformance suite needs to know about one backend, and what its tests share."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from cacheflow.types import ObjectKey, Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.memory import InFlight
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import TransferResult

__all__ = [
    "PATIENCE",
    "BackendHarness",
    "Pause",
    "idle",
    "load_all",
    "step_and_cancel",
    "store_all",
]

PATIENCE: Final = 20.0
"""Seconds after which something that must happen is taken not to happen."""


class Pause:
    """Holds up I/O: the backend's thread or task sets ``began`` and waits for ``go``.

    ``abortable``: cancelling really ends the I/O, so that nothing may be held after it.
    """

    def __init__(self, *, abortable: bool = False) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.abortable = abortable

    def wait(self) -> None:
        """Called where the I/O would touch the caller's buffer, on a thread of the backend."""
        self.began.set()
        self.go.wait(PATIENCE)

    async def until_began(self) -> None:
        """Wait until I/O has been held up."""
        assert await asyncio.to_thread(self.began.wait, PATIENCE), "no I/O began"


class BackendHarness:
    """Hooks that an implementer fills in; the ``raw_`` ones go behind the backend's back."""

    model_share: ClassVar[float] = 0.25
    """Of the hypothesis profile's examples, how many the comparison with a dictionary plays: fewer
    where opening the backend takes long, which each of them does several times."""

    @abstractmethod
    async def open_backend(self, where: Path) -> StorageBackend:
        """Open the backend with its data (if it keeps any) in the empty folder ``where``.

        Called again with the same folder it opens the same store.
        """

    @abstractmethod
    async def raw_get(self, backend: StorageBackend, key: ObjectKey) -> bytes | None:
        """The stored bytes of an object as they lie in the medium, or None."""

    @abstractmethod
    async def raw_set(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> bool:
        """Put ``data`` in the place of ``stored``, as damage or another writer would.

        False if that cannot happen in this medium (memory does not get shorter, say).
        """

    async def leftovers(self, backend: StorageBackend) -> Sequence[str]:
        """Names of temporary things in the medium: there are none when nothing is running."""
        return ()

    async def open_small(self, where: Path) -> StorageBackend | None:
        """A backend with room for at least two but not for sixteen objects of 28 KiB."""
        return None

    def paused(self, backend: StorageBackend) -> AbstractContextManager[Pause] | None:
        """While in the context, reads and writes wait before they touch the caller's memory.

        None if there is no way to do that; on leaving the context everything goes on.
        """
        return None

    # -- shared by the tests -------------------------------------------------------------------

    @asynccontextmanager
    async def opened(self, where: Path) -> AsyncIterator[StorageBackend]:
        """The backend, closed afterwards; nothing temporary may be left."""
        backend = await self.open_backend(where)
        try:
            yield backend
            assert not await self.leftovers(backend)
        finally:
            await backend.aclose()

    def pause(self, backend: StorageBackend) -> AbstractContextManager[Pause]:
        """:meth:`paused`, or the test is skipped."""
        context = self.paused(backend)
        if context is None:
            pytest.skip("capability: this harness has no way to hold up I/O")
        return context

    async def damage(self, backend: StorageBackend, stored: StoredObject, data: bytes) -> None:
        """:meth:`raw_set`, or the test is skipped."""
        if not await self.raw_set(backend, stored, data):
            pytest.skip("capability: objects in this medium cannot be damaged like that")

    async def bytes_of(self, backend: StorageBackend, stored: StoredObject) -> bytes:
        """The object read whole through the backend."""
        from cacheflow.testing.objects import load_one

        result, data = await load_one(backend, stored.key, 0, len(stored.data))
        assert result.status is TransferStatus.OK, result
        return data


async def store_all(backend: StorageBackend, *objects: StoredObject) -> None:
    """Store ``objects`` in one batch; all must succeed."""
    results = await backend.store([each.write() for each in objects])
    assert [result.status for result in results] == [TransferStatus.OK] * len(objects), results


async def load_all(backend: StorageBackend, reads: Sequence[Read]) -> list[TransferResult]:
    """All results, in the order in which they came."""
    return [result async for result in backend.load(reads)]


async def idle(hold: InFlight) -> None:
    """Wait until nothing is in flight on ``hold``."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def resolve() -> None:
        if not ended.done():
            ended.set_result(None)

    def from_any_thread() -> None:
        loop.call_soon_threadsafe(resolve)

    hold.when_idle(from_any_thread)
    await asyncio.wait_for(ended, PATIENCE)


async def step_and_cancel(work: Coroutine[object, object, object], steps: int) -> bool:
    """Let ``work`` run for ``steps`` turns of the loop and cancel it; True if it was done first."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        if task.done():
            break
        await asyncio.sleep(0)
    was_done = task.done()
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.done(), "cancelling did not end it"
    if not task.cancelled():
        task.result()
    return was_done
