"""``bench_stages.py --real``: two stages as processes over gloo, each with a link of its own.

In turns: recompute alone and loads alone (both ranks active, so that they disturb each other as
they will), then both ends with boundary activations and without. A stage's bound is fluid, from
its bytes as loads alone took them and its tiles as recompute alone computed them: before and after,
each counting by how long ago; how much that changed in a round (drift) says what a round is worth.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cacheflow.cli.output import progress
from cacheflow.distributed import Mode, StageCosts, best_split, fluid_seconds
from cacheflow.testing.processes import run_ranks
from cacheflow.types import LayersComputed, LoadEnded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from rich.progress import Progress

    from cacheflow.session import CacheFlow
    from cacheflow.storage_backends.throttled import Link
    from cacheflow.testing.processes import Seat
    from cacheflow.types import Event

STAGES: Final = 2
SUFFIX: Final = 32
_DEADLINE: Final = 1800.0
_MIB: Final = 2**20
_STORE_BYTES: Final = 16 << 30
"""Touched as it fills."""
_BEFORE: Final = 3
"""Turns before the first round."""
_WAYS: Final = 4
"""Turns of a round."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Two ranks on this machine's CPU. Blocking."""
    from rigs import model_folder

    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(options, Path(scratch))
        return measure_stages(STAGES, folder, options.real_tokens, options.rounds, options.threads)


def measure_stages(
    stages: int, folder: Path, tokens: int, rounds: int, threads: int, dtype: str = "float32"
) -> dict[str, Any]:
    """Rounds of ``stages`` ranks, put together: on GPUs where there are any. Blocking."""
    ranks = run_ranks(
        stages, stage, str(folder), tokens, rounds, threads, dtype, deadline=_DEADLINE
    )
    rows: list[dict[str, Any]] = []
    for parts in zip(*(rank["rounds"] for rank in ranks), strict=True):
        bound = max(part["bound"] for part in parts)
        row = {way: max(part[way] for part in parts) for way in ("load", "both", "waiting")}
        row |= {name: max(part[name] for part in parts) for name in ("compute", "drift")}
        row["bound"] = bound
        row["efficiency"] = bound / row["both"]
        row["efficiency_waiting"] = max(part["bound_without"] for part in parts) / row["waiting"]
        rows.append(row)
    last = [rank["rounds"][-1] for rank in ranks]
    return {
        "tokens": tokens,
        "stages": stages,
        "rounds": rows,
        "efficiency": statistics.median(row["efficiency"] for row in rows),
        "efficiency_waiting": statistics.median(row["efficiency_waiting"] for row in rows),
        "recomputed": [part["recomputed"] for part in last],
        "hidden_bytes": [part["hidden_bytes"] for part in last],
        "predicted_hidden_bytes": [part["predicted_hidden_bytes"] for part in last],
        "kv_bytes": [rank["kv_bytes"] for rank in ranks],
        "ratio": [rank["ratio"] for rank in ranks],
        "planner": [rank["planner"] for rank in ranks],
        "tokens_equal": len({tuple(rank["answers"]) for rank in ranks}) == 1,
    }


async def stage(
    seat: Seat, folder: str, tokens: int, rounds: int, threads: int, dtype: str
) -> dict[str, Any]:
    """One rank of the measurement."""
    from cacheflow.plugins.pipeline import PipelineEngine
    from cacheflow.registry import load_backend
    from cacheflow.session import CacheFlow
    from cacheflow.settings import Settings
    from cacheflow.storage_backends.throttled import Link, ThrottledBackend

    engine = await PipelineEngine.open_model(
        folder,
        dtype=dtype,
        threads=threads,
        rank=seat.rank,
        ranks=seat.count,
        init_method=seat.init_method,
        deadline=120.0,
    )
    store = await load_backend("dram").open({"capacity_bytes": _STORE_BYTES})
    link = Link(0.0, 0.0)
    events: list[Event] = []
    settings = Settings(staging_bytes=512 << 20, keep_costs=False)
    try:
        async with CacheFlow.open(
            settings,
            engine=engine,
            backends={"link": ThrottledBackend(store, link)},
            observer=events.append,
        ) as flow:
            with progress() if seat.rank == 0 else contextlib.nullcontext() as bar:
                return await Bench(engine, flow, link, events, tokens).run(rounds, bar)
    finally:
        await engine.aclose()
        await store.aclose()


@dataclass(frozen=True, slots=True)
class Alone:
    """Recompute alone: when its middle was, and seconds of each tile of the prefix."""

    middle: float
    tiles: list[float]

    def at(self, later: Alone, moment: float) -> list[float]:
        """The same at a moment between this run and ``later``."""
        share = (moment - self.middle) / (later.middle - self.middle)
        return [a + share * (b - a) for a, b in zip(self.tiles, later.tiles, strict=True)]


