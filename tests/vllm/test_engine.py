"""vLLM with CacheFlow says, token for token, what plain vLLM says, whatever the store does."""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tests.vllm.prompts import BASE, BLOCK, EDGES, FORKS, LONG, LONG_TAILED

if TYPE_CHECKING:
    from tests.vllm.serving import Serving

Expected = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module", autouse=True)
def _stored(serving: Serving, expected: Expected) -> None:
    """The long prompt is in the store."""
    assert serving.generate([LONG]) == [expected[tuple(LONG)]]
    assert serving.stored(LONG)


@pytest.mark.parametrize("policy", ["recompute", "load", "adaptive"])
@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.02, 0.1])
def test_same_tokens_at_any_speed(
    serving: Serving, expected: Expected, policy: str, seconds: float
) -> None:
    """However slow the store is and whichever end makes the KV, the tokens are the same."""
    serving.steer(seconds=seconds)
    assert serving.generate([LONG], policy) == [expected[tuple(LONG)]]


def test_whole_blocks_count_as_cached(serving: Serving) -> None:
    """A fast store gives every whole block, and the request's usage says so."""
    serving.generate([LONG], "load")
    assert serving.found == [len(LONG) // BLOCK * BLOCK]


def test_edges(serving: Serving, expected: Expected) -> None:
    """Prompts of a token, of whole blocks and around them, wholly stored or not."""
    for policy in ("adaptive", "load"):  # nothing is computed instead on a busy machine
        for prompt in EDGES:
            assert serving.generate([prompt], policy) == [expected[tuple(prompt)]]
    assert serving.found == [(len(EDGES[-1]) - 1) // BLOCK * BLOCK]


@pytest.mark.parametrize("fault", ["error", "corrupt", "hang"])
@pytest.mark.parametrize("after", [0, 5])
def test_failed_loads_are_computed(
    serving: Serving, expected: Expected, fault: str, after: int
) -> None:
    """A load that fails, lies or hangs, on its first block or in the middle, costs time only."""
    for policy in ("adaptive", "load") if fault != "hang" else ("adaptive",):
        serving.steer(seconds=0.004, fail_after=after, fault=fault, test=f"{fault}{after}{policy}")
        assert serving.generate([LONG], policy) == [expected[tuple(LONG)]]


def overlaps(serving: Serving, result: str) -> float:
    return serving.metric("vllm:cacheflow_overlaps", result=result)


def store_again(serving: Serving, number: int) -> None:
    """A block that was corrupt is gone; ``number``: another one each time."""
    serving.steer(again=number)

    def whole() -> bool:
        serving.generate([LONG], "load", 1)
        return serving.found == [len(LONG) // BLOCK * BLOCK]

    assert serving.comes(whole, lambda: serving.generate([LONG], "recompute", 1))


@pytest.mark.parametrize("policy", ["load", "adaptive"])
def test_goes_on_under_its_last_loads(serving: Serving, expected: Expected, policy: str) -> None:
    """What is behind the prefix is computed while the last layers come, and comes out the same."""
    store_again(serving, -1)
    serving.steer(seconds=0.01, stores="full")  # or the tail would be stored as well
    before = overlaps(serving, "complete")

    def asked() -> None:
        assert serving.generate([LONG_TAILED], policy) == [expected[tuple(LONG_TAILED)]]
        assert serving.found[0] <= len(BASE)

    assert serving.comes(lambda: overlaps(serving, "complete") > before, asked)


@pytest.mark.parametrize("fault", ["error", "corrupt"])
def test_a_load_that_fails_under_a_pass_is_computed(
    serving: Serving, expected: Expected, fault: str
) -> None:
    """vLLM drops what the pass said and takes the request back; others are not disturbed. (A tier
    that hangs is set aside for long: that is tried on the miniature.)"""
    before = overlaps(serving, "failed")
    numbers = count()

    def asked() -> None:
        number = next(numbers)
        store_again(serving, number)
        serving.steer(
            seconds=0.01,
            stores="full",
            parts=1,  # which come last, and go on under the pass
            fail_after=(4 + 7 * number) % 28,
            fail_count=1,
            fault=fault,
            number=number,
        )
        prompts = [LONG_TAILED, EDGES[-1]]
        answers = serving.generate(prompts, "load")
        assert answers == [expected[tuple(prompt)] for prompt in prompts]

    assert serving.comes(lambda: overlaps(serving, "failed") > before, asked)


def test_aborted_while_it_is_restored(serving: Serving, expected: Expected) -> None:
    """An abort in any state of a restore frees everything; the others go on."""
    serving.steer(seconds=0.02)
    for policy in ("load", "adaptive"):
        for steps in (1, 3, 10):
            dropped, kept = serving.submit(LONG, policy), serving.submit(EDGES[-1], policy)
            done = serving.work(until=iter([False] * steps + [True]).__next__)
            serving.abort(dropped)
            done |= serving.work()
            assert done[kept] == expected[tuple(EDGES[-1])]


def test_tenants_do_not_share(serving: Serving, expected: Expected) -> None:
    """Another cache_salt finds nothing, and later its own."""
    from tests.vllm.serving import NEW_TOKENS, greedy

    prompt = {"prompt_token_ids": EDGES[-1], "cache_salt": "other"}

    def found() -> int:
        (output,) = serving.llm.generate([prompt], greedy("load", NEW_TOKENS), use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected[tuple(EDGES[-1])]
        return int(output.num_cached_tokens)

    assert found() == 0
    whole = len(EDGES[-1]) // BLOCK * BLOCK
    # Stored behind the request, and what a busy tier did not take is stored when it is recomputed.
    assert serving.comes(lambda: found() == whole)


def test_random_batches(serving: Serving, expected: Expected) -> None:
    """Forty prompts with shared prefixes in batches of up to eight, on a pool too small for them,
    with aborts, failing loads and every speed: all tokens as in plain vLLM."""
    chance, left = random.Random(11), list(FORKS)
    batch = 0
    while left:
        batch += 1
        serving.steer(
            seconds=chance.choice([0.0, 0.002, 0.01, 0.05]),
            fail_after=chance.choice([-1, -1, 0, 7]),
            fault=chance.choice(["error", "corrupt"]),
            batch=batch,
        )
        prompts, left = left[:8], left[8:]
        names = {serving.submit(prompt): prompt for prompt in prompts}
        serving.submit(LONG)
        doomed = serving.submit(LONG)
        done = serving.work(until=iter([False] * chance.randrange(1, 6) + [True]).__next__)
        serving.abort(doomed)
        done |= serving.work()
        for name, prompt in names.items():
            assert done[name] == expected[tuple(prompt)]


def test_reset_forgets_what_is_stored(serving: Serving, expected: Expected) -> None:
    """After the weights may have changed nothing stored before is used again."""
    assert serving.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    assert serving.generate([LONG], "load") == [expected[tuple(LONG)]]
    assert serving.found == [0]
