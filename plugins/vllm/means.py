"""What loads and stores of one worker share: tiers, memory, threads, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from cacheflow.abc import StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.memory import StagingPool
    from cacheflow.plugins.vllm.blocks import BlockMemory
    from cacheflow.plugins.vllm.counts import Counts
    from cacheflow.tiers import Traffic
    from cacheflow.types import Shard

__all__ = ["Means"]


@dataclass(frozen=True, slots=True)
class Means:
    """Made by the depot, used on its event loop."""

    tiers: Mapping[str, StorageBackend]
    """In the order in which their copies are preferred."""
    memory: BlockMemory
    shard: Shard
    """Which heads ``memory`` holds."""
    pool: StagingPool
    threads: Executor
    """For copies, checksums and headers."""
    clock: Clock
    deadline: float
    """Seconds after which one transfer is given up."""
    changed: Callable[[], None]
    """Called when there is something to report; from any thread."""
    landed: Callable[[], None]
    """Called when something is in place, or has failed; from any thread."""
    counts: Counts
    traffic: Traffic
    """Loads, to which stores give way."""
