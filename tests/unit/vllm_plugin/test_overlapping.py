"""Requests whose last tokens are computed while the last layers of their prefix are loaded."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from cacheflow.plugins.vllm import planner
from cacheflow.plugins.vllm.admission import Admission
from cacheflow.plugins.vllm.records import Found, Progress, Report
from cacheflow.testing import steered
from tests.unit.vllm_plugin.minivllm import BLOCK, LAYOUT
from tests.unit.vllm_plugin.test_faults import TOKENS, Steered
from tests.unit.vllm_plugin.test_restores import STEP, learned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cacheflow.plugins.vllm.records import Orders
    from cacheflow.plugins.vllm.restores import Restore
    from tests.unit.vllm_plugin.minivllm import MiniRequest, MiniVllm

PREFIX = 384
BLOCKS = PREFIX // BLOCK
BALANCED = STEP * BLOCK / 128
"""Seconds a block that takes as long as compute does for one."""
SECONDS = 0.01
"""A block."""
TRIES = 40
"""Whether a step sees a part of what is loaded is a matter of time."""


@pytest.fixture(autouse=True)
def _by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The miniature's blocks take a few milliseconds, which is too little to come by layers."""
    monkeypatch.setattr(planner, "_LEAST_BLOCK", 0.0)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steered]:
    """Passes begin as soon as the first layers are there: what comes in time depends on how busy
    the machine is."""

    def eager(_: Admission, restore: Restore, computed: int) -> bool:
        return restore.progress is not None and restore.progress.row and not computed % BLOCK

    monkeypatch.setattr(Admission, "may_overlap", eager)
    rig = Steered(tmp_path)
    rig.mini.step_seconds = STEP
    learned(rig.mini)
    yield rig
    rig.close()


def prompt(number: int) -> list[int]:
    """Its prefix is stored; what is behind it takes a pass."""
    return [*TOKENS[:PREFIX], *random.Random(number).choices(range(1000), k=120)]


def ended(mini: MiniVllm, result: str) -> float:
    return mini.desk.counts.take().get(f"vllm:cacheflow_overlaps\t{result}", 0.0)


@pytest.mark.parametrize(("policy", "seconds"), [("load", STEP), ("load", 0.0), ("adaptive", STEP)])
def test_a_pass_begins_under_the_last_loads(rig: Steered, policy: str, seconds: float) -> None:
    """It reads each layer when it is there (the miniature looks), and the prefix is restored; also
    if it is at the next layer sooner than was thought."""
    rig.mini.step_seconds = seconds
    for number in range(TRIES):
        steered.steer(rig.control, seconds=SECONDS / (1 + number % 4), number=number)
        learned(rig.mini)  # Tries that missed have taught it otherwise.
        request = rig.mini.add(f"r{number}", prompt(number), policy)
        rig.mini.run()
        assert request in rig.mini.done
        if ended(rig.mini, "complete"):
            assert rig.mini.broken == 0
            return
    pytest.fail("no pass began before its loads had ended")


@pytest.mark.parametrize("fault", ["error", "corrupt", "hang"])
def test_a_load_that_fails_under_a_pass_is_computed(rig: Steered, fault: str) -> None:
    """The request is taken back to where the loads are, computes the rest, and ends right."""
    for number in range(TRIES):
        steered.steer(
            rig.control,
            seconds=SECONDS,
            fail_after=BLOCKS + number % 3,  # when the first layers of all blocks are there
            fail_count=1,
            fault=fault,
            number=number,
        )
        request = rig.mini.add(f"r{number}", prompt(number), "load" if number % 2 else "adaptive")
        rig.mini.run()
        assert request in rig.mini.done
        if rig.mini.broken:
            assert ended(rig.mini, "failed")
            return
    pytest.fail("no load failed under a pass")


