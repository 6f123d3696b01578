"""Restores on a GPU: recompute alone, loads alone, both at once; and stages where there are more.

    make bench-gpu                                a random model of 8B shape and SmolLM2
    make bench-gpu ARGS="--quick --device cpu"    the same code on a CPU, in a minute

KV lies in pinned host memory, on a disk, and in host memory behind links that take as long as
recompute says (``--links``). Efficiency is the fluid bound, from recompute alone and loads alone of
the same round, by what CacheFlow took. With several GPUs each is then a stage of the first model.
``docs/gpu.md`` says how to run it on a machine without network.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from rigs import QUICK_MODEL, start
from stages_real import measure_stages, tell_real

from cacheflow.cli.bench_rig import SUFFIX_TOKENS, Rig, real_tokens
from cacheflow.cli.bench_run import Bench, Point
from cacheflow.cli.demo_report import parse_links
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.storage_backends.throttled import Link, ThrottledBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from cacheflow.abc import StorageBackend

SHAPE_8B: Final = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
"""Of Llama 3.1 8B; 128 KiB of KV a token in 16 bits."""
RANDOM: Final = "random-8b"
_TOKENS: Final = 256
"""Every random model knows so many."""
WAYS: Final = ("recompute", "load", "adaptive", "fluid")
MEMORY, DISK = "pinned memory", "disk"


class KeptMemory(DramBackend):
    """Memory that restorers close over and over, and that stays until :meth:`free`."""

    async def aclose(self) -> None:
        return

    async def free(self) -> None:
        """Close it."""
        await super().aclose()


class MemoryRig(Rig):
    """A rig whose store is this process's memory: it outlives each restorer over it."""

    def __init__(self, engine: Any, folder: Path, store: KeptMemory) -> None:
        super().__init__(engine, folder)
        self._store = store

    async def open_link(
        self, bandwidth: float | None, folder: Path | None = None
    ) -> StorageBackend:
        """See :meth:`Rig.open_link`; closing it leaves the store open."""
        if folder is not None:
            return await super().open_link(bandwidth, folder)
        return ThrottledBackend(self._store, Link(bandwidth, 0.0)) if bandwidth else self._store


