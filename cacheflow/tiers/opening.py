"""From settings to tiers: backend, what guards it, index and capacity and eviction, and codec."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cacheflow.errors import ConfigError
from cacheflow.kv import import_coders
from cacheflow.registry import load_backend
from cacheflow.tiers.departures import Departures, departures_path
from cacheflow.tiers.encoded import Encoded
from cacheflow.tiers.guarded import Guarded
from cacheflow.tiers.tier import Tier
from cacheflow.tiers.value import FLAT
from cacheflow.types import Codec, tell

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from cacheflow.abc import StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.kv import Stamp
    from cacheflow.settings import Settings, TierSettings
    from cacheflow.tiers.value import Value
    from cacheflow.types import Event, Observer

__all__ = ["front", "open_tiers", "try_tiers"]


async def try_tiers(settings: Settings) -> None:
    """Open the backends of ``settings`` and close them again: who loads a model first, for minutes,
    hears of a wrong option before that.

    Raises: as :func:`open_tiers`.
    """
    for tier in settings.tiers:
        await (await _open(tier)).aclose()


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
        if tier.codec is not Codec.RAW:
            await asyncio.to_thread(import_coders)
        backend = await _open(tier)
        told = observer
        if settings.keep_departures and backend.capabilities.persistent:
            try:
                told = await _keeping_departures(settings, tier, stack, observer)
            except BaseException:  # cancelled as well: nobody else knows of it
                await backend.aclose()
                raise
        guarded = Guarded(
            backend,
            tier.name,
            deadline=settings.load_deadline,
            clock=clock,
            observer=told,
        )
        asked = value if tier.eviction == "cost-aware" else FLAT
        opened = await front(guarded, tier, clock=clock, observer=told, value=asked)
        if tier.codec is not Codec.RAW:
            opened = Encoded(opened, tier.codec, stamp)
        stack.push_async_callback(opened.aclose)
        tiers[tier.name] = opened
    return tiers


async def front(
    guarded: StorageBackend,
    settings: TierSettings,
    *,
    clock: Clock | None = None,
    observer: Observer = lambda event: None,
    value: Value = FLAT,
) -> StorageBackend:
    """A tier in front of ``guarded``, where one is needed: a store that evicts by itself, and is
    given no limits here, needs no index of everything that a whole fleet has in it."""
    limits = (settings.capacity_bytes, settings.ttl, settings.tenant_quota_bytes)
    is_limited = any(limit is not None for limit in limits) or settings.pin_bytes > 0
    if guarded.capabilities.evicts and not is_limited:
        return guarded
    return await Tier.over(guarded, settings, clock=clock, observer=observer, value=value)


async def _keeping_departures(
    settings: Settings, tier: TierSettings, stack: AsyncExitStack, observer: Observer
) -> Observer:
    """``observer``, and what keeps the departures of ``tier`` until ``stack`` has closed it."""
    path = await asyncio.to_thread(departures_path, settings.cache_dir, tier)
    departures = Departures(path, tier.name)
    stack.push_async_callback(asyncio.to_thread, departures.close)

    def both(event: Event) -> None:
        tell(observer, event)
        departures(event)

    return both


async def _open(tier: TierSettings) -> StorageBackend:
    # Finding and importing a backend reads the disk.
    try:
        kind = await asyncio.to_thread(load_backend, tier.backend)
        return await kind.open(tier.options)
    except ConfigError as error:
        raise ConfigError(f"tier {tier.name!r}: {error}") from error
