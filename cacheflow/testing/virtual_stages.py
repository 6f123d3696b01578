"""A pipeline of stages in virtual time: each with its own compute and link, the real scheduler.

Stages that have their boundary activations do not wait for one another, so each is a run of its
own; without them a stage is fed when the one before has computed a tile, so they run one after the
other. What moves between stages is taken to move at once. It is the restore that is measured, so
the suffix comes when that is over. One request at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from cacheflow.distributed import Mode, StageCosts, cut_layers, fluid_seconds, grid_seconds
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cacheflow.types import RequestSpec, Tile

__all__ = ["Pipeline", "StageResult"]

_CHUNK: Final = 256
_AT_ONCE: Final = 1e-9
_AFTERWARDS: Final = 1e6


@dataclass(frozen=True, slots=True)
class StageResult:
    """What one stage did. Seconds since the request's arrival; bytes on its link."""

    seconds: float
    bound: float
    """Fluid bound of the stage, with the bytes of its activations."""
    possible: float
    """The same where compute takes whole layers of whole tiles, and waits for activations."""
    load_seconds: float
    """Loading all of its KV, alone."""
    kv_bytes: int
    hidden_bytes: int
    """Of activations loaded."""
    recomputed: float
    """Share of its token-layers."""


class Pipeline:
    """``layers`` layers of ``layer_bytes`` KV a token in ``count`` stages; ``hidden_bytes`` a token
    at each boundary. ``layer_seconds(tile)``: of one layer of one tile, on every stage."""

    def __init__(
        self,
        count: int,
        layers: int,
        layer_seconds: Callable[[Tile], float],
        layer_bytes: int,
        hidden_bytes: int,
    ) -> None:
        self._stages = cut_layers(layers, count)
        self._layer_seconds = layer_seconds
        self._stride = _CHUNK * layer_bytes
        self._hidden = _CHUNK * hidden_bytes

    def compute_seconds(self, tokens: int) -> float:
        """The slowest stage's recompute of a prefix, alone."""
        tiles = make_spec(tokens, tokens + 1).tiles
        return max(map(len, self._stages)) * sum(map(self._layer_seconds, tiles))

    def stage_bytes(self, tokens: int) -> int:
        """The largest stage's KV of a prefix."""
        return max(map(len, self._stages)) * tokens // _CHUNK * self._stride

    def restore(
        self, tokens: int, bandwidth: float, mode: Mode = Mode.INDEPENDENT, policy: str = "adaptive"
    ) -> list[StageResult]:
        """A prefix of ``tokens``, all of it stored; ``bandwidth`` of each stage's link."""
        results: list[StageResult] = []
        fed: dict[int, float] = {}
        for number in range(len(self._stages)):
            result, fed = self._stage(number, tokens, bandwidth, mode, policy, fed)
            results.append(result)
        return results

    def _stage(
        self,
        number: int,
        tokens: int,
        bandwidth: float,
        mode: Mode,
        policy: str,
        fed: dict[int, float],
    ) -> tuple[StageResult, dict[int, float]]:
        """One stage, given when the one before fed it; and when it could feed the next one."""
        layers, chunks = len(self._stages[number]), tokens // _CHUNK
        link = Link(bandwidth, 50e-6)
        run = VirtualRun(self._layer_seconds, {"link": link})
        spec = replace(make_spec(tokens, tokens + 1, layers=layers), fed=True)
        self._learn(run, spec.tiles)
        there = (number > 0 and mode is Mode.INDEPENDENT,) * chunks
        every = ((1 << layers) - 1,) * chunks
        run.arrive(spec, [Coverage("link", every, self._stride, there, self._hidden)], policy)
        if not number:  # which embeds tokens itself
            fed = dict.fromkeys((tile.start for tile in spec.tiles), _AT_ONCE)
        if not number or mode is Mode.DEPENDENT:
            for start, when in fed.items():
                run.at(when, partial(run.scheduler.feed, spec.id, start))
        run.at(_AFTERWARDS, partial(run.scheduler.feed, spec.id, tokens))
        run.run(spec.id)
        return self._result(run, spec, link, bool(number)), dict(run.computed_at)

    def _learn(self, run: VirtualRun, tiles: Sequence[Tile]) -> None:
        """Warm costs: an engine knows its own speed."""
        for tile in tuple(tiles[:16]) * 4:
            run.compute.observe(tile, self._layer_seconds(tile))

    def _result(
        self, run: VirtualRun, spec: RequestSpec, link: Link, has_boundary: bool
    ) -> StageResult:
        chunks = [tile.width // _CHUNK for tile in spec.tiles]
        kv = [spec.num_layers * self._stride * count / link.bandwidth for count in chunks]
        hidden = [self._hidden * has_boundary * count / link.bandwidth for count in chunks]
        compute = [spec.num_layers * self._layer_seconds(tile) for tile in spec.tiles]
        cells = {(t, layer): source for _, t, layer, source in run.writes}
        recomputed = sum(spec.tiles[t].width for (t, _), s in cells.items() if s == "recompute")
        costs = StageCosts(compute, kv, hidden)
        return StageResult(
            seconds=run.restored_at[spec.id],
            bound=fluid_seconds(costs),
            possible=grid_seconds(costs, spec.num_layers),
            load_seconds=sum(kv),
            kv_bytes=run.loaded_bytes["kv"],
            hidden_bytes=run.loaded_bytes["hidden"],
            recomputed=recomputed / (spec.prefix_tokens * spec.num_layers),
        )
