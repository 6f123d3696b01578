"""Requests that go on behind their prefix: when the two ends have met, or under the last loads.

Before a step a request whose ends have met jumps: what loads brought counts as computed. Where the
rest is expected to come while the next pass runs, it jumps before, and the pass waits for each
layer. If a load fails then, vLLM takes the request back to where compute was, and it races on.
Belongs to the scheduler's thread; waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cacheflow.plugins.vllm.planner import hideable
from cacheflow.plugins.vllm.records import Overlap
from cacheflow.plugins.vllm.restores import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.plugins.vllm.admission import Admission
    from cacheflow.plugins.vllm.counts import Counts
    from cacheflow.plugins.vllm.restores import Limits, Restore, Restores
    from cacheflow.plugins.vllm.saves import Blocks, Saves

__all__ = ["Jumps"]

_PATIENCE: Final = 4.0
"""A pass waits for its loads this many times as long as they may take, and"""
_PATIENCE_SECONDS: Final = 0.25
"""this much longer, since the others of its batch wait with it."""


@dataclass(slots=True)
class Jumps:
    """Those of one scheduler."""

    restores: Restores
    admission: Admission
    limits: Limits
    cache: Blocks
    saves: Saves
    counts: Counts

    def all(self, running: Callable[[str], bool]) -> None:
        """Before a step. ``running``: whether a request is running now."""
        for restore in self.restores.all():
            if restore.phase is not Phase.RACING or not running(restore.request.request_id):
                continue
            if restore.overlaps:
                self._settle(restore)
            elif restore.found is not None:
                self._try(restore)

    def enter(self, restore: Restore) -> None:
        """A request got blocks for its whole prefix, all of it from loads but what it had."""
        restore.base = restore.edge * self.limits.block
        restore.phase = Phase.RACING if restore.overlaps else Phase.PLACED
        if not restore.overlaps:
            self._count(restore, restore.base)

    def race(self, restore: Restore) -> None:
        """A request got blocks for its whole prefix, and computes what does not come first."""
        restore.base = restore.first * self.limits.block
        restore.phase = Phase.RACING

    def order(self, restore: Restore) -> None:
        """The request of a jump under the last loads computes in the next step."""
        assert restore.found is not None
        ids = self.cache.get_block_ids(restore.request.request_id)[0]
        view = restore.view(restore.edge * self.limits.block, self.limits, self.admission.hidden)
        seconds = _PATIENCE_SECONDS + _PATIENCE * hideable(view, self.admission.costs)
        overlap = Overlap(restore.edge, tuple(ids[restore.edge : restore.found.top]), seconds)
        self.restores.orders.overlaps[restore.id] = overlap

    def finished(self, restore: Restore) -> None:
        """Its request has ended, having read what it waited for."""
        if restore.overlaps and restore.phase is Phase.RACING:
            self._complete(restore)

    def undo(self, restore: Restore) -> None:
        """Nothing more is loaded for it: what is not there is computed."""
        if restore.phase is not Phase.RACING:
            return
        if restore.overlaps:
            self._settle(restore)
        if restore.overlaps:
            self._take_back(restore)

    def _settle(self, restore: Restore) -> None:
        """See how a jump under the last loads has ended, if it has."""
        progress, found, request = restore.progress, restore.found, restore.request
        assert progress is not None
        assert found is not None
        if progress.low <= restore.edge:
            self._complete(restore)
            end = found.top * self.limits.block
            self.cache.cache_blocks(request, min(request.num_computed_tokens, end))
            restore.overlaps = False
            self.restores.close(restore)
        elif progress.dead:
            self._take_back(restore)

    def _complete(self, restore: Restore) -> None:
        self.counts.add("overlaps", "complete")
        self._count(restore, restore.edge * self.limits.block)

    def _take_back(self, restore: Restore) -> None:
        request, computed = restore.request, restore.edge * self.limits.block
        restore.overlaps = False
        request.num_computed_tokens = min(request.num_computed_tokens, computed)
        self.saves.rewind(request.request_id, restore.edge)
        self.counts.add("overlaps", "failed")
        self._tell(restore, 0)

    def _try(self, restore: Restore) -> None:
        request, found, block = restore.request, restore.found, self.limits.block
        assert found is not None
        done, end = request.num_computed_tokens, found.top * block
        if done < end and restore.low(done, block) * block > done:
            if self.admission.may_overlap(restore, done):
                restore.edge, restore.overlaps = done // block, True
                request.num_computed_tokens = end
                self._tell(restore, end - done)
            return
        self._count(restore, done)
        if done < end:
            request.num_computed_tokens = end
            self.cache.cache_blocks(request, end)
            self._tell(restore, end - done)
        self.restores.close(restore)

    def _count(self, restore: Restore, done: int) -> None:
        """The restore is over: ``done`` tokens were there, or computed, and loads brought the rest
        of the prefix."""
        assert restore.found is not None
        end = restore.found.top * self.limits.block
        computed = max(min(done, end) - restore.base, 0)
        self.counts.add("restore_tokens", "recompute", amount=computed)
        if done >= end:
            self.counts.add("restores", "computed")
            return
        self.counts.add("restore_tokens", "load", amount=end - done)
        self.counts.add("restores", "both" if computed else "loaded")

    def _tell(self, restore: Restore, tokens: int) -> None:
        """Have the request's usage say how many tokens were restored."""
        request, stats = restore.request, restore.request.prefill_stats
        if stats and not request.num_preemptions:
            stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=stats.num_local_cached_tokens,
                num_external_cached_tokens=min(
                    tokens, request.num_prompt_tokens - stats.num_local_cached_tokens
                ),
            )
