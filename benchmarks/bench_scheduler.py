"""What a decision costs: every call of the scheduler timed, with 100 to 10,000 active restores.

make bench-scheduler

Virtual time, real calls: requests of log-normal length stay active, one that ends is replaced, so
the number of active restores is what the row says. Nothing but the calls themselves is timed.
The same events can be played several times (``--rounds``): what one decision took at least is free
of most that the machine did meanwhile. Limits are about rounds as they are, the middle one.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import math
import random
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.simulation.svg import COLOURS, Plot
from cacheflow.types import Claim, ComputeDone, Coverage, RequestSpec, TileGrid

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.types import Load, Tile, TileWork

LAYERS: Final = 32
CHUNK: Final = 256
STRIDE: Final = 1 << 20
BANDWIDTH: Final = 12.5e9
LIMITS: Final = {"median_us": 30.0, "p99_us": 150.0}
"""With 1,000 active restores."""
ALONE: Final = (512, 4096, 16384, 65536)
ALONE_TIMES: Final = 5


def layer_seconds(tile: Tile) -> float:
    """A layer of an 8B model on a fast GPU, about."""
    return (4e-5 * tile.width + 2.5e-9 * tile.width * (tile.start + tile.stop) / 2) / LAYERS


class Timed:
    """A scheduler in virtual time that notes how long each of its calls took."""

    def __init__(self, active: int, objective: str, seed: int) -> None:
        self.clock = ManualClock()
        self.scheduler = BatchScheduler(ComputeModel(1.0, 1e-4), self.clock, objective=objective)
        self.calls: dict[str, list[int]] = {}
        self._chance = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()
        self._work: TileWork | None = None
        self._free_at = 0.0
        self._warm()
        self._replaces = True
        for _ in range(active):
            self._arrive()
        self.calls.clear()

    def run(self, events: int) -> None:
        """Play that many events."""
        for _ in range(events):
            now = self.clock.now()
            if self._work is None:
                batch = self._time("next_compute", self.scheduler.next_compute, now)
                if batch is not None:
                    self._work = batch.work[0]
                    self._layer(self._work, self._work.first_layer)
            while (
                load := self._time("next_load", self.scheduler.next_load, "link", now)
            ) is not None:
                self._start(load)
            when, _, action, details = heapq.heappop(self._events)
            self.clock.advance(max(0.0, when - now))
            action(*details)

    def _time(self, name: str, call: Callable[..., Any], *details: Any) -> Any:
        begin = time.perf_counter_ns()
        result = call(*details)
        self.calls.setdefault(name, []).append(time.perf_counter_ns() - begin)
        return result

    def _warm(self) -> None:
        grid, channel = TileGrid(), self.scheduler.channel("link")
        for index in range(30):
            tile = grid.tile(index % 10)
            self.scheduler._outlook.compute.observe(tile, layer_seconds(tile))
            channel.started(-index - 1, STRIDE, index * STRIDE / BANDWIDTH)
            channel.ended(-index - 1, (index + 1) * STRIDE / BANDWIDTH, delivered=True)
        self.clock.advance(1.0)

    def alone(self, tokens: int) -> tuple[float, int, int]:
        """One request, nobody else: TTFT in virtual seconds; nanoseconds of real calls before
        anything of it began, and in all."""
        self._replaces, begin = False, self.clock.now()
        self._arrive(tokens)
        while self.scheduler._requests:
            self.run(1)
        first = ("admit", "extend_coverage", "next_compute", "next_load")
        planned = sum(self.calls[name][0] for name in first)
        return self.clock.now() - begin, planned, sum(sum(each) for each in self.calls.values())

    def _arrive(self, tokens: int = 0) -> None:
        grid = TileGrid()
        if not tokens:
            tokens = int(min(max(self._chance.lognormvariate(9.2, 1.0), CHUNK), 128 << 10))
        prefix = tokens // CHUNK * CHUNK
        spec = RequestSpec(
            id=f"r{next(self._number)}",
            arrival=self.clock.now(),
            prefix_tokens=prefix,
            total_tokens=prefix + 64,
            chunk_tokens=CHUNK,
            num_layers=LAYERS,
            tiles=grid.split(0, prefix),
            suffix=grid.split(prefix, prefix + 64),
        )
        full = ((1 << LAYERS) - 1,) * (prefix // CHUNK)
        self._time("admit", self.scheduler.admit, spec, load_policy("adaptive"))
        coverage = Coverage("link", full, STRIDE)
        self._time("extend_coverage", self.scheduler.extend_coverage, spec.id, coverage)

    def _at(self, when: float, action: Callable[..., None], *details: Any) -> None:
        heapq.heappush(self._events, (when, next(self._number), action, details))

    def _layer(self, work: TileWork, layer: int) -> None:
        if self._time("claim", self.scheduler.claim, work, layer) is Claim.REFUSED:
            self._work = None
            self._time("computed", self.scheduler.computed, ComputeDone(work, layer, ()))
            self._look(work.request_id)
            self._at(self.clock.now(), lambda: None)
            return
        self._at(self.clock.now() + layer_seconds(work.tile), self._layer, work, layer + 1)

    def _start(self, load: Load) -> None:
        self._free_at = max(self._free_at, self.clock.now()) + load.nbytes / BANDWIDTH
        self._at(self._free_at, self._land, load)

    def _land(self, load: Load) -> None:
        granted = self._time("commit", self.scheduler.commit, load)
        self._time("loaded", self.scheduler.loaded, load, granted, self.clock.now())
        self._look(load.request_id)

    def _look(self, request_id: str) -> None:
        """Replace a request that is over."""
        scheduler = self.scheduler
        if request_id in scheduler._requests and scheduler.finished(request_id):
            self._time("remove", scheduler.remove, request_id)
            if self._replaces:
                self._arrive()


def quantile(values: list[int], share: float) -> float:
    """In microseconds."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] / 1e3