def test_a_runner_that_does_not_ask_for_layers_gets_whole_prefixes(rig: Steered) -> None:
    """Nothing is begun early after its first pass, and before it nothing is known."""
    rig.mini.by_layer = False
    rig.mini.depot.overlaps.take_news()
    steered.steer(rig.control, seconds=SECONDS)
    warm = rig.mini.add("warm", prompt(0), "recompute")
    rig.mini.run()
    for number in range(5):
        rig.mini.add(f"r{number}", prompt(number), "load")
        rig.mini.run()
    assert warm in rig.mini.done
    assert rig.mini.broken == 0
    assert not [key for key in rig.mini.desk.counts.take() if "overlaps" in key]


@pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways
def test_many_at_once(rig: Steered) -> None:
    """Whatever fails, is aborted or preempted: nobody keeps what was read too early."""
    rig.mini.step_seconds = 0.004
    chance = random.Random(11)
    for number in range(40):
        if number % 4 == 0:
            fault = chance.choice(["error", "corrupt", "none"])
            after = chance.randrange(10, 60) if fault != "none" else -1
            steered.steer(
                rig.control,
                seconds=0.002,
                fail_after=after,
                fail_count=1,
                fault=fault,
                number=number,
            )
        rig.mini.add(f"r{number}", prompt(number), chance.choice(["adaptive", "load"]))
        for _ in range(chance.randrange(6)):
            rig.mini.step()
        if rig.mini.running and chance.random() < 0.2:
            rig.mini.preempt(chance.choice(rig.mini.running))
        if (there := [*rig.mini.running, *rig.mini.waiting]) and chance.random() < 0.2:
            rig.mini.finish(chance.choice(there))
    rig.mini.run(60.0)
    assert len(rig.mini.done) == 41


# -- the scheduler's side, with reports as they may come ------------------------------------------


def begun(mini: MiniVllm) -> tuple[MiniRequest, int]:
    """A request whose first layers are there, let in: it, and its restore."""
    learned(mini)
    desk = mini.desk
    desk.heard({0: Report(by_layer=True)})
    request = mini.add("r", prompt(0), "load")
    assert desk.matched(request, 0) is None
    (opened,) = desk.orders({}, {}, ()).opened
    restore = opened.restore
    early = Progress(low=3, waited=0.0, block_seconds=BALANCED, part=1.0, row=False)
    desk.heard({0: Report(found={restore: Found(0, BLOCKS)}, progress={restore: early})})
    assert desk.matched(request, 0) is None
    assert desk.orders({}, {}, ()).tails[restore] == 8
    rows = Progress(low=3, waited=0.0, block_seconds=BALANCED, part=1.5, row=True)
    desk.heard({0: Report(progress={restore: rows})})
    assert desk.matched(request, 0) == PREFIX
    mini.allocate_slots(request, len(request.all_token_ids))
    desk.allocated(request, PREFIX)
    mini.waiting.remove(request)
    mini.running.append(request)
    request.num_computed_tokens = PREFIX
    orders = desk.orders({"r": 120}, {"r": request}, ())
    ids = tuple(mini.tables["r"][:BLOCKS])
    assert orders.targets[restore] == (0, ids)
    assert (orders.overlaps[restore].first, orders.overlaps[restore].ids) == (0, ids)
    assert orders.claims == {restore: 0}  # nothing of what is still to come is compute's
    request.num_computed_tokens += 120
    assert not orders.saves  # what the step computes may come to nothing
    return request, restore


def over(mini: MiniVllm, request: MiniRequest, restore: int) -> None:
    """The request goes, and the worker has heard of it."""
    if request in mini.running:
        mini.running.remove(request)
    mini.desk.finished("r")
    mini._free(request)
    told(mini, restore)


def told(mini: MiniVllm, restore: int) -> Orders:
    """The worker has carried out all orders."""
    orders = mini.desk.orders({}, {}, ())
    mini.desk.heard({0: Report(ended=[restore], copied=[order.save for order in orders.saves])})
    return orders


def test_it_goes_on_when_all_has_come(engine: Callable[..., MiniVllm]) -> None:
    """The restore is over, and what was computed stays."""
    mini = engine()
    request, restore = begun(mini)
    mini.desk.heard({0: Report(progress={restore: Progress(low=0, waited=0.0, dead=True)})})
    mini.desk.jump(lambda _: True)
    assert request.num_computed_tokens == PREFIX + 120
    assert ended(mini, "complete") == 1
    over(mini, request, restore)


