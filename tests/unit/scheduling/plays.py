"""Random instances of everything that can happen, played to their end under watch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, cast

from hypothesis import strategies as st

from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid
from tests.unit.scheduling.checked import Checked
from tests.unit.scheduling.harness import options

if TYPE_CHECKING:
    from cacheflow.scheduling import BatchScheduler
    from cacheflow.types import Load, RequestSpec, Tile

__all__ = ["CHUNK", "GRID", "STRIDE", "Instance", "Play", "Trouble", "instances", "powers"]

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
    alike: list[tuple[int, int]] = field(default_factory=list)
    """Of each request: an earlier one (by number), and how many tiles it begins like that one."""
    launch: int = 0
    """What a pass costs whatever its width, in tokens: narrow tiles are dear, and go in rows."""


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
def instances(
    draw: st.DrawFn, trouble: st.SearchStrategy[Trouble] = troubles, *, sharing: bool = False
) -> Instance:
    count = draw(st.integers(1, 8))
    alike = [(draw(st.integers(0, max(0, i - 1))), draw(st.integers(0, 5))) for i in range(count)]
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
        alike=alike if sharing else [],
        launch=draw(st.sampled_from([0, 32, 256])),
    )


class Play:
    """One instance, played to its end under watch."""

    def __init__(self, instance: Instance, policy: str, objective: str, **caps: int | None) -> None:
        self.instance = instance
        self.chance = random.Random(instance.seed)
        links = {
            f"link{i}": Link(bandwidth, 1e-4, self._fate)
            for i, bandwidth in enumerate(instance.bandwidths)
        }
        self.run = VirtualRun(
            self._cost,
            links,
            linear=1.0,
            attention=instance.attention,
            **options(objective),
            **caps,
        )
        self.checked = Checked(self.run.scheduler)
        self.run.scheduler = cast("BatchScheduler", self.checked)
        self.specs = [self._spec(i) for i in range(len(instance.lengths))]
        self.stories = self._stories()
        for i, spec in enumerate(self.specs):
            self.run.arrive(spec, self._coverage(spec), policy, self._alike(i))
        self.run.at(instance.trouble.drift_at, self._drift)
        for index, after in instance.trouble.cancels.items():
            if index < len(self.specs):
                spec = self.specs[index]
                self.run.at(spec.arrival + after, partial(self.run.cancel, spec.id))

    def play(self) -> None:
        self.run.run(*(spec.id for spec in self.specs))
        self.run.settle()

    def _stories(self) -> list[list[int]]:
        """What each request's tiles hold: equal numbers, equal tokens up to there."""
        stories: list[list[int]] = []
        for i, spec in enumerate(self.specs):
            other, tiles = self.instance.alike[i] if self.instance.alike else (0, 0)
            begins = stories[other][:tiles] if i else []
            stories.append([*begins, *[i] * (len(spec.tiles) - len(begins))])
        return stories

    def _alike(self, index: int) -> list[tuple[str, int]]:
        """Every other request with as many whole tiles as it has in common with this one."""
        found = []
        for i, spec in enumerate(self.specs):
            mine = zip(self.specs[index].tiles, self.stories[index], strict=False)
            theirs = zip(spec.tiles, self.stories[i], strict=False)
            same = takewhile(
                lambda pair: pair[0] == pair[1] and pair[0][0] == GRID.tile(pair[0][0].index),
                zip(mine, theirs, strict=False),
            )
            tiles = sum(1 for _ in same)
            if i != index and tiles:
                found.append((spec.id, tiles))
        return found

    def _cost(self, tile: Tile) -> float:
        trouble = self.instance.trouble
        drifted = self.run.clock.now() >= trouble.drift_at
        work = tile.width * (1 + self.instance.attention * (tile.start + tile.width / 2))
        work += self.instance.launch
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
