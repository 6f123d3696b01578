"""A tier that may be slow, hung or dead, made safe to ask: deadlines, and a breaker.

Every operation has a deadline that follows from its bytes and from what the channel delivers. A
tier that fails or is late too often is set aside: lookups find nothing, reads and writes are
refused, all at once; a task of the tier's own then probes it until it is well again, so that no
request is spent on finding out. What could not be read although it was listed is a miss for a
while. Knows no index, capacity or request, and verifies nothing: see :meth:`Guarded.distrust`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar, Final, Self, TypeVar

from cacheflow.abc import StorageBackend
from cacheflow.clock import SystemClock
from cacheflow.errors import BackendError, ClosedError, ConfigError
from cacheflow.tasks import no_strays
from cacheflow.tiers.cutoff import Cutoff
from cacheflow.tiers.doubts import Doubts
from cacheflow.tiers.health import Ailment
from cacheflow.tiers.patience import Patience
from cacheflow.tiers.probe import BadObjectError, probe
from cacheflow.tiers.recovery import Recovery
from cacheflow.types import Lent, Loan, Read, TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        Sequence,
    )

    from cacheflow.clock import Clock
    from cacheflow.tiers.health import Health, HealthLimits
    from cacheflow.types import (
        Buffer,
        ChunkInfo,
        ChunkKey,
        Extent,
        ObjectKey,
        Observer,
        StorePart,
        Write,
    )

__all__ = ["Guarded"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_NAMES_SECONDS: Final = 2.0
_NAME_SECONDS: Final = 0.01
"""Operations on names: seconds, and seconds a name."""
_CLOSE_SECONDS: Final = 5.0
_KNOWN: Final = 4
_OVERDUE: Final = 0.25
"""Share of its deadline after which an operation that was given up counts against the tier."""
_AILMENTS: Final = {
    TransferStatus.SHORT: Ailment.SHORT,
    TransferStatus.FAILED: Ailment.FAILED,
    TransferStatus.LATE: Ailment.LATE,
}
"""What is wrong with a tier; a missing object or a full disk is not."""


class Guarded(StorageBackend):
    """``inner``, called ``channel`` in events. Closing it closes ``inner``.

    ``deadline``: seconds that no operation may exceed. Reads and writes are judged apart: a store
    that can only be read is still read.
    """

    name: ClassVar[str] = "guarded"

    def __init__(
        self,
        inner: StorageBackend,
        channel: str,
        *,
        deadline: float = 30.0,
        limits: HealthLimits | None = None,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.refused: Counter[str] = Counter()
        """Keys, reads and writes that a sick tier was not asked for, by operation."""
        self._channel = channel
        self._deadline = deadline
        self._clock = clock or SystemClock()
        self._recovery = Recovery(
            channel, self._probe, self._clock, limits, observer, longest_probe=deadline
        )
        self._reads = Patience(deadline)
        self._writes = Patience(deadline)
        self._doubts = Doubts()
        self._known: deque[ObjectKey] = deque(maxlen=_KNOWN)
        """Objects that a probe may ask for, those that could be read last at the end."""
        self._closed = False

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        """There is nothing to open by name: wrap a backend."""
        raise ConfigError("a guarded backend is made by Guarded(inner, channel)")

    @property
    def reading(self) -> Health:
        """Of lookups and loads; where it is not well, nothing at all is asked of the tier."""
        return self._recovery.reading

    @property
    def writing(self) -> Health:
        """Of stores."""
        return self._recovery.writing

    # -- reading -------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        """Empty at once while the tier is set aside; without what could not be read lately."""
        self._check()
        if not self.reading.well:
            self.refused["lookup"] += len(keys)
            return [() for _ in keys]
        found = await self._names("lookup", len(keys), self.inner.lookup(keys))
        if len(found) != len(keys):
            self._recovery.reading_failed(Ailment.FAILED)
            raise self._error("lookup", f"{len(found)} answers to {len(keys)} keys")
        if not self._doubts:
            return found
        now, about = self._clock.now(), self._doubts.about
        return [[info for info in infos if not about(info.key, now)] for infos in found]

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        """Reads that are not there by their deadline are LATE, those of a sick tier REFUSED."""
        self._check()
        if not self.reading.well:
            self.refused["load"] += len(reads)
            for read in reads:
                yield self._refusal(read, "load")
            return
        start = self._clock.now()
        number, seconds = self._reads.begin(sum(read.buffer.nbytes for read in reads), start)
        cutoff = Cutoff(seconds)
        ended: list[int] = []
        wrong: Ailment | None = None
        well = True
        try:
            with no_strays():
                async with aclosing(self.inner.load(reads)) as results:
                    while len(ended) < len(reads):
                        with cutoff:
                            result = await anext(results, None)
                        if result is None:
                            wrong = Ailment.FAILED  # the rest never comes
                            break
                        ended.append(id(result.request))
                        if result.status is not TransferStatus.OK:
                            well = False
                            self._judge(_key(result.request), result.status)
                        yield result
        except TimeoutError:
            wrong = Ailment.LATE
            for read in _without(reads, ended):
                yield self._lateness(read, seconds, "load")
        except (asyncio.CancelledError, GeneratorExit):
            if len(ended) < len(reads) and self._clock.now() - start > _OVERDUE * seconds:
                wrong = Ailment.OVERTAKEN
            raise
        except ClosedError:
            raise
        except Exception:  # whatever a third party's backend raises is for its caller to see
            wrong = Ailment.RAISED
            raise
        finally:
            cutoff.close()
            well = well and len(ended) == len(reads)
            self._reads.end(number, self._clock.now(), delivered=well)
            self._loaded([read.key for read in reads], wrong, well=well)

    def borrow(self, extents: Sequence[Extent]) -> Loan | None:
        """Of a sick tier everything is REFUSED. Lending takes no time, so it has no deadline and
        says nothing of the channel's speed."""
        self._check()
        if not self.reading.well:
            self.refused["load"] += len(extents)
            error = self._error("load", "set aside as sick")
            return Loan([Lent(each, TransferStatus.REFUSED, error=error) for each in extents])
        try:
            loan = self.inner.borrow(extents)
        except ClosedError:
            raise
        except Exception:  # whatever a third party's backend raises is for its caller to see
            self._loaded([each.key for each in extents], Ailment.RAISED, well=False)
            raise
        if loan is not None:
            bad = [part for part in loan.parts if part.status is not TransferStatus.OK]
            for part in bad:
                self._judge(part.extent.key, part.status)
            wrong = None if len(loan.parts) == len(extents) else Ailment.FAILED
            self._loaded([each.key for each in extents], wrong, well=not (bad or wrong))
        return loan

    def _loaded(self, keys: Sequence[ObjectKey], wrong: Ailment | None, *, well: bool) -> None:
        """A load has ended, one way or another."""
        if wrong is not None:
            self._recovery.reading_failed(wrong)
        elif well:
            self.reading.succeeded()
        if well and keys:
            self._known.append(keys[-1])
        for key in () if well else keys[: _KNOWN - len(self._known)]:
            self._known.appendleft(key)

    def distrust(self, keys: Sequence[ObjectKey]) -> None:
        """These are misses until somebody stores or deletes them, or for a while."""
        for key in keys:
            self._doubt(key, Ailment.CORRUPT)
        self.inner.distrust(keys)

    def register_memory(self, memory: Buffer) -> Callable[[], None]:
        return self.inner.register_memory(memory)

    def parts(self) -> Sequence[StorePart]:
        """None of a store that cannot say: all other metrics are on the same page."""
        try:
            return tuple(self.inner.parts())
        except Exception as error:  # a third party's backend may raise anything
            _log.debug("tier %s: its parts cannot be told: %s", self._channel, error)
            return ()

    def hint(self, keys: Sequence[ChunkKey], priority: float, ttl: float) -> None:
        self.inner.hint(keys, priority, ttl)

    def pin(self, keys: Sequence[ChunkKey], ttl: float) -> int:
        return self.inner.pin(keys, ttl)

    def _judge(self, key: ObjectKey, status: TransferStatus) -> None:
        """What a failed read says of the tier; an object that cannot be had is a miss from now."""
        if status is TransferStatus.LATE:
            self._recovery.reading_failed(Ailment.LATE)
        else:
            self._doubt(key, _AILMENTS.get(status))

    def _doubt(self, key: ObjectKey, ailment: Ailment | None) -> None:
        """Counted once an object: a bad one that is read layer by layer is no sick tier."""
        now = self._clock.now()
        is_new = not self._doubts.about(key, now)
        self._doubts.add(key, now)
        if is_new and ailment is not None:
            self._recovery.reading_failed(ailment)

    # -- writing -------------------------------------------------------------------------------

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        """Writes that have not ended by their deadline are LATE, those of a sick tier REFUSED."""
        self._check()
        if not self._recovery.may_write():
            self.refused["store"] += len(writes)
            return [self._refusal(write, "store") for write in writes]
        is_probe, ended = not self.writing.well, False
        try:
            results, wrong = await self._store(writes)
            ended = True
        except (asyncio.CancelledError, ClosedError):
            raise
        except Exception:  # whatever a third party's backend raises is for its caller to see
            wrong, ended = Ailment.RAISED, True
            raise
        finally:
            self._dispel(write.info.key for write in writes)
            if ended:
                (self._recovery.write_probed if is_probe else self._recovery.written)(wrong)
            elif is_probe:
                self.writing.probe_abandoned()
        return results

    async def _store(self, writes: Sequence[Write]) -> tuple[list[TransferResult], Ailment | None]:
        nbytes = sum(write.nbytes for write in writes)
        number, seconds = self._writes.begin(nbytes, self._clock.now())
        wrong: Ailment | None = Ailment.RAISED
        try:
            async with asyncio.timeout(seconds):
                with no_strays():
                    results = await self.inner.store(writes)
            wrong = self._judge_writes(writes, results)
        except TimeoutError:
            wrong = Ailment.LATE
            results = [self._lateness(write, seconds, "store") for write in writes]
        finally:
            self._writes.end(number, self._clock.now(), delivered=wrong is None)
        return results, wrong

    def _judge_writes(
        self, writes: Sequence[Write], results: Sequence[TransferResult]
    ) -> Ailment | None:
        wrong = None if len(results) == len(writes) else Ailment.FAILED
        for result in results:
            wrong = _AILMENTS.get(result.status, wrong)
        return wrong

    def _dispel(self, keys: Iterable[ObjectKey]) -> None:
        """However a store or delete ended: what was known of the objects before is out of date, and
        who keeps an index in front has to be told what is there."""
        for key in keys:
            self._doubts.dispel(key)

    # -- names ---------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        self._check_well("delete")
        try:
            return await self._names("delete", len(keys), self.inner.delete(keys))
        finally:
            self._dispel(keys)

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        self._check()
        self._check_well("scan")
        async with aclosing(self.inner.scan()) as infos:
            while (info := await self._names("scan", 1, anext(infos, None))) is not None:
                yield info

    async def used_bytes(self) -> int:
        self._check()
        self._check_well("used_bytes")
        return await self._names("used_bytes", 1, self.inner.used_bytes())

    async def aclose(self) -> None:
        """Bounded, and without an error, whatever ``inner`` does: others are still to be closed."""
        if self._closed:
            return
        self._closed = True
        await self._recovery.aclose()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                with no_strays():
                    await self.inner.aclose()
        except TimeoutError:
            _log.error("tier %s: not closed after %g s", self._channel, _CLOSE_SECONDS)
        except Exception:  # a third party's backend may raise anything
            _log.exception("tier %s: closing it failed", self._channel)

    async def _names(self, operation: str, count: int, asking: Awaitable[T]) -> T:
        """Await an operation on ``count`` names, with its deadline."""
        seconds = min(_NAMES_SECONDS + count * _NAME_SECONDS, self._deadline)
        try:
            async with asyncio.timeout(seconds):
                with no_strays():
                    return await asking
        except TimeoutError:
            self._recovery.reading_failed(Ailment.LATE)
            raise self._error(operation, f"not there after {seconds:g} s") from None
        except ClosedError:
            raise
        except Exception:  # whatever a third party's backend raises is for its caller to see
            self._recovery.reading_failed(Ailment.RAISED)
            raise

    async def _probe(self) -> None:
        key = self._known[-1] if self._known else None
        try:
            await probe(self.inner, key)
        except BadObjectError:
            self._known.pop()  # it may be the object's own fault: the next probe takes another
            raise

    # -- errors --------------------------------------------------------------------------------

    def _refusal(self, request: Read | Write, operation: str) -> TransferResult:
        error = self._error(operation, "set aside as sick")
        return TransferResult(request, TransferStatus.REFUSED, 0, 0.0, error)

    def _lateness(self, request: Read | Write, seconds: float, operation: str) -> TransferResult:
        error = self._error(operation, f"not there after {seconds:.3g} s")
        return TransferResult(request, TransferStatus.LATE, 0, seconds, error)

    def _error(self, operation: str, reason: str) -> BackendError:
        return BackendError(reason, operation=operation, context=self._channel, is_temporary=True)

    def _check_well(self, operation: str) -> None:
        if not self.reading.well:
            self.refused[operation] += 1
            raise self._error(operation, "set aside as sick")

    def _check(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self._channel} is closed")


def _without(reads: Sequence[Read], ended: Sequence[int]) -> list[Read]:
    """Those of which no result has come (a read may be given several times)."""
    left = Counter(map(id, reads))
    left.subtract(ended)
    return [read for read in reads if left[id(read)] > 0]


def _key(request: Read | Write) -> ObjectKey:
    return request.key if isinstance(request, Read) else request.info.key
