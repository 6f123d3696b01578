"""A vLLM engine as the tests use it: token ids in, greedy token ids out, and a steered store."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Self

from vllm import LLM, SamplingParams

from cacheflow.testing import steered
from tests.vllm.prompts import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

NEW_TOKENS: Final = 6
BLOCK_BYTES: Final = BLOCK * 4 * 2 * 2 * 64 * 4
"""KV of a block of the tests' model: tokens, layers, K and V, heads, dimensions, float32."""
POOL_BLOCKS: Final = 90
"""Fewer than eight requests of 2k tokens need, so that some are preempted."""


class Serving:
    """One engine. ``control``: the file that steers its store."""

    def __init__(self, llm: LLM, control: Path) -> None:
        self.llm = llm
        self._control = control
        self.done: dict[str, list[int]] = {}
        self.cached: list[int] = []
        """Tokens that the prompts of the last :meth:`generate` found in a cache."""
        self._ids = count(1)

    @classmethod
    @contextmanager
    def start(
        cls, model: Path, folder: Path, *, plain: bool = False, **options: Any
    ) -> Iterator[Self]:
        """Start vLLM, with CacheFlow or ``plain``; gone when the context is left."""
        control = folder / "control.json"
        steered.install(folder / "site")
        tier = {"name": "store", "backend": "steered", "options": {"control": str(control)}}
        # A busy machine takes its time to answer: no test here is about late lookups.
        extra = {"lookup_patience": 5.0, **options.pop("extra", {})}
        if not plain:
            options |= {
                "scheduler_cls": "cacheflow.plugins.vllm.scheduler.CacheFlowScheduler",
                "kv_transfer_config": {
                    "kv_connector": "CacheFlowConnector",
                    "kv_connector_module_path": "cacheflow.plugins.vllm.connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"tiers": [tier], **extra},
                },
            }
        llm = LLM(
            model=str(model),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=4096,
            num_gpu_blocks_override=POOL_BLOCKS,
            disable_log_stats=False,
            **{"enable_prefix_caching": False, "max_num_seqs": 8, **options},
        )
        try:
            yield cls(llm, control)
        finally:
            llm.llm_engine.engine_core.shutdown()

    def steer(self, **wishes: float | str) -> None:
        """See ``steered.steer``; without wishes the store is fast and sound."""
        steered.steer(self._control, **wishes)

    def generate(
        self, prompts: Sequence[list[int]], policy: str = "adaptive", **sampling: Any
    ) -> list[list[int]]:
        """Greedy tokens after each prompt, all asked for at once."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            params(policy, **sampling),
            use_tqdm=False,
        )
        self.cached = [output.num_cached_tokens for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def submit(self, prompt: list[int], policy: str = "adaptive", **sampling: Any) -> str:
        """Add a request without waiting for it; see :meth:`work`."""
        name = f"request-{next(self._ids)}"
        self.llm.llm_engine.add_request(
            name, {"prompt_token_ids": prompt}, params(policy, **sampling)
        )
        return name

    def work(self, until: Callable[[], bool], seconds: float = 60.0) -> dict[str, list[int]]:
        """Take outputs until ``until`` says so, or all requests are finished; tokens of all that
        have finished since the engine started, by request."""
        engine = self.llm.llm_engine
        end = time.monotonic() + seconds
        while engine.has_unfinished_requests() and not until():
            assert time.monotonic() < end, "the engine hangs"
            for output in engine.step():
                if output.finished:
                    self.done[output.request_id] = list(output.outputs[0].token_ids)
        return self.done

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def used_share(self) -> float:
        """Share of the pool's blocks in use once a last small request has ended."""
        end = time.monotonic() + 20.0
        while True:
            self.generate([[1, 2, 3]], "recompute", max_tokens=1)
            share = self._gauge("vllm:kv_cache_usage_perc")
            if share == 0.0 or time.monotonic() > end:
                return share

    def stored(self, prompt: list[int]) -> bool:
        """Whether the store takes all of ``prompt``, waited for: it is stored behind requests, and
        what a busy tier did not take is stored when it is computed again."""
        nbytes = len(prompt) // BLOCK * BLOCK_BYTES
        again = partial(self.generate, [prompt], "recompute", max_tokens=1)
        return self.comes(lambda: self.stored_bytes() >= nbytes, again)

    def comes(self, true: Callable[[], bool], work: Callable[[], object] | None = None) -> bool:
        """Whether ``true`` becomes so within a minute; ``work`` is done between the tries."""
        end = time.monotonic() + 60.0
        while not true():
            if time.monotonic() > end:
                return False
            if work is not None:
                work()
        return True

    def stored_bytes(self) -> float:
        """What the store has taken since the engine started, headers included."""
        name = "vllm:cacheflow_transfer_bytes"
        metrics = [m for m in self.llm.get_metrics() if m.name == name]
        return sum(float(m.value) for m in metrics if m.labels["direction"] == "store")

    def _gauge(self, name: str) -> float:
        (metric,) = (m for m in self.llm.get_metrics() if m.name == name)
        return float(metric.value)


def params(policy: str, **sampling: Any) -> SamplingParams:
    """Greedy, and the plugin's own policy for this request."""
    wanted = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, **sampling}
    hints = {"kv_transfer_params": {"cacheflow_policy": policy}}
    return SamplingParams(detokenize=False, extra_args=hints, **wanted)
