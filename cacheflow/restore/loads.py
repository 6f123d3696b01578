"""The load driver of one channel: keeps it as busy as the scheduler wants."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from cacheflow.restore.fetching import fetched
from cacheflow.restore.transfer import LoadFailed, published_parts, verify_pieces
from cacheflow.tasks import no_strays, to_the_end
from cacheflow.tiers import tell_damaged
from cacheflow.types import LoadEnded, LoadOutcome, Published

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.restore.job import Job
    from cacheflow.restore.restorer import Restorer
    from cacheflow.restore.transfer import Piece
    from cacheflow.types import Load

__all__ = ["LoadDriver"]

_log = logging.getLogger(__name__)


class LoadDriver:
    """Starts loads on one channel and sees each through to its end."""

    def __init__(self, restorer: Restorer, channel: str) -> None:
        self._restorer = restorer
        self.channel = channel
        self._wake = asyncio.Event()
        self._unstarted: set[int] = set()
        """Claimed loads whose task has not taken its first step."""

    def kick(self) -> None:
        """Something changed: ask the scheduler again."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        restorer = self._restorer
        while True:
            self._wake.clear()
            load = restorer.scheduler.next_load(self.channel, restorer.clock.now())
            if load is None:
                await self._wake.wait()
                continue
            self._start(load)

    def _start(self, load: Load) -> None:
        job = self._restorer.job(load.request_id)
        assert job is not None, "the scheduler only loads for admitted requests"
        task = self._restorer.group.create_task(self._run(load, job))
        self._restorer.spawn(job, task)
        self._unstarted.add(load.id)
        self._restorer.traffic.began(self.channel)

        def ended(_: asyncio.Task[None]) -> None:
            self._restorer.traffic.ended(self.channel)
            # A task cancelled before its first step never reaches its own clean-up.
            if load.id in self._unstarted:
                self._unstarted.discard(load.id)
                self._end(load, job, None, (), LoadOutcome.CANCELLED)

        task.add_done_callback(ended)

    async def _run(self, load: Load, job: Job) -> None:
        """One load; its end is always told to the scheduler, whatever happens."""
        restorer = self._restorer
        self._unstarted.discard(load.id)
        start = restorer.clock.now()
        outcome, reason = LoadOutcome.CANCELLED, ""
        lost: tuple[int, ...] = ()
        granted: int | None = None
        nbytes = load.nbytes
        try:
            async with asyncio.timeout(restorer.load_deadline):
                tier, located = restorer.channels[self.channel], job.located[self.channel].of(load)
                with no_strays():
                    async with fetched(tier, load, located, restorer.pool) as pieces:
                        await self._verify(pieces)
                        nbytes = sum(len(piece.stored) for piece in pieces)
                        layers = restorer.scheduler.commit(load)
                        if layers and load.hidden:
                            await self._import(load, job, pieces)
                        elif layers:
                            await self._publish(load, job, pieces, layers)
                        granted = layers
            outcome = LoadOutcome.PUBLISHED if granted else LoadOutcome.DROPPED
        except LoadFailed as error:
            outcome, reason, lost = error.outcome, str(error), error.chunks
            if outcome is LoadOutcome.CORRUPT:
                restorer.group.create_task(self._distrust(load, job, lost))
        except TimeoutError:
            outcome, lost = LoadOutcome.LATE, load.chunks
            reason = f"not there after {restorer.load_deadline:g} s (setting load_deadline)"
        except Exception as error:  # a third party's backend may raise anything: a failed load
            reason = str(error) or type(error).__name__
            outcome, lost = LoadOutcome.FAILED, load.chunks
        finally:
            self._end(load, job, granted, lost, outcome)
            stop = restorer.clock.now()
            restorer.emit(_ended(load, nbytes, start, stop, outcome, reason))
            restorer.changed(load.request_id)

    async def _verify(self, pieces: Sequence[Piece]) -> None:
        """To the end: until then a thread reads, and decodes into, memory that is given back."""
        loop = asyncio.get_running_loop()
        auth = self._restorer.stamp.auth
        checking = loop.run_in_executor(self._restorer.verifiers, verify_pieces, pieces, auth)
        await to_the_end(checking)

    async def _publish(self, load: Load, job: Job, pieces: list[Piece], layers: int) -> None:
        restorer = self._restorer
        start = restorer.clock.now()
        job.histories[load.tile].copies.update(piece.info for piece in pieces)
        try:
            parts = published_parts(pieces, layers)
            publish = restorer.recomputer.publish(load.request_id, parts)
            # Not in the group: its error is the request's, and would end all others there.
            with no_strays():
                await to_the_end(publish)
        except Exception as error:  # the KV cache may be half written: the request cannot go on
            restorer.fail(load.request_id, error)
            raise LoadFailed(LoadOutcome.FAILED, load.chunks, str(error)) from error
        nbytes = sum(len(part.view) for part in parts)
        stop = restorer.clock.now()
        event = Published(load.request_id, load.tile, load.layers, nbytes, start, stop)
        restorer.emit(event)

    async def _import(self, load: Load, job: Job, pieces: list[Piece]) -> None:
        """Boundary activations for the engine; the KV cache is not touched."""
        stage, tile = self._restorer.stage, job.spec.tiles[load.tile]
        assert stage is not None, "only stages load activations"
        importing = stage.engine.import_hidden(load.request_id, tile, published_parts(pieces, 1))
        await to_the_end(importing)

    async def _distrust(self, load: Load, job: Job, chunks: Sequence[int]) -> None:
        """Tell the tier whose bytes were not what it says it stores."""
        located, tier = job.located[self.channel].of(load), self._restorer.channels[self.channel]
        read = {take.info for chunk in chunks for take in located.takes(chunk, load.layers)}
        try:
            async with asyncio.timeout(self._restorer.load_deadline):
                with no_strays():
                    await tell_damaged(tier, read)
        except Exception:  # a third party's backend may raise anything; the load has failed anyway
            _log.exception("tier %s: was to hear of %d corrupt objects", self.channel, len(read))

    def _end(
        self,
        load: Load,
        job: Job,
        granted: int | None,
        lost: tuple[int, ...],
        outcome: LoadOutcome,
    ) -> None:
        scheduler, now = self._restorer.scheduler, self._restorer.clock.now()
        if granted is None:
            late = outcome in (LoadOutcome.LATE, LoadOutcome.REFUSED)
            scheduler.failed(load, now, chunks=lost, late=late)
            job.failed += outcome is not LoadOutcome.CANCELLED
            if lost:
                _log.warning(
                    "%s: load of %d chunks failed (%s); recomputing instead",
                    load.channel,
                    len(lost),
                    outcome.value,
                )
            return
        scheduler.loaded(load, granted, now)
        job.dropped += granted == 0
        if load.hidden:
            job.hidden_chunks += granted and len(load.chunks)
            return
        tokens = len(load.chunks) * job.spec.chunk_tokens
        job.origins.loaded(load.channel, load.tile, granted, tokens)
        if granted:
            job.loaded_chunks.setdefault(load.channel, set()).update(load.chunks)


def _ended(
    load: Load, nbytes: int, start: float, stop: float, outcome: LoadOutcome, reason: str
) -> LoadEnded:
    return LoadEnded(
        request_id=load.request_id,
        channel=load.channel,
        tile=load.tile,
        layers=load.layers,
        chunks=len(load.chunks),
        nbytes=nbytes,
        start=start,
        stop=stop,
        outcome=outcome,
        reason=reason,
        hidden=load.hidden,
    )
