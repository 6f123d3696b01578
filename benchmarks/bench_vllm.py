"""Seconds to the first token in vLLM: recompute, load everything, CacheFlow, at many store speeds.

One engine (the connector and scheduler of the plugin, SmolLM2's real weights) answers one long
prompt again and again; a request says which of the three it wants, so the runs of a pair come right
after one another. The store takes its loads one after the other, so many milliseconds a block.

    make bench-vllm                  # everything, about ten minutes
    make bench-vllm ARGS=--quick     # a short prompt, three speeds, three pairs
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

POLICIES: Final = ("recompute", "load", "adaptive")
DELAYS: Final = (0.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
"""Milliseconds a block."""
BLOCK: Final = 128
SUFFIX: Final = 64
FEW: Final = 3
"""Runs of what takes several times as long as the better way: it is not what is compared with."""


class Bench:
    """One engine and one prompt."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from cacheflow.testing import steered

        self.options = options
        self._control = folder / "control.json"
        self._steer = steered.steer
        steered.install(folder / "site")
        self.blocks = options.tokens // BLOCK
        chance = random.Random(1)
        self._prompt = chance.choices(range(1000, 40000), k=self.blocks * BLOCK + SUFFIX)
        self._llm = self._start()

    def _start(self) -> Any:
        from vllm import LLM

        control = {"control": str(self._control)}
        tier = {"name": "store", "backend": "steered", "options": control}
        return LLM(
            model=self.options.model or _smollm2(),
            dtype=self.options.dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=len(self._prompt) + 64,
            max_num_batched_tokens=self.options.chunk or len(self._prompt) + 64,
            max_num_seqs=4,
            enable_prefix_caching=False,
            scheduler_cls="cacheflow.plugins.vllm.scheduler.CacheFlowScheduler",
            kv_transfer_config={
                "kv_connector": "CacheFlowConnector",
                "kv_connector_module_path": "cacheflow.plugins.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"tiers": [tier]},
            },
        )

    def first_token(self, policy: str) -> float:
        """Seconds from asking to the first token."""
        from vllm import SamplingParams

        hints = {"kv_transfer_params": {"cacheflow_policy": policy}}
        sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=hints)
        prompt = {"prompt_token_ids": self._prompt}
        start = time.perf_counter()
        (output,) = self._llm.generate([prompt], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        self.cached = output.num_cached_tokens
        return seconds

    def fill(self) -> float:
        """Store the prompt; what recompute takes, the median of a few runs."""
        self._steer(self._control)
        self.first_token("recompute")
        while self.first_token("load") and self.cached < self.blocks * BLOCK:
            time.sleep(0.2)
        return statistics.median(self.first_token("recompute") for _ in range(3))

    def at(self, delay: float) -> dict[str, Any]:
        """All pairs at ``delay`` milliseconds a block."""
        self._steer(self._control, seconds=delay / 1000)
        self.first_token("adaptive")  # learns the new speed
        times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for pair in range(self.options.pairs):
            for policy in POLICIES:
                if policy == "load" and pair >= FEW and _hopeless(times):
                    continue
                times[policy].append(self.first_token(policy))
        return _summary(delay, times)

    def close(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()


def _hopeless(times: dict[str, list[float]]) -> bool:
    return min(times["load"]) > 2 * max(times["recompute"])


def _summary(delay: float, times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {policy: statistics.median(values) for policy, values in times.items()}
    best = min(medians["recompute"], medians["load"])
    return {
        "delay_ms": round(delay, 2),
        "pairs": len(times["adaptive"]),
        **{f"{policy}_s": round(seconds, 4) for policy, seconds in medians.items()},
        "ratio": round(medians["adaptive"] / best, 3),
        "within": medians["adaptive"] <= best + max(0.05 * best, 0.015),
    }


def _smollm2() -> str:
    from cacheflow.plugins.transformers import prepare_smollm2

    return str(prepare_smollm2())


def _show(row: dict[str, Any], out: Any = sys.stdout) -> None:
    mark = "" if row["within"] else "  <- worse than the better one"
    cells = "".join(f"{row[f'{policy}_s']:12.3f}" for policy in POLICIES)
    print(f"{row['delay_ms']:9.1f}{cells}{row['ratio']:10.2f}{mark}", file=out, flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="figures only, as JSON")
    parser.add_argument("--model", help="folder of a Llama-shaped model (default: SmolLM2)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096, help="of the stored prefix")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--chunk", type=int, help="tokens a step (default: the whole prompt)")
    parser.add_argument("--delays", type=float, nargs="*", default=list(DELAYS), metavar="MS")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.pairs, options.delays = 2048, 3, [0.0, 400.0]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        try:
            _run(bench, options)
        finally:
            bench.close()


def _run(bench: Bench, options: argparse.Namespace) -> None:
    alone = bench.fill()
    balance = 1000 * alone / bench.blocks
    progress = sys.stderr if options.json else sys.stdout
    print(f"{options.tokens} stored tokens, {bench.blocks} blocks; at balance {balance:.1f} ms")
    print(
        f"{'ms/block':>9}{'recompute':>12}{'load':>12}{'cacheflow':>12}{'ratio':>10}", file=progress
    )
    rows = []
    for delay in sorted([*options.delays, balance]):
        rows.append(bench.at(delay))
        _show(rows[-1], progress)
    if options.json:
        print(json.dumps({"balance_ms": round(balance, 2), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
