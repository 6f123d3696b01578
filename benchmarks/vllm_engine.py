"""vLLM as the benches start it, and timed first tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from cacheflow.testing.vllm_engine import VOCABULARY, VllmEngine, cacheflow_options, random_llama

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = [
    "BLOCK",
    "VOCABULARY",
    "Engine",
    "arguments",
    "cacheflow_options",
    "quick_llama",
    "smollm2",
]

BLOCK: Final = 128
"""Tokens of vLLM's blocks on a CPU."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What all benches of vLLM take."""
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument("--json", action="store_true", help="figures only, as JSON")
    parser.add_argument(
        "--model",
        help="folder of a Llama-shaped model (default: SmolLM2, or where only speed counts a "
        "random one that computes 4k tokens in seconds)",
    )


class Engine(VllmEngine):
    """``last_cached``: tokens of the prompt of the last :meth:`first_token` that were found in a
    cache."""

    last_cached = 0

    def first_token(self, prompt: Sequence[int], policy: str) -> float:
        """Seconds from asking to the first token, of one request alone."""
        start = time.perf_counter()
        name = self.submit(prompt, policy)
        self.work(600.0)
        self.last_cached = self.cached[name]
        return time.perf_counter() - start

    def have_stored(self, prompts: Iterator[Sequence[int]], tokens: int) -> None:
        """Ask until the first ``tokens`` tokens of the prompts are found.

        Raises:
            SystemExit: they are not after five minutes.
        """
        end = time.monotonic() + 300.0
        while self.first_token(next(prompts), "load") and self.last_cached < tokens:
            if time.monotonic() > end:
                raise SystemExit(f"{tokens} tokens are not stored after five minutes")


def quick_llama(folder: Path) -> str:
    """Folder of a random model of eight layers, small enough that a CPU is quick."""
    return str(random_llama(folder, layers=8))


def smollm2() -> str:
    """Folder of the model, made on first use."""
    from cacheflow.plugins.transformers import prepare_smollm2

    return str(prepare_smollm2())
