"""What stores cost a restore that goes on beside them, measured and simulated.

One engine, one nvme tier behind a link that loads and stores share. A long prompt is computed, and
while it is being stored another one of the same length is restored: after the stores have ended
(alone), beside stores that give way to its loads, and beside stores that do not. Interleaved, in
random order. Then the simulator plays the same over as much compute and the same link.

    make bench-giving-way ARGS="--quick"
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from placement_real import balanced_bandwidth, shared_link
from rich.console import Console
from rich.progress import track
from rigs import model_name, model_options, opened, random_prompt, ratio, show, start

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.simulation import (
    Channel,
    Device,
    Job,
    Machine,
    ModelShape,
    Scenario,
    Synthetic,
    simulate,
)
from cacheflow.simulation.presets import LinkPreset
from cacheflow.tiers.write_behind import GivingWay
from cacheflow.types import TileGrid

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cacheflow.cli.bench_rig import Rig

WAYS: Final = ("alone", "giving way", "in the way")
_BLOCK: Final = 512
_LATER: Final = 1000.0


def never_wait(way: str) -> AbstractContextManager[object]:
    """Stores as they were before they gave way, real and simulated ones."""
    if way != "in the way":
        return nullcontext()
    return patch.object(GivingWay, "wait", lambda self, now: 0.0)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """TTFT by way, in seconds."""
    chance, found = random.Random(options.seed), {way: list[float]() for way in WAYS}
    async with opened(options) as rig:
        tokens = options.tokens + SUFFIX_TOKENS
        prompt = random_prompt(chance, tokens)
        bandwidth = await balanced_bandwidth(rig, prompt) * options.ratio
        with tempfile.TemporaryDirectory() as folder:
            tier = shared_link(folder, bandwidth)
            settings = Settings(tiers=(tier,), keep_costs=False)
            async with CacheFlow.open(settings, engine=rig.engine) as it:
                await _first_token(it, "kept", prompt)
                await it.flush()
                for _ in track(range(options.rounds), "measured", console=Console(stderr=True)):
                    for way in chance.sample(WAYS, len(WAYS)):
                        with never_wait(way):
                            seconds = await _beside(it, way, prompt, chance)
                        found[way].append(seconds)
        seconds = len(prompt) * rig.engine.layout.token_bytes / bandwidth * options.ratio
        played = {way: simulated(rig, way, tokens, seconds, bandwidth) for way in WAYS}
    return {"model": model_name(options), "measured": found, "simulated": played}


async def _first_token(flow: CacheFlow, name: str, prompt: list[int]) -> float:
    """Seconds to it. The session remains."""
    started, first = flow.clock.now(), 0.0
    async for _ in flow.session(name).generate(prompt, max_new_tokens=1):
        first = first or flow.clock.now() - started
    return first


async def _beside(flow: CacheFlow, way: str, prompt: list[int], chance: random.Random) -> float:
    """TTFT of ``prompt`` while a new one is being stored, or just after that."""
    await flow.session("kept").forget()
    await _first_token(flow, "new", random_prompt(chance, len(prompt)))
    if way == "alone":
        await flow.flush()
    first = await _first_token(flow, "kept", prompt)
    await flow.flush()
    await flow.session("new").forget()
    return first


# -- simulated ---------------------------------------------------------------------------------


def simulated(rig: Rig, way: str, tokens: int, seconds: float, bandwidth: float) -> float:
    """TTFT of the same, where computing the prompt takes ``seconds``."""
    machine = _machine(rig, tokens, seconds)
    link = LinkPreset("link", bandwidth, 1e-3, "measured", duplex=False)
    scenario = Scenario(machine, (Channel(link),), grid=TileGrid())

    def played(when: float) -> list[float]:
        jobs = [_job("kept", 0.0, 0, tokens), _job("new", _LATER, 1, tokens)]
        jobs.append(_job("again", when, 0, tokens))
        with never_wait(way):
            records = simulate(scenario, Synthetic("beside", jobs), "adaptive").records
        return [next(r for r in records if r.request_id == job.id).ttft for job in jobs]

    alone = played(2 * _LATER)
    return alone[2] if way == "alone" else played(_LATER + alone[1] + 1e-6)[2]


def _job(name: str, arrival: float, kind: int, tokens: int) -> Job:
    blocks = tuple(kind << 32 | block for block in range(tokens // _BLOCK))
    return Job(name, arrival, tokens, hash_ids=(*blocks, -1), leaves=blocks)


def _machine(rig: Rig, tokens: int, seconds: float) -> Machine:
    """The engine's shape (16-bit there: twice the heads), as fast as it was."""
    layout = rig.engine.layout
    linear, attention = rig.engine.layer_flops
    shape = ModelShape(
        "real",
        layout.num_layers,
        max(1, round(attention / 4 / layout.head_dim)),
        layout.token_bytes // (4 * layout.num_layers * layout.head_dim),
        layout.head_dim,
        linear / 2,
        "the engine's",
    )
    assert shape.token_bytes == layout.token_bytes
    device = Device("cpu", 1e12, 1.0, 1.0, 1.0, "measured", 1.0, 0.0)
    tiles = TileGrid().split(0, tokens)
    needed = sum(device.layer_seconds(shape, t.start, t.width) for t in tiles) * shape.layers
    device = Device("cpu", 1e12 * needed / seconds, 1.0, 1.0, 1.0, "measured", 1.0, 0.0)
    return Machine(device, shape, layers_per_block=1)


# -- output ------------------------------------------------------------------------------------


def tell(found: dict[str, Any]) -> None:
    """One table."""
    rows = []
    base = found["measured"]["alone"]
    for way in WAYS:
        seconds = found["measured"][way]
        times = statistics.mean(b / a for a, b in zip(base, seconds, strict=True))
        pairs = [b - a for a, b in zip(base, seconds, strict=True)]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else float("nan")
        mean, played = statistics.mean(seconds), found["simulated"][way]
        rows.append(
            [
                way,
                f"{1e3 * mean:.0f}",
                f"{times:.2f}",
                f"{1e3 * error:.0f}",
                f"{1e3 * played:.0f}",
                f"{played / found['simulated']['alone']:.2f}",
            ]
        )
    heads = ["stores", "TTFT, ms", "ratio", "+- ms", "simulated, ms", "ratio"]
    caption = f"{found['model']}, {len(base)} rounds; ratio: to the same alone"
    show("A restore beside stores over one link", heads, rows, caption)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, default=4096, help="of both prefixes")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    ratio_help = "compute:I/O of the link (default: 1:1)"
    parser.add_argument("--ratio", type=ratio, default=1.0, help=ratio_help)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(start(parse(), measure, tell))
