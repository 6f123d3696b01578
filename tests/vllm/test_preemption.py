"""Preempted requests, restored or not, say what plain vLLM says, and leave nothing behind.

vLLM keeps blocks free for the whole of a prompt before it admits it, and for whatever is loaded:
then only tokens that are made preempt. Told not to, it preempts prompts that it computes as well.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import pytest

from tests.vllm.prompts import EDGES, FORKS, LONG, OTHER

if TYPE_CHECKING:
    from tests.vllm.serving import Serving

Expected = dict[tuple[int, ...], list[int]]

ENGINE: Final = {
    "num_gpu_blocks_override": 33,
    "scheduler_reserve_full_isl": False,
    "max_num_batched_tokens": 512,
}
BATCH: Final = [EDGES[-1], EDGES[-1], LONG, OTHER, *sorted(FORKS, key=len)[-2:], LONG]
"""The first two fill the pool, and each needs another block for its second token."""


def preemptions(serving: Serving) -> float:
    return serving.metric("vllm:num_preemptions")


@pytest.mark.parametrize("policy", ["recompute", "load", "adaptive"])
@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_preempted_requests(
    serving: Serving, expected: Expected, policy: str, seconds: float
) -> None:
    """Whether they are computed, loaded or both, from a quick store and from a slow one."""
    serving.steer(seconds=seconds)
    before = preemptions(serving)

    def asked() -> None:
        assert serving.generate(BATCH, policy) == [expected[tuple(each)] for each in BATCH]

    asked()
    # Over a slow store one may have ended before the other has loaded what fills the pool.
    assert seconds or serving.comes(lambda: preemptions(serving) > before, asked)


def test_preempted_beside_aborts_and_failing_loads(serving: Serving, expected: Expected) -> None:
    """Requests come and go in the middle of restores that fail or do not."""
    chance, before = random.Random(23), preemptions(serving)
    for batch in range(5):
        serving.steer(
            seconds=chance.choice([0.0, 0.002, 0.02]),
            fail_after=chance.choice([-1, 0, 9]),
            fault=chance.choice(["error", "corrupt"]),
            batch=batch,
        )
        names = {serving.submit(prompt): prompt for prompt in chance.sample(BATCH, 4)}
        doomed = [serving.submit(chance.choice(BATCH)) for _ in range(2)]
        done: dict[str, list[int]] = {}
        for name in doomed:
            steps = chance.randrange(1, 9)
            done |= serving.work(until=iter([False] * steps + [True]).__next__)
            serving.abort(name)
        done |= serving.work()
        assert {name: done[name] for name in names} == {
            name: expected[tuple(prompt)] for name, prompt in names.items()
        }
    assert preemptions(serving) > before
