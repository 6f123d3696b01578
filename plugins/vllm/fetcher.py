"""Bytes of a block or of some of its layers, verified: lent by a tier where they lie, or read into
staging memory.

Knows no restore. Bytes that are not what was stored are reported to their tier, so that it does not
list them again and takes the block anew. Lives on the depot's event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from cacheflow.errors import ClosedError, IntegrityError
from cacheflow.kv import verify
from cacheflow.types import Extent, Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cacheflow.costs import ChannelModel
    from cacheflow.memory import Lease
    from cacheflow.plugins.vllm.means import Means
    from cacheflow.types import Buffer, ChunkInfo, Lent, Loan, Span

__all__ = ["Fetcher", "Held", "LoadFailed"]


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

    def hold(self, info: ChunkInfo, layers: Span, tier: str, owner: str) -> Held | None:
        """Where ``layers`` of the object are going to be; None while there is no staging memory.

        Raises:
            ClosedError: the worker is on its way out.
            LoadFailed: the tier fails to say whether it lends.
        """
        extent = Extent(info.key, *info.layer_range(layers))
        try:
            loan = self._means.tiers[tier].borrow([extent])
        except ClosedError:
            raise
        except Exception as error:  # a third party's backend may raise anything: the load failed
            raise LoadFailed("failed", f"{type(error).__name__}: {error}") from error
        if loan is None:
            nbytes = self._means.memory.layout.payload_bytes(len(layers))
            return self._means.pool.try_lease(nbytes, owner)
        if len(loan.parts) != 1:
            loan.release()
            raise LoadFailed("failed", f"{len(loan.parts)} parts for one extent")
        return _Borrowed(loan, loan.parts[0], asyncio.get_running_loop())

    async def fetch(
        self, info: ChunkInfo, layers: Span, tier: str, held: Held, arrived: Callable[[], None]
    ) -> None:
        """Return when ``held`` has ``layers``, verified. ``arrived`` is called once the tier is
        free for the next load.

        Raises:
            LoadFailed: it was late, missing, short, corrupt, or failed otherwise.
        """
        try:
            async with asyncio.timeout(self._means.deadline):
                if isinstance(held, _Borrowed):
                    with self._clocked(tier, info, layers):  # here it is checking that takes time
                        _check(held.part)
                        await self._verify(info, layers, tier, held)
                    arrived()
                    return
                with self._clocked(tier, info, layers):
                    await self._read(info, layers, tier, held)  # type: ignore[arg-type]  # what is not lent is leased
                arrived()
                await self._verify(info, layers, tier, held)
        except TimeoutError as error:
            raise LoadFailed("late", str(error) or "no answer within the deadline") from error

    @contextmanager
    def _clocked(self, tier: str, info: ChunkInfo, layers: Span) -> Iterator[None]:
        """One transfer, for the model of the tier's channel."""
        self._transfers += 1
        number, channel, clock = self._transfers, self._channels[tier], self._means.clock
        channel.started(number, info.layer_range(layers)[1], clock.now())
        delivered = False
        try:
            yield
            delivered = True
        finally:
            channel.ended(number, clock.now(), delivered=delivered)

    async def _read(self, info: ChunkInfo, layers: Span, tier: str, lease: Lease) -> None:
        offset, nbytes = info.layer_range(layers)
        read, delivered = Read(info.key, offset, lease.part(0, nbytes)), False
        try:
            async for result in self._means.tiers[tier].load([read]):
                if result.status is not TransferStatus.OK or result.nbytes != nbytes:
                    raise LoadFailed(result.status.value, str(result.error or result.status.value))
                delivered = True
        except (LoadFailed, TimeoutError):
            raise
        except Exception as error:  # a third party's backend may raise anything: the load failed
            raise LoadFailed("failed", f"{type(error).__name__}: {error}") from error
        if not delivered:
            raise LoadFailed("missing", "the backend gave no result")

    async def _verify(self, info: ChunkInfo, layers: Span, tier: str, held: Held) -> None:
        loop, view = asyncio.get_running_loop(), held.buffer.view
        assert view is not None, "staging memory of a worker is host memory"
        try:
            await loop.run_in_executor(self._means.threads, verify, info, layers, view)
        except IntegrityError as error:
            self._means.tiers[tier].distrust([info.key])
            raise LoadFailed("corrupt", f"corrupt: {error}") from error


def _check(part: Lent) -> None:
    if part.status is not TransferStatus.OK or part.buffer is None:
        raise LoadFailed(part.status.value, str(part.error or part.status.value))
