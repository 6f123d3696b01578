"""From settings to a running restorer and saver: who gets what, and in which order they end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cacheflow.abc import Packer, Staged, Together
from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel, CostChecks
from cacheflow.errors import ConfigError
from cacheflow.kv import ChunkAuth, Stamp, model_id, tenant_id
from cacheflow.memory import StagingPool
from cacheflow.restore import Restorer
from cacheflow.restore.boundary import StageSaver, WorthStoring
from cacheflow.restore.saver import STAGING_OWNER, Saver
from cacheflow.scheduling import BatchScheduler, JointScheduler
from cacheflow.session.keeping import keeping, kept_costs
from cacheflow.tiers.opening import open_tiers
from cacheflow.tiers.planned import PlannedWrites
from cacheflow.tiers.staged import STAGED_CHANNEL, StagedCopies
from cacheflow.tiers.value import CostValue
from cacheflow.tiers.write_policies import WriteAll
from cacheflow.types import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AsyncExitStack

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.settings import Settings
    from cacheflow.tiers.write_policies import WritePolicy
    from cacheflow.types import Event, Observer

__all__ = ["Parts", "open_parts", "stamp_of"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a flow is made of; all of it ends with the stack it was opened in."""

    backends: Mapping[str, StorageBackend]
    restorer: Restorer
    saver: Saver
    clock: Clock


async def open_parts(
    settings: Settings,
    engine: Engine,
    stack: AsyncExitStack,
    backends: Mapping[str, StorageBackend] | None,
    observer: Observer | None,
    compute: ComputeModel | None,
) -> Parts:
    """See :meth:`cacheflow.session.CacheFlow.open`."""
    clock = SystemClock()
    tiers = settings.tiers if backends is None else ()
    costs = compute or ComputeModel(*engine.layer_flops)
    value = CostValue(costs, engine.layout, engine.grid)
    stamp = stamp_of(settings, engine)
    if backends is None:
        backends = await open_tiers(settings, stack, value, stamp, clock, observer or _ignore)
    channels, staged = _with_staged(backends)
    decoded = any(tier.codec is not Codec.RAW for tier in tiers)
    pool = _staging(settings.staging_bytes, channels, engine, len(backends), decoded=decoded)
    stack.push_async_callback(pool.aclose)
    for backend in backends.values():
        stack.callback(backend.register_memory(pool.arena))
    stack.push_async_callback(staged.aclose)
    scheduler = _scheduler(settings, engine, costs, clock, len(channels))
    value.loads_over(scheduler.channel(name) for name in backends)
    if compute is None and settings.keep_costs:
        kept = kept_costs(settings, tiers, engine, costs, scheduler)
        await stack.enter_async_context(keeping(kept))
    if observer is not None:
        observer = CostChecks(observer, costs, backends, scheduler.channel)
    restorer = Restorer(
        engine,
        scheduler,
        channels,
        pool,
        clock=clock,
        load_deadline=settings.load_deadline,
        observer=observer,
        stamp=stamp,
        allow_lossy=settings.allow_lossy,
    )
    await stack.enter_async_context(restorer)
    saver = _saver(engine, costs, scheduler, backends)(
        engine,
        backends,
        pool,
        clock,
        restorer.emit,
        staged,
        deadline=settings.load_deadline,
        max_bytes=settings.staging_bytes // (len(channels) + 1),
        policy=_write_policy(settings, engine, costs, scheduler, backends),
        stamp=stamp,
        traffic=restorer.traffic,
    )
    await stack.enter_async_context(saver)
    return Parts(backends, restorer, saver, clock)


def _scheduler(
    settings: Settings, engine: Engine, costs: ComputeModel, clock: Clock, channels: int
) -> BatchScheduler:
    kind = JointScheduler if isinstance(engine, Together) else BatchScheduler
    return kind(
        costs,
        clock,
        objective=settings.objective,
        max_load_bytes=settings.staging_bytes // (8 * (channels + 1)),
        claim_ahead=engine.claim_ahead,
        max_requests=settings.max_restores,
        max_tokens=settings.max_restore_tokens,
        pack_tokens=_pack_tokens(settings, engine),
    )