def play(active: int, events: int, objective: str) -> dict[str, list[int]]:
    """One round: nanoseconds of every call, by name and in order."""
    timed = Timed(active, objective, seed=active)
    gc.collect()
    gc.freeze()
    timed.run(events)
    gc.unfreeze()
    return timed.calls


def decided(calls: dict[str, list[int]]) -> list[int]:
    """Decisions are what a resource asks before it begins something."""
    return [
        value for name in ("next_compute", "claim", "next_load") for value in calls.get(name, [])
    ]


def measure(active: int, events: int, objective: str, rounds: int) -> dict[str, Any]:
    """One row: the round with the middle P99, and the least of all rounds, call by call."""
    played = [play(active, events, objective) for _ in range(rounds)]
    played.sort(key=lambda calls: quantile(decided(calls), 0.99))
    calls = played[rounds // 2]
    least = {
        name: [*map(min, zip(*(each[name] for each in played), strict=True))] for name in calls
    }
    decisions, undisturbed = decided(calls), decided(least)
    row: dict[str, Any] = {"active": active, "objective": objective, "decisions": len(decisions)}
    row |= {"median_us": quantile(decisions, 0.5), "p99_us": quantile(decisions, 0.99)}
    row["least"] = {
        "rounds": rounds,
        "median_us": quantile(undisturbed, 0.5),
        "p99_us": quantile(undisturbed, 0.99),
    }
    row["calls"] = {
        name: {"count": len(values), "median": quantile(values, 0.5), "p99": quantile(values, 0.99)}
        for name, values in calls.items()
    }
    return row


def planning(objective: str) -> list[dict[str, float]]:
    """What the scheduler takes of the TTFT of one request: before anything begins, and in all (most
    of that beside compute and loads under way). The least of a few times."""
    found = []
    for tokens in ALONE:
        runs = [Timed(0, objective, seed=0).alone(tokens) for _ in range(ALONE_TIMES)]
        ttft, planned, total = (min(values) for values in zip(*runs, strict=True))
        found.append({"tokens": tokens, "ttft_s": ttft, "planned": planned / 1e9 / ttft,
                      "all": total / 1e9 / ttft})  # fmt: skip
    return found


def tell(rows: list[dict[str, Any]]) -> None:
    """A few lines a row."""
    for row in rows:
        least = row["least"]
        print(
            f"{row['active']:6d} active: median {row['median_us']:6.1f} us, "
            f"p99 {row['p99_us']:6.1f} us ({row['decisions']} decisions)"
        )
        if least["rounds"] > 1:
            print(
                f"         least of {least['rounds']} rounds: median "
                f"{least['median_us']:.1f} us, p99 {least['p99_us']:.1f} us"
            )
        for name, call in row["calls"].items():
            print(
                f"         {name:16s} {call['median']:7.1f} {call['p99']:7.1f} us ({call['count']})"
            )


def drawn(rows: list[dict[str, Any]]) -> str:
    """Median and P99 against the number of active restores, each over what it would be if it grew
    from the smallest number on like its logarithm (dashed)."""
    sizes = [float(row["active"]) for row in rows]
    lines = {
        "median": [row["least"]["median_us"] for row in rows],
        "p99": [row["least"]["p99_us"] for row in rows],
    }
    growth = [math.log(size) / math.log(sizes[0]) for size in sizes]
    top = 1.1 * max(max(lines["p99"]), lines["p99"][0] * growth[-1])
    plot = Plot(
        (sizes[0], 1.2 * sizes[-1]),
        (0.0, top),
        "active restores (log)",
        "us a decision",
        log_x=True,
    )
    plot.axes()
    for (name, values), colour in zip(lines.items(), COLOURS, strict=False):
        plot.line(list(zip(sizes, values, strict=True)), colour)
        logarithmic = [values[0] * more for more in growth]
        plot.line(list(zip(sizes, logarithmic, strict=True)), colour, dash="4 4")
        plot.label(sizes[-1] / 1.4, values[-1] + 0.14 * top, name)
    style = "<style>text{font:12px sans-serif;fill:#666}.grid{stroke:#8884}</style>"
    begin, inner = plot.render().split(">", 1)
    return f'{begin} xmlns="http://www.w3.org/2000/svg">{style}{inner}\n'


def main() -> int:
    """Print a row a size; 1 if a limit is not kept."""
    parser = argparse.ArgumentParser(description="What a decision of the scheduler costs.")
    parser.add_argument("--active", default="100,300,1000,3000,10000")
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--objective", default="tail")
    parser.add_argument("--rounds", type=int, default=1, help="of the same events")
    parser.add_argument("--plot", type=Path, help="draw the growth with the number into this SVG")
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args()
    sizes = [int(size) for size in parsed.active.split(",")]
    rows = [measure(size, parsed.events, parsed.objective, parsed.rounds) for size in sizes]
    if parsed.plot is not None:
        parsed.plot.write_text(drawn(rows))
    if parsed.json:
        print(json.dumps({"rows": rows, "alone": planning(parsed.objective)}))
    else:
        tell(rows)
        for alone in planning(parsed.objective):
            print(
                f"{alone['tokens']:6.0f} tokens alone: TTFT {1e3 * alone['ttft_s']:.1f} ms, "
                f"planning {alone['planned']:.2%} of it, all calls {alone['all']:.2%}"
            )
    limited = [row for row in rows if row["active"] == 1000]
    return int(any(row[name] > limit for row in limited for name, limit in LIMITS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
