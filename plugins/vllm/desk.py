"""The scheduler's side: what vLLM's scheduler asks and tells CacheFlow, step by step.

A request that races has blocks for its whole prefix: compute takes chunks from the front, sized for
the point where the two will meet, loads fill blocks from the back, and when they meet the request
jumps to the end of the prefix.

Everything is decided in vLLM's scheduler thread, between steps; nothing here waits or does I/O.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cacheflow.plugins.vllm.admission import Admission
from cacheflow.plugins.vllm.agreement import Agreement
from cacheflow.plugins.vllm.counts import Counts
from cacheflow.plugins.vllm.jumps import Jumps
from cacheflow.plugins.vllm.pieces import hidden_share
from cacheflow.plugins.vllm.planner import WHOLE
from cacheflow.plugins.vllm.restores import Phase, Restores
from cacheflow.plugins.vllm.saves import Saves
from cacheflow.types import Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.clock import Clock
    from cacheflow.costs import ComputeModel
    from cacheflow.plugins.vllm.keyring import Keyring, Request
    from cacheflow.plugins.vllm.pins import Pins
    from cacheflow.plugins.vllm.records import Found, Orders, Report, SaveOrder
    from cacheflow.plugins.vllm.restores import Limits, Restore
    from cacheflow.plugins.vllm.saves import Blocks, SaveBook
    from cacheflow.plugins.vllm.settings import VllmSettings

__all__ = ["Desk"]

_log = logging.getLogger(__name__)

_TIMED_TOKENS = 32
"""Steps of fewer tokens say little about what prefill costs."""


@dataclass(slots=True)
class Desk:
    """One scheduler's restores and saves."""

    settings: VllmSettings
    limits: Limits
    keyring: Keyring
    book: SaveBook
    costs: ComputeModel
    clock: Clock
    pins: Pins
    cache: Blocks
    races: bool = False
    """The scheduler is one of ours, so a request can jump."""
    counts: Counts = field(default_factory=Counts)
    _restores: Restores = field(init=False)
    _admission: Admission = field(init=False)
    _saves: Saves = field(init=False)
    _jumps: Jumps = field(init=False)
    _agreement: Agreement = field(init=False)
    _may_overlap: bool = False
    _timed: Tile | None = None
    _lost: bool = False
    _tables: list[list[int]] = field(default_factory=list)
    """Block ids of each request of the last step, if that step reads what is still being loaded."""

    def __post_init__(self) -> None:
        self._restores = Restores(self.pins)
        self._agreement = Agreement(self.limits.ranks)
        self._admission = Admission(
            self.settings,
            self.limits,
            self.keyring,
            self.costs,
            self.clock,
            self.counts,
            self._restores,
            self.races,
        )
        block = self.limits.block
        self._saves = Saves(self.keyring, self.book, self.cache, self.pins, block)
        self._jumps = Jumps(
            self._restores, self._admission, self.limits, self.cache, self._saves, self.counts
        )

    @property
    def pending(self) -> bool:
        """Whether steps are needed although no request does: blocks are pinned."""
        return bool(self.pins.held or self._restores.pending)

    # -- admission -----------------------------------------------------------------------------

    def let_race(self, races: bool, *, overlaps: bool = False) -> None:
        """Whether requests can jump, once it is known which scheduler this is; ``overlaps``: before
        their last loads, too, since no step is scheduled ahead of what came of the one before."""
        self._admission.races = self.races = races
        self._may_overlap = overlaps and races and self.settings.overlap

    def arrived(self, request: Request) -> None:
        """vLLM has a new request, and will ask for its prefix when it can run it."""
        if not self._lost:
            self._admission.arrived(request, self.cache.get_computed_blocks(request)[1])

    def matched(self, request: Request, computed: int) -> int | None:
        """Tokens behind the ``computed`` ones that are staged, or None: ask again next step."""
        return 0 if self._lost else self._admission.matched(request, computed)

    def allocated(self, request: Request, external: int) -> None:
        """The request got blocks: reserve those of the whole prefix, and say where loads go."""
        restore = self._restores.of(request.request_id)
        if restore is None or restore.found is None:
            return
        top, block = restore.found.top, self.limits.block
        if external:
            self._aim(restore, restore.edge)
            self._jumps.enter(restore)
            return
        slots = self.cache.allocate_slots(request, top * block, delay_cache_blocks=True)
        if slots is None:
            self.counts.add("restores", "computed")
            self._restores.close(restore)
            return
        self._jumps.race(restore)
        self._aim(restore, max(restore.first, restore.found.bottom))

    def _aim(self, restore: Restore, first: int) -> None:
        assert restore.found is not None
        ids = self.cache.get_block_ids(restore.request.request_id)[0]
        self._restores.aim(restore, first, ids[first : restore.found.top])

    # -- steps ---------------------------------------------------------------------------------

    def jump(self, running: Callable[[str], bool]) -> None:
        """Before a step: requests whose two ends have met, or will while they compute, go on behind
        their prefix. ``running``: whether a request is running now."""
        self._jumps.all(running)

    def cap(self, request: Request, computed: int, new: int) -> int:
        """How many of the ``new`` tokens behind ``computed`` the step should compute."""
        restore = self._restores.of(request.request_id)
        if restore is None or restore.phase is Phase.PLACED or restore.found is None:
            return new
        if restore.overlaps:
            return new
        if restore.phase is Phase.RACING:
            restore.blocks = self._admission.decide(restore, computed)
        if restore.blocks == WHOLE:
            return new
        block = self.limits.block
        stop = (-(-computed // block) + restore.blocks) * block  # WAIT: to the end of a begun block
        restore.meets = stop <= computed + new
        if stop > computed + new:  # loads can only take whole blocks
            whole = (computed + new) // block * block
            stop = whole if whole > computed else computed + new
        return stop - computed

    def orders(
        self, scheduled: Mapping[str, int], requests: Mapping[str, Request], gone: Sequence[str]
    ) -> Orders:
        """What the worker has to do in this step. ``gone``: requests preempted in it."""
        self._close_ended(gone)
        next_orders = self._restores.orders
        next_orders.saves = self._saves.take_held()
        saves: list[SaveOrder] = []
        for request_id, tokens in scheduled.items():
            request = requests[request_id]
            done = request.num_computed_tokens + tokens
            restore = self._restores.of(request_id)
            if restore is not None and restore.overlaps:
                self._jumps.order(restore)
            elif restore is not None and restore.phase is Phase.RACING:
                next_orders.claims[restore.id] = -(-done // self.limits.block)
                if restore.meets:
                    self._admission.split(restore, done)
            if self.settings.save and not self._lost:
                saves += self._saves.plan(request, done, tokens)
        early = scheduled if next_orders.overlaps else ()
        if early:  # what the step computes is right only if all that it reads comes, on all ranks
            self._saves.hold(saves)
        else:
            next_orders.saves += saves
        self._tables = [list(self.cache.get_block_ids(each)[0]) for each in early]
        self._time(scheduled, requests)
        orders = self._restores.take_orders()
        orders.computes = bool(scheduled)
        orders.idle = not scheduled and bool(self._restores.busy or self.pins.held)
        return orders

    def stale(self, invalid: set[int]) -> set[int]:
        """Blocks of which nothing may be believed when the last step has read the ``invalid`` ones,
        and nothing is stored: these, and what lies behind them in the tables of its requests. Those
        that were aborted while it ran have left theirs in the local prefix cache."""
        stale = set(invalid)
        for ids in self._tables:
            bad = next((at for at, block_id in enumerate(ids) if block_id in invalid), len(ids))
            stale.update(ids[bad:])
        self._saves.drop_held(stale)
        return stale

    def unread(self, request_id: str) -> int | None:
        """The number of the first block that a running request counts as computed and that has not
        come yet, if there is one: a request that is preempted before it is read leaves nothing of
        it, or behind it, in the local prefix cache."""
        restore = self._restores.of(request_id)
        early = restore is not None and restore.overlaps and restore.phase is Phase.RACING
        return restore.edge if restore is not None and early else None

    def _close_ended(self, gone: Sequence[str]) -> None:
        for each in self._restores.all():
            if each.phase is Phase.PLACED and each.id not in self._restores.orders.targets:
                self._restores.close(each)  # the step before this one put it in place
        for request_id in gone:
            restore = self._restores.of(request_id)
            if restore is not None and restore.phase is not Phase.OUTSIDE:
                self._restores.close(restore)

    def _time(self, scheduled: Mapping[str, int], requests: Mapping[str, Request]) -> None:
        """Steps of one request's prefill alone say what compute costs."""
        self._timed = None
        if len(scheduled) == 1 and not self._restores.orders.overlaps:
            ((request_id, tokens),) = scheduled.items()
            start = requests[request_id].num_computed_tokens
            if tokens >= _TIMED_TOKENS:
                self._timed = Tile(0, start, start + tokens)

    def take_timed(self) -> Tile | None:
        """What the step whose orders were given last computes, if its time is worth knowing."""
        timed, self._timed = self._timed, None
        return timed

    def heard(self, reports: Mapping[int, Report]) -> None:
        """Take the workers' reports of a step, by rank."""
        report, tops = self._agreement.merge(reports)
        for restore_id, found in report.found.items():
            restore = self._restores.get(restore_id)
            if restore is not None and restore.found is None:
                restore.found = found
                self._note_found(restore, found)
        for restore_id, progress in report.progress.items():
            if restore := self._restores.get(restore_id):
                restore.progress = progress
        self._restores.orders.tops |= {r: top for r, top in tops.items() if self._restores.get(r)}
        self._restores.ended(report.ended)
        self.book.copied(report.copied, self.pins)
        self.book.ended(report.saves)
        self.book.missed(report.missed)
        if report.by_layer is not None:
            self._heard_of_layers(report.by_layer)
        if report.lost:
            self._give_up()

    def _note_found(self, restore: Restore, found: Found) -> None:
        """What is stored need not be again; what is not there any more has to be."""
        bottom, top = found.bottom - restore.first, found.top - restore.first
        self.book.remember(restore.keys[max(bottom, 0) : max(top, 0)])
        self.book.missed([*restore.keys[: max(bottom, 0)], *restore.keys[max(top, 0) :]])

    def _heard_of_layers(self, by_layer: bool) -> None:
        if self._may_overlap and not by_layer:
            _log.warning(
                "this runner does not ask for each layer before it reads it: what is behind a "
                "prefix is computed when all of the prefix is there"
            )
        self._may_overlap = self._may_overlap and by_layer
        self._admission.hidden = hidden_share(self.limits.layers) if self._may_overlap else 0.0

    def _give_up(self) -> None:
        """A worker's storage is gone: nothing is restored or stored from now on. What other
        workers may still write or read stays pinned until they have said that they do not."""
        if not self._lost:
            _log.error("storage has died: every request is computed from now on")
            self._lost = True
            for restore in self._restores.all():
                self._jumps.undo(restore)
            for restore in self._restores.all():
                self._restores.close(restore)
            self._saves.drop_held()
        if self._agreement.all_lost:
            self._restores.abandon()
            self.book.abandon(self.pins)

    # -- the end -------------------------------------------------------------------------------

    def finished(self, request_id: str) -> None:
        """The request is over, whatever it was doing."""
        if restore := self._restores.of(request_id):
            self._jumps.finished(restore)
            self._restores.close(restore)
        self.keyring.forget(request_id)
        self._saves.finished(request_id)

    def reset(self) -> None:
        """What is stored does not count any more: the model's weights have changed."""
        for restore in self._restores.all():
            self._jumps.undo(restore)
        for restore in self._restores.all():
            self._restores.close(restore)
        self.keyring.renew()
        self._saves.renew()
