"""An agent of twenty turns whose KV cache is forgotten during every tool call, on a real engine.

The agent writes some 200 tokens a turn, a tool answers with at most 62 more, and meanwhile the
server forgets; twice the serving process ends and another one goes on with the same store. Compares
the tokens with those of a server that never forgets, and the time to the first token of each turn:
with everything resident, recomputed, loaded, and from both ends, over a link as fast as recompute
for the turn in the middle; and from the disk itself. Then what pauses of the tool save if its
context is prefetched meanwhile, and what eight branches, resumed together, restore.

    make bench-agents ARGS="--quick"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_child import LIVE, Life
from agent_report import SINGLE, paused_turns, tell, turns_of, verdict
from rigs import model_folder, model_name, model_options, start

from cacheflow.cli.output import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TURNS: Final = 20
QUICK_TURNS: Final = 6
RESTARTS: Final = 2
BRANCHES: Final = 8
CHUNK: Final = 256
CHILD: Final = Path(__file__).with_name("agent_child.py")


@dataclass(frozen=True, slots=True)
class Lived:
    """What one or more processes, one after the other, did."""

    turns: tuple[dict[str, Any], ...]
    end: dict[str, Any]
    """What the last one said at its end: the context in tokens, and what else was asked for."""


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
    return Lived(tuple(turns), end)


async def lived_on(life: Life, restarts: int, tell: Callable[[], None]) -> Lived:
    """The same in several processes, each of which knows only the context it is given."""
    turns: list[dict[str, Any]] = []
    edges = [life.stop * i // (restarts + 1) for i in range(restarts + 2)]
    end: dict[str, Any] = {"tokens": []}
    for first, stop in pairwise(edges):
        part = replace(life, first=first, stop=stop, tokens=end["tokens"])
        did = await lived(part, tell)
        turns, end = [*turns, *did.turns], did.end
    return Lived(tuple(turns), end)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The conversation never forgotten; forgotten and compared; from the disk; with pauses."""
    with tempfile.TemporaryDirectory(dir=options.store) as scratch, progress() as bar:
        folder = Path(scratch)
        task = bar.add_task("an agent's turns", total=4 * options.turns + 4)

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
            chunk=options.chunk,
            calibrate=options.turns // 2,
        )
        never = await lived(life, tell)
        calibrated = never.end["calibrated"]
        link = calibrated["nbytes"] / calibrated["seconds"]
        life = replace(life, store=str(folder / "agent" / "kv"), forget=True, calibrate=None)
        compared = replace(life, ways=(*SINGLE, LIVE), bandwidth=link)
        agent = await lived_on(compared, options.restarts, tell)
        answers = tuple(tuple(turn["answer"]) for turn in agent.turns)
        disk = await lived(replace(life, answers=answers), tell)
        restores = paused_at(agent.turns, options.paused)
        life = replace(life, ways=(), answers=answers, bandwidth=link)
        last = await lived(replace(life, restores=restores, branches=BRANCHES), tell)
    turns = turns_of(never.turns, agent.turns, disk.turns)
    edges = [options.turns * i // (options.restarts + 1) for i in range(1, options.restarts + 1)]
    return {
        "model": model_name(options),
        "bandwidth": link,
        "restarted_before": [edge + 1 for edge in edges],
        "turns": turns,
        **verdict(turns),
        "paused": paused_turns(last.turns, restores),
        "forked": last.end["forked"],
    }


def paused_at(turns: Sequence[Any], count: int) -> tuple[float, ...]:
    """Seconds of the restore of ``count`` turns, the last and some before; 0 for the others."""
    chosen = {len(turns) - 1 - i * (len(turns) - 1) // count for i in range(count)}
    return tuple(
        turn["ways"][LIVE]["ttft_s"] if i in chosen else 0.0 for i, turn in enumerate(turns)
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--turns", type=int, help=f"{TURNS}, or {QUICK_TURNS} if --quick")
    parser.add_argument("--restarts", type=int, default=RESTARTS)
    parser.add_argument("--paused", type=int, help="turns that pauses are measured at")
    words = "tokens of a chunk: with its answer and the tool's result a turn adds one"
    parser.add_argument("--chunk", type=int, default=CHUNK, help=f"{words} (default: {CHUNK})")
    options = parser.parse_args()
    options.turns = options.turns or (QUICK_TURNS if options.quick else TURNS)
    options.paused = options.paused or (1 if options.quick else 4)
    return options


if __name__ == "__main__":
    sys.exit(start(parse(), measure, tell))
