"""One simulated GPU: exact times where they can be worked out, and conservation everywhere."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import ComputeModel
from cacheflow.scheduling import POLICIES, BatchScheduler, load_policy
from cacheflow.simulation.events import EventLoop
from cacheflow.simulation.jobs import WIDE, Cut, Job
from cacheflow.simulation.links import SerialLink
from cacheflow.simulation.node import Node
from cacheflow.types import Coverage

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.simulation.records import Record
    from cacheflow.types import Load, RequestSpec, Tile

BLOCKS = 8
CUT = Cut(BLOCKS, 512, WIDE)
STRIDE = 1 << 20
LINEAR, ATTENTION = 1e-5, 1e-9
BANDWIDTH = STRIDE * BLOCKS / 512 / LINEAR
"""At which loading a token takes as long as computing it at position 0."""


def layer_seconds(tile: Tile, now: float = 0.0) -> float:
    return tile.width * (LINEAR + ATTENTION * (tile.start + tile.width / 2)) / BLOCKS


def new_node(
    bandwidth: float = BANDWIDTH,
    latency: float = 0.0,
    cost: Callable[[Tile, float], float] = layer_seconds,
    **options: Any,
) -> tuple[EventLoop, Node]:
    loop = EventLoop()
    scheduler = BatchScheduler(ComputeModel(LINEAR, ATTENTION), loop)
    return loop, Node(
        loop, scheduler, cost, {"net": SerialLink(loop, bandwidth, latency)}, **options
    )


def spec_of(prefix: int, suffix: int = 1, name: str = "r", arrival: float = 0.0) -> RequestSpec:
    return CUT.spec(Job(name, arrival, prefix + suffix, prefix_tokens=prefix), prefix)


def stored(spec: RequestSpec, holes: frozenset[int] = frozenset()) -> list[Coverage]:
    chunks = range(spec.prefix_tokens // spec.chunk_tokens)
    full = (1 << BLOCKS) - 1
    return [Coverage("net", tuple(0 if c in holes else full for c in chunks), STRIDE)]


def recompute_seconds(spec: RequestSpec) -> float:
    return sum(layer_seconds(tile) for tile in (*spec.tiles, *spec.suffix)) * BLOCKS


def admit(loop: EventLoop, node: Node, spec: RequestSpec, policy: str, **more: Any) -> None:
    loop.at(
        spec.arrival, lambda _: node.admit(spec, load_policy(policy), stored(spec, **more)), None
    )


def test_recompute_takes_the_sum_of_its_layers() -> None:
    """Recompute alone: every layer once, the link idle, the first token after the suffix."""
    loop, node = new_node()
    spec = spec_of(8192, 256)
    admit(loop, node, spec, "recompute")
    loop.run()
    record = node.records["r"]
    assert record.first_token == pytest.approx(recompute_seconds(spec))
    assert record.cells == {"recompute": 8192 * BLOCKS}
    suffix = sum(layer_seconds(tile) for tile in spec.suffix) * BLOCKS
    assert record.restored == pytest.approx(record.first_token - suffix)
    assert node.compute.busy == pytest.approx(record.first_token)
    assert node.compute.useful == pytest.approx(record.restored)
    assert node.links["net"].busy == 0.0
    assert node.unfinished == 0


def test_load_takes_its_bytes_and_one_latency() -> None:
    """Load alone: all bytes at the link's bandwidth, compute for the suffix only."""
    loop, node = new_node(BANDWIDTH, 1e-3)
    spec = spec_of(8192)
    admit(loop, node, spec, "load")
    loop.run()
    record = node.records["r"]
    seconds = 16 * STRIDE * BLOCKS / BANDWIDTH
    assert node.links["net"].busy == pytest.approx(seconds)
    assert seconds < record.restored <= seconds * 1.05 + 2e-3
    assert record.cells == {"net": 8192 * BLOCKS}
    assert node.pending_seconds == record.restored


def test_both_ends_beat_the_better_one() -> None:
    """Adaptive is faster than either way alone on the same hardware, even from a cold start."""
    times = {}
    for policy in ("recompute", "load", "adaptive"):
        loop, node = new_node(BANDWIDTH, 1e-4)
        admit(loop, node, spec_of(16384), policy)
        loop.run()
        times[policy] = node.records["r"].restored
    assert times["adaptive"] < 0.75 * min(times["recompute"], times["load"])


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    policy=st.sampled_from(sorted(POLICIES)),
    holes=st.frozensets(st.integers(0, 23), max_size=5),
    failing=st.floats(0.0, 0.5),
    ratio=st.floats(0.1, 10.0),
    seed=st.integers(0, 1000),
)
def test_every_request_gets_every_cell_once(
    lengths: list[int],
    policy: str,
    holes: frozenset[int],
    failing: float,
    ratio: float,
    seed: int,
) -> None:
    """Any policy, holes, failing loads, several requests: each prefix is restored completely, no
    cell is counted twice, useful time is part of busy time, and busy time of the span."""
    chance = random.Random(seed)
    loop, node = new_node(
        BANDWIDTH * ratio, 1e-4, fate=lambda load, now: chance.random() >= failing
    )
    for index, chunks in enumerate(lengths):
        spec = spec_of(chunks * 512, 100, f"r{index}", arrival=index * 0.01)
        admit(loop, node, spec, policy, holes=holes)
    loop.run()
    assert node.unfinished == 0
    for index, chunks in enumerate(lengths):
        record = node.records[f"r{index}"]
        loaded = record.cells.get("net", 0)
        computed = record.cells.get("recompute", 0)
        # Chunks of a tile that was recomputed after all may have been loaded before.
        assert loaded + computed >= chunks * 512 * BLOCKS
        assert computed <= chunks * 512 * BLOCKS
        assert record.arrival < record.restored <= record.first_token
    for usage in (node.compute, node.links["net"]):
        assert usage.useful <= usage.busy * (1 + 1e-9)
        assert usage.busy <= loop.now() * (1 + 1e-9)