def test_it_is_taken_back_when_a_load_fails(engine: Callable[..., MiniVllm]) -> None:
    """Compute takes exactly what did not come, and jumps behind the rest."""
    mini = engine()
    request, restore = begun(mini)
    dead = Progress(low=2, waited=0.0, block_seconds=BALANCED, dead=True)
    mini.desk.heard({0: Report(progress={restore: dead})})
    mini.desk.jump(lambda _: True)
    assert request.num_computed_tokens == 0
    assert mini.desk.cap(request, 0, 128) == 2 * BLOCK
    request.num_computed_tokens = 2 * BLOCK
    mini.desk.jump(lambda _: True)
    assert request.num_computed_tokens == PREFIX
    over(mini, request, restore)


@pytest.mark.parametrize("way", ["reset", "lost"])
def test_it_is_taken_back_when_nothing_more_will_come(
    engine: Callable[..., MiniVllm], way: str
) -> None:
    """A request that waits for its place in a step does not keep what was never loaded."""
    mini = engine()
    request, restore = begun(mini)
    if way == "reset":
        mini.desk.reset()
    else:
        mini.desk.heard({0: Report(lost=True)})
    assert request.num_computed_tokens == 0
    assert ended(mini, "failed") == 1
    over(mini, request, restore) if way == "reset" else mini.finish(request)


def test_an_abort_leaves_its_blocks_to_the_loads(engine: Callable[..., MiniVllm]) -> None:
    """They are free when the worker says that it writes nothing more."""
    mini = engine()
    request, restore = begun(mini)
    free = len(mini.pool.free)
    mini.running.remove(request)
    mini.desk.finished("r")
    mini._free(request)
    held = len(mini.pool.free)
    assert held - free == 1  # the last block is not whole; the others behind are to be stored
    assert told(mini, restore).closed == [restore]
    assert len(mini.pool.free) - held == len(prompt(0)) // BLOCK


def test_nobody_finds_what_an_aborted_pass_computed_over_missing_rows(
    engine: Callable[..., MiniVllm],
) -> None:
    """vLLM deals with aborts before it hears what the pass had read: the request and its table are
    gone, but its blocks lie in the prefix cache under their hashes, also those behind the prefix.
    Blocks of requests that read nothing of it stay."""
    mini = engine()
    request, restore = begun(mini)
    table = list(mini.tables["r"])
    other = mini.add("other", TOKENS[1:41], "recompute")
    mini.allocate_slots(other, 40)
    orders = mini.desk.orders({"r": 1, "other": 40}, {"r": request, "other": other}, ())
    mini.desk.heard({0: Report(copied=[order.save for order in orders.saves])})
    assert mini.desk.unread("r") == 0
    mini.desk.finished("r")
    assert mini.desk.stale(set(table[4:BLOCKS])) == set(table[4:])
    mini.running.remove(request)
    mini._free(request)
    assert {order.block_id for order in told(mini, restore).saves} == set(mini.tables["other"][:2])
    assert mini.desk.stale(set(table[:4])) == set(table[:4])  # they may be anybody's by now
    mini.finish(other)


def test_what_has_come_may_be_found(engine: Callable[..., MiniVllm]) -> None:
    """A request that is preempted keeps its blocks in the local prefix cache, but for those that
    it counts as computed and that have not come."""
    mini = engine()
    request, restore = begun(mini)
    assert mini.desk.unread("other") is None
    assert mini.desk.unread("r") == 0
    mini.desk.heard({0: Report(progress={restore: Progress(low=0, waited=0.0, dead=True)})})
    mini.desk.jump(lambda _: True)
    assert mini.desk.unread("r") is None
    over(mini, request, restore)


def test_steps_ahead_wait_for_whole_prefixes(engine: Callable[..., MiniVllm]) -> None:
    """Where a step is scheduled before the one before has ended, it could not be taken back."""
    mini = engine(depth=2)
    mini.desk.heard({0: Report(by_layer=True)})
    assert mini.desk._admission.hidden == 0.0
    assert LAYOUT.num_layers > 1