class Bench:
    """What one rank measures, always in the same order as the others."""

    def __init__(
        self, engine: Any, flow: CacheFlow, link: Link, events: list[Event], tokens: int
    ) -> None:
        self.engine, self.flow, self.link, self.events = engine, flow, link, events
        self.prompt = [(7 * i + i // 11) % 256 + 3 for i in range(tokens + SUFFIX)]
        layout = engine.layout
        self.chunks = tokens // layout.chunk_tokens
        self.kv_bytes = self.chunks * layout.payload_bytes()
        boundary = engine.boundary
        hidden = 0 if boundary is None else boundary.layout.payload_bytes()
        self.ratio = hidden / layout.payload_bytes()
        self.tiles = engine.grid.split(0, tokens)
        self.answers: list[int] = []
        self._tell: Callable[[], None] = lambda: None

    async def run(self, rounds: int, bar: Progress | None) -> dict[str, Any]:
        """Cold, then a calibration of the link to 1:1, then the rounds, telling ``bar``."""
        if bar is not None:
            task = bar.add_task("two stages", total=_BEFORE + rounds * _WAYS)
            self._tell = lambda: bar.advance(task)
        await self.turn("adaptive", save=True)
        await self.flow.flush()
        before = await self.alone()
        self.link.bandwidth = self.kv_bytes / sum(before.tiles)
        await self.turn("adaptive")  # learns the link
        stage = self.flow.restorer.stage
        assert stage is not None
        planner = stage.expected(self.tiles).value
        found = []
        for _ in range(rounds):
            row = await self.round()
            after = await self.alone()
            found.append(row | self.bounds(row, before, after))
            before = after
        return {
            "rounds": found,
            "kv_bytes": self.kv_bytes,
            "ratio": self.ratio,
            "planner": planner,
            "answers": self.answers,
        }

    async def alone(self) -> Alone:
        """Recompute alone, stage by stage."""
        start = time.perf_counter()
        await self.turn("recompute")
        middle = (start + time.perf_counter()) / 2
        seconds = dict.fromkeys(range(len(self.tiles)), 0.0)
        for event in self.events:
            if isinstance(event, LayersComputed) and not event.is_suffix:
                seconds[event.tile] += event.stop - event.starts[0]
        return Alone(middle, list(seconds.values()))

    async def round(self) -> dict[str, Any]:
        """The other three ways once."""
        found: dict[str, Any] = {"load": (await self.turn("load")).restored_seconds}
        for way, mode in (("both", Mode.INDEPENDENT), ("waiting", Mode.DEPENDENT)):
            start = time.perf_counter()
            restoration = await self.turn("adaptive", mode)
            found[f"{way}_at"] = (start + time.perf_counter()) / 2
            found[way] = restoration.restored_seconds
            if way == "both":
                found["recomputed"] = restoration.recomputed_share
                found["hidden_bytes"] = self.hidden_bytes()
        return found

    def bounds(self, row: dict[str, Any], before: Alone, after: Alone) -> dict[str, Any]:
        """What the round's restores could have taken, by recompute alone before and after it."""
        compute = before.at(after, row["both_at"])
        widths = [tile.width / self.tiles[-1].stop for tile in self.tiles]
        kv = [row["load"] * width for width in widths]
        costs = StageCosts(compute, kv, [self.ratio * each for each in kv])
        without = StageCosts(before.at(after, row["waiting_at"]), kv, [0.0] * len(kv))
        units = best_split(costs).units if self.ratio else 0
        predicted = sum(widths[:units])
        return {
            "compute": sum(compute),
            "drift": sum(after.tiles) / sum(before.tiles),
            "bound": fluid_seconds(costs),
            "bound_without": fluid_seconds(without),
            "predicted_hidden_bytes": round(self.ratio * self.kv_bytes * predicted),
        }

    async def turn(self, policy: str, mode: Mode = Mode.INDEPENDENT, *, save: bool = False) -> Any:
        """Forget, restore, one token."""
        from cacheflow.session import Generation

        stage = self.flow.restorer.stage
        assert stage is not None, "a stage is restored by stages"
        stage.mode = mode
        await self.flow.forget()
        self.events.clear()
        report = Generation()
        session = self.flow.session("bench")
        turns = session.generate(
            self.prompt, max_new_tokens=1, policy=policy, save=save, report=report
        )
        self.answers += [token async for token in turns]
        self._tell()
        return report.restoration

    def hidden_bytes(self) -> int:
        """Of activations loaded in the last turn."""
        return sum(e.nbytes for e in self.events if isinstance(e, LoadEnded) and e.hidden)


def tell_real(found: dict[str, Any]) -> None:
    """For people."""
    print(f"{found['stages']} processes over gloo, prefix {found['tokens']}\n")
    print(
        "| recompute alone (drift) | loads alone | compute:I/O | bound | both ends | of bound "
        "| without activations | of its bound |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in found["rounds"]:
        print(
            f"| {row['compute']:.3f} s ({row['drift']:.2f}) | {row['load']:.3f} s "
            f"| {row['compute'] / row['load']:.2f} | {row['bound']:.3f} s "
            f"| {row['both']:.3f} s | {row['efficiency']:.3f} | {row['waiting']:.3f} s "
            f"| {row['efficiency_waiting']:.3f} |"
        )
    shares = ", ".join(f"{share:.0%} and {1 - share:.0%}" for share in found["recomputed"])
    print(
        f"\nmedian: {found['efficiency']:.3f} of the bound, {found['efficiency_waiting']:.3f} "
        f"without activations; recomputed and loaded by stage: {shares}; answers "
        f"equal in all ranks: {found['tokens_equal']}; planner: {', '.join(found['planner'])}"
    )
    for rank, nbytes in enumerate(found["hidden_bytes"]):
        print(
            f"stage {rank}: activations {nbytes / _MIB:.2f} MiB loaded, "
            f"{found['predicted_hidden_bytes'][rank] / _MIB:.2f} predicted "
            f"({found['ratio'][rank]:.1%} of its KV a token), "
            f"KV {found['kv_bytes'][rank] / _MIB:.0f} MiB"
        )
