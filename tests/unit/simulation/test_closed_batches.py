"""Eight requests at once on a modelled GPU: near the bound of their mean, neither resource idle."""

from __future__ import annotations

from statistics import fmean

import pytest

from cacheflow.simulation import (
    Channel,
    Lengths,
    Scenario,
    Synthetic,
    load_link,
    load_machine,
    mean_lower_bound,
    simulate,
    synthetic,
)
from cacheflow.types import TileGrid

LENGTHS = {
    "mixed": Lengths("lognormal", (15000.0, 1.0)),
    "short": Lengths("fixed", (512, 1024, 2048, 3072, 4096, 5120, 6144, 8192)),
}
LIMITS = {"mixed": 1.06, "short": 1.065}
"""Of the mean over its bound. The best plans that a search with all costs finds are at 1.046 and
1.056: narrow first tiles have to be computed before wide ones, which the bound does not know."""


@pytest.mark.parametrize(("name", "seed"), [("mixed", 0), ("mixed", 1), ("short", 0)])
def test_near_the_bound_and_busy(name: str, seed: int) -> None:
    """8B on an H100 at 25 Gbps, cells of one layer on the grid that serves, objective mean: both
    resources useful for 98 % of the time; whoever is admitted first, for all of them are there
    before anything begins."""
    scenario = Scenario(
        load_machine("h100:llama-3.1-8b", layers_per_block=1),
        (Channel(load_link("25gbps")),),
        chunk_tokens=256,
        grid=TileGrid(),
        objective="mean",
    )
    jobs = synthetic(8, LENGTHS[name], chunk_tokens=256, suffix_tokens=256, seed=seed)
    run = simulate(scenario, Synthetic("jobs", tuple(jobs)), "adaptive")
    place = scenario.placement(named=False).place
    bound = mean_lower_bound([scenario.fluid(place(job, 0)) for job in jobs])
    assert fmean(record.ttft for record in run.records) <= LIMITS[name] * bound
    assert min(run.summary.utilisation.values()) >= 0.98
