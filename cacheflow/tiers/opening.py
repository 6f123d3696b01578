"""From settings to tiers: backend, what guards it, index and capacity and eviction, and codec."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cacheflow.errors import ConfigError
from cacheflow.registry import load_backend
from cacheflow.tiers.encoded import Encoded
from cacheflow.tiers.guarded import Guarded
from cacheflow.tiers.tier import Tier
from cacheflow.tiers.value import FLAT
from cacheflow.types import Codec

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from cacheflow.abc import StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.kv import Stamp
    from cacheflow.settings import Settings, TierSettings
    from cacheflow.tiers.value import Value
    from cacheflow.types import Observer

__all__ = ["open_tiers"]


async def open_tiers(
    settings: Settings,
    stack: AsyncExitStack,
    value: Value,
    stamp: Stamp,
    clock: Clock,
    observer: Observer,
) -> dict[str, StorageBackend]:
    """The tiers of ``settings`` by name, fastest first; ``stack`` closes them.

    ``value``: what objects are worth, for those tiers whose eviction asks. ``stamp``: who stores.

    Raises:
        ConfigError: a backend is not there, or an option of it cannot be used.
        IntegrityError: a tier's folder holds something else.
    """
    tiers: dict[str, StorageBackend] = {}
    for tier in settings.tiers:
        if tier.name in tiers:
            raise ConfigError(f"setting tiers: two tiers are called {tier.name!r}")
        guarded = Guarded(
            await _open(tier),
            tier.name,
            deadline=settings.load_deadline,
            clock=clock,
            observer=observer,
        )
        asked = value if tier.eviction == "cost-aware" else FLAT
        opened: StorageBackend
        opened = await Tier.over(guarded, tier, clock=clock, observer=observer, value=asked)
        if tier.codec is not Codec.RAW:
            opened = Encoded(opened, tier.codec, stamp)
        stack.push_async_callback(opened.aclose)
        tiers[tier.name] = opened
    return tiers


async def _open(tier: TierSettings) -> StorageBackend:
    # Finding and importing a backend reads the disk.
    kind = await asyncio.to_thread(load_backend, tier.backend)
    return await kind.open(tier.options)
