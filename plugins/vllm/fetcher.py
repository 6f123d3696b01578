"""Bytes of a block or of some of its layers, verified: lent by a tier where they lie, or read into
staging memory.

Knows no restore. Bytes that are not what was stored are reported to their tier, so that it does not
list them again and takes the block anew. Lives on the depot's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from cacheflow.errors import ClosedError
from cacheflow.plugins.vllm.sources import CorruptPart
from cacheflow.tiers import tell_damaged
from cacheflow.types import Extent, Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cacheflow.costs import ChannelModel
    from cacheflow.memory import Lease
    from cacheflow.plugins.vllm.means import Means
    from cacheflow.plugins.vllm.sources import Source
    from cacheflow.types import Buffer, ChunkInfo, Lent, Loan, Span, TransferResult

__all__ = ["Fetcher", "Held", "LoadFailed"]

_log = logging.getLogger(__name__)


class Held(Protocol):
    """A block's bytes outside vLLM's cache; given back once, from any thread."""

    @property
    def buffer(self) -> Buffer: ...

    def release(self) -> None: ...


class LoadFailed(Exception):
    """One block did not arrive; says why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Borrowed:
    """What a tier lends of one object. Loans belong to the event loop, so they go back there."""

    def __init__(self, loan: Loan, part: Lent, loop: asyncio.AbstractEventLoop) -> None:
        self._loan = loan
        self._loop = loop
        self.part = part

    @property
    def buffer(self) -> Buffer:
        assert self.part.buffer is not None
        return self.part.buffer

    def release(self) -> None:
        with suppress(RuntimeError):  # the loop is closed, and its tiers with it
            self._loop.call_soon_threadsafe(self._loan.release)


class Fetcher:
    """``channels``: what is learned of each tier's speed."""

    def __init__(self, means: Means, channels: Mapping[str, ChannelModel]) -> None:
        self._means = means
        self._channels = channels
        self._transfers = 0

    def hold(self, source: Source, layers: Span, owner: str) -> Held | None:
        """Where ``layers`` of the block are going to be; None while there is no staging memory.

        Raises:
            ClosedError: the worker is on its way out.
            LoadFailed: the tier fails to say whether it lends.
        """
        loan = self._borrowed(source, layers) if source.is_whole else None
        if loan is None:
            nbytes = self._means.memory.layout.payload_bytes(len(layers))
            return self._means.pool.try_lease(nbytes, owner)
        if len(loan.parts) != 1:
            loan.release()
            raise LoadFailed("failed", f"{len(loan.parts)} parts for one extent")
        return _Borrowed(loan, loan.parts[0], asyncio.get_running_loop())

    def _borrowed(self, source: Source, layers: Span) -> Loan | None:
        ((key, offset, nbytes, _),) = source.ranges(layers)
        try:
            return self._means.tiers[source.tier].borrow([Extent(key, offset, nbytes)])
        except ClosedError:
            raise
        except Exception as error:  # a third party's backend may raise anything: the load failed
            raise LoadFailed("failed", f"{type(error).__name__}: {error}") from error

    async def fetch(
        self, source: Source, layers: Span, held: Held, arrived: Callable[[], None]
    ) -> None:
        """Return when ``held`` has ``layers``, verified. ``arrived`` is called once the tier is
        free for the next load.

        Raises:
            LoadFailed: it was late, missing, short, corrupt, or failed otherwise.
        """
        clocked = self._clocked(source.tier, self._means.memory.layout.payload_bytes(len(layers)))
        try:
            async with asyncio.timeout(self._means.deadline):
                if isinstance(held, _Borrowed):
                    with clocked:  # here it is checking that takes time
                        _check(held.part)
                        await self._verify(source, layers, held)
                    arrived()
                    return
                with clocked:
                    await self._read(source, layers, held)  # type: ignore[arg-type]  # what is not lent is leased
                arrived()
                await self._verify(source, layers, held)
        except TimeoutError as error:
            raise LoadFailed("late", str(error) or "no answer within the deadline") from error

    @contextmanager
    def _clocked(self, tier: str, nbytes: int) -> Iterator[None]:
        """One transfer, for the model of the tier's channel."""
        self._transfers += 1
        number, channel, clock = self._transfers, self._channels[tier], self._means.clock
        channel.started(number, nbytes, clock.now())
        self._means.traffic.began(tier)
        delivered = False
        try:
            yield
            delivered = True
        finally:
            self._means.traffic.ended(tier)
            channel.ended(number, clock.now(), delivered=delivered)

    async def _read(self, source: Source, layers: Span, lease: Lease) -> None:
        reads = [
            Read(key, offset, lease.part(place, nbytes))
            for key, offset, nbytes, place in source.ranges(layers)
        ]
        missing = {id(read): read for read in reads}
        try:
            async with aclosing(self._means.tiers[source.tier].load(reads)) as results:
                async for result in results:
                    _check_read(missing.pop(id(result.request)), result)
        except (LoadFailed, TimeoutError):
            raise
        except Exception as error:  # a third party's backend may raise anything: the load failed
            raise LoadFailed("failed", f"{type(error).__name__}: {error}") from error
        if missing:
            raise LoadFailed("missing", "the backend gave no result")

    async def _verify(self, source: Source, layers: Span, held: Held) -> None:
        loop, view = asyncio.get_running_loop(), held.buffer.view
        assert view is not None, "staging memory of a worker is host memory"
        try:
            await loop.run_in_executor(self._means.threads, source.verify, layers, view)
        except CorruptPart as error:
            await self._distrust(source.tier, error.info)
            raise LoadFailed("corrupt", f"corrupt: {error}") from error

    async def _distrust(self, name: str, read: ChunkInfo) -> None:
        try:
            await tell_damaged(self._means.tiers[name], [read])
        except Exception:  # a third party's backend may raise anything; the load has failed anyway
            _log.exception("tier %s: was to hear of a corrupt object", name)


def _check_read(read: Read, result: TransferResult) -> None:
    if result.status is not TransferStatus.OK or result.nbytes != read.buffer.nbytes:
        raise LoadFailed(result.status.value, str(result.error or result.status.value))


def _check(part: Lent) -> None:
    if part.status is not TransferStatus.OK or part.buffer is None:
        raise LoadFailed(part.status.value, str(part.error or part.status.value))
