"""The measurements behind ``cacheflow profile``: tiles on an engine, reads on a tier.

Uses the public contracts only (``Engine``, ``StorageBackend``) and teaches the cost models what it
sees. Knows nothing of how results are shown or kept.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from cacheflow.errors import BackendError
from cacheflow.kv import seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.types import (
    ChunkKey,
    Claim,
    ComputeBatch,
    ObjectKey,
    Read,
    Segment,
    Span,
    Tile,
    TileWork,
    TransferStatus,
    Write,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from cacheflow.abc import Engine, StorageBackend
    from cacheflow.clock import Clock
    from cacheflow.costs import ChannelModel, ComputeModel
    from cacheflow.types import ChunkInfo, KVLayout

__all__ = ["DEPTHS", "ReadRate", "TileCost", "measure_channel", "measure_compute", "plan_tiles"]

DEPTHS: Final = (1, 2, 4, 8)
_NARROW: Final = (16, 64, 256)
_NARROW_REPEATS: Final = 3
_OBJECT_BYTES: Final = 64 << 20
"""Written to each tier, as two objects at least and eight at most."""
_POINT_SECONDS: Final = 0.25
"""Each size and depth is read for this long, and a few loads at least."""
_LONGEST_POINT: Final = 4.0
"""Sizes and depths that would take longer than this are left out."""
_STAGING_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class TileCost:
    """What one tile took: ``layer_seconds`` is the median over its layers and repeats."""

    start: int
    width: int
    layer_seconds: float
    layers: int

    @property
    def tokens_per_second(self) -> float:
        """Through all layers."""
        return self.width / (self.layer_seconds * self.layers)


@dataclass(frozen=True, slots=True)
class ReadRate:
    """Reads of ``nbytes``, ``depth`` at a time."""

    nbytes: int
    depth: int
    load_seconds: float
    """Median, from asking to having."""
    bytes_per_second: float


# -- compute ---------------------------------------------------------------------------------------


def plan_tiles(engine: Engine, tokens: int) -> list[Tile]:
    """Narrow tiles at the front, the grid's tiles up to ``tokens``, narrow ones behind them."""
    grid = engine.grid
    front = [grid.split(0, width)[0] for width in _NARROW if width < tokens]
    back = [grid.split(tokens, tokens + width)[0] for width in _NARROW]
    return [*front, *grid.split(0, tokens), *back]


async def measure_compute(
    engine: Engine, tokens: int, model: ComputeModel, tell: Callable[[], None]
) -> list[TileCost]:
    """Push every tile of :func:`plan_tiles` through all layers, telling after each.

    Raises:
        ConfigError: the model's context is too short.
    """
    tiles = plan_tiles(engine, tokens)
    request = "cacheflow-profile"
    await engine.open(request, [1 + i % 100 for i in range(max(tile.stop for tile in tiles))])
    costs = []
    try:
        await _push(engine, request, tiles[0])  # allocations and caches are not what is measured
        for tile in tiles:
            seconds: list[float] = []
            for _ in range(_NARROW_REPEATS if tile.width in _NARROW else 1):
                seconds += await _push(engine, request, tile)
            for each in seconds:
                model.observe(tile, each)
            middle = statistics.median(seconds)
            costs.append(TileCost(tile.start, tile.width, middle, engine.layout.num_layers))
            tell()
    finally:
        await engine.close(request)
    return costs


async def _push(engine: Engine, request: str, tile: Tile) -> tuple[float, ...]:
    batch = ComputeBatch((TileWork(request, tile, 0),))
    (done,) = await engine.recompute(batch, lambda _work, _layer: Claim.WRITE)
    return done.seconds


# -- channels --------------------------------------------------------------------------------------


