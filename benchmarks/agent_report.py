"""What bench_agents.py found, as figures and as tables. Measures nothing itself."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from agent_child import LIVE
from agent_pauses import RESIDENT
from rigs import show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["GOAL", "SINGLE", "identical", "paused_turns", "tell", "turns_of", "verdict"]

GOAL: Final = 0.65
"""Of the median TTFT of resumed turns, by either single way."""
PREFETCHED: Final = 1.1
"""Of a resident turn's TTFT, behind a pause in which all was restored."""
SINGLE: Final = ("recompute", "load")
ONCE: Final = 1.0
"""How often branches restore what they share; a little more with what each one has of its own."""
_COLUMNS: Final = ("resident", "disk", *SINGLE, LIVE)
_HEADS: Final = ("resident", "disk", "recomp.", "load", "both")


def identical(never: Sequence[int], agent: Sequence[int], ways: dict[str, Any]) -> bool:
    """Whether the answers, and their beginnings by every way, are those never forgotten."""
    return list(agent) == list(never) and all(
        way["begins"] == list(never[: len(way["begins"])]) for way in ways.values()
    )


def turns_of(never: Iterable[Any], agent: Iterable[Any], disk: Iterable[Any]) -> list[Any]:
    """The turns of the three conversations, side by side."""
    turns = []
    for one, two, three in zip(never, agent, disk, strict=True):
        ways = {"resident": one["ways"][LIVE], "disk": three["ways"][LIVE], **two["ways"]}
        turns.append(
            {
                "turn": one["turn"] + 1,
                "context": two["context"],
                "identical": identical(one["answer"], two["answer"], ways),
                "ways": {way: ways[way] for way in _COLUMNS if way in ways},
            }
        )
    return turns


def verdict(turns: Sequence[Any]) -> dict[str, Any]:
    """The figures that are promised of resumed turns."""
    resumed = turns[1:]
    middle = turns[len(turns) // 2]["ways"]
    ttft = {way: [turn["ways"][way]["ttft_s"] for turn in resumed] for way in _COLUMNS}
    medians = {way: statistics.median(values) for way, values in ttft.items()}
    return {
        "identical": all(turn["identical"] for turn in turns),
        "longest_suffix": max(turn["ways"][LIVE]["suffix"] for turn in resumed),
        "compute_io": middle["recompute"]["restored_s"] / middle["load"]["restored_s"],
        "median_ttft_s": medians,
        "by_single": {way: medians[LIVE] / medians[way] for way in SINGLE},
        "growth": {way: _growth(values) for way, values in ttft.items()},
    }


def _growth(ttft: Sequence[float]) -> float:
    """Seconds in the last quarter of the turns by those in the first: 1 is flat."""
    quarter = max(len(ttft) // 4, 1)
    return statistics.median(ttft[-quarter:]) / statistics.median(ttft[:quarter])


def paused_turns(turns: Iterable[Any], restores: Sequence[float]) -> list[Any]:
    """By turn and pause: the TTFT, and what it should be if each second of pause saved one."""
    found = []
    for turn in turns:
        if not turn["pauses"]:
            continue
        medians = {name: statistics.median(each) for name, each in turn["pauses"].items()}
        resident, restore = medians.pop(RESIDENT), restores[turn["turn"]]
        whole = medians["0.0"]
        rows = []
        for name, ttft in medians.items():
            expected = max(whole - float(name) * restore, resident)
            rows.append({"pause_s": float(name) * restore, "ttft_s": ttft, "expected_s": expected})
        found.append({"turn": turn["turn"] + 1, "resident_s": resident, "pauses": rows})
    return found


def tell(found: dict[str, Any]) -> None:
    """A line a turn, then the pauses, then the verdict."""
    rows = []
    for turn in found["turns"]:
        ways = turn["ways"]
        restarted = "*" if turn["turn"] in found["restarted_before"] else ""
        rows.append(
            (
                f"{turn['turn']}{restarted}",
                str(turn["context"]),
                str(ways[LIVE]["suffix"]),
                *(f"{ways[way]['ttft_s']:.2f}" if way in ways else "" for way in _COLUMNS),
                f"{ways[LIVE]['recomputed_share']:.0%}",
                "yes" if turn["identical"] else "NO",
            )
        )
    medians = found["median_ttft_s"].values()
    grown = found["growth"].values()
    rows.append(("median", "", "", *(f"{value:.2f}" for value in medians), "", ""))
    rows.append(("growth", "", "", *(f"{value:.1f}x" for value in grown), "", ""))
    heads = ("turn", "tokens", "new", *_HEADS, "front", "same")
    show(f"TTFT of an agent's turns, {found['model']}", heads, rows, _caption(found))
    _tell_pauses(found)


def _caption(found: dict[str, Any]) -> str:
    ratios = ", ".join(f"{value:.2f} x {way}" for way, value in found["by_single"].items())
    return (
        "seconds; new: the suffix; both: CacheFlow; front: recomputed; *: a new process; "
        "same: the answer's tokens; growth: last quarter by first; "
        f"link of {found['bandwidth'] / 1e6:.1f} MB/s: compute:I/O {found['compute_io']:.2f} "
        "at the median turn.\n"
        f"Median resumed turn from both ends: {ratios} (goal {GOAL}); tokens identical: "
        f"{'yes' if found['identical'] else 'NO'}; suffixes of up to {found['longest_suffix']}"
    )


def _tell_pauses(found: dict[str, Any]) -> None:
    rows = []
    whole = [turn["pauses"][-1]["ttft_s"] / turn["resident_s"] for turn in found["paused"]]
    for turn in found["paused"]:
        for pause in turn["pauses"]:
            expected, resident = pause["expected_s"], turn["resident_s"]
            rows.append(
                (
                    str(turn["turn"]),
                    f"{pause['pause_s']:.2f}",
                    f"{pause['ttft_s']:.3f}",
                    f"{expected:.3f}",
                    f"{pause['ttft_s'] / expected:.2f}",
                    f"{pause['ttft_s'] / resident:.2f}",
                )
            )
    forked = found["forked"]
    once, again = forked["forked"], forked["forgotten"]
    caption = (
        "seconds, medians; hoped for: less by the pause, but no less than resident. "
        f"In a pause longer than the restore: {max(whole, default=0.0):.2f} x resident at most "
        f"(goal {PREFETCHED}).\n"
        f"{forked['branches']} forks of a restored session: restored {once['restored']:.2f} times, "
        f"all answering after {max(once['ttft_s']):.2f} s; forgotten and resumed together: "
        f"{again['restored']:.2f} times (goal {ONCE}), after {max(again['ttft_s']):.2f} s"
    )
    heads = ("turn", "pause", "TTFT", "hoped for", "by it", "by resident")
    show("Prefetch while a tool runs", heads, rows, caption)
