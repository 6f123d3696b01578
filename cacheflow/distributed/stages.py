"""How the stages of a pipeline should restore a prefix: what each recomputes, and fed from where.

A stage can begin to recompute where it knows the hidden state at its first layer: from the token
embeddings (the first stage), from a stored *boundary activation*, which is bytes on the same
channel as its KV, or from the stage before, which has to have computed it first. Pure arithmetic
on seconds: knows no tensors, channels or clocks. The pointers of each stage still meet where real
speeds let them (``cacheflow.scheduling``); this says which way is worth preparing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Mode",
    "PipelinePlan",
    "StageCosts",
    "StagePlan",
    "best_split",
    "fluid_seconds",
    "grid_seconds",
    "plan_stages",
    "worth_storing",
]


class Mode(StrEnum):
    """How stages get what they recompute from."""

    INDEPENDENT = "independent"
    """Each from its own stored boundary activations: no stage waits for another."""
    DEPENDENT = "dependent"
    """Each from the stage before, tile by tile."""
    LOAD = "load"
    """Nothing is recomputed."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of each unit of a prefix (a chunk, or a tile) on one stage, in order.

    ``hidden``: loading its boundary activation (zeros for the first stage, which embeds tokens).
    """

    compute: Sequence[float]
    kv: Sequence[float]
    hidden: Sequence[float]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """``units``: leading ones to recompute, the last of them perhaps only in its lower layers."""

    units: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What all stages do."""

    mode: Mode
    stages: tuple[StagePlan, ...]
    alternatives: dict[Mode, float]
    """Seconds of every mode."""

    @property
    def seconds(self) -> float:
        """Until the slowest stage is restored."""
        return max(stage.seconds for stage in self.stages)

    @property
    def balance(self) -> float:
        """Mean over the slowest: 1.0 where all stages end together."""
        return sum(stage.seconds for stage in self.stages) / (len(self.stages) * self.seconds or 1)


def plan_stages(stages: Sequence[StageCosts]) -> PipelinePlan:
    """The fastest of the three modes; loading where recompute does not help."""
    plans = {
        Mode.LOAD: tuple(StagePlan(0, sum(stage.kv)) for stage in stages),
        Mode.INDEPENDENT: tuple(map(best_split, stages)),
        Mode.DEPENDENT: _dependent(stages),
    }
    seconds = {mode: max(stage.seconds for stage in plan) for mode, plan in plans.items()}
    mode = min(seconds, key=lambda each: seconds[each])
    return PipelinePlan(mode, plans[mode], seconds)


def worth_storing(stage: StageCosts, doubt: float = 2.0) -> int:
    """Of how many leading units the boundary activation should be stored.

    As many as a plausible frontier recomputes: one whose compute is ``doubt`` times as fast as
    believed, over a channel ``doubt`` times as slow. Where an activation is no smaller than the KV
    that recompute from it would save, that is none.
    """
    if sum(stage.hidden) >= sum(stage.kv):
        return 0
    doubted = StageCosts(
        [seconds / doubt for seconds in stage.compute],
        [seconds * doubt for seconds in stage.kv],
        [seconds * doubt for seconds in stage.hidden],
    )
    return best_split(doubted).units


def fluid_seconds(stage: StageCosts) -> float:
    """Lower bound of one stage's restore, its activations' bytes included: units divide at will.

    ``min over x of max(compute of [0, x), hidden of [0, x) + KV of [x, end))``.
    """
    computed, loaded = 0.0, sum(stage.kv)
    for compute, kv, hidden in zip(stage.compute, stage.kv, stage.hidden, strict=True):
        saved = kv - hidden
        if saved <= 0.0:
            break  # from here on recompute costs more bytes than it saves
        if computed + compute >= loaded - saved:
            share = (loaded - computed) / (compute + saved)
            return max(computed, computed + max(share, 0.0) * compute)
        computed += compute
        loaded -= saved
    return max(computed, loaded)


def grid_seconds(stage: StageCosts, layers: int) -> float:
    """What is left of :func:`fluid_seconds` where compute takes whole ``layers`` of whole units, in
    order, and none before its activation has come: no scheduler can be faster on the same grid.

    Activations come first, as nothing else on the link is waited for; KV divides at will.
    """
    best = loaded = sum(stage.kv)
    fed = computed = 0.0
    for compute, kv, hidden in zip(stage.compute, stage.kv, stage.hidden, strict=True):
        fed += hidden
        loaded += hidden
        computed = max(computed, fed)
        for done in range(1, layers + 1):
            share = done / layers
            best = min(best, max(computed + share * compute, loaded - share * kv))
        computed += compute
        loaded -= kv
    return best


def best_split(stage: StageCosts) -> StagePlan:
    """The best number of leading units for one stage to recompute from its own activations.

    The activation of the last unit is loaded whole even if only its lower layers are recomputed.
    """
    best = StagePlan(0, sum(stage.kv))
    computed, loaded = 0.0, best.seconds
    for unit, (compute, kv, hidden) in enumerate(
        zip(stage.compute, stage.kv, stage.hidden, strict=True)
    ):
        loaded += hidden
        share = min(1.0, max(0.0, (loaded - computed) / (compute + kv or 1.0)))
        seconds = max(computed + share * compute, loaded - share * kv)
        if seconds < best.seconds:
            best = StagePlan(unit + 1, seconds)
        computed += compute
        loaded -= kv
    return best


def _dependent(stages: Sequence[StageCosts]) -> tuple[StagePlan, ...]:
    """Every stage takes over from the one before what that one has computed to its end."""
    plans: list[StagePlan] = []
    ready = [0.0] * len(stages[0].compute)
    most = len(ready)
    for stage in stages:
        ends, at = [], 0.0
        for compute, fed in zip(stage.compute, ready, strict=True):
            at = max(at, fed) + compute
            ends.append(at)
        kv = list(accumulate(reversed(stage.kv), initial=0.0))[::-1]
        options = [
            StagePlan(units, max(ends[units - 1] if units else 0.0, kv[units]))
            for units in range(most + 1)
        ]
        plans.append(min(options, key=lambda plan: plan.seconds))
        most, ready = plans[-1].units, ends
    return tuple(plans)