async def measure_channel(
    backend: StorageBackend,
    layout: KVLayout,
    model: ChannelModel,
    clock: Clock,
    tell: Callable[[], None],
) -> list[ReadRate]:
    """Write temporary objects, read them at several sizes and depths, remove them.

    ``tell`` is called once for each pair of size and depth, measured or left out.

    Raises:
        BackendError: the tier does not take the objects, or does not give them back.
    """
    rates = []
    async with _objects(backend, layout) as infos:
        prober = _Prober(backend, infos, model, clock)
        for layers in sorted({1, max(1, layout.num_layers // 4), layout.num_layers}):
            nbytes = layers * layout.layer_stride()
            for depth in DEPTHS:
                known = model.bandwidth
                wait = nbytes * depth / known + model.latency if known else 0.0
                if wait <= _LONGEST_POINT and depth * nbytes <= _STAGING_BYTES:
                    rates.append(await prober.point(layers, nbytes, depth))
                tell()
    return rates


class _Prober:
    """Reads ranges of ``infos`` in turn, teaching ``model``."""

    def __init__(
        self,
        backend: StorageBackend,
        infos: Sequence[ChunkInfo],
        model: ChannelModel,
        clock: Clock,
    ) -> None:
        self._backend = backend
        self._infos = infos
        self._model = model
        self._clock = clock
        self._ids = count(1)

    async def point(self, layers: int, nbytes: int, depth: int) -> ReadRate:
        """Keep ``depth`` reads of ``layers`` layers in flight for a moment."""
        pool = StagingPool(depth * nbytes)
        begun = self._clock.now()
        until = begun + _POINT_SECONDS
        seconds: list[float] = []

        async def stream() -> None:
            while not seconds or self._clock.now() < until:
                seconds.append(await self._load(pool, layers, nbytes))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(depth):
                    group.create_task(stream())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await pool.aclose()
        passed = max(self._clock.now() - begun, 1e-9)
        return ReadRate(nbytes, depth, statistics.median(seconds), len(seconds) * nbytes / passed)

    async def _load(self, pool: StagingPool, layers: int, nbytes: int) -> float:
        number = next(self._ids)
        info = self._infos[number % len(self._infos)]
        whole = info.layout.num_layers
        first = number * layers % (whole - layers + 1)
        offset, _ = info.layer_range(Span(first, first + layers))
        with await pool.lease(nbytes) as lease:
            begun = self._clock.now()
            self._model.started(number, nbytes, begun)
            delivered = False
            try:
                read = Read(info.key, offset, lease.part(0, nbytes))
                async for result in self._backend.load([read]):
                    delivered = result.status is TransferStatus.OK
                    if not delivered:
                        reason = str(result.error or result.status.value)
                        raise BackendError(reason, operation="load", context="profile")
            finally:
                ended = self._clock.now()
                self._model.ended(number, ended, delivered=delivered)
        return ended - begun


@asynccontextmanager
async def _objects(backend: StorageBackend, layout: KVLayout) -> AsyncIterator[list[ChunkInfo]]:
    """A few objects under keys that nothing else has; gone afterwards."""
    nbytes = layout.payload_bytes()
    pool = StagingPool(nbytes)
    infos: list[ChunkInfo] = []
    try:
        with await pool.lease(nbytes) as lease:
            for _ in range(min(max(_OBJECT_BYTES // nbytes, 2), 8)):
                info, header = await asyncio.to_thread(_sealed, layout, lease.view)
                (result,) = await backend.store([Write(info, (buffer_from(header), lease.buffer))])
                if result.status is not TransferStatus.OK:
                    reason = str(result.error or result.status.value)
                    raise BackendError(reason, operation="store", context="profile")
                infos.append(info)
        yield infos
    finally:
        await pool.aclose()
        await backend.delete([info.key for info in infos])


def _sealed(layout: KVLayout, payload: memoryview) -> tuple[ChunkInfo, bytes]:
    """Runs in a thread: random bytes, so that no layer below can compress them."""
    payload[:] = os.urandom(len(payload))
    chunk = ChunkKey(os.urandom(32))
    key = ObjectKey(chunk, Span(0, layout.num_layers), Span(0, layout.num_kv_heads))
    segments = (Segment(0, layout.chunk_tokens, layout.chunk_tokens),)
    return seal(key, layout, payload, grid_id="profile", segments=segments, canonical=False)
