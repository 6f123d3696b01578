"""Whatever the costs, the stores and the users do: the scheduler's promises hold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.scheduling import POLICIES
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid
from tests.unit.scheduling.checked import Checked
from tests.unit.scheduling.harness import OBJECTIVES, options

if TYPE_CHECKING:
    from cacheflow.scheduling import BatchScheduler
    from cacheflow.types import Load, RequestSpec, Tile

CHUNK = 16
GRID = TileGrid((32, 32, 64), 128)
STRIDE = 1 << 12

powers = st.floats(-2.0, 2.0).map(lambda power: 10.0**power)
"""Four orders of magnitude."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong: shares of loads that fail (wholly, in part) or hang until ``patience``."""

    failing: float = 0.0
    partly: float = 0.0
    hanging: float = 0.0
    patience: float = 1.0
    compute_drift: float = 1.0
    link_drift: float = 1.0
    drift_at: float = 0.0
    cancels: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Instance:
    """Lengths are in chunks, times in seconds; a layer of one token costs ``token`` seconds."""

    lengths: list[int]
    suffixes: list[int]
    arrivals: list[float]
    layers: int
    token: float
    attention: float
    bandwidths: list[float]
    holes: float
    trouble: Trouble
    seed: int


troubles = st.builds(
    Trouble,
    failing=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    partly=st.sampled_from([0.0, 0.3]),
    hanging=st.sampled_from([0.0, 0.0, 0.2, 1.0]),
    patience=powers,
    compute_drift=st.sampled_from([1.0, 0.1, 10.0]),
    link_drift=st.sampled_from([1.0, 0.1, 10.0]),
    drift_at=powers,
    cancels=st.dictionaries(st.integers(0, 7), powers, max_size=2),
)


@st.composite
def instances(draw: st.DrawFn, trouble: st.SearchStrategy[Trouble] = troubles) -> Instance:
    count = draw(st.integers(1, 8))
    some = st.integers(1, 24)
    gaps = st.floats(0.0, 3.0)
    return Instance(
        lengths=draw(st.lists(some, min_size=count, max_size=count)),
        suffixes=draw(st.lists(st.integers(1, 200), min_size=count, max_size=count)),
        arrivals=draw(st.lists(gaps, min_size=count, max_size=count)),
        layers=draw(st.integers(1, 6)),
        token=draw(powers) * 1e-3,
        attention=draw(st.sampled_from([0.0, 1e-3, 1e-2])),
        bandwidths=[STRIDE * 100.0 * draw(powers) for _ in range(draw(st.integers(1, 3)))],
        holes=draw(st.sampled_from([0.0, 0.0, 0.2, 0.7])),
        trouble=draw(trouble),
        seed=draw(st.integers(0, 1 << 32)),
    )


