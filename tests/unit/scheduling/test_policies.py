"""What each policy is known for, seen from outside: who is served first, and by which side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from cacheflow.errors import ConfigError
from cacheflow.scheduling import POLICIES, load_policy
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid
from tests.unit.scheduling.harness import options, warm

if TYPE_CHECKING:
    from cacheflow.types import Load, RequestSpec, Tile

LAYERS: Final = 8
STRIDE: Final = 1 << 20
BANDWIDTH: Final = 8.0 * STRIDE / 0.04
BOTH_WAYS: Final = [name for name in POLICIES if name not in ("recompute", "load")]


def cost(tile: Tile) -> float:
    """40 ms for 2,048 tokens, as long as the load of its cell."""
    return 2e-5 * tile.width


class Watched:
    """A warm run that remembers what was loaded in which order."""

    def __init__(self, objective: str = "", scale: float = 1.0) -> None:
        self.loads: list[Load] = []
        link = Link(BANDWIDTH * scale, outcome=self._note)
        self.run = VirtualRun(cost, {"link": link}, linear=1.0, attention=0.0, **options(objective))
        warm(self.run, [TileGrid().tile(i) for i in range(6)], cost, 8 * STRIDE)
        self.start = self.run.clock.now()

    def _note(self, load: Load) -> bool:
        self.loads.append(load)
        return True

    def play(self, policy: str, *prefixes: int) -> list[float]:
        """TTFT of requests that all wait from the start, in this order."""
        specs = [
            make_spec(prefix, prefix + 32, layers=LAYERS, request_id=f"r{i}", arrival=self.start)
            for i, prefix in enumerate(prefixes)
        ]
        for spec in specs:
            self.run.admit(spec, [full(spec)], policy)
        self.run.run(*(spec.id for spec in specs))
        return [self.run.finished_at[spec.id] - self.start for spec in specs]

    def sources(self, request: str) -> set[str]:
        return {source for name, _, _, source in self.run.writes if name == request}


def full(spec: RequestSpec) -> Coverage:
    chunks = spec.prefix_tokens // spec.chunk_tokens
    return Coverage("link", ((1 << spec.num_layers) - 1,) * chunks, STRIDE)


def known(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name not in POLICIES, reason=f"there is no policy {name!r} yet")


def test_policies_go_by_their_names() -> None:
    """A name loads the policy of that name; a wrong one lists what there is."""
    for name in POLICIES:
        assert load_policy(name).name == name
    with pytest.raises(ConfigError, match="recompute"):
        load_policy("nonsense")


@pytest.mark.parametrize("policy", BOTH_WAYS)
def test_both_ends_work_at_once(policy: str) -> None:
    """At 1:1 either side does about half, so the restore takes a bit over half the time."""
    watched = Watched()
    (seconds,) = watched.play(policy, 8192)
    alone = LAYERS * 8192 * 2e-5
    assert watched.sources("r0") == {"recompute", "link"}
    assert seconds <= 0.6 * alone


@pytest.mark.parametrize("scale", [1 / 30, 30])
def test_a_useless_side_does_no_harm(scale: float) -> None:
    """Thirty times faster or slower one way than the other: about as good as that way alone. (The
    policies that predict nothing do lose here: their first claim cannot be taken back.)"""
    (seconds,) = Watched(scale=scale).play("adaptive", 4096)
    alone = LAYERS * 4096 * 2e-5
    unit = 8 * STRIDE / BANDWIDTH / scale
    suffix = LAYERS * 32 * 2e-5
    assert seconds <= min(alone, alone / scale) * 1.02 + 0.04 + unit + suffix


@known("cake")
def test_cake_serves_first_come_first() -> None:
    """A short request waits for the long one before it."""
    long, short = Watched().play("cake", 16384, 1024)
    assert long < short


@known("cake")
def test_cake_moves_each_resource_on_as_soon_as_it_is_free() -> None:
    """Three requests take hardly longer than their work shared by both resources."""
    watched = Watched()
    watched.play("cake", 4096, 4096, 4096)
    busy = watched.run.compute_busy + watched.run.links["link"].busy
    last = max(watched.run.finished_at.values()) - watched.start
    assert last <= busy / 2 * 1.1


@known("cake-sjf")
def test_cake_sjf_serves_the_shortest_first() -> None:
    """The order of arrival does not matter."""
    long, middle, short = Watched().play("cake-sjf", 16384, 4096, 1024)
    assert short < middle < long


@known("two-pointer")
def test_two_pointer_gives_the_channel_to_the_request_with_most_left() -> None:
    """The longest is loaded first, wherever it stands in the queue."""
    watched = Watched()
    watched.play("two-pointer", 1024, 16384, 4096)
    assert watched.loads[0].request_id == "r1"


@known("two-pointer")
def test_two_pointer_advances_all_requests_by_compute() -> None:
    """Those that the channel is not at are recomputed meanwhile."""
    watched = Watched()
    watched.play("two-pointer", 2048, 16384)
    assert "recompute" in watched.sources("r0")


@pytest.mark.parametrize("rival", [name for name in POLICIES if name != "adaptive"])
def test_adaptive_is_best_at_the_mean_of_a_batch(rival: str) -> None:
    """Mixed lengths in an unlucky order, objective ``mean``."""
    lengths = (16384, 512, 8192, 1024, 4096, 2048)
    ours = sum(Watched("mean").play("adaptive", *lengths))
    assert ours <= sum(Watched("mean").play(rival, *lengths)) * 1.01


@pytest.mark.parametrize("rival", [name for name in POLICIES if name != "adaptive"])
def test_adaptive_is_best_at_the_last_of_a_batch(rival: str) -> None:
    """The same batch, objective ``makespan``."""
    lengths = (16384, 512, 8192, 1024, 4096, 2048)
    ours = max(Watched("makespan").play("adaptive", *lengths))
    assert ours <= max(Watched("makespan").play(rival, *lengths)) * 1.01
