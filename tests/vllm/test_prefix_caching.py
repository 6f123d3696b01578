"""With vLLM's own prefix cache on: local hits come first, the store gives the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.vllm.prompts import BASE, BLOCK, EDGES, FORKS, LONG, TAILED

if TYPE_CHECKING:
    from tests.vllm.serving import Serving

ENGINE = {"enable_prefix_caching": True}
Expected = dict[tuple[int, ...], list[int]]


def test_requests_with_one_prefix_restore_it_once(serving: Serving, expected: Expected) -> None:
    """Several requests that arrive together with a stored prefix: one brings it, all have it."""
    assert serving.generate([LONG]) == [expected[tuple(LONG)]]
    assert serving.stored(LONG)
    for seconds in (0.0, 0.01):
        assert serving.llm.llm_engine.reset_prefix_cache()
        serving.steer(seconds=seconds)
        prompts = [LONG, LONG, EDGES[-1], LONG]
        assert serving.generate(prompts) == [expected[tuple(p)] for p in prompts]
        whole = len(LONG) // BLOCK * BLOCK
        if seconds:  # the others may go on from what the first has, before it has all
            assert BLOCK <= serving.found[1] <= whole
        else:
            assert serving.found[1] == whole


def test_store_goes_on_where_local_hits_end(serving: Serving, expected: Expected) -> None:
    """A prefix that is partly in the local cache is loaded from there on."""
    assert serving.llm.llm_engine.reset_prefix_cache()
    serving.generate([BASE[:700]], "recompute")
    for policy in ("load", "adaptive"):
        assert serving.generate([EDGES[-1]], policy) == [expected[tuple(EDGES[-1])]]
    assert serving.generate(FORKS[:8]) == [expected[tuple(p)] for p in FORKS[:8]]


def test_nobody_finds_what_a_failed_load_left(serving: Serving, expected: Expected) -> None:
    """A pass has begun over blocks that do not come: requests that share them compute them too."""
    prompts = [TAILED, LONG, EDGES[-1], TAILED]
    for after in range(12, 24):
        assert serving.llm.llm_engine.reset_prefix_cache()
        serving.steer(seconds=0.01, fail_after=after, fail_count=1, fault="error")
        assert serving.generate(prompts) == [expected[tuple(prompt)] for prompt in prompts]


def test_reset_while_restoring(serving: Serving, expected: Expected) -> None:
    """Resetting the local cache in the middle preempts what runs; the tokens stay right."""
    serving.steer(seconds=0.02)
    assert serving.llm.llm_engine.reset_prefix_cache()
    name = serving.submit(LONG)
    done = serving.work(until=iter([False, True]).__next__)
    serving.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    done |= serving.work()
    assert done[name] == expected[tuple(LONG)]