def _pack_tokens(settings: Settings, engine: Engine) -> int:
    """The widest pass; 0 in exact mode. ConfigError where the engine is in another mode."""
    tokens = engine.pack_tokens if isinstance(engine, Packer) else 0
    if settings.mode == "fast" and not tokens:
        raise ConfigError(
            "setting mode: it is fast, but the engine computes every tile by itself: open the "
            "engine with fast=True, or set mode to exact"
        )
    if settings.mode == "exact" and tokens:
        raise ConfigError(
            "setting mode: it is exact, but the engine was opened with fast=True: open it without, "
            "or set mode to fast and allow_lossy to true"
        )
    return tokens


def _saver(
    engine: Engine, costs: ComputeModel, scheduler: BatchScheduler, tiers: Collection[str]
) -> Callable[..., Saver]:
    """What stores: a stage of a pipeline, but the first, also stores what it was fed with."""
    if not (isinstance(engine, Staged) and engine.boundary is not None):
        return Saver
    channels = [scheduler.channel(name) for name in tiers]
    return partial(StageSaver, worth=WorthStoring(engine, costs, channels))


def _with_staged(
    backends: Mapping[str, StorageBackend],
) -> tuple[dict[str, StorageBackend], StagedCopies]:
    """The channels that are loaded from: the tiers, and what waits to be stored in them."""
    channels: dict[str, StorageBackend] = dict(backends)
    staged = StagedCopies(backends)
    if STAGED_CHANNEL in channels:
        raise ConfigError(f"setting tiers: the name {STAGED_CHANNEL!r} is taken")
    if backends:
        channels[STAGED_CHANNEL] = staged
    return channels, staged


def _write_policy(
    settings: Settings,
    engine: Engine,
    costs: ComputeModel,
    scheduler: BatchScheduler,
    tiers: Collection[str],
) -> WritePolicy:
    if settings.write_policy == "all":
        return WriteAll()
    channels = [scheduler.channel(name) for name in tiers]
    return PlannedWrites(costs, channels, engine.layout, engine.grid)


def stamp_of(settings: Settings, engine: Engine) -> Stamp:
    """What this model and tenant write into chunks, and look for in them."""
    auth = ChunkAuth(settings.auth_bytes) if settings.auth_bytes else None
    return Stamp(model_id(engine.identity), tenant_id(settings.salt_bytes), auth)


def _staging(
    nbytes: int, channels: Collection[str], engine: Engine, tiers: int, *, decoded: bool
) -> StagingPool:
    """The staging pool in equal shares: one a channel, so that a hung tier cannot starve the rest,
    and one for what is being stored.

    Raises:
        ConfigError: a share has no room for one layer of the widest tile, or for one whole chunk.
    """
    layout, grid = engine.layout, engine.grid
    widest = max((*grid.head, grid.tail)) // layout.chunk_tokens
    # Encoded layers lie beside what they stand for, and are no larger than that.
    layers = widest * layout.layer_stride() * (2 if decoded else 1)
    needed = max(layout.payload_bytes(), layers)
    shares = len(channels) + 1
    share = nbytes // shares
    if share < needed:
        raise ConfigError(
            f"setting staging_bytes: {nbytes} bytes are too few for this model and "
            f"{tiers} tiers; give at least {needed * shares}"
        )
    try:
        pool = StagingPool(nbytes)
    except ConfigError as error:
        raise ConfigError(f"setting staging_bytes: {error}") from error
    for owner in (*channels, STAGING_OWNER):
        pool.set_cap(owner, share)
    return pool


def _ignore(event: Event) -> None:
    """An observer where there is none."""
