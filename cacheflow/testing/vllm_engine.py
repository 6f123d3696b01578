"""A vLLM engine over a store that is steered, for tests and benches: prompts of token ids in.

Plain, with CacheFlow, or with another connector. Requests go to the engine itself, so that whoever
drives it sees every step's outputs, aborts what it likes and times each token. Needs vLLM.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.testing import steered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["VOCABULARY", "VllmEngine", "cacheflow_options", "greedy", "random_llama"]

VOCABULARY: Final = 2048
"""Tokens of :func:`random_llama`."""


def random_llama(folder: Path, layers: int = 4) -> Path:
    """A small Llama in float32 whose greedy tokens differ from prompt to prompt; its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=16384,
    )
    llama = LlamaForCausalLM(config).float()
    for weight in llama.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.05)
    llama.save_pretrained(folder / "llama")
    return folder / "llama"


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


def greedy(policy: str, tokens: int) -> Any:
    """vLLM's sampling parameters for so many greedy tokens, with the plugin's own policy."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"cacheflow_policy": policy}},
    )


@contextmanager
def _cores_for(ranks: int) -> Iterator[None]:
    """vLLM gives each of several workers a NUMA node; where there are fewer it has to be told which
    cores are whose."""
    name, before = "VLLM_CPU_OMP_THREADS_BIND", os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // ranks, 1)
    parts = [cores[rank * each % len(cores) :][:each] for rank in range(ranks)]
    if ranks > 1 and before is None:
        os.environ[name] = "|".join(",".join(map(str, part)) for part in parts)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


class VllmEngine:
    """One vLLM in processes of its own. ``cached``: tokens of each request's prompt that were found
    in a cache."""

    def __init__(self, llm: Any, control: Path) -> None:
        self.llm = llm
        self._engine = llm.llm_engine
        self._control = control
        self._ids = count(1)
        self.cached: dict[str, int] = {}

    @classmethod
    @contextmanager
    def start(
        cls,
        folder: Path,
        model: str,
        *,
        with_cacheflow: bool = True,
        tier: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Self]:
        """Gone when the context is left. ``folder``: for what steers the store; ``tier``: other
        settings of the one tier; ``extra``: other settings of CacheFlow; ``options``: vLLM's."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        control = folder / "control.json"
        steered.install(folder / "site")
        if with_cacheflow:
            store = {"name": "store", "backend": "steered", "options": {"control": str(control)}}
            settings = {"tiers": [{**store, **(tier or {})}], **(extra or {})}
            options |= cacheflow_options(**settings)
        with _cores_for(int(options.get("tensor_parallel_size", 1))):
            llm = LLM(
                model=model,
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
        """See :func:`cacheflow.testing.steered.steer`; without wishes the store is fast and
        sound."""
        steered.steer(self._control, **wishes)

    def submit(self, prompt: Sequence[int], policy: str = "adaptive", tokens: int = 1) -> str:
        """Add a request for so many greedy tokens; its name."""
        name = f"request-{next(self._ids)}"
        self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, greedy(policy, tokens))
        return name

    def abort(self, *names: str) -> None:
        """What these have not said yet is not wanted."""
        self._engine.abort_request(list(names))

    def step(self) -> dict[str, list[int]]:
        """One step's outputs: all tokens so far of each request that got any."""
        outputs = {}
        for output in self._engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
            self.cached[output.request_id] = output.num_cached_tokens or 0
        return outputs

    def work(
        self, seconds: float = 60.0, until: Callable[[], bool] = lambda: False
    ) -> dict[str, list[int]]:
        """Step until nothing is left to do, or ``until`` says so; tokens of each request.

        Raises:
            TimeoutError: it was not done after ``seconds``.
        """
        end = time.monotonic() + seconds
        done: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests() and not until():
            if time.monotonic() > end:
                raise TimeoutError(f"requests are not done after {seconds:g} s")
            done |= self.step()
        return done

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's values over all labels but those given."""
        return sum(
            float(metric.value)
            for metric in self.llm.get_metrics()
            if metric.name == name and labels.items() <= metric.labels.items()
        )

    def used_share(self) -> float:
        """Share of the pool's blocks in use when nothing is left to do."""
        end = time.monotonic() + 30.0
        while True:
            self.submit([1, 2, 3], "recompute")
            self.work()
            share = self.metric("vllm:kv_cache_usage_perc")
            if not share or time.monotonic() > end:
                return share
