"""Where each policy wins: one request at a time over a grid of compute:I/O ratios and lengths.

Runs small simulations; draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cacheflow.simulation.jobs import Job
from cacheflow.simulation.presets import LinkPreset
from cacheflow.simulation.scenario import Channel, simulate
from cacheflow.simulation.workloads import Synthetic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cacheflow.simulation.hardware import Machine
    from cacheflow.simulation.scenario import Scenario

__all__ = ["LENGTHS", "RATIOS", "Point", "win_map"]

RATIOS: Final = (1 / 20, 1 / 10, 1 / 3, 1.0, 3.0, 10.0, 20.0)
LENGTHS: Final = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_LATENCY: Final = 50e-6


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds to first token by policy, at one ratio and length."""

    ratio: float
    tokens: int
    ttft: dict[str, float]

    @property
    def winner(self) -> str:
        """The fastest policy; of equals the first."""
        return min(self.ttft, key=lambda name: self.ttft[name])

    def gain(self, policy: str, others: Iterable[str]) -> float | None:
        """Best time of ``others`` / time of ``policy``; None where either is missing."""
        times = [self.ttft[name] for name in others if name in self.ttft and name != policy]
        return min(times) / self.ttft[policy] if times and policy in self.ttft else None


def win_map(
    scenario: Scenario,
    policies: Sequence[str],
    *,
    ratios: Sequence[float] = RATIOS,
    lengths: Sequence[int] = LENGTHS,
    suffix_tokens: int = 256,
    progress: Callable[[int], None] | None = None,
) -> list[Point]:
    """One idle GPU, one request, one link: at each ratio the link's bandwidth is such that
    recompute alone takes ``ratio`` times as long as loading alone. ``progress(points done)``."""
    points = []
    for ratio in ratios:
        for tokens in lengths:
            alone = _alone(scenario, ratio, tokens)
            job = Job("r", 0.0, tokens + suffix_tokens, prefix_tokens=tokens)
            runs = ((name, simulate(alone, Synthetic("one", [job]), name)) for name in policies)
            times = {name: run.summary.ttft.mean for name, run in runs}
            points.append(Point(ratio, tokens, times))
            if progress is not None:
                progress(len(points))
    return points


def _alone(scenario: Scenario, ratio: float, tokens: int) -> Scenario:
    bandwidth = _bandwidth(scenario, scenario.machine, ratio, tokens)
    link = LinkPreset("link", bandwidth, _LATENCY, "by compute:I/O ratio")
    return replace(scenario, gpus=1, channels=(Channel(link),), failing=0.0)


def _bandwidth(scenario: Scenario, machine: Machine, ratio: float, tokens: int) -> float:
    tiles = scenario.cut.grid.split(0, tokens)
    recompute = sum(machine.block_seconds(tile) for tile in tiles) * machine.layer_blocks
    return machine.model.token_bytes * tokens * ratio / recompute
