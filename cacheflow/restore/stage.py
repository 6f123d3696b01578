"""One stage's part in a restore that several stages do together: who feeds whom with what.

Before a request is admitted all stages agree on its prefix. Then each restores its own layers from
its own channels; what comes out of the last layer of a tile goes to the stage behind where that
wants it: for the suffix always, for the prefix where it has no stored activation, or lost the one
it had. Owns no tensors and no connection: the engine does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from cacheflow.distributed.stages import Mode, StageCosts, plan_stages
from cacheflow.errors import PeerError
from cacheflow.types import Agreement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import Staged
    from cacheflow.restore.job import Job
    from cacheflow.restore.restorer import Restorer
    from cacheflow.types import ComputeDone, Coverage, Tile

__all__ = ["StageDriver"]

_NOTHING: Final = Agreement(None)


@dataclass(slots=True)
class _Shared:
    """What is known of one request's other stages."""

    mode: Mode = Mode.INDEPENDENT
    agreed: Agreement = _NOTHING
    demanded: set[int] = field(default_factory=set)
    """Tiles that it cannot do without."""
    handed: set[int] = field(default_factory=set)
    """Tiles that it was given, so that a demand which crossed them on the way is met already."""
    fed: set[int] = field(default_factory=set)
    """Tiles that the stage before has given here."""
    handing: int = 0
    """How many tiles are on their way out of the engine."""
    settled: bool = False
    """The stage behind demands nothing more."""
    told: bool = False
    """So was the stage before."""


