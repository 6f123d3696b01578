"""A vLLM engine as the benches use it: prompts of token ids, and a store they steer.

Plain, with CacheFlow, or with another connector. Requests go to the engine itself, so that a bench
sees every step's outputs, aborts what it likes and times each token.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.testing import steered

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["BLOCK", "Engine", "arguments", "cacheflow_options", "smollm2"]

BLOCK: Final = 128
"""Tokens of vLLM's blocks on a CPU."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What all benches of vLLM take."""
    parser.add_argument("--quick", action="store_true", help="small, to see that it works")
    parser.add_argument("--json", action="store_true", help="figures only, as JSON")
    parser.add_argument("--model", help="folder of a Llama-shaped model (default: SmolLM2)")


def cacheflow_options(tiers: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """vLLM's options that switch CacheFlow on; ``extra``: its settings besides tiers."""
    return {
        "scheduler_cls": "cacheflow.plugins.vllm.scheduler.CacheFlowScheduler",
        "kv_transfer_config": {
            "kv_connector": "CacheFlowConnector",
            "kv_connector_module_path": "cacheflow.plugins.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"tiers": list(tiers), **extra},
        },
    }


class Engine:
    """One vLLM in processes of its own. ``cached``: tokens of a request's prompt that were found in
    a cache; ``last_cached``: those of the last :meth:`first_token`."""

    def __init__(self, llm: Any, control: Path) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._control = control
        self._ids = count(1)
        self.cached: dict[str, int] = {}
        self.last_cached = 0

    @classmethod
    @contextmanager
    def start(
        cls, folder: Path, model: str | None, *, with_cacheflow: bool = True, **options: Any
    ) -> Iterator[Self]:
        """``options``: vLLM's, and ``tier``: other settings of the one tier, which is a store that
        is steered; ``extra``: other settings of CacheFlow."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        control = folder / "control.json"
        steered.install(folder / "site")
        tier = {"name": "store", "backend": "steered", "options": {"control": str(control)}}
        tier |= options.pop("tier", {})
        if with_cacheflow:
            options |= cacheflow_options(**{"tiers": [tier], **options.pop("extra", {})})
        llm = LLM(
            model=model or smollm2(),
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            **{"enable_prefix_caching": False, **options},
        )
        try:
            yield cls(llm, control)
        finally:
            llm.llm_engine.engine_core.shutdown()

    def steer(self, **wishes: float | str) -> None:
        """See :func:`cacheflow.testing.steered.steer`."""
        steered.steer(self._control, **wishes)

    def submit(self, prompt: Sequence[int], policy: str = "adaptive", tokens: int = 1) -> str:
        """Add a request for so many greedy tokens."""
        from vllm import SamplingParams

        name = f"request-{next(self._ids)}"
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"cacheflow_policy": policy}},
        )
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
        return name

    def abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))

    def step(self) -> dict[str, list[int]]:
        """One step's outputs: all tokens so far of each request that got any."""
        outputs = {}
        for output in self._engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
            self.cached[output.request_id] = output.num_cached_tokens or 0
        return outputs

    def work(self, seconds: float) -> dict[str, list[int]]:
        """Until nothing is left to do; tokens of each request.

        Raises:
            TimeoutError: it was not done after ``seconds``.
        """
        end = time.monotonic() + seconds
        done: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            if time.monotonic() > end:
                raise TimeoutError(f"requests are not done after {seconds:g} s")
            done |= self.step()
        return done

    def first_token(self, prompt: Sequence[int], policy: str) -> float:
        """Seconds from asking to the first token, of one request alone."""
        start = time.perf_counter()
        name = self.submit(prompt, policy)
        self.work(600.0)
        self.last_cached = self.cached[name]
        return time.perf_counter() - start

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's values over all labels but those given."""
        return sum(
            float(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name == name and labels.items() <= metric.labels.items()
        )

    def used_share(self) -> float:
        """Share of the pool's blocks in use when nothing is left to do."""
        end = time.monotonic() + 30.0
        while True:
            self.submit([1, 2, 3], "recompute")
            self.work(60.0)
            share = self.metric("vllm:kv_cache_usage_perc")
            if not share or time.monotonic() > end:
                return share


def smollm2() -> str:
    """Folder of the model, made on first use."""
    from cacheflow.plugins.transformers import prepare_smollm2

    return str(prepare_smollm2())
