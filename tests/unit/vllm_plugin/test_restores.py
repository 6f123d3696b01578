"""Requests of a miniature vLLM are restored from both ends, whatever happens to them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from cacheflow.types import Tile
from tests.unit.vllm_plugin.minivllm import BLOCK, LAYOUT

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.vllm_plugin.minivllm import MiniRequest, MiniVllm

TOKENS = random.Random(1).choices(range(1000), k=400)
SLOW = LAYOUT.payload_bytes() / 0.004
"""Bytes a second at which a block takes 4 ms, as long as it takes to compute at STEP."""
STEP = 0.032
TRIES = 20


def learned(mini: MiniVllm) -> MiniVllm:
    """Compute costs as they are: 4 ms a block."""
    for start in (0, 128, 256, 0, 128, 256):
        mini.desk.costs.observe(Tile(0, start, start + 8 * BLOCK), STEP)
        mini.desk.costs.observe(Tile(0, start, start + 4 * BLOCK), STEP / 2)
    return mini


def stored(mini: MiniVllm, tokens: list[int] = TOKENS) -> MiniRequest:
    """Compute and store a prompt."""
    first = mini.add("first", tokens)
    mini.run()
    mini.settle()
    return first


def test_what_was_computed_once_is_loaded(engine: Callable[..., MiniVllm]) -> None:
    """The second request with the same prompt enters with all whole blocks in place."""
    mini = engine()
    assert stored(mini).computed == 400
    second = mini.add("second", TOKENS, "load")
    mini.run()
    assert second.computed == 16  # the last whole block: some token has to be computed


def test_other_tokens_are_computed(engine: Callable[..., MiniVllm]) -> None:
    """Only the common prefix is loaded; a request that asks for it is computed whole."""
    mini = engine()
    stored(mini)
    fork = mini.add("fork", [*TOKENS[:200], *reversed(TOKENS[:200])], "load")
    plain = mini.add("plain", TOKENS, "recompute")
    mini.run()
    assert fork.computed == 400 - 192
    assert plain.computed == 400


@pytest.mark.parametrize("depth", [1, 2])
def test_both_ends_meet(engine: Callable[..., MiniVllm], depth: int) -> None:
    """Where loading takes as long as computing, each does a part, and they meet. On a machine that
    is busy with other things one of them may be too slow for that: then it is tried again."""
    mini = learned(engine(bandwidth=SLOW, step_seconds=STEP, depth=depth))
    stored(mini)
    warm = mini.add("warm", TOKENS, "load")
    mini.run()
    assert warm.computed == 16
    for number in range(TRIES):
        both = mini.add(f"both-{number}", TOKENS)
        mini.run()
        if 64 <= both.computed <= 320:
            return
    pytest.fail("each time one of the two ends did nearly everything")


@pytest.mark.parametrize("depth", [1, 2])
def test_many_at_once_with_aborts_and_preemptions(
    engine: Callable[..., MiniVllm], depth: int
) -> None:
    """Whatever is aborted or preempted while it is restored, every block ends with the right
    content (the miniature checks each position) and goes back to the pool; also where a step is
    scheduled before the one before it has been carried out."""
    mini = learned(engine(bandwidth=SLOW * 2, step_seconds=0.002, pool_blocks=120, depth=depth))
    stored(mini)
    chance = random.Random(7)
    for number in range(40):
        length = chance.randrange(20, 400)
        mini.add(f"r{number}", TOKENS[:length], chance.choice(["adaptive", "adaptive", "load"]))
        for _ in range(chance.randrange(4)):
            mini.step()
        if mini.running and chance.random() < 0.3:
            mini.preempt(chance.choice(mini.running))
        if (there := [*mini.running, *mini.waiting]) and chance.random() < 0.2:
            mini.finish(chance.choice(there))
    mini.run()
    assert len(mini.done) == 41


def test_a_prefix_is_loaded_while_its_request_waits_for_a_place(
    engine: Callable[..., MiniVllm],
) -> None:
    """Loads begin when a request arrives, not when vLLM has room for it: once it has, the prefix is
    there, and the request's first step is its last."""
    mini = learned(engine())
    stored(mini)
    request = mini.add("later", TOKENS, "load")
    mini.waiting.remove(request)  # no place is free: nobody asks
    restore = mini.desk._restores.of("later")
    assert restore is not None
    while not (restore.progress and restore.progress.low == 0):
        mini.step()
    mini.waiting.append(request)
    assert mini.step() == {"later": 16}
    mini.run()
    assert request.computed == 16


def test_requests_that_wait_begin_no_more_than_staging_memory_holds(
    engine: Callable[..., MiniVllm],
) -> None:
    """Of many that arrive at once the first begin; the others do when they are asked for."""
    mini = learned(engine())
    stored(mini)
    room = mini.desk.limits.staged_blocks // (len(TOKENS) // BLOCK)
    requests = [mini.add(f"r{number}", TOKENS, "load") for number in range(room + 5)]
    begun = [mini.desk._restores.of(each.request_id) is not None for each in requests]
    assert begun == [True] * room + [False] * 5
    mini.run()
    assert sum(each.computed for each in requests) < 100 * len(requests)


def test_a_request_that_is_aborted_before_it_is_asked_for_leaves_nothing(
    engine: Callable[..., MiniVllm],
) -> None:
    """Its loads end, whatever they have brought; the fixture sees that nothing is pinned."""
    mini = learned(engine(bandwidth=SLOW))
    stored(mini)
    request = mini.add("gone", TOKENS)
    mini.waiting.remove(request)
    for _ in range(3):
        mini.step()
    mini.waiting.append(request)
    mini.finish(request)
    mini.run()
    assert mini.desk._restores.of("gone") is None
