"""The end of a restore is planned cell by cell: the best plan there is, which both ends keep."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import ChannelProfile
from cacheflow.scheduling.ending import Ending
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, Tile
from tests.unit.scheduling.oracle import Job, ttft_optimum
from tests.unit.scheduling.test_oracle import draw, play

seconds = st.floats(0.1, 10.0)


def walk(job: Job, heights: list[int]) -> float:
    """The suffix's end, layer by layer, if ``heights[tile]`` layers of each tile are recomputed."""
    rows = list(zip(job.compute, job.load, heights, strict=True))
    end = sum(sum(compute[:height]) for compute, _, height in rows)
    missing = [
        sum(load[layer] for _, load, height in rows if layer >= height)
        for layer in range(job.layers)
    ]
    for arrival, suffix in zip(accumulate(missing), job.suffix, strict=True):
        end = max(end, arrival) + suffix
    return end


@given(data=st.data(), tiles=st.integers(1, 4), layers=st.integers(1, 4))
def test_the_best_meeting_is_found(data: st.DataObject, tiles: int, layers: int) -> None:
    """Of all meeting points in the order of compute none ends the suffix sooner, whatever cells
    cost; and no plan at all does where the order of compute is the best one."""
    compute = data.draw(st.lists(seconds, min_size=tiles, max_size=tiles).map(sorted))
    load, suffix = data.draw(seconds), data.draw(seconds)
    rests = [suffix * (layers - layer) for layer in range(layers)]
    ending = Ending(
        [cost for cost in compute for _ in rests],
        [load] * tiles * layers,
        rests * tiles,
        compute_free=0.0,
        channel_free=0.0,
        landed=0.0,
        suffix=rests[0],
    )
    count = ending.meeting()
    assert ending.computes() is (count > 0)
    job = Job(
        tuple((cost,) * layers for cost in compute), ((load,) * layers,) * tiles, (suffix,) * layers
    )
    every = [
        walk(job, [min(max(n - t * layers, 0), layers) for t in range(tiles)])
        for n in range(tiles * layers + 1)
    ]
    assert every[count] == pytest.approx(min(every))
    assert ttft_optimum(job) <= min(every) * (1 + 1e-9)


def test_what_is_under_way_counts() -> None:
    """A layer that lands late keeps the suffix waiting whoever takes the rest, so compute leaves
    all of the rest to the channel."""

    def meeting(
        *, compute_free: float = 0.0, channel_free: float = 0.0, landed: float = 0.0
    ) -> int:
        ending = Ending(
            [1.0, 1.0],
            [1.0, 1.0],
            [0.2, 0.1],
            compute_free=compute_free,
            channel_free=channel_free,
            landed=landed,
            suffix=0.4,
        )
        assert ending.computes() is (ending.meeting() > 0)
        return ending.meeting()

    assert meeting() == 1
    assert meeting(channel_free=2.0, landed=9.3) == 0
    assert meeting(compute_free=5.0) == 0
    assert meeting(channel_free=30.0) == 2


@pytest.mark.parametrize("seed", [1, 35, 44, 53])
def test_both_ends_keep_to_it(seed: int) -> None:
    """A few large cells, where each side by its own next cell was 5 to 26 % off."""
    small = draw(seed, suffix=(64, 256, 512)[seed % 3])
    ((_, finished),) = play(small, "adaptive")
    assert finished == pytest.approx(ttft_optimum(small.job(small.specs()[0], suffix=True)))


def test_a_link_known_from_a_profile_is_planned_with_once_a_load_agrees() -> None:
    """One tile over a slow link, nothing observed of it here: the first load comes when it was
    expected, and from then on both ends keep the best plan. (Until four loads had come, cells were
    loaded that compute had just begun: an eighth more.)"""
    layers, stride, bandwidth = 16, 1 << 20, 4e8
    spec = make_spec(512, 768, layers=layers)
    load = 2 * stride / bandwidth
    seconds = {512: load / 3, 256: 0.8 * load / 3}
    run = VirtualRun(lambda tile: seconds[tile.width], {"link": Link(bandwidth)}, attention=0.0)
    for width in (512, 256) * 20:
        run.compute.observe(Tile(0, 0, width), seconds[width])
    run.scheduler.channel("link").prime(ChannelProfile(0.0, 1 / bandwidth, 2.0 * stride))
    run.admit(spec, [Coverage("link", ((1 << layers) - 1,) * 2, stride)])
    run.run(spec.id)
    job = Job(((seconds[512],) * layers,), ((load,) * layers,), (seconds[256],) * layers)
    assert run.finished_at[spec.id] <= 1.05 * ttft_optimum(job)
