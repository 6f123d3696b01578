"""What each power of ``adaptive`` is worth, several sources, and where it loses."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Final

from policy_runs import LLAMA, Case, Table, balanced, percent, setting, single, tokens, verdict
from policy_streams import MAIN, NoHedge

from cacheflow.costs.fluid import concave_hull
from cacheflow.scheduling.order import FirstCome
from cacheflow.scheduling.policies.adaptive import Adaptive
from cacheflow.scheduling.policies.staircase import best_staircase
from cacheflow.simulation import batch_fluid_seconds
from cacheflow.simulation.maps import win_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy_runs import Cell, Row, Runner

    from cacheflow.scheduling import Policy
    from cacheflow.scheduling.order import Order
    from cacheflow.scheduling.planned import Planned
    from cacheflow.simulation import Job, Scenario
    from cacheflow.types import RequestSpec


# -- ablation --------------------------------------------------------------------------------------


class NoOverlap(Adaptive):
    """The suffix waits for the whole prefix."""

    overlaps: ClassVar[bool] = False


class InOrder(Adaptive):
    """First come, first served."""

    order: ClassVar[Order | None] = FirstCome()


class TileByTile(Adaptive):
    """Narrow leading tiles are recomputed one after the other."""

    rows: ClassVar[bool] = False


class AlwaysBegin(Adaptive):
    """Recompute starts even where it can save nothing."""

    def begin(self, gain: float | None) -> bool:
        return True


class WholeTiles(Adaptive):
    """The meeting tile is not split by layer."""

    def whole_tiles(self, spec: RequestSpec) -> bool:
        return True


class Fixed(Adaptive):
    """The staircase of the moment of arrival, kept to the end."""

    plans: ClassVar[bool] = True

    def plan(self, what: Planned) -> Sequence[int] | None:
        return best_staircase(what)


ABLATIONS: Final[dict[str, type[Policy]]] = {
    "full": Adaptive,
    "without suffix overlap": NoOverlap,
    "without hedging": NoHedge,
    "first come, first served": InOrder,
    "tile by tile, no rows": TileByTile,
    "without a threshold to begin": AlwaysBegin,
    "whole tiles, no split by layer": WholeTiles,
    "planned once, not corrected": Fixed,
}


def ablation(run_all: Runner) -> list[Table]:
    """What each power is worth, and how close several sources come to their bound."""
    return [_powers(run_all), _sources(run_all)]


def _powers(run_all: Runner) -> Table:
    fine = setting(LLAMA, "25gbps")
    places: dict[str, list[tuple[Scenario, tuple[Job, ...], str]]] = {
        name: [
            (case.scenario, case.jobs, trouble)
            for case in (MAIN.case("adaptive", 0.65, "tail", seed) for seed in range(2))
        ]
        for name, trouble in (("open 0.65", ""), ("link halves", "slow"), ("loads hang", "hang"))
    }
    places["4k + 1,024, 1:1"] = [(balanced(fine, 4096), single(4096, 1024), "")]
    places["16k, 1:1"] = [(balanced(fine, 16384), single(16384), "")]
    for ratio in (20, 100):
        places[f"16k, {ratio}:1"] = [(balanced(fine, 16384, ratio), single(16384), "")]
    cases = [
        Case(scenario, jobs, policy, trouble)
        for policy in ABLATIONS.values()
        for runs in places.values()
        for scenario, jobs, trouble in runs
    ]
    found = iter(run_all(cases))
    means = [[fmean(next(found).mean for _ in runs) for runs in places.values()] for _ in ABLATIONS]
    rows: list[Row] = []
    for name, row in zip(ABLATIONS, means, strict=True):
        ratios = [mine / full for mine, full in zip(row, means[0], strict=True)]
        worth = "" if name == "full" else "gain" if max(ratios) >= 1.005 else "**no gain shown**"
        rows.append((name, *ratios, worth))
    rows.append(("full, seconds", *means[0], ""))
    note = (
        f"Mean TTFT / that of the full policy, objective tail; above 1: the power is worth that. "
        f"Open: {MAIN.name}, load 0.65, 2 seeds; link halves: half its speed every other 5 s; "
        "loads hang: one in 500 never answers, given up after 0.5 s."
    )
    return Table("Adaptive less one power", ("variant", *places, "verdict"), tuple(rows), note)


def _sources(run_all: Runner) -> Table:
    rows: list[Row] = []
    for first, share in (("dram", 0.5), ("50gbps", 0.5), ("dram", 1.0), ("50gbps", 1.0)):
        for length in (4096, 16384, 65536):
            both = setting(LLAMA, first, "25gbps")
            parts = tuple(replace(each, share=share) for each in both.channels)
            scenario = replace(both, channels=parts)
            jobs = single(length)
            found = run_all([Case(scenario, jobs, policy) for policy in (Adaptive, NoOverlap)])
            least, whole = _bounds(scenario, jobs[0])
            restored = found[1].summary.restore.mean / least
            first_token = found[0].mean / whole
            name = f"{first} + 25gbps, {'a half each' if share < 1 else 'both have all'}"
            kept = verdict(restored <= 1.08)
            rows.append((name, tokens(length), least, restored, 1.08, kept, first_token))
    heads = ("sources", "prefix", "two-channel bound, s", "restored / bound", "limit", "verdict",
             "TTFT / bound with suffix")  # fmt: skip
    note = (
        "Half each: the later half of the prefix is on the first source. Restored: adaptive that "
        "lets the suffix wait, so that it does not take compute from the restore. TTFT: the full "
        "policy against a bound in which the whole suffix may hide under loads."
    )
    return Table("Several sources", heads, tuple(rows), note)


def _bounds(scenario: Scenario, job: Job) -> tuple[float, float]:
    """Least seconds to restore, and to the first token."""
    if scenario.channels[0].share < 1:
        length, suffix = job.prefix_tokens, job.total_tokens - job.prefix_tokens
        return halves_bound(scenario, length, 0), halves_bound(scenario, length, suffix)
    fluid = scenario.fluid(scenario.placement(named=False).place(job, 0))
    return batch_fluid_seconds([replace(fluid, fixed=0.0)]), batch_fluid_seconds([fluid])


def halves_bound(scenario: Scenario, length: int, suffix: int) -> float:
    """Least TTFT when the later half is on the first channel and the earlier on the second.

    In time ``t`` each channel delivers ``t`` seconds of its own half; what remains of either half
    costs at least its cheapest staircase, and all that has to fit into ``t`` less the suffix.
    """
    machine, middle = scenario.machine, length // 2
    pieces = scenario.grid.split(length, length + suffix)
    fixed = sum(machine.block_seconds(piece) for piece in pieces) * machine.layer_blocks
    halves = []
    for channel, start, stop in zip(scenario.channels, (middle, 0), (length, middle), strict=True):
        cells = [
            (machine.block_seconds(tile), machine.block_bytes(tile.width) / channel.link.bandwidth)
            for tile in scenario.grid.split(start, stop)
            for _ in range(machine.layer_blocks)
        ]
        saved = accumulate(cells, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0.0, 0.0))
        halves.append([(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(concave_hull([*saved]))])
    low, high = fixed, fixed + sum(cost for cells in halves for cost, _ in cells)
    for _ in range(60):
        t = (low + high) / 2
        fits = fixed + sum(_left_over(cells, t) for cells in halves) <= t
        low, high = (low, t) if fits else (t, high)
    return high


def _left_over(cells: Sequence[tuple[float, float]], t: float) -> float:
    """Seconds of compute for what a channel does not deliver of ``cells`` (or runs of them, the
    cheapest a second of loads first) within ``t``."""
    left, spent = sum(load for _, load in cells) - t, 0.0
    for cost, load in cells:
        if left <= 0:
            break
        spent += cost * min(1.0, left / load)
        left -= load
    return spent


# -- the losing map --------------------------------------------------------------------------------

MAP_RATIOS: Final = (1 / 20, 1 / 8, 1 / 3, 1.0, 3.0, 8.0, 20.0)
MAP_LENGTHS: Final = tuple(256 << power for power in range(10))


def losing_map(run_all: Runner) -> list[Table]:
    """Who wins with one request, and by how much adaptive loses where it does."""
    scenario = setting(LLAMA, "25gbps", layers=2)
    names = ("recompute", "load", "cake", "two-pointer", "staircase", "adaptive")
    points = win_map(scenario, names, ratios=MAP_RATIOS, lengths=MAP_LENGTHS)
    rows: list[Row] = []
    losses: list[Row] = []
    for ratio in MAP_RATIOS:
        row: list[Cell] = [f"1:{1 / ratio:.0f}" if ratio < 1 else f"{ratio:.0f}:1"]
        for point in (each for each in points if each.ratio == ratio):
            others = {name: seconds for name, seconds in point.ttft.items() if name != "adaptive"}
            best = min(others, key=lambda name: others[name])
            share = point.ttft["adaptive"] / others[best]
            row.append(f"{share:.3f}" if share <= 1.0005 else f"**{share:.3f}** {best}")
            either = point.ttft["adaptive"] / min(others["recompute"], others["load"])
            if share > 1.0005:
                lost = 1e3 * (point.ttft["adaptive"] - others[best])
                losses.append((row[0], tokens(point.tokens), best, share - 1, lost, either))
        rows.append(tuple(row))
    losses = sorted(losses, key=lambda each: -float(each[3]))
    shown = tuple((*each[:3], percent(float(each[3])), *each[4:]) for each in losses[:20])
    worst = max(
        each.ttft["adaptive"] / min(each.ttft["recompute"], each.ttft["load"]) for each in points
    )
    note = (
        "TTFT of adaptive / best other policy; bold with the winner's name where it loses. "
        f"Against the better single way: worst {worst:.3f}, limit 1.05 plus a layer block "
        f"and a load; {verdict(worst <= 1.05)}. Cells of 2 layers, suffix 256."
    )
    heads = ("compute:I/O", *map(tokens, MAP_LENGTHS))
    lost_heads = ("compute:I/O", "prefix", "winner", "lost", "lost, ms", "/ better single way")
    return [
        Table("The map: adaptive by the best other policy", heads, tuple(rows), note),
        Table(f"Where adaptive loses ({len(losses)} of {len(points)} points)", lost_heads, shown),
    ]