def save_random(folder: Path, shape: dict[str, int], device: torch.device) -> Path:
    """A Llama with random weights in bfloat16, made on ``device``: 16 GB for the 8B shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").is_file():
        torch.manual_seed(1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                model = LlamaForCausalLM(LlamaConfig(**shape))
        finally:
            torch.set_default_dtype(before)
        model.save_pretrained(folder)
    return folder


def model_folder(name: str, options: argparse.Namespace, scratch: Path) -> Path:
    """Where a model of ``--models`` lies: made there if need be. Blocking."""
    from cacheflow.plugins.transformers import prepare_smollm2

    if name == RANDOM:
        shape = QUICK_MODEL if options.quick else SHAPE_8B
        return save_random(Path(options.store or scratch) / RANDOM, shape, device_of(options))
    return prepare_smollm2() if name == "smollm2" else Path(name)


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that was asked for."""
    if options.device == "auto" and not torch.cuda.is_available():
        raise SystemExit(
            "error: torch finds no CUDA device here; the same code runs on a CPU with "
            "--device cpu --quick"
        )
    return torch.device("cuda" if options.device == "auto" else options.device)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All models from all media, then stages."""
    device = device_of(options)
    found: dict[str, Any] = {"device": described(device), "torch": torch.__version__, "rows": []}
    with tempfile.TemporaryDirectory(dir=options.store) as scratch:
        for name in options.models.split(","):
            folder = await asyncio.to_thread(model_folder, name, options, Path(scratch))
            found["rows"] += await measure_model(name, folder, options, Path(scratch))
            gc.collect()  # the next model, and the stages, need the device's memory
            torch.cuda.empty_cache()
        count = torch.cuda.device_count() if device.type == "cuda" else options.cpu_stages
        if count > 1:
            first = options.models.split(",")[0]
            folder = await asyncio.to_thread(model_folder, first, options, Path(scratch))
            longest = max(row["tokens"] for row in found["rows"] if row["model"] == first)
            what = (min(count, options.most_stages), folder, longest)
            found["stages"] = await asyncio.to_thread(
                measure_stages, *what, options.rounds, options.threads, options.dtype
            )
    return found


async def measure_model(
    name: str, folder: Path, options: argparse.Namespace, scratch: Path
) -> list[dict[str, Any]]:
    """One model, from memory, disk and over links."""
    from cacheflow.plugins.transformers import TransformersEngine

    engine = await TransformersEngine.open_model(
        folder,
        device=str(device_of(options)),
        dtype=options.dtype,
        threads=options.threads,
        kv_bytes=options.kv_bytes,
    )
    try:
        room = engine.max_tokens - SUFFIX_TOKENS
        lengths = [length for length in lengths_of(options) if length <= room]
        tokens = await asyncio.to_thread(tokens_of, engine, max(lengths) + SUFFIX_TOKENS)
        rows: list[dict[str, Any]] = []
        for medium in (MEMORY, DISK):
            links = options.links if medium == MEMORY else "raw"
            points = [Point(n, link) for n in lengths for link in parse_links(links)]
            async with rig_of(medium, engine, scratch / f"kv-{len(rows)}", max(lengths)) as rig:
                bench = Bench(rig, tokens)
                print(f"{name}: storing {max(lengths)} tokens in {medium}", file=sys.stderr)
                await bench.fill(lambda: None)
                for length in lengths:
                    own = [point for point in points if point.tokens == length]
                    print(f"{name}: {length} tokens from {medium}", file=sys.stderr)
                    await bench.measure(own, options.rounds, lambda: None)
            lag = bench.lag.quantile(0.99)
            row = {"model": name, "medium": medium, "loop_lag_p99_ms": lag * 1e3}
            rows += [{**row, **point.summary()} for point in points]
        return rows
    finally:
        await engine.aclose()


@asynccontextmanager
async def rig_of(medium: str, engine: Any, folder: Path, tokens: int) -> AsyncIterator[Rig]:
    """A rig over ``medium`` with room for the KV of ``tokens``; the engine stays open."""
    if medium == DISK:
        rig = Rig(engine, folder)
        try:
            yield rig
        finally:
            await rig.pool.aclose()
        return
    room = 2 * tokens // engine.layout.chunk_tokens * engine.layout.payload_bytes() + (64 << 20)
    store = await KeptMemory.open({"capacity_bytes": room})
    rig = MemoryRig(engine, folder, store)
    forget = store.register_memory(rig.pool.arena)
    try:
        yield rig
    finally:
        forget()
        await store.free()
        await rig.pool.aclose()


def tokens_of(engine: Any, count: int) -> list[int]:
    """Text where the model has a tokenizer, else chance."""
    if engine.tokenizer is not None:
        return real_tokens(engine.tokenizer, count)
    chance = random.Random(count)
    return [chance.randrange(_TOKENS) for _ in range(count)]


def lengths_of(options: argparse.Namespace) -> list[int]:
    """Prefixes to restore, in tokens."""
    return [int(part) for part in options.lengths.split(",")]


def described(device: torch.device) -> str:
    """Its name; a figure means nothing without it."""
    if device.type != "cuda":
        return f"CPU, {os.cpu_count()} cores"
    found = torch.cuda.get_device_properties(device)
    return f"{torch.cuda.device_count()} x {found.name}, {found.total_memory / 2**30:.0f} GiB"


def tell(found: dict[str, Any]) -> None:
    """For people."""
    print(f"{found['device']}, torch {found['torch']}; seconds to the first token\n")
    print("| model | KV in | tokens | compute:I/O | recompute | loads | both | bound | of bound |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in found["rows"]:
        ways = " | ".join(
            f"{row[f'{w}_s']:.4f}" for w in ("recompute", "load", "adaptive", "fluid")
        )
        print(
            f"| {row['model']} | {row['medium']} | {row['tokens']} | {row['compute_io']} | {ways} "
            f"| {row['efficiency']:.3f} |"
        )
    lag = max(row["loop_lag_p99_ms"] for row in found["rows"])
    print(f"\nevent-loop lag p99 during restores: {lag:.2f} ms at most\n")
    if "stages" in found:
        tell_real(found["stages"])
    else:
        print("stages: not run, there is one device")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto", help="cuda, cuda:N or cpu (auto: needs CUDA)")
    models = f"{RANDOM}, smollm2 or folders"
    parser.add_argument("--models", default=f"{RANDOM},smollm2", help=models)
    parser.add_argument("--lengths", help="prefixes in tokens (4096,7936,16384,32768)")
    parser.add_argument("--links", default="raw,3:1,1:1,1:3", help="compute:I/O, or raw")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-bytes", type=int, default=16 << 30, help="for the engine's KV cache")
    parser.add_argument("--store", help="folder for weights and KV (default: a temporary one)")
    parser.add_argument("--most-stages", type=int, default=8)
    parser.add_argument("--cpu-stages", type=int, default=1, help="of --device cpu")
    parser.add_argument("--quick", action="store_true", help="a small random model, short prompts")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    options = parser.parse_args(arguments)
    options.lengths = options.lengths or ("1024" if options.quick else "4096,7936,16384,32768")
    if options.quick:
        options.models, options.rounds = options.models.replace(",smollm2", ""), 1
        options.kv_bytes = min(options.kv_bytes, 1 << 30)
    return options


if __name__ == "__main__":
    raise SystemExit(start(parsed(), measure, tell))
