"""The options of ``cacheflow simulate``, one name each. Defaults stand in the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "Agents",
    "Cells",
    "Chunk",
    "Cold",
    "Coverage",
    "DecodeShare",
    "Failing",
    "Gpus",
    "Holes",
    "Lengths",
    "Links",
    "Load",
    "Objective",
    "Policies",
    "Preset",
    "ReportFile",
    "Requests",
    "Router",
    "Seed",
    "Speed",
    "Suffix",
    "TraceFile",
    "Turns",
    "Uplink",
]

Preset: TypeAlias = Annotated[
    str, typer.Option(help="GPU:MODEL, e.g. h100:llama-3.1-8b, a100x4:llama-3.1-70b.")
]
Links: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Links of each GPU: 25gbps, nvme, pcie4, pcie5, dram; several with a comma; "
        "nvme@0.5 holds half of each prefix. With a trace or agents, of two links the first "
        "is local to its GPU."
    ),
]
Uplink: TypeAlias = Annotated[
    str | None,
    typer.Option(help="The last link of all GPUs meets in one pipe of this rate (400gbps)."),
]
Gpus: TypeAlias = Annotated[int, typer.Option(min=1, help="GPUs, each with its own scheduler.")]
Cells: TypeAlias = Annotated[
    str, typer.Option(help="Tokens of a tile x layers of a block; 'exact': the real grid.")
]
Chunk: TypeAlias = Annotated[int, typer.Option(min=1, help="Tokens of a stored chunk.")]
DecodeShare: TypeAlias = Annotated[
    float, typer.Option(help="Share of the compute that decode keeps for itself.")
]
Failing: TypeAlias = Annotated[float, typer.Option(help="Probability that a load fails.")]
Cold: TypeAlias = Annotated[
    bool, typer.Option("--cold", help="Begin with cost models that know nothing.")
]

# -- requests

Requests: TypeAlias = Annotated[int, typer.Option(min=1, help="How many (of a trace: at most).")]
Lengths: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Prefixes: lognormal:MEAN:SIGMA, uniform:1k:32k, 8k or 512,1k,4k; rounded to chunks."
    ),
]
Suffix: TypeAlias = Annotated[
    int, typer.Option(min=1, max=1 << 24, help="New tokens behind each prefix.")
]
Coverage: TypeAlias = Annotated[float, typer.Option(help="Share of each prefix that is stored.")]
Holes: TypeAlias = Annotated[float, typer.Option(help="Probability that a stored chunk is gone.")]
Load: TypeAlias = Annotated[
    float,
    typer.Option(
        help="Random arrivals, as a share of what GPUs and links together can carry; "
        "0: all at once."
    ),
]
TraceFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Requests from a file in Mooncake's format (JSON lines).")
]
Speed: TypeAlias = Annotated[float, typer.Option(help="Play the trace this much faster.")]
Agents: TypeAlias = Annotated[
    int, typer.Option(min=0, help="Instead: so many agent sessions with tool pauses.")
]
Turns: TypeAlias = Annotated[int, typer.Option(min=1, help="Turns of each agent session.")]
Seed: TypeAlias = Annotated[int, typer.Option(help="Same seed, same result.")]

# -- what is compared

Policies: TypeAlias = Annotated[str, typer.Option(help="Policies to compare, with commas.")]
Objective: TypeAlias = Annotated[str, typer.Option(help="tail, mean, deadline or makespan.")]
Router: TypeAlias = Annotated[
    str, typer.Option(help="Of requests to GPUs: round-robin, least-work or affinity.")
]
ReportFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Write an HTML page with plots here.")
]
