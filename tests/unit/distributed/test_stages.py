"""What is planned for the stages of a pipeline."""

from __future__ import annotations

import pytest

from cacheflow.distributed import (
    Mode,
    StageCosts,
    fluid_seconds,
    grid_seconds,
    plan_stages,
    worth_storing,
)


def stage(
    units: int = 64, compute: float = 1.0, kv: float = 1.0, hidden: float = 0.0
) -> StageCosts:
    return StageCosts([compute] * units, [kv] * units, [hidden] * units)


@pytest.mark.parametrize(("ratio", "speedup"), [(0.125, 0.9375), (0.25, 0.875), (0.5, 0.75)])
def test_bound_with_activations(ratio: float, speedup: float) -> None:
    """At compute:I/O 1:1 a stage's bound is 1 / (2 - r) of loading alone, for activations of r
    times the KV: 0.94, 0.88 and 0.75 of what S independent GPUs could reach."""
    without, with_them = fluid_seconds(stage()), fluid_seconds(stage(hidden=ratio))
    assert with_them == pytest.approx(64 / (2 - ratio))
    assert without / with_them == pytest.approx(speedup)


def test_plan_is_the_best_split() -> None:
    """No other number of recomputed units would end earlier, and the plan is near the bound."""
    costs = StageCosts([0.5 + 0.05 * i for i in range(40)], [1.0] * 40, [0.25] * 40)
    seconds = plan_stages([costs]).alternatives[Mode.INDEPENDENT]
    by_hand = min(
        max(sum(costs.compute[:j]), sum(costs.hidden[:j]) + sum(costs.kv[j:])) for j in range(41)
    )
    assert seconds <= by_hand
    assert fluid_seconds(costs) <= seconds <= 1.02 * fluid_seconds(costs)


def test_what_the_grid_allows() -> None:
    """Two units of two layers by hand: the first activation is waited for, the second one comes
    under the first unit, and a layer is computed or not. Finer layers tend to the fluid bound."""
    costs = StageCosts([1.0, 1.0], [2.0, 2.0], [0.5, 0.5])
    # [0, 0.5] first activation, one unit until 1.5; a half more until 2.0, and 1 + 1 s of loads
    assert grid_seconds(costs, 2) == 2.0
    assert grid_seconds(costs, 1) == 2.5
    free = stage(compute=1.0, kv=3.0)
    assert grid_seconds(free, 1000) == pytest.approx(fluid_seconds(free), rel=1e-3)
    assert grid_seconds(stage(compute=1e3), 4) == 64.0


def test_modes_are_chosen_by_what_they_take() -> None:
    """Own activations where a prefix has few units, so that filling the pipeline costs more than
    their bytes; the stage before where it has many; loads alone where compute is hopeless."""
    short = plan_stages([stage(8), *(stage(8, hidden=0.25) for _ in range(3))])
    assert short.mode is Mode.INDEPENDENT
    assert [plan.units for plan in short.stages] == [4, 5, 5, 5]
    long = plan_stages([stage(256), *(stage(256, hidden=0.25) for _ in range(3))])
    assert long.mode is Mode.DEPENDENT
    assert long.alternatives[Mode.DEPENDENT] < long.alternatives[Mode.INDEPENDENT]
    slow = plan_stages([stage(compute=500.0), stage(compute=500.0, hidden=0.5)])
    assert slow.mode is Mode.LOAD
    assert slow.seconds == 64.0


def test_dependent_stages_wait_for_each_other() -> None:
    """The second stage ends its units a unit behind the first, and takes no more than that has."""
    plan = plan_stages([stage(4), stage(4, hidden=9.0)])
    dependent = plan.alternatives[Mode.DEPENDENT]
    # two units computed in 1, 2 (first) and 2, 3 (second), or one in 2 with three loaded
    assert dependent == 3.0


def test_balance_names_the_slowest_stage() -> None:
    """Equal stages are in balance; one with twice the work is not."""
    assert plan_stages([stage(), stage()]).balance == pytest.approx(1.0)
    assert plan_stages([stage(), stage(compute=2.0, kv=2.0)]).balance == pytest.approx(0.75)


def test_activations_that_do_not_pay_are_not_stored() -> None:
    """None where they are as large as the KV they save, or recompute is hopeless; else those of the
    units that any plausible frontier recomputes, and no more."""
    assert worth_storing(stage(hidden=1.0)) == 0
    assert worth_storing(stage(compute=1e5, hidden=0.125)) == 0
    some = worth_storing(stage(hidden=0.125))
    assert 64 / 1.875 < some < 64