class Play:
    """One instance, played to its end under watch."""

    def __init__(self, instance: Instance, policy: str, objective: str) -> None:
        self.instance = instance
        self.chance = random.Random(instance.seed)
        links = {
            f"link{i}": Link(bandwidth, 1e-4, self._fate)
            for i, bandwidth in enumerate(instance.bandwidths)
        }
        self.run = VirtualRun(
            self._cost, links, linear=1.0, attention=instance.attention, **options(objective)
        )
        self.checked = Checked(self.run.scheduler)
        self.run.scheduler = cast("BatchScheduler", self.checked)
        self.specs = [self._spec(i) for i in range(len(instance.lengths))]
        for spec in self.specs:
            self.run.arrive(spec, self._coverage(spec), policy)
        self.run.at(instance.trouble.drift_at, self._drift)
        for index, after in instance.trouble.cancels.items():
            if index < len(self.specs):
                spec = self.specs[index]
                self.run.at(spec.arrival + after, partial(self.run.cancel, spec.id))

    def play(self) -> None:
        self.run.run(*(spec.id for spec in self.specs))
        self.run.settle()

    def _cost(self, tile: Tile) -> float:
        trouble = self.instance.trouble
        drifted = self.run.clock.now() >= trouble.drift_at
        work = tile.width * (1 + self.instance.attention * (tile.start + tile.width / 2))
        return self.instance.token * work * (trouble.compute_drift if drifted else 1.0)

    def _drift(self) -> None:
        for link in self.run.links.values():
            link.bandwidth *= self.instance.trouble.link_drift

    def _spec(self, index: int) -> RequestSpec:
        prefix = self.instance.lengths[index] * CHUNK
        return make_spec(
            prefix,
            prefix + self.instance.suffixes[index],
            layers=self.instance.layers,
            chunk=CHUNK,
            grid=GRID,
            request_id=f"r{index}",
            arrival=self.instance.arrivals[index],
        )

    def _coverage(self, spec: RequestSpec) -> list[Coverage]:
        """Each channel has all of a chunk, or (with holes) nothing or any layers of it."""
        full = (1 << spec.num_layers) - 1
        found = []
        for name in self.run.links:
            layers = [full] * (spec.prefix_tokens // CHUNK)
            for chunk in range(len(layers)):
                if self.chance.random() < self.instance.holes:
                    layers[chunk] = self.chance.choice([0, self.chance.randrange(full + 1)])
            found.append(Coverage(name, tuple(layers), STRIDE))
        return found

    def _fate(self, load: Load) -> bool | None:
        trouble, now = self.instance.trouble, self.run.clock.now()
        dice = self.chance.random()
        if dice < trouble.hanging:
            late = self.chance.random() < 0.5
            self.run.at(now + trouble.patience, lambda: self.run.lose(load, late=late))
            return None
        if self.chance.random() < trouble.failing * trouble.partly:
            lost = [chunk for chunk in load.chunks if self.chance.random() < 0.5]
            self.run.at(now + 1e-3, lambda: self.run.lose(load, lost))
            return None
        return self.chance.random() >= trouble.failing


def cells(spec: RequestSpec) -> int:
    return len(spec.tiles) * spec.num_layers


@pytest.mark.parametrize("policy", POLICIES)
@given(instance=instances(), data=st.data())
def test_every_cell_is_made_ready_exactly_once(
    policy: str, instance: Instance, data: st.DataObject
) -> None:
    """Holes, drift by ten, stores that fail or hang, requests that come and go: whoever is not
    cancelled finishes with each cell written by one side, and the sources add up to all cells."""
    play = Play(instance, policy, data.draw(st.sampled_from(OBJECTIVES)))
    play.play()
    made = Counter(request for request, _, _ in play.checked.written)
    for spec in play.specs:
        if spec.id in play.checked.cancelled:
            assert made[spec.id] <= cells(spec)
            continue
        assert spec.id in play.run.finished_at
        assert play.run.restored_at[spec.id] <= play.run.finished_at[spec.id]
        assert made[spec.id] == cells(spec)
    recorded = Counter(
        (request, tile, layer)
        for request, tile, layer, source in play.run.writes
        if source == "recompute"
    )
    assert set(recorded) == {
        cell for cell, source in play.checked.written.items() if source == "recompute"
    }
    assert max(recorded.values(), default=1) == 1


@pytest.mark.parametrize("policy", POLICIES)
@given(instance=instances())
def test_nothing_is_left_of_requests_that_are_over(policy: str, instance: Instance) -> None:
    """Finished or cancelled, and its loads ended: no work, no load, no bytes in flight are left."""
    play = Play(instance, policy, OBJECTIVES[0])
    play.play()
    now = play.run.clock.now()
    assert play.checked.removed == {spec.id for spec in play.specs}
    assert play.run.scheduler.next_compute(now) is None
    for name in play.run.links:
        assert play.run.scheduler.next_load(name, now) is None
        assert play.run.scheduler.channel(name).in_flight == 0
    assert play.run.scheduler.wake_at(now) == float("inf")
    for spec in play.specs:
        assert play.run.scheduler.paused_tiles(spec.id) == []


steady = st.builds(Trouble)


@pytest.mark.parametrize("policy", POLICIES)
@given(instance=instances(steady))
def test_without_holes_the_recomputed_set_is_a_staircase(policy: str, instance: Instance) -> None:
    """One steady channel that has everything: in each layer recompute takes leading tiles, never
    more of them than in the layer below. (Suffix deadlines turn the order of the last loads round,
    so a load that is late against what was believed can leave recomputed cells above it: off.)"""
    one = Instance(
        **{
            **{name: getattr(instance, name) for name in Instance.__slots__},
            "holes": 0.0,
            "bandwidths": instance.bandwidths[:1],
        }
    )
    play = Play(one, policy, OBJECTIVES[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adaptive, "overlaps", False)
        play.play()
    for spec in play.specs:
        heights = []
        for layer in range(spec.num_layers):
            taken = [
                play.checked.written[spec.id, tile.index, layer] == "recompute"
                for tile in spec.tiles
            ]
            assert taken == sorted(taken, reverse=True), f"layer {layer} has a gap"
            heights.append(sum(taken))
        assert heights == sorted(heights, reverse=True)


@given(instance=instances())
def test_the_single_ways_keep_to_themselves(instance: Instance) -> None:
    """``recompute`` never loads; ``load`` computes nothing that it could have."""
    play = Play(instance, "recompute", OBJECTIVES[0])
    play.play()
    assert set(play.checked.written.values()) <= {"recompute"}
    assert all(link.busy == 0 for link in play.run.links.values())


@pytest.mark.parametrize("channels", [1, 2])
def test_channels_that_never_answer_hold_nobody_up(channels: int) -> None:
    """Cold, and everything hangs: all requests are recomputed, one after the other, though the
    first one's loads block every channel."""
    hang = Trouble(hanging=1.0, patience=1e3)
    instance = Instance(
        [21, 24], [29, 200], [0.0, 0.1], 1, 0.02, 1e-3, [1e6] * channels, 0.0, hang, 0
    )
    play = Play(instance, "adaptive", "mean")
    play.play()
    work = sum(play._cost(tile) for spec in play.specs for tile in (*spec.tiles, *spec.suffix))
    assert max(play.run.finished_at.values()) <= work * 1.05
