"""Storage that goes wrong on purpose: a seeded decorator for any backend.

::

    slow = Fault(FaultKind.SLOW, "load", rate=0.1, seconds=0.5)
    gone = Fault(FaultKind.DISCONNECT, "*", after=10.0, duration=5.0)
    backend = FaultyBackend(inner, [slow, gone], seed=7)

What a strike means is here, when there is one in :mod:`cacheflow.testing.fault_schedule`. Obeys the
storage contract in all else: holds above all. Knows no restorer.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final, Self

from cacheflow.abc import StorageBackend
from cacheflow.clock import SystemClock
from cacheflow.errors import BackendError, CapacityError, ClosedError, ConfigError
from cacheflow.testing.fault_schedule import Fault, FaultKind, Schedule
from cacheflow.types import Read, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

    from cacheflow.clock import Clock
    from cacheflow.types import Buffer, ChunkInfo, ChunkKey, ObjectKey, StorePart, Write

__all__ = ["Fault", "FaultKind", "FaultyBackend"]

_NEVER_WRITTEN: Final = 0xAA
"""What lies where a short read ended."""
_LATE: Final = 0xEE
"""What hung I/O writes when it ends after all, into memory that nobody may have reused."""
_PASS: Final = frozenset(
    {None, FaultKind.SLOW, FaultKind.SHORT, FaultKind.TORN, FaultKind.FLIP, FaultKind.STALE}
)
"""Reads that reach the store, and whose results come at once."""
_UNSTORED: Final = frozenset({FaultKind.LOST, FaultKind.FULL, FaultKind.EIO})


class FaultyBackend(StorageBackend):
    """``inner``, struck by faults; the first that strikes an operation is the one that happens.

    Closing it closes ``inner``. Payloads are copied when stored while a ``STALE`` fault is in
    place, so that there is something older to give.
    """

    name: ClassVar[str] = "faulty"

    def __init__(
        self,
        inner: StorageBackend,
        faults: Iterable[Fault] = (),
        *,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self._schedule = Schedule(seed, clock or SystemClock())
        self._chance = random.Random(seed)
        self.hanging = asyncio.Event()
        """Set while something hangs."""
        self._gate = asyncio.Event()
        """What hangs waits for it."""
        self._abandoned: list[Buffer] = []
        """Held by I/O that hangs although nobody waits for it any more."""
        self._versions: dict[ObjectKey, tuple[bytes, bytes]] = {}
        """The latest version and the one before it."""
        self._closed = False
        self.inject(*faults)

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """There is nothing to open by name: wrap a backend."""
        raise ConfigError("the faulty backend is for tests: FaultyBackend(inner, faults)")

    # -- control -------------------------------------------------------------------------------

    @property
    def strikes(self) -> Counter[FaultKind]:
        """How often each kind has happened."""
        return self._schedule.strikes

    def inject(self, *faults: Fault) -> None:
        """Put ``faults`` in place, behind those that are; their times count from now."""
        for fault in faults:
            self._schedule.inject(fault)

    def heal(self) -> None:
        """No faults from now on; what hangs goes on."""
        self._schedule.clear()
        self.release()

    def release(self) -> None:
        """What hangs goes on: to its end where somebody waits for it; else it writes late, into
        the buffer it was given, and only then lets go of that."""
        self._gate.set()
        self._gate = asyncio.Event()
        self.hanging.clear()
        abandoned, self._abandoned = self._abandoned, []
        for buffer in abandoned:
            if buffer.view is not None and not buffer.view.readonly:
                buffer.view[:] = bytes([_LATE]) * buffer.nbytes
            buffer.hold.release()

    # -- contract ------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        self._check()
        fault = await self._call("lookup")
        found = await self.inner.lookup(keys)
        return found[: len(keys) // 2] if fault is not None else found

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        self._check()
        held = Counter(map(id, reads))
        for read in reads:
            read.buffer.hold.acquire()
        hung: list[Read] = []
        try:
            struck = self._strike_each("load", len(reads))
            faults = {id(read): fault for read, fault in zip(reads, struck, strict=True) if fault}
            hung = [read for read in reads if _kind(faults, read) is FaultKind.HANG]
            async with aclosing(self._load(reads, faults)) as results:
                async for result in results:
                    _let_go(held, result.request)
                    yield result
            if hung:
                await self._hang()
                late, hung = hung, []
                async with aclosing(self.inner.load(late)) as results:
                    async for result in results:
                        _let_go(held, result.request)
                        yield result
        finally:
            self._abandoned += [read.buffer for read in hung]
            held.subtract(map(id, hung))
            for read in reads:
                _let_go(held, read)

    async def _load(
        self, reads: Sequence[Read], faults: Mapping[int, Fault]
    ) -> AsyncGenerator[TransferResult, None]:
        """All that does not hang: errors first, the rest as the store gives it."""
        kinds = {id(read): _kind(faults, read) for read in reads}
        for read in reads:
            if kinds[id(read)] is FaultKind.EIO:
                yield TransferResult(read, TransferStatus.FAILED, 0, 0.0, _io_error("load"))
        rest = [read for read in reads if kinds[id(read)] in _PASS]
        raises = FaultKind.RAISE in kinds.values()
        given = 0
        async with aclosing(self.inner.load(rest)) as results:
            async for result in results:
                if raises and given >= len(rest) // 2:
                    break
                given += 1
                fault = faults.get(id(result.request))
                if fault is not None and fault.kind is FaultKind.SLOW:
                    await asyncio.sleep(fault.seconds)
                elif fault is not None:
                    result = self._altered(result, fault.kind)
                yield result
        if raises:
            raise RuntimeError("injected: the transport broke in the middle of a batch")

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        self._check()
        held = [part for write in writes for part in write.parts]
        for part in held:
            part.hold.acquire()
        hangs = False
        try:
            faults = self._strike_each("store", len(writes))
            kinds = [None if fault is None else fault.kind for fault in faults]
            if hangs := FaultKind.HANG in kinds:
                await self._hang()
                hangs = False
            await asyncio.sleep(sum(f.seconds for f in faults if f and f.kind is FaultKind.SLOW))
            pairs = list(zip(writes, kinds, strict=True))
            stored = iter(await self._store([w for w, kind in pairs if kind not in _UNSTORED]))
            results = [
                _unstored(write, kind) if kind in _UNSTORED else next(stored)
                for write, kind in pairs
            ]
        finally:
            if hangs:
                self._abandoned += held
            else:
                for part in held:
                    part.hold.release()
        if FaultKind.RAISE in kinds:
            raise RuntimeError("injected: the answer to a store was lost")
        return [r for r, kind in zip(results, kinds, strict=True) if kind is not FaultKind.PARTIAL]

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        await self._call("delete")
        return await self.inner.delete(keys)

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        self._check()
        await self._call("scan")
        async for info in self.inner.scan():
            yield info

    async def used_bytes(self) -> int:
        self._check()
        return await self.inner.used_bytes()

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        return self.inner.register_memory(memory)

    def parts(self) -> Sequence[StorePart]:
        return self.inner.parts()

    async def aclose(self) -> None:
        """Whoever waits for what hangs gets ClosedError; the buffers stay held until released."""
        if not self._closed:
            self._closed = True
            self._gate.set()
            await self.inner.aclose()

    # -- strikes -------------------------------------------------------------------------------

    def _strike_each(self, operation: str, count: int) -> list[Fault | None]:
        """Of each read or write of a batch; a disconnection is of all."""
        faults = [self._schedule.strike(operation) for _ in range(count)]
        if any(fault is not None and fault.kind is FaultKind.DISCONNECT for fault in faults):
            raise _disconnected(operation)
        return faults

    async def _call(self, operation: str) -> Fault | None:
        """An operation struck as a whole; the fault that is left to happen to its answer."""
        fault = self._schedule.strike(operation)
        if fault is None:
            return None
        match fault.kind:
            case FaultKind.SLOW:
                await asyncio.sleep(fault.seconds)
            case FaultKind.HANG:
                await self._hang()
            case FaultKind.EIO:
                raise _io_error(operation)
            case FaultKind.DISCONNECT:
                raise _disconnected(operation)
            case FaultKind.RAISE:
                raise RuntimeError(f"injected: a mistake in {operation}")
            case _:
                return fault
        return None

    async def _hang(self) -> None:
        self.hanging.set()
        await self._gate.wait()
        self._check()

    def _altered(self, result: TransferResult, kind: FaultKind) -> TransferResult:
        """``result`` and its bytes, as the fault leaves them."""
        read = result.request
        if result.status is not TransferStatus.OK or not isinstance(read, Read):
            return result
        view = read.buffer.view
        if view is None:
            raise ValueError("faults alter host memory only")
        half = len(view) // 2
        match kind:
            case FaultKind.FLIP:
                view[self._chance.randrange(len(view))] ^= 1 << self._chance.randrange(8)
            case FaultKind.STALE:
                view[:] = self._older(read, len(view))
            case _:
                view[half:] = bytes([_NEVER_WRITTEN]) * (len(view) - half)
        if kind is FaultKind.SHORT:
            return replace(result, status=TransferStatus.SHORT, nbytes=half)
        return result

    def _older(self, read: Read, nbytes: int) -> bytes:
        _, older = self._versions.get(read.key, (b"", b""))
        return older[read.offset : read.offset + nbytes].ljust(nbytes, b"\0")

    async def _store(self, writes: Sequence[Write]) -> list[TransferResult]:
        if not writes:
            return []
        if FaultKind.STALE in self._schedule:
            for write in writes:
                data = b"".join(bytes(part.view or b"") for part in write.parts)
                latest, _ = self._versions.get(write.info.key, (b"", b""))
                self._versions[write.info.key] = (data, latest)
        return await self.inner.store(writes)

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the faulty tier is closed")


def _kind(faults: Mapping[int, Fault], read: Read) -> FaultKind | None:
    fault = faults.get(id(read))
    return None if fault is None else fault.kind


def _let_go(held: Counter[int], request: Read | Write) -> None:
    """Once for each time that it is still held."""
    if held[id(request)] > 0 and isinstance(request, Read):
        held[id(request)] -= 1
        request.buffer.hold.release()


def _unstored(write: Write, kind: FaultKind | None) -> TransferResult:
    if kind is FaultKind.LOST:
        return TransferResult(write, TransferStatus.OK, write.nbytes, 0.0)
    if kind is FaultKind.FULL:
        error = CapacityError("injected: no space left on device")
        return TransferResult(write, TransferStatus.FULL, 0, 0.0, error)
    return TransferResult(write, TransferStatus.FAILED, 0, 0.0, _io_error("store"))


def _io_error(operation: str) -> BackendError:
    return BackendError("injected: input/output error", operation=operation)


def _disconnected(operation: str) -> BackendError:
    return BackendError("injected: connection lost", operation=operation, is_temporary=True)
