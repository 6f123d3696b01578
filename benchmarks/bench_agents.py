"""An agent of twenty turns whose KV cache is forgotten during every tool call, on a real engine.

The agent writes some 200 tokens a turn, a tool answers with at most 62 more, and meanwhile the
server forgets; twice the serving process ends and another one goes on with the same store. Compares
the tokens with those of a server that never forgets, and the time to the first token of each turn:
with everything resident, recomputed, loaded, and from both ends, over a link as fast as recompute
for the turn in the middle; and from the disk itself.

    make bench-agents ARGS="--quick"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_child import LIVE, Life
from rigs import model_folder, model_name, model_options, show, start

from cacheflow.cli.output import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TURNS: Final = 20
QUICK_TURNS: Final = 6
RESTARTS: Final = 2
GOAL: Final = 0.65
"""Of the median TTFT of resumed turns, by either single way."""
CHILD: Final = Path(__file__).with_name("agent_child.py")
_SINGLE: Final = ("recompute", "load")
_COLUMNS: Final = ("resident", "disk", *_SINGLE, LIVE)
_HEADS: Final = ("resident", "disk", "recomp.", "load", "both")


@dataclass(frozen=True, slots=True)
class Lived:
    """What one or more processes, one after the other, did."""

    turns: tuple[dict[str, Any], ...]
    tokens: list[int]
    """The context at the end."""
    calibrated: dict[str, float] | None = None

    @property
    def answers(self) -> tuple[tuple[int, ...], ...]:
        """The answer of each turn, whole."""
        return tuple(tuple(turn["answer"]) for turn in self.turns)


async def lived(life: Life, tell: Callable[[], None]) -> Lived:
    """Run one process to its end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(CHILD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(asdict(life)).encode())
    child.stdin.write_eof()
    said = []
    async for line in child.stdout:
        said.append(json.loads(line))
        tell()
    if await child.wait():
        raise SystemExit(f"error: the serving process ended with {child.returncode}")
    *turns, end = said
    return Lived(tuple(turns), end["tokens"], end.get("calibrated"))


async def lived_on(life: Life, restarts: int, tell: Callable[[], None]) -> Lived:
    """The same in several processes, each of which knows only the context it is given."""
    turns: list[dict[str, Any]] = []
    edges = [life.stop * i // (restarts + 1) for i in range(restarts + 2)]
    tokens: list[int] = []
    for first, stop in pairwise(edges):
        part = await lived(replace(life, first=first, stop=stop, tokens=tokens), tell)
        turns += part.turns
        tokens = part.tokens
    return Lived(tuple(turns), tokens)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The conversation three times: never forgotten, forgotten and compared, from the disk."""
    with tempfile.TemporaryDirectory(dir=options.store) as scratch, progress() as bar:
        folder = Path(scratch)
        task = bar.add_task("an agent's turns", total=3 * options.turns + 1)

        def tell() -> None:
            bar.advance(task)

        model = await asyncio.to_thread(model_folder, options, folder)
        life = Life(
            model=str(model),
            threads=options.threads,
            store=str(folder / "never-forgets" / "kv"),
            first=0,
            stop=options.turns,
            turns=options.turns,
            ways=(LIVE,),
            tokens=[],
            forget=False,
            calibrate=options.turns // 2,
        )
        never = await lived(life, tell)
        assert never.calibrated is not None
        bandwidth = never.calibrated["nbytes"] / never.calibrated["seconds"]
        life = replace(life, store=str(folder / "agent" / "kv"), forget=True, calibrate=None)
        agent = await lived_on(
            replace(life, ways=(*_SINGLE, LIVE), bandwidth=bandwidth), options.restarts, tell
        )
        disk = await lived(replace(life, answers=agent.answers), tell)
        return summary(options, bandwidth, never, agent, disk)


def summary(
    options: argparse.Namespace, bandwidth: float, never: Lived, agent: Lived, disk: Lived
) -> dict[str, Any]:
    """All turns, and the figures that are promised."""
    turns = []
    for one, two, three in zip(never.turns, agent.turns, disk.turns, strict=True):
        ways = {"resident": one["ways"][LIVE], "disk": three["ways"][LIVE], **two["ways"]}
        turns.append(
            {
                "turn": one["turn"] + 1,
                "context": two["context"],
                "identical": identical(one["answer"], two["answer"], ways),
                "ways": {way: ways[way] for way in _COLUMNS if way in ways},
            }
        )
    resumed = turns[1:]
    middle = turns[len(turns) // 2]["ways"]
    medians = {way: median(turn["ways"][way]["ttft_s"] for turn in resumed) for way in _COLUMNS}
    return {
        "model": model_name(options),
        "bandwidth": bandwidth,
        "compute_io": middle["recompute"]["restored_s"] / middle["load"]["restored_s"],
        "restarted_before": [
            options.turns * i // (options.restarts + 1) + 1 for i in range(1, options.restarts + 1)
        ],
        "turns": turns,
        "identical": all(turn["identical"] for turn in turns),
        "longest_suffix": max(turn["ways"][LIVE]["suffix"] for turn in resumed),
        "median_ttft_s": medians,
        "by_single": {way: medians[LIVE] / medians[way] for way in _SINGLE},
        "growth": {
            way: growth([turn["ways"][way]["ttft_s"] for turn in resumed]) for way in _COLUMNS
        },
    }


def identical(never: Sequence[int], agent: Sequence[int], ways: dict[str, Any]) -> bool:
    """Whether the answers, and their beginnings by every way, are those never forgotten."""
    return list(agent) == list(never) and all(
        way["begins"] == list(never[: len(way["begins"])]) for way in ways.values()
    )


def median(values: Any) -> float:
    """Of an iterable of numbers."""
    return float(statistics.median(values))


def growth(ttft: Sequence[float]) -> float:
    """Seconds in the last quarter of the turns by those in the first: 1 is flat."""
    quarter = max(len(ttft) // 4, 1)
    return median(ttft[-quarter:]) / median(ttft[:quarter])


def tell(found: dict[str, Any]) -> None:
    """A line a turn, then the verdict."""
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
    show(f"TTFT of an agent's turns, {found['model']}", heads, rows, caption(found))


def caption(found: dict[str, Any]) -> str:
    """What the table's columns are, and the promised figures."""
    ratios = ", ".join(f"{value:.2f} x {way}" for way, value in found["by_single"].items())
    return (
        "seconds; new: the suffix; both: CacheFlow; front: recomputed; *: a new process; "
        "same: the answer's tokens; growth: last quarter by first; "
        f"link of {found['bandwidth'] / 1e6:.1f} MB/s: compute:I/O {found['compute_io']:.2f} "
        "at the median turn.\n"
        f"Median resumed turn from both ends: {ratios} (goal {GOAL}); tokens identical: "
        f"{'yes' if found['identical'] else 'NO'}; suffixes of up to {found['longest_suffix']}"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--turns", type=int, help=f"{TURNS}, or {QUICK_TURNS} if --quick")
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    options = parser.parse_args()
    options.turns = options.turns or (QUICK_TURNS if options.quick else TURNS)
    return options


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))