class StageDriver:
    """Loop-owned; hears what the neighbours say, and looks after each request while it runs.

    ``mode``: how the stage is fed, or None to choose for each request what should be faster.
    """

    def __init__(self, restorer: Restorer, engine: Staged) -> None:
        self.engine = engine
        self.mode: Mode | None = None
        self._restorer = restorer
        self._shared: dict[str, _Shared] = {}
        self._broken: BaseException | None = None
        self._took: float = 0.0
        self._all_took: tuple[float, ...] = ()
        engine.listen(self)

    # -- what the restorer tells ---------------------------------------------------------------

    async def agree(self, job: Job, stored: int | None) -> int | None:
        """See :meth:`cacheflow.abc.Staged.agree`. Raises PeerError."""
        if self._broken is not None:
            raise PeerError(str(self._broken)) from self._broken
        shared = self._shared[job.spec.id] = _Shared(settled=self.engine.is_last)
        shared.mode = self.mode or self.expected(job.spec.tiles)
        request = job.request
        last = int.from_bytes(request.keys[-1].digest[:7]) if request.keys else 0
        same = (len(request.tokens), request.resident, job.spec.prefix_tokens, last)
        lacks = self._lacks(job, shared)
        try:
            shared.agreed = await self.engine.agree(
                job.spec.id, stored, same=same, lacks=lacks, took=self._took
            )
        except PeerError as error:
            self.engine.give_up(job.spec.id, str(error))
            raise
        self._all_took = shared.agreed.took
        return shared.agreed.stored

    def coverage(self, job: Job, coverage: Coverage) -> Coverage:
        """Without the activations where it is better to wait for the stage before."""
        independent = self._shared[job.spec.id].mode is Mode.INDEPENDENT
        return coverage if independent else replace(coverage, hidden=())

    def admitted(self, job: Job) -> None:
        """What came before that counts now."""
        for start in self._shared[job.spec.id].fed:
            self._restorer.scheduler.feed(job.spec.id, start)

    def computed(self, done: ComputeDone) -> None:
        """Compute returned from a tile: hand over what came out of it, if it is wanted."""
        request_id, start = done.work.request_id, done.work.tile.start
        shared, job = self._shared.get(request_id), self._restorer.job(request_id)
        if self.engine.is_last or shared is None or job is None:
            return
        if done.next_layer < job.spec.num_layers:
            return
        wanted = start in shared.agreed.relayed or start in shared.demanded
        if done.work.is_suffix or wanted:
            shared.handed.add(start)
            shared.demanded.discard(start)
            shared.handing += 1
            handing = self._restorer.group.create_task(self._hand_over(job, shared, start))
            self._restorer.spawn(job, handing)

    async def _hand_over(self, job: Job, shared: _Shared, start: int) -> None:
        try:
            await self.engine.hand_over(job.spec.id, start)
        except Exception as error:  # the stage behind waits for it in vain: nobody goes on
            self._restorer.fail(job.spec.id, error)
        finally:
            shared.handing -= 1
            self._restorer.changed(job.spec.id)

    def look(self, request_id: str) -> None:
        """Something of the request ended: demand what is missing, say so when nothing is."""
        shared, job = self._shared.get(request_id), self._restorer.job(request_id)
        if shared is None or job is None or not job.admitted:
            return
        for start in self._restorer.scheduler.starving(request_id):
            self.engine.demand(request_id, start, again=start in shared.fed)
            shared.fed.discard(start)
        if shared.settled and not shared.told and self._restorer.scheduler.restored(request_id):
            shared.told = True
            self.engine.settle(request_id)

    def may_end(self, request_id: str) -> bool:
        """Whether no other stage needs the request here any more."""
        shared = self._shared[request_id]
        return shared.told and not shared.handing

    def gave_up(self, job: Job, outcome: str) -> None:
        """It has ended here without success: the other stages must not wait for it."""
        error = job.done.exception() if job.done.done() and not job.done.cancelled() else None
        if not isinstance(error, PeerError):
            self.engine.give_up(job.spec.id, str(error or outcome))

    def forget(self, job: Job) -> None:
        """The request is over."""
        self._shared.pop(job.spec.id, None)
        if job.restored_at is not None and job.spec.tiles:
            self._took = job.restored_at - job.request.arrival

    @property
    def balance(self) -> float | None:
        """Mean over the longest of the stages' restores before the latest one: 1.0 where all end
        together; None before that."""
        longest = max(self._all_took, default=0.0)
        return sum(self._all_took) / len(self._all_took) / longest if longest else None

    # -- what the neighbours tell: cacheflow.abc.StageListener -----------------------------------

    def fed(self, request_id: str, start: int) -> None:
        if (shared := self._shared.get(request_id)) is not None:
            shared.fed.add(start)
            self._restorer.scheduler.feed(request_id, start)
            self._restorer.changed(request_id)

    def demanded(self, request_id: str, start: int, *, again: bool) -> None:
        shared = self._shared.get(request_id)
        if shared is None:
            self.engine.give_up(request_id, "the stage before had ended it already")
        elif again or start not in shared.handed:
            shared.handed.discard(start)
            shared.demanded.add(start)
            self._restorer.scheduler.pass_on(request_id, start)
            self._restorer.changed(request_id)

    def settled(self, request_id: str) -> None:
        if (shared := self._shared.get(request_id)) is not None:
            shared.settled = True
            self._restorer.changed(request_id)

    def failed(self, request_id: str | None, error: BaseException) -> None:
        if request_id is not None:
            self._restorer.fail(request_id, error)
            return
        self._broken = error
        for each in list(self._shared):
            self._restorer.fail(each, error)

    def left(self, error: BaseException, *, behind: bool) -> None:
        for each, shared in list(self._shared.items()):
            if not (shared.settled if behind else shared.told):
                self.engine.give_up(each, str(error))
                self._restorer.fail(each, error)

    # -- how ------------------------------------------------------------------------------------

    def expected(self, tiles: Sequence[Tile]) -> Mode:
        """What should be fastest for a prefix of ``tiles``, by what was measured here and as if all
        stages were alike: own activations while nothing is known."""
        if self.engine.boundary is None:
            return Mode.INDEPENDENT
        outlook = self._restorer.scheduler.costs(tiles)
        if outlook is None:
            return Mode.INDEPENDENT
        compute, speed = outlook
        layout = self.engine.shard.layout
        chunks = [tile.width / layout.chunk_tokens for tile in tiles]
        kv = [count * layout.payload_bytes() / speed for count in chunks]
        hidden = [count * self.engine.boundary.layout.payload_bytes() / speed for count in chunks]
        costs = StageCosts([layout.num_layers * seconds for seconds in compute], kv, hidden)
        first = StageCosts(costs.compute, costs.kv, [0.0] * len(kv))
        return plan_stages([first, *[costs] * (self.engine.num_stages - 1)]).mode

    def _lacks(self, job: Job, shared: _Shared) -> list[int]:
        """Tiles, by first token, that no channel is to feed."""
        if self.engine.boundary is None:
            return []
        if shared.mode is not Mode.INDEPENDENT:
            return [tile.start for tile in job.spec.tiles]
        size, found = job.spec.chunk_tokens, set[int]()
        for located in job.located.values():
            assert located.hidden is not None, "a stage looks for its activations"
            found |= {chunk for chunk, infos in enumerate(located.hidden.chunks) if infos}
        return [
            tile.start
            for tile in job.spec.tiles
            if not found.issuperset(range(tile.start // size, tile.stop // size))
        ]
