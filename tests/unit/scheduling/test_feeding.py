"""Tiles of a pipeline stage: fed by stored activations where they pay, by the stage before else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheflow.distributed import StageCosts, fluid_seconds
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, RequestSpec

LAYERS, CHUNK, STRIDE = 8, 256, 1 << 20


class Stage:
    """A stage other than the first in virtual time; recompute alone takes a second."""

    def __init__(self, tokens: int, ratio: float, io: float = 1.0, stored: float = 1.0) -> None:
        self.tokens, chunks = tokens, tokens // CHUNK
        bandwidth = chunks * LAYERS * STRIDE / io
        seconds = 1.0 / (tokens * LAYERS)
        self.link = Link(bandwidth, 1e-4)
        self.run = VirtualRun(lambda tile: tile.width * seconds, {"link": self.link}, attention=0.0)
        self.spec: RequestSpec = replace(make_spec(tokens, tokens + 1, layers=LAYERS), fed=True)
        for tile in self.spec.tiles * 8:
            self.run.compute.observe(tile, tile.width * seconds)
        self.hidden = int(ratio * LAYERS * STRIDE)
        there = tuple(chunk < stored * chunks for chunk in range(chunks))
        self.coverage = Coverage("link", ((1 << LAYERS) - 1,) * chunks, STRIDE, there, self.hidden)
        widths = [tile.width / tokens for tile in self.spec.tiles]
        self.costs = StageCosts(widths, [io * w for w in widths], [io * ratio * w for w in widths])

    def restore(self, coverage: Coverage | None = None, policy: str = "adaptive") -> float:
        """Seconds until the prefix is there; the stage before sends the suffix at once."""
        self.run.arrive(self.spec, [coverage or self.coverage], policy)
        for piece in self.spec.suffix:
            self.run.at(1e-9, lambda start=piece.start: self.run.scheduler.feed("r", start))  # type: ignore[misc]
        self.run.run("r")
        return self.run.restored_at["r"]

    @property
    def recomputed(self) -> float:
        """Share of the cells."""
        widths = [self.spec.tiles[t].width for _, t, _, s in self.run.writes if s == "recompute"]
        return sum(widths) / (self.tokens * LAYERS)


@pytest.mark.parametrize("ratio", [0.125, 0.25, 0.5])
def test_restores_near_the_bound_that_counts_activations(ratio: float) -> None:
    """At compute:I/O 1:1 a stage reaches 0.98 of its fluid bound, activation bytes included, from
    both ends."""
    stage = Stage(32768, ratio)
    seconds = stage.restore()
    assert fluid_seconds(stage.costs) >= 0.98 * seconds
    assert 0.3 < stage.recomputed < 0.7


def test_no_activation_is_loaded_that_costs_more_than_it_saves() -> None:
    """As large as the KV it saves, or over a link that is faster than compute: loads alone."""
    stage = Stage(16384, 1.0)
    assert stage.restore() == pytest.approx(1.0, rel=0.07)
    slow = Stage(16384, 0.125, io=0.01)
    assert slow.restore() == pytest.approx(0.01, rel=0.1)
    assert slow.recomputed < 0.01  # of the first tile, while nothing is known of the link
    assert slow.link.busy == pytest.approx(0.01, rel=0.01)


def test_without_activations_everything_is_loaded() -> None:
    """Nothing stored to begin with, and nobody feeds: loads alone, and no waiting for compute."""
    stage = Stage(8192, 0.25, stored=0.0)
    assert stage.restore() == pytest.approx(1.0, rel=0.01)
    assert stage.recomputed == 0.0


def test_a_hole_is_fed_before_anything_else() -> None:
    """A tile that is not stored is recomputed from its activation, whatever that costs."""
    stage = Stage(8192, 0.9, io=0.05)
    layers = list(stage.coverage.layers)
    layers[20] = 0
    stage.restore(replace(stage.coverage, layers=tuple(layers)))
    holes = {t for _, t, _, source in stage.run.writes if source == "recompute"}
    assert stage.spec.tiles[4].start <= 20 * CHUNK < stage.spec.tiles[4].stop
    assert 4 in holes
    assert stage.run.scheduler.starving("r") == []


def test_a_hole_without_activation_asks_the_stage_before() -> None:
    """What no channel can feed is asked for once, and computed when it has come."""
    stage = Stage(4096, 0.25, stored=0.0)
    layers = (0, *stage.coverage.layers[1:])
    stage.run.arrive(stage.spec, [replace(stage.coverage, layers=layers)])
    asked: list[int] = []

    def look() -> None:
        asked.extend(stage.run.scheduler.starving("r"))

    def deliver() -> None:
        for start in (0, stage.spec.suffix[0].start):
            stage.run.scheduler.feed("r", start)

    stage.run.at(0.1, look)
    stage.run.at(0.2, look)
    stage.run.at(2.0, deliver)
    stage.run.run("r")
    assert asked == [0]
    assert stage.run.restored_at["r"] > 2.0
    assert {t for _, t, _, source in stage.run.writes if source == "recompute"} == {0}


def test_a_lost_activation_is_not_asked_for_again() -> None:
    """Corrupt on its channel: the tile is loaded instead, or left to the stage before."""
    stage = Stage(8192, 0.125)
    hidden = []

    def outcome(load: object) -> bool:
        hidden.append(load)
        return not getattr(load, "hidden", False)

    stage.link.outcome = outcome
    assert stage.restore() < 1.2
    assert stage.recomputed == 0.0
    lost = [load.chunks for load in hidden if load.hidden]  # type: ignore[attr-defined]
    assert lost
    assert len({c for chunks in lost for c in chunks}) == sum(map(len, lost))


@pytest.mark.parametrize("policy", ["recompute", "staircase", "two-pointer", "cake"])
def test_no_policy_waits_for_ever_for_what_is_lost(policy: str) -> None:
    """Activations are lost under policies that leave tiles to compute: the stage before is asked,
    and the restore ends."""
    stage = Stage(4096, 0.125)
    stage.link.outcome = lambda load: not load.hidden

    def deliver() -> None:
        for start in stage.run.scheduler.starving("r"):
            stage.run.scheduler.feed("r", start)
        if "r" not in stage.run.finished_at:
            stage.run.at(stage.run.clock.now() + 0.05, deliver)

    stage.run.at(0.05, deliver)
    assert stage.restore(policy=policy) < 3.0
    if policy == "recompute":
        assert stage.recomputed == 1.0


def test_a_tile_is_gone_through_once_more_for_the_stage_behind() -> None:
    """Loaded, then wanted by the next stage: compute passes all layers and writes none."""
    stage = Stage(4096, 0.25)
    stage.spec = replace(stage.spec, fed=False)
    spec = stage.spec
    stage.run.arrive(spec, [stage.coverage], "load")
    stage.run.at(0.5, lambda: stage.run.scheduler.pass_on("r", spec.tiles[1].start))
    stage.run.at(0.5, lambda: stage.run.scheduler.pass_on("r", spec.tiles[0].start))
    stage.run.run("r")
    computed = [w for w in stage.run.writes if w[3] == "recompute"]
    assert stage.run.compute_busy > (512 + 512) / 4096
    assert len({(t, layer) for _, t, layer, _ in stage.run.writes}) == len(stage.run.writes)
    assert all(t in (0, 1) for _, t, _, _ in computed)
