"""Lower bounds of batches: tight for one request, never above what any split or order reaches."""

from __future__ import annotations

from itertools import accumulate, permutations, product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.costs import fluid_seconds
from cacheflow.simulation.bounds import FluidRequest, batch_fluid_seconds, mean_lower_bound

SECONDS = st.floats(0.01, 10.0)
CELLS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=5)


@st.composite
def requests(draw: st.DrawFn) -> FluidRequest:
    cells = draw(CELLS)
    fixed = draw(st.floats(0.0, 3.0))
    return FluidRequest(tuple(c for c, _ in cells), tuple(load for _, load in cells), fixed)


@given(compute=st.lists(SECONDS, min_size=1, max_size=12), load=SECONDS)
def test_one_request_with_growing_costs_is_the_single_bound(
    compute: list[float], load: float
) -> None:
    """Cells that grow dearer with their position and cost the same to load: both bounds agree."""
    compute.sort()
    loads = [load] * len(compute)
    single = fluid_seconds(compute, loads)
    batch = batch_fluid_seconds([FluidRequest(tuple(compute), tuple(loads))])
    assert batch == pytest.approx(single, rel=1e-9)


@given(batch=st.lists(requests(), min_size=1, max_size=3))
def test_no_split_is_faster(batch: list[FluidRequest]) -> None:
    """Whatever number of leading cells each request recomputes, the makespan is not below it."""
    bound = batch_fluid_seconds(batch)
    for split in product(*(range(len(request.compute) + 1) for request in batch)):
        compute = sum(sum(r.compute[:k]) + r.fixed for r, k in zip(batch, split, strict=True))
        load = sum(sum(r.load[k:]) for r, k in zip(batch, split, strict=True))
        assert bound <= max(compute, load) * (1 + 1e-9)


@given(batch=st.lists(requests(), min_size=1, max_size=4), extra=requests())
def test_more_work_never_takes_less(batch: list[FluidRequest], extra: FluidRequest) -> None:
    """The bound grows with the batch, and is at least each request's own."""
    whole = batch_fluid_seconds([*batch, extra])
    assert whole >= batch_fluid_seconds(batch) - 1e-9
    assert whole >= batch_fluid_seconds([extra]) - 1e-9


@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), load=st.floats(0.2, 5.0))
def test_no_order_has_a_smaller_mean(lengths: list[int], load: float) -> None:
    """Requests that differ in length only, one after the other at the fluid rate in any order,
    have no smaller mean than the bound; shortest first comes near it."""
    batch = [
        FluidRequest(tuple(1.0 + 0.1 * i for i in range(n)), (load,) * n, 0.2) for n in lengths
    ]
    bound = mean_lower_bound(batch)
    means = []
    for order in permutations(batch):
        ends = list(accumulate(batch_fluid_seconds([each]) for each in order))
        means.append(sum(ends) / len(ends))
    assert bound <= min(means) * (1 + 1e-9)
    assert bound >= 0.5 * min(means)


def test_cells_that_nothing_stores_are_computed() -> None:
    """An infinite load time is a hole: its compute is certain, whatever the channel does."""
    request = FluidRequest((1.0, 1.0, 1.0), (1e-6, inf, 1e-6), fixed=0.5)
    assert batch_fluid_seconds([request]) == pytest.approx(1.5)


def test_a_batch_without_requests_takes_no_time() -> None:
    """Nothing to do is done at once."""
    assert batch_fluid_seconds([]) == 0.0
    assert mean_lower_bound([]) == 0.0


@pytest.mark.parametrize(
    ("compute", "load", "fixed"), [((1.0,), (), 0.0), ((-1.0,), (1.0,), 0.0), ((), (), -1.0)]
)
def test_nonsense_is_refused(
    compute: tuple[float, ...], load: tuple[float, ...], fixed: float
) -> None:
    """Sequences of different lengths and negative seconds are errors."""
    with pytest.raises(ValueError, match=r"compute times|negative"):
        FluidRequest(compute, load, fixed)
