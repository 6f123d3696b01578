"""A vLLM engine as the tests use it: small, float32, a pool that is too small for its batches."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from cacheflow.testing.vllm_engine import VllmEngine, greedy
from tests.vllm.prompts import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["NEW_TOKENS", "Serving", "greedy"]

NEW_TOKENS: Final = 6
BLOCK_BYTES: Final = BLOCK * 4 * 2 * 2 * 64 * 4
"""KV of a block of the tests' model: tokens, layers, K and V, heads, dimensions, float32."""
POOL_BLOCKS: Final = 90
"""Fewer than eight requests of 2k tokens need, so that some are preempted."""


class Serving(VllmEngine):
    """``found``: tokens that the prompts of the last :meth:`generate` found in a cache."""

    found: Sequence[int] = ()

    @classmethod
    @contextmanager
    def serve(
        cls, model: Path, folder: Path, *, plain: bool = False, **options: Any
    ) -> Iterator[Self]:
        """Start vLLM, with CacheFlow or ``plain``; gone when the context is left."""
        # A busy machine takes its time to answer: no test here is about late lookups.
        extra = {"lookup_patience": 5.0, **options.pop("extra", {})}
        usual = {
            "dtype": "float32",
            "max_model_len": 4096,
            "num_gpu_blocks_override": POOL_BLOCKS,
            "max_num_seqs": 8,
        }
        with cls.start(
            folder, str(model), with_cacheflow=not plain, extra=extra, **{**usual, **options}
        ) as serving:
            yield serving

    def generate(
        self, prompts: Sequence[list[int]], policy: str = "adaptive", tokens: int = NEW_TOKENS
    ) -> list[list[int]]:
        """Greedy tokens after each prompt, all asked for at once."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, greedy(policy, tokens), use_tqdm=False)
        self.found = [output.num_cached_tokens for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def submit(
        self, prompt: Sequence[int], policy: str = "adaptive", tokens: int = NEW_TOKENS
    ) -> str:
        return super().submit(prompt, policy, tokens)

    def stored(self, prompt: list[int]) -> bool:
        """Whether the store takes all of ``prompt``, waited for: it is stored behind requests, and
        what a busy tier did not take is stored when it is computed again."""
        nbytes = len(prompt) // BLOCK * BLOCK_BYTES
        again = partial(self.generate, [prompt], "recompute", 1)
        return self.comes(lambda: self.stored_bytes() >= nbytes, again)

    def comes(self, true: Callable[[], bool], work: Callable[[], object] | None = None) -> bool:
        """Whether ``true`` becomes so within five minutes; ``work`` is done between the tries. A
        tier that failed in vain is set aside for half a minute in the end."""
        end = time.monotonic() + 300.0
        while not true():
            if time.monotonic() > end:
                return False
            if work is not None:
                work()
        return True

    def stored_bytes(self) -> float:
        """What the store has taken since the engine started, headers included."""
        return self.metric("vllm:cacheflow_transfer_bytes", direction="store")
