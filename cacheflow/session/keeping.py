"""What was learned about costs, between processes: taken up at the start, kept now and then."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from cacheflow.costs import (
    COSTS_FILE,
    ComputeModel,
    CostStore,
    KeptCosts,
    channel_key,
    compute_key,
)
from cacheflow.tasks import Lasting
from cacheflow.types import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from cacheflow.abc import Engine
    from cacheflow.scheduling import BatchScheduler
    from cacheflow.settings import Settings, TierSettings

__all__ = ["keeping", "kept_costs"]

_KEEP_SECONDS: Final = 60.0
"""Between two saves of what was learned about costs."""
_CLOSE_SECONDS: Final = 2.0
"""Closing waits this long for what is being saved, and for the last one."""


def kept_costs(
    settings: Settings,
    tiers: Sequence[TierSettings],
    engine: Engine,
    costs: ComputeModel,
    scheduler: BatchScheduler,
) -> KeptCosts:
    """Under keys that say what decides the costs; nothing is known of a caller's own backends."""
    return KeptCosts(
        CostStore(settings.cache_dir / COSTS_FILE),
        costs,
        compute_key(engine.identity, engine.grid_id),
        {tier.name: channel_key(tier.name, tier.backend, _channel_options(tier)) for tier in tiers},
        scheduler.channel,
    )


def _channel_options(tier: TierSettings) -> dict[str, object]:
    """What decides the speed of a tier: decoding is part of it."""
    return tier.options if tier.codec is Codec.RAW else {**tier.options, "tier codec": tier.codec}


def keeping(kept: KeptCosts) -> AbstractAsyncContextManager[None]:
    """Begin with the costs learned once; keep what is learned, now and then and at the end."""
    closing = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        kept.prime(*await asyncio.to_thread(kept.read))
        tasks.append(asyncio.create_task(_keep(kept, closing)))

    async def end() -> None:
        closing.set()
        try:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        finally:
            for task in tasks:
                task.cancel()  # the disk hangs
            await asyncio.wait(tasks)

    return Lasting(begin, end)


async def _keep(kept: KeptCosts, closing: asyncio.Event) -> None:
    """Save what was learned, once a minute at most, and at the end."""
    is_last = False
    while not is_last:
        with suppress(TimeoutError):
            async with asyncio.timeout(_KEEP_SECONDS):
                await closing.wait()
        is_last = closing.is_set()
        if save := kept.to_save():
            await asyncio.to_thread(save)
