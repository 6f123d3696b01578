"""What a missing part of a prefix costs: nothing, where recompute would have passed anyway."""

from __future__ import annotations

import pytest

from cacheflow.simulation import Channel, Scenario, Synthetic, load_link, load_machine, simulate
from cacheflow.simulation.jobs import Job

BLOCKS = 52


def seconds(link: str, *missing: int) -> float:
    """To the first token, of a prefix whose blocks ``missing`` are stored nowhere."""
    tokens = BLOCKS * 512
    job = Job("r", 0.0, tokens + 1024, prefix_tokens=tokens, holes=frozenset(missing))
    scenario = Scenario(load_machine("h100:llama-3.1-8b"), (Channel(load_link(link)),))
    return simulate(scenario, Synthetic("one", [job]), "adaptive").summary.ttft.mean


@pytest.mark.parametrize(("link", "free"), [("10gbps", 32), ("25gbps", 20)])
def test_a_hole_before_the_meeting_point_costs_nothing(link: str, free: int) -> None:
    """Wherever it is: compute comes by on its way from the front, so the channel loads from the
    back as ever, and not first what lies before the hole (which took 10 % more)."""
    whole = seconds(link)
    for start in range(0, free, 4):
        assert seconds(link, *range(start, start + 4)) < 1.02 * whole, start
    assert seconds(link, *range(free)) < 1.02 * whole
    assert seconds(link, *range(4), *range(free - 8, free)) < 1.02 * whole


def test_a_hole_behind_it_costs_its_own_recompute() -> None:
    """Compute has to come that far, and what it does there it need not do in front: the channel
    brings what the hole depends on first."""
    whole, alone = seconds("100gbps"), seconds("100gbps", *range(BLOCKS))
    assert seconds("100gbps", *range(32, 36)) < whole + 0.35 * (alone - whole)
