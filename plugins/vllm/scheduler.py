"""vLLM's schedulers with a few places in which CacheFlow has a say.

Before a step, requests whose ends have met jump behind their prefix; in a step, the chunk of a
request that is being restored is capped, and one that is preempted leaves nothing to find of what
has not come yet; after a step, its time is learned, and what it read too early is computed anew.
Everything else is vLLM's. With another connector, or none, these are vLLM's schedulers unchanged.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from cacheflow.plugins.vllm.connector import CacheFlowConnector

if TYPE_CHECKING:
    from cacheflow.plugins.vllm.desk import Desk
    from cacheflow.types import Tile

__all__ = ["CacheFlowAsyncScheduler", "CacheFlowScheduler", "RestoringMixin"]


class RestoringMixin(Scheduler):  # type: ignore[misc]
    """Put before ``Scheduler`` or ``AsyncScheduler`` in a class's bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = self.connector
        self._desk: Desk | None = None
        if isinstance(connector, CacheFlowConnector) and connector.desk is not None:
            self._desk = connector.desk
            # Runner V2 keeps its own count of computed tokens, so that a jump would be lost.
            races = not self.use_v2_model_runner
            self._desk.let_race(races, overlaps=not isinstance(self, AsyncScheduler))
            self.recompute_kv_load_failures = True  # a load that fails costs time, not the request
        self._steps: dict[int, tuple[float, Tile]] = {}
        """Scheduler outputs under way: when they began and what they compute."""
        self._step_ended = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Jump, then schedule."""
        if self._desk is None:
            return super().schedule(*args, **kwargs)
        began = time.monotonic()
        self._desk.jump(self._is_running)
        output = super().schedule(*args, **kwargs)
        if (tile := self._desk.take_timed()) is not None:
            self._steps[id(output)] = (began, tile)
        return output

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        new = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if self._desk is None or not new:
            return int(new)
        return self._desk.cap(request, num_computed_tokens, new)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Learn what the step took, then go on."""
        now = time.monotonic()
        step = self._steps.pop(id(scheduler_output), None)
        if self._desk is not None and step is not None:
            self._desk.costs.observe(step[1], now - max(step[0], self._step_ended))
        self._step_ended = now
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        told = model_runner_output.kv_connector_output
        if self._desk is not None and told is not None and told.invalid_block_ids:
            self._compute_anew(told.invalid_block_ids)
        return outputs

    def _compute_anew(self, invalid: set[int]) -> None:
        """Every request that has one of these blocks computes it and all that follow, and nobody
        finds them. vLLM lets the second of two that share a block count on the first, which may
        need several steps."""
        assert self._desk is not None
        for request in self.running:
            (ids,) = self.kv_cache_manager.get_block_ids(request.request_id)
            bad = next((i for i, block_id in enumerate(ids) if block_id in invalid), None)
            if bad is not None:
                computed = min(request.num_computed_tokens, bad * self.block_size)
                request.num_computed_tokens = computed
        self.kv_cache_manager.evict_blocks(self._desk.stale(invalid))

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM lets the blocks of a step be found when it is scheduled. A request of low priority
        may be preempted in the same step: of what it was to read and compute, nothing is there."""
        first = self._desk.unread(request.request_id) if self._desk is not None else None
        if first is not None:
            (ids,) = self.kv_cache_manager.get_block_ids(request.request_id)
            self.kv_cache_manager.evict_blocks(set(ids[first:]))
        return super()._preempt_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Pins are lifted for the moment: blocks that storage reads or writes are given to nobody
        in it, and their hashes go like all others."""
        if self._desk is None:
            return bool(super().reset_prefix_cache(*args, **kwargs))
        with self._desk.pins.lifted():
            return bool(super().reset_prefix_cache(*args, **kwargs))

    def _is_running(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.status == RequestStatus.RUNNING


class CacheFlowScheduler(RestoringMixin, Scheduler):  # type: ignore[misc]
    """For ``--scheduler-cls`` without async scheduling (a CPU has none)."""


class CacheFlowAsyncScheduler(RestoringMixin, AsyncScheduler):  # type: ignore[misc]
    """For ``--scheduler-cls`` with async scheduling."""
