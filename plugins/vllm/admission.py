"""When a request that can be restored enters the batch, and how far compute goes for it.

Its prefix is looked for, and loaded, from its arrival on, while staging memory has room. It waits
outside (no blocks, no compute) for as long as its loads alone are expected to be faster than loads
and compute together; if they complete, it enters with its prefix in place. Otherwise it enters to
race. Belongs to the scheduler's thread; waits for nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.plugins.vllm.planner import WAIT, WHOLE, choose, may_begin, tail
from cacheflow.plugins.vllm.restores import Phase
from cacheflow.plugins.vllm.settings import policy_of

if TYPE_CHECKING:
    from cacheflow.clock import Clock
    from cacheflow.costs import ComputeModel
    from cacheflow.plugins.vllm.counts import Counts
    from cacheflow.plugins.vllm.keyring import Keyring, Request
    from cacheflow.plugins.vllm.restores import Limits, Restore, Restores
    from cacheflow.plugins.vllm.settings import VllmSettings

__all__ = ["Admission"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Admission:
    """``races``: the scheduler is one of ours, so a request can jump; ``hidden``: share of a
    forward pass under which the last loads may go on."""

    settings: VllmSettings
    limits: Limits
    keyring: Keyring
    costs: ComputeModel
    clock: Clock
    counts: Counts
    restores: Restores
    races: bool
    hidden: float = 0.0

    def arrived(self, request: Request, computed: int) -> None:
        """Begin although nobody asks yet: vLLM does when it has a place and tokens left in a step,
        and until then storage would be idle. ``computed``: tokens in the local prefix cache."""
        wanted = request.num_tokens // self.limits.block - computed // self.limits.block
        if wanted + self._outside() <= self.limits.staged_blocks:
            self._begin(request, computed)

    def matched(self, request: Request, computed: int) -> int | None:
        """Tokens behind the ``computed`` ones that are staged, or None: ask again next step."""
        restore = self.restores.of(request.request_id)
        if restore is not None and restore.phase is not Phase.OUTSIDE:
            self.restores.close(restore)  # it was preempted: its blocks are gone, it starts anew
            restore = None
        if restore is None:
            return self._begin(request, computed)
        restore.asked += 1
        return self._continue(restore, computed)

    def decide(self, restore: Restore, computed: int) -> int:
        """Blocks that compute should take next; see :func:`planner.choose`."""
        view = restore.view(computed, self.limits, self.hidden)
        if restore.policy == "load" and view.low > view.bottom:
            return WAIT
        return choose(view, self.costs)

    def may_overlap(self, restore: Restore, computed: int) -> bool:
        """Whether compute may go on behind the prefix now: the rest of the blocks behind the
        ``computed`` tokens is expected while it does."""
        if restore.progress is None or not restore.progress.row:
            return False
        return may_begin(restore.view(computed, self.limits, self.hidden), self.costs)

    def split(self, restore: Restore, computed: int) -> None:
        """Have the last blocks above the ``computed`` tokens come by layers, as many as pay."""
        if self.hidden:
            blocks = tail(restore.view(computed, self.limits, self.hidden), self.costs)
            if blocks:
                self.restores.orders.tails[restore.id] = blocks

    def _begin(self, request: Request, computed: int) -> int | None:
        policy = policy_of(self.settings, request.kv_transfer_params)
        if policy == "recompute" or request.skip_reading_prefix_cache:
            return 0
        keys = self.keyring.keys(request, request.num_tokens - 1) or ()
        first = computed // self.limits.block
        if first >= len(keys):
            return 0
        digests = [key.digest for key in keys[first:]]
        if not self._is_led(request, digests[0]):
            self.restores.open(request, first, digests, policy, self.clock.now())
        return None

    def _is_led(self, request: Request, key: bytes) -> bool:
        """Another request is bringing the same blocks: soon they are in the local prefix cache."""
        leader = self.restores.leader(key)
        if leader is None or not self.limits.shares:
            return False
        return leader.phase is not Phase.OUTSIDE or request.priority >= leader.request.priority

    def _continue(self, restore: Restore, computed: int) -> int | None:
        found, edge = restore.found, computed // self.limits.block
        if found is None or restore.progress is None:
            if restore.asked < 2 or self._patient(restore):
                return None
            _log.info("request %s: no tier answered in time", restore.request.request_id)
            self.restores.close(restore)
            return 0
        if found.top <= max(edge, found.bottom):
            self.restores.close(restore)
            return 0
        self.restores.orders.claims[restore.id] = edge
        restore.overlaps = self.may_overlap(restore, computed)
        if restore.progress.low <= edge or restore.overlaps:
            restore.edge, restore.blocks = edge, WHOLE
            return (found.top - edge) * self.limits.block
        self.split(restore, computed)
        restore.blocks = self.decide(restore, computed)
        if restore.blocks == WAIT and self._fits(restore, edge):
            return None
        return self._enter(restore, computed)

    def _enter(self, restore: Restore, computed: int) -> int:
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
            self.restores.close(restore)
            return 0
        restore.blocks = restore.blocks or 1
        return 0

    def _patient(self, restore: Restore) -> bool:
        return self.clock.now() - restore.opened < self.settings.lookup_patience

    def _outside(self) -> int:
        """Blocks that may be staged for requests that are not in yet."""
        return sum(len(each.keys) for each in self.restores.all() if each.phase is Phase.OUTSIDE)

    def _fits(self, restore: Restore, edge: int) -> bool:
        """Whether all that is loaded before it enters has room in staging memory."""
        assert restore.found is not None
        wanted = restore.found.top - max(edge, restore.found.bottom)
        others = sum(
            other.found.top - other.first
            for other in self.restores.all()
            if other.phase is Phase.OUTSIDE and other.found and other.id < restore.id
        )
        return wanted + others <= self.limits.staged_blocks
