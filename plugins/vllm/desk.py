"""The scheduler's side: which requests are restored, from which end, and when they jump.

A request that can be restored waits outside (no blocks, no compute) for as long as its loads alone
are expected to be faster than loads and compute together; if they complete, it enters with its
prefix in place. Otherwise it enters with blocks for the whole prefix: compute takes chunks from the
front, sized for the point where the two will meet, loads fill blocks from the back, and when they
meet the request jumps to the end of the prefix.

Everything is decided in vLLM's scheduler thread, between steps; nothing here waits or does I/O.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from cacheflow.plugins.vllm.counts import Counts
from cacheflow.plugins.vllm.planner import WAIT, WHOLE, View, choose
from cacheflow.plugins.vllm.records import Opened, Orders
from cacheflow.plugins.vllm.settings import policy_of
from cacheflow.types import Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.clock import Clock
    from cacheflow.costs import ComputeModel
    from cacheflow.plugins.vllm.keyring import Keyring, Request
    from cacheflow.plugins.vllm.pins import Pins
    from cacheflow.plugins.vllm.records import Found, Progress, Report
    from cacheflow.plugins.vllm.saves import SaveBook
    from cacheflow.plugins.vllm.settings import VllmSettings

__all__ = ["Blocks", "Desk", "Limits"]

_log = logging.getLogger(__name__)

_TIMED_TOKENS = 32
"""Steps of fewer tokens say little about what prefill costs."""


class Blocks(Protocol):
    """The part of vLLM's KVCacheManager that is used."""

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...

    def allocate_slots(
        self, request: Any, num_new_tokens: int, *, delay_cache_blocks: bool
    ) -> object | None: ...

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None: ...


class Phase(Enum):
    """Where a restore is."""

    OUTSIDE = auto()
    """The request has no blocks yet: looking up, or loading into staging memory."""
    RACING = auto()
    """It runs: compute from the front, loads from the back."""
    PLACED = auto()
    """It entered with its prefix complete."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What vLLM's configuration says."""

    block: int
    """Tokens of a block."""
    budget: int
    """Tokens a step may compute."""
    staged_blocks: int
    """Blocks that staging memory holds for loads."""
    shares: bool
    """Local prefix caching is on."""