def test_events_stay_in_proportion_to_cells() -> None:
    """A handful of events a cell whatever the number of requests waiting: no polling, no timer
    that spins, so large clusters can be simulated."""
    asked = 0

    class Counting(EventLoop):
        def at(self, when: float, action: Callable[[Any], object], argument: Any = None) -> None:
            nonlocal asked
            asked += 1
            super().at(when, action, argument)

    loop = Counting()
    scheduler = BatchScheduler(ComputeModel(LINEAR, ATTENTION), loop)
    node = Node(loop, scheduler, layer_seconds, {"net": SerialLink(loop, BANDWIDTH, 1e-4)})
    for index in range(60):
        admit(loop, node, spec_of(8192, 256, f"r{index}", arrival=index * 1e-3), "adaptive")
    loop.run()
    cells = 60 * (4 + 1) * BLOCKS
    assert node.unfinished == 0
    assert asked <= 4 * cells


def test_costs_may_drift() -> None:
    """A machine that becomes twice as slow half way takes half as long again."""
    loop, node = new_node(cost=lambda tile, now: layer_seconds(tile) * (2 if now > 0.05 else 1))
    spec = spec_of(8192)
    admit(loop, node, spec, "recompute")
    loop.run()
    alone = recompute_seconds(spec)
    expected = 0.05 + 2 * (alone - 0.05)
    assert node.records["r"].first_token == pytest.approx(expected, rel=0.05)


def test_decode_keeps_its_share_of_compute() -> None:
    """With half of the compute kept for decode every layer takes twice as long."""
    loop, node = new_node(decode_share=0.5)
    spec = spec_of(4096)
    admit(loop, node, spec, "recompute")
    loop.run()
    assert node.records["r"].first_token == pytest.approx(2 * recompute_seconds(spec))
    with pytest.raises(ValueError, match="decode_share"):
        new_node(decode_share=1.0)


def test_a_load_that_never_answers_is_given_up() -> None:
    """After its deadline its channel is not waited for, and even `load` recomputes then."""
    loop, node = new_node(fate=lambda load, now: None, load_deadline=0.5)
    spec = spec_of(4096)
    admit(loop, node, spec, "load")
    loop.run()
    record = node.records["r"]
    assert record.failed_loads >= 1
    assert record.first_token == pytest.approx(0.5 + recompute_seconds(spec), rel=0.05)


def test_the_timeline_shows_all_busy_time() -> None:
    """Bars of compute do not overlap and add up to the busy seconds, as do those of the link; the
    recorded intervals say the same."""
    loop, node = new_node(timeline=True, record=True)
    admit(loop, node, spec_of(16384, 512), "adaptive")
    loop.run()
    assert node.timeline is not None
    for name, usage in (("compute", node.compute), ("net", node.links["net"])):
        compute = name == "compute"
        bars = [
            (work.start, work.stop)
            for work in node.timeline
            if (work.source in ("recompute", "suffix")) == compute
        ]
        assert sum(stop - start for start, stop in bars) == pytest.approx(usage.busy)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(bars))
        flat = list(usage.intervals)
        assert sum(flat[1::2]) - sum(flat[::2]) == pytest.approx(usage.busy)


def test_a_request_without_a_prefix_is_computed() -> None:
    """Nothing is stored: restored at once, the first token after the whole prompt."""
    ended: list[Record] = []
    loop, node = new_node(finished=ended.append)
    spec = spec_of(0, 3000)
    admit(loop, node, spec, "adaptive")
    loop.run()
    assert ended == [node.records["r"]]
    assert ended[0].restored == 0.0
    assert ended[0].ttft == pytest.approx(recompute_seconds(spec))


def test_busy_periods_are_the_spans_with_unfinished_requests() -> None:
    """Two requests far apart make two periods, two close together one."""
    loop, node = new_node()
    for index, arrival in enumerate((0.0, 0.001, 10.0)):
        admit(loop, node, spec_of(2048, name=f"r{index}", arrival=arrival), "adaptive")
    loop.run()
    periods = node.busy_periods
    assert [start for start, _ in periods] == [0.0, 10.0]
    assert periods[0][1] == max(node.records[name].first_token for name in ("r0", "r1"))


def test_loads_in_flight_at_the_end_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose prefix was recomputed past a slow load is forgotten only once that ended."""
    loop, node = new_node(BANDWIDTH / 1000)
    removed: list[float] = []
    remove = node.scheduler.remove

    def noting(name: str) -> None:
        removed.append(loop.now())
        remove(name)

    monkeypatch.setattr(node.scheduler, "remove", noting)
    landed: list[float] = []

    def fate(load: Load, now: float) -> bool:
        landed.append(now)
        return True

    node._fate = fate
    admit(loop, node, spec_of(4096), "adaptive")
    loop.run()
    record = node.records["r"]
    assert landed
    assert record.in_flight == 0
    assert removed == [loop.now()]
    assert record.first_token <= recompute_seconds(spec_of(4096)) * 1.3