@dataclass(slots=True)
class _Restore:
    id: int
    request: Request
    keys: tuple[bytes, ...]
    """Of the blocks from ``first`` on."""
    first: int
    policy: str
    opened: float
    edge: int = 0
    """Blocks before this one were in the local prefix cache when it entered."""
    asked: int = 0
    phase: Phase = Phase.OUTSIDE
    found: Found | None = None
    progress: Progress | None = None
    blocks: int = 0
    """Blocks compute may take in this step; WHOLE: as many as it likes."""


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
    _restores: dict[str, _Restore] = field(default_factory=dict)
    """By request id."""
    _by_id: dict[int, _Restore] = field(default_factory=dict)
    _leaders: dict[bytes, int] = field(default_factory=dict)
    """Key of the first missing block -> the restore that brings it."""
    _ending: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Restores the worker may still write for, with the block ids pinned for them."""
    _pinned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _planned: dict[str, int] = field(default_factory=dict)
    """Request -> blocks that were looked at for saving."""
    _orders: Orders = field(default_factory=Orders)
    _numbers: count[int] = field(default_factory=lambda: count(1))
    _timed: Tile | None = None
    _lost: bool = False
    counts: Counts = field(default_factory=Counts)

    @property
    def pending(self) -> bool:
        """Whether steps are needed although no request does: blocks are pinned."""
        return bool(self.pins.held or self._ending or self._orders)

    # -- admission -----------------------------------------------------------------------------

    def matched(self, request: Request, computed: int) -> int | None:
        """Tokens behind the ``computed`` ones that are staged, or None: ask again next step."""
        restore = self._restores.get(request.request_id)
        if restore is not None and restore.phase is not Phase.OUTSIDE:
            self._close(restore)  # it was preempted: its blocks are gone, and it starts anew
            restore = None
        if restore is None:
            return self._begin(request, computed)
        restore.asked += 1
        return self._continue(restore, computed)

    def _begin(self, request: Request, computed: int) -> int | None:
        policy = policy_of(self.settings, request.kv_transfer_params)
        if policy == "recompute" or request.skip_reading_prefix_cache or self._lost:
            return 0
        keys = self.keyring.keys(request, request.num_tokens - 1) or ()
        first = computed // self.limits.block
        if first >= len(keys):
            return 0
        digests = tuple(key.digest for key in keys[first:])
        if self._is_led(request, digests[0]):
            return None
        now = self.clock.now()
        restore = _Restore(next(self._numbers), request, digests, first, policy, now)
        self._restores[request.request_id] = self._by_id[restore.id] = restore
        self._leaders.setdefault(digests[0], restore.id)
        self._orders.opened.append(Opened(restore.id, first, digests))
        return None

    def _is_led(self, request: Request, key: bytes) -> bool:
        """Another request is bringing the same blocks: soon they are in the local prefix cache."""
        leader = self._by_id.get(self._leaders.get(key, 0))
        if leader is None or not self.limits.shares:
            return False
        return leader.phase is not Phase.OUTSIDE or request.priority >= leader.request.priority

    def _continue(self, restore: _Restore, computed: int) -> int | None:
        found, edge = restore.found, computed // self.limits.block
        if found is None or restore.progress is None:
            if restore.asked < 2 or self._patient(restore):
                return None
            _log.info("request %s: no tier answered in time", restore.request.request_id)
            self._close(restore)
            return 0
        if found.top <= max(edge, found.bottom):
            self._close(restore)
            return 0
        self._orders.claims[restore.id] = edge
        low = restore.progress.low
        if low <= edge:
            restore.edge, restore.blocks = edge, WHOLE
            return (found.top - edge) * self.limits.block
        restore.blocks = self._decide(restore, computed)
        if restore.blocks == WAIT and self._fits(restore, edge):
            return None
        return self._enter(restore, computed)

    def _enter(self, restore: _Restore, computed: int) -> int:
        """Let it in: to race, or without its restore where a race cannot be or cannot pay."""
        found, progress = restore.found, restore.progress
        assert found is not None
        assert progress is not None
        alone = restore.blocks == WHOLE and (
            restore.request.num_tokens - computed <= self.limits.budget
        )
        nothing = progress.dead and progress.low >= found.top
        if alone or nothing or not self.races:
            self.counts.add("restores", "computed")
            self._close(restore)
            return 0
        restore.blocks = restore.blocks or 1
        return 0

    def _patient(self, restore: _Restore) -> bool:
        return self.clock.now() - restore.opened < self.settings.lookup_patience

    def _fits(self, restore: _Restore, edge: int) -> bool:
        """Whether all that is loaded before it enters has room in staging memory."""
        assert restore.found is not None
        wanted = restore.found.top - max(edge, restore.found.bottom)
        others = sum(
            other.found.top - other.first
            for other in self._by_id.values()
            if other.phase is Phase.OUTSIDE and other.found and other.id < restore.id
        )
        return wanted + others <= self.limits.staged_blocks

    def _decide(self, restore: _Restore, computed: int) -> int:
        view = self._view(restore, computed)
        if restore.policy == "load" and view.low > view.bottom:
            return WAIT
        return choose(view, self.costs)

    def _view(self, restore: _Restore, computed: int) -> View:
        found, progress = restore.found, restore.progress
        assert found is not None
        assert progress is not None
        return View(
            done=computed,
            tokens=restore.request.num_tokens,
            block=self.limits.block,
            top=found.top,
            low=progress.low,
            bottom=progress.low if progress.dead else found.bottom,
            block_seconds=progress.block_seconds,
            first_seconds=progress.first_seconds,
            waited=progress.waited,
            budget=self.limits.budget,
        )

    def allocated(self, request: Request, external: int) -> None:
        """The request got blocks: reserve those of the whole prefix, and say where loads go."""
        restore = self._restores.get(request.request_id)
        if restore is None or restore.found is None:
            return
        top, block = restore.found.top, self.limits.block
        if external:
            restore.phase = Phase.PLACED
            self._aim(restore, restore.edge)
            self._note_restored(restore, external)
            return
        slots = self.cache.allocate_slots(request, top * block, delay_cache_blocks=True)
        if slots is None:
            self.counts.add("restores", "computed")
            self._close(restore)
            return
        restore.phase = Phase.RACING
        self._aim(restore, max(restore.first, restore.found.bottom))

    def _aim(self, restore: _Restore, first: int) -> None:
        assert restore.found is not None
        ids = self.cache.get_block_ids(restore.request.request_id)[0]
        targets = tuple(ids[first : restore.found.top])
        self.pins.pin(targets)
        self._pinned[restore.id] = targets
        self._orders.targets[restore.id] = (first, targets)

    # -- steps ---------------------------------------------------------------------------------

    def jump(self, running: Callable[[str], bool]) -> None:
        """Before a step: requests whose two ends have met go on behind their prefix.

        ``running``: whether a request is running now.
        """
        for restore in list(self._restores.values()):
            if restore.phase is Phase.RACING and running(restore.request.request_id):
                self._try_jump(restore)

    def _try_jump(self, restore: _Restore) -> None:
        request, found, progress = restore.request, restore.found, restore.progress
        assert found is not None
        assert progress is not None
        done, end = request.num_computed_tokens, found.top * self.limits.block
        if done < end and progress.low * self.limits.block > done:
            return
        if done >= end:
            self.counts.add("restores", "computed")
        else:
            request.num_computed_tokens = end
            self.cache.cache_blocks(request, end)
            self._note_restored(restore, end - done)
        self._close(restore)

    def _note_restored(self, restore: _Restore, tokens: int) -> None:
        self.counts.add("restore_tokens", "load", amount=tokens)
        self.counts.add("restores", "both" if restore.phase is Phase.RACING else "loaded")
        stats, request = restore.request.prefill_stats, restore.request
        if restore.phase is Phase.RACING and stats and not request.num_preemptions:
            stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=stats.num_local_cached_tokens,
                num_external_cached_tokens=min(
                    tokens, request.num_prompt_tokens - stats.num_local_cached_tokens
                ),
            )

    def cap(self, request: Request, computed: int, new: int) -> int:
        """How many of the ``new`` tokens behind ``computed`` the step should compute."""
        restore = self._restores.get(request.request_id)
        if restore is None or restore.phase is Phase.PLACED or restore.found is None:
            return new
        if restore.phase is Phase.RACING:
            restore.blocks = self._decide(restore, computed)
        if restore.blocks == WHOLE:
            return new
        block = self.limits.block
        stop = (-(-computed // block) + restore.blocks) * block  # WAIT: to the end of a begun block
        if stop > computed + new:  # loads can only take whole blocks
            whole = (computed + new) // block * block
            stop = whole if whole > computed else computed + new
        return stop - computed

    def orders(
        self, scheduled: Mapping[str, int], requests: Mapping[str, Request], gone: Sequence[str]
    ) -> Orders:
        """What the worker has to do in this step. ``gone``: requests preempted in it."""
        for each in list(self._restores.values()):
            if each.phase is Phase.PLACED and each.id not in self._orders.targets:
                self._close(each)  # the step before this one put it in place
        for request_id in gone:
            restore = self._restores.get(request_id)
            if restore is not None and restore.phase is not Phase.OUTSIDE:
                self._close(restore)
        for request_id, tokens in scheduled.items():
            request = requests[request_id]
            done = request.num_computed_tokens + tokens
            restore = self._restores.get(request_id)
            if restore is not None and restore.phase is Phase.RACING:
                self._orders.claims[restore.id] = -(-done // self.limits.block)
            if self.settings.save and not self._lost:
                self._plan_saves(request, done, tokens)
        self._time(scheduled, requests)
        orders, self._orders = self._orders, Orders()
        orders.idle = not scheduled and bool(self._by_id or self._ending or self.pins.held)
        return orders

    def _time(self, scheduled: Mapping[str, int], requests: Mapping[str, Request]) -> None:
        """Steps of one request's prefill alone say what compute costs."""
        self._timed = None
        if len(scheduled) == 1:
            ((request_id, tokens),) = scheduled.items()
            start = requests[request_id].num_computed_tokens
            if tokens >= _TIMED_TOKENS:
                self._timed = Tile(0, start, start + tokens)

    def take_timed(self) -> Tile | None:
        """What the step whose orders were given last computes, if its time is worth knowing."""
        timed, self._timed = self._timed, None
        return timed

    def _plan_saves(self, request: Request, done: int, width: int) -> None:
        block = self.limits.block
        first = self._planned.get(request.request_id, 0)
        complete = min(done, len(request.all_token_ids)) // block
        if complete <= first:
            return
        keys = self.keyring.keys(request, complete * block)
        if keys is None:
            self._planned[request.request_id] = 1 << 62
            return
        ids = self.cache.get_block_ids(request.request_id)[0][first:complete]
        tenant = self.keyring.tenant(request)
        reached, saves = self.book.plan(
            first, keys[first:complete], ids, self.pins, width=width, tenant=tenant
        )
        self._planned[request.request_id] = reached
        self._orders.saves += saves

    def heard(self, report: Report) -> None:
        """Take the worker's report of a step."""
        for restore_id, found in report.found.items():
            restore = self._by_id.get(restore_id)
            if restore is not None and restore.found is None:
                restore.found = found
                there = restore.keys[found.bottom - restore.first : found.top - restore.first]
                self.book.remember(there)
        for restore_id, progress in report.progress.items():
            if restore_id in self._by_id:
                self._by_id[restore_id].progress = progress
        for restore_id in report.ended:
            self.pins.unpin(self._ending.pop(restore_id, ()))
        self.book.heard(report.saves, self.pins)
        if report.lost and not self._lost:
            self._give_up()

    def _give_up(self) -> None:
        """The worker's storage is gone: nothing is restored or stored from now on."""
        _log.error("storage has died: every request is computed from now on")
        self._lost = True
        for restore in list(self._restores.values()):
            self._close(restore)
        for pinned in self._ending.values():
            self.pins.unpin(pinned)
        self._ending.clear()
        self._orders = Orders()
        self.book.abandon(self.pins)

    # -- the end -------------------------------------------------------------------------------

    def finished(self, request_id: str) -> None:
        """The request is over, whatever it was doing."""
        if restore := self._restores.get(request_id):
            self._close(restore)
        self.keyring.forget(request_id)
        self._planned.pop(request_id, None)

    def reset(self) -> None:
        """What is stored does not count any more: the model's weights have changed."""
        for restore in list(self._restores.values()):
            self._close(restore)
        self.keyring.renew()
        self.book.forget()
        self._planned.clear()

    def _close(self, restore: _Restore) -> None:
        """Tell the worker to stop; until it says so, the targets stay pinned."""
        del self._restores[restore.request.request_id], self._by_id[restore.id]
        first = restore.keys[0]
        if self._leaders.get(first) == restore.id:
            del self._leaders[first]
        self._orders.targets.pop(restore.id, None)
        self._orders.claims.pop(restore.id, None)
        pinned = self._pinned.pop(restore.id, ())
        unheard = [order for order in self._orders.opened if order.restore == restore.id]
        if unheard:  # the worker was never told of it
            self._orders.opened.remove(unheard[0])
            self.pins.unpin(pinned)
            return
        self._ending[restore.id] = pinned
        self._orders.closed.append(restore.id)
