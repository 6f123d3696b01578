"""Tensor-parallel ranks of a miniature vLLM: each has its heads, and all go on together."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.plugins.vllm import planner
from cacheflow.plugins.vllm.admission import Admission
from cacheflow.plugins.vllm.records import Found, Progress, Report
from cacheflow.plugins.vllm.settings import VllmSettings
from cacheflow.testing import steered
from tests.unit.vllm_plugin.minivllm import BLOCK, WIDE, MiniVllm
from tests.unit.vllm_plugin.test_restores import STEP, learned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cacheflow.plugins.vllm.restores import Restore
    from cacheflow.types import ChunkKey, ObjectKey
    from tests.unit.vllm_plugin.minivllm import MiniRequest

TOKENS = random.Random(6).choices(range(1000), k=400)
BLOCKS = 24
"""Whole blocks that can be loaded: one token has to be computed."""
TRIES = 40


class Ranks:
    """Engines over steered stores: one for each rank, or one folder for all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control = folder / "control.json"
        steered.install(folder / "site")
        self.made: list[MiniVllm] = []

    def start(self, ranks: int = 2, *, shared: bool = False, **options: Any) -> MiniVllm:
        steering = {"control": str(self.control)}
        if shared:
            steering["path"] = str(self.folder / "store")
        tier = {"name": "store", "backend": "steered", "options": steering}
        settings = {"tiers": [tier], "staging_bytes": 8 << 20, "lookup_patience": 5.0}
        mini = MiniVllm(VllmSettings.parse(settings), layout=WIDE, ranks=ranks, **options)
        self.made.append(mini)
        return mini

    def stop(self, mini: MiniVllm) -> None:
        self.made.remove(mini)
        for depot in mini.depots:
            depot.close()
        assert len(mini.pool.free) == mini.pool_blocks - 1, "blocks leaked"

    def steer(self, **wishes: float | str) -> None:
        steered.steer(self.control, **wishes)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Ranks]:
    rig = Ranks(tmp_path)
    yield rig
    for mini in [*rig.made]:
        rig.stop(mini)


def ask(mini: MiniVllm, policy: str = "load", tokens: list[int] = TOKENS) -> MiniRequest:
    """Answer a prompt, and let its blocks be stored."""
    request = mini.add(f"request-{len(mini.done)}", tokens, policy)
    mini.run()
    mini.settle()
    return request


def tier(mini: MiniVllm, rank: int) -> Any:
    return mini.depots[rank]._loader._means.tiers["store"]


def on_loop(mini: MiniVllm, rank: int, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, mini.depots[rank]._loop).result(20)


def objects(mini: MiniVllm, rank: int = 0) -> list[ObjectKey]:
    async def listed() -> list[ObjectKey]:
        return [info.key async for info in tier(mini, rank).scan()]

    found: list[ObjectKey] = on_loop(mini, rank, listed())
    return found


def keys(mini: MiniVllm, request: MiniRequest) -> list[ChunkKey]:
    found = list(mini.desk.keyring.keys(request) or ())
    mini.desk.keyring.forget(request.request_id)
    return found


def test_each_rank_stores_and_loads_its_heads(rig: Ranks) -> None:
    """In a store of its own here, so that no rank could have another's."""
    mini = rig.start()
    assert ask(mini).computed == 400
    for rank in (0, 1):
        assert {(key.heads.start, key.heads.stop) for key in objects(mini, rank)} == {
            (rank, rank + 1)
        }
        assert len(objects(mini, rank)) == 25
    assert ask(mini).computed == 16
    assert ask(mini, "adaptive").computed <= 400


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), (2, 2), (4, 2), (1, 4), (4, 4)])
def test_what_one_number_of_ranks_stored_another_reads(
    rig: Ranks, writers: int, readers: int
) -> None:
    """Heads that several ranks hold are stored once, and nothing that is there is stored again."""
    first = rig.start(writers, shared=True)
    assert ask(first).computed == 400
    rig.stop(first)
    second = rig.start(readers, shared=True)
    assert len(objects(second)) == 25 * min(writers, 2)
    assert ask(second).computed == 16
    ask(second, "recompute")
    assert len(objects(second)) == 25 * min(writers, 2)


def test_ranks_with_the_same_heads_and_stores_of_their_own(rig: Ranks) -> None:
    """Then each of them keeps them: nobody can read another's memory."""
    mini = rig.start(4)
    ask(mini)
    assert [len(objects(mini, rank)) for rank in range(4)] == [25] * 4
    assert ask(mini).computed == 16


@pytest.mark.parametrize("fault", ["error", "corrupt"])
@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("policy", ["load", "adaptive"])
def test_a_load_that_fails_on_one_rank_is_computed_by_all(
    rig: Ranks, fault: str, after: int, policy: str
) -> None:
    """What failed there and what lies below it; what had arrived on all is used."""
    mini = rig.start()
    ask(mini)
    rig.steer(head=1, fail_after=after, fault=fault)
    assert ask(mini, policy).computed >= 400 - BLOCK * (after + 2)


def test_a_rank_whose_store_hangs_holds_nobody_up(rig: Ranks) -> None:
    """Compute overtakes its loads."""
    mini = rig.start()
    ask(mini)
    rig.steer(head=1, fail_after=3, fault="hang")
    mini.add("hung", TOKENS, "adaptive")
    mini.run(10.0)


def test_a_rank_that_does_not_say_what_it_has_is_not_waited_for(
    rig: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the others have found and loaded by then is let go."""
    mini = rig.start()
    ask(mini)

    async def never(*_: object) -> None:
        await asyncio.sleep(3600)

    with monkeypatch.context() as patch:
        patch.setattr(mini.depots[1]._loader._finder, "find", never)
        patch.setattr(Admission, "_patient", lambda *_: False)
        assert ask(mini).computed == 400
    assert ask(mini).computed == 16


@pytest.mark.parametrize("gone", [(0, 25), (20, 25), (0, 5), (10, 12)])
def test_only_what_all_ranks_have_is_loaded(rig: Ranks, gone: tuple[int, int]) -> None:
    """What is missing on one is computed, stored there again, and loaded the next time."""
    mini = rig.start()
    first = ask(mini)
    chunks = keys(mini, first)[gone[0] : gone[1]]
    deleted = [key for key in objects(mini, 1) if key.chunk in chunks]
    on_loop(mini, 1, tier(mini, 1).delete(deleted))
    left = {(0, 25): 0, (20, 25): 20, (0, 5): BLOCKS - 5, (10, 12): BLOCKS - 12}[gone]
    assert ask(mini).computed == 400 - left * BLOCK
    assert ask(mini).computed == 16


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging memory is full: who can be restored enters, and loads go to its blocks."""
    monkeypatch.setattr(Admission, "_fits", lambda *_: False)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.004])
def test_a_prefix_is_cut_to_what_all_have_while_it_loads(rig: Ranks, seconds: float) -> None:
    """The rank that has more of it learns of that when its loads are under way already."""
    mini = rig.start()
    chunks = keys(mini, ask(mini))[12:]
    for policy in ("load", "adaptive"):
        gone = [key for key in objects(mini, 1) if key.chunk in chunks]
        on_loop(mini, 1, tier(mini, 1).delete(gone))
        rig.steer(seconds=seconds, head=0)
        least = 400 - 12 * BLOCK
        computed = ask(mini, policy).computed
        assert computed in (least, least + BLOCK) if policy == "load" else computed >= least


@pytest.mark.parametrize("status", ["failed", "full"])
def test_what_one_rank_did_not_store_is_stored_later(rig: Ranks, status: str) -> None:
    """It counts as stored when all have it; those that have it do not store it twice."""
    mini = rig.start()
    rig.steer(head=1, stores=status)
    assert ask(mini).computed == 400
    rig.steer()
    for _ in range(200):  # a tier that was set aside takes a moment to come back
        ask(mini, "recompute")
        if len(objects(mini, 1)) == 25:
            break
    assert [len(objects(mini, rank)) for rank in (0, 1)] == [25, 25]
    assert ask(mini).computed == 16


@pytest.mark.parametrize("dying", [0, 1])
def test_all_go_on_when_the_storage_of_one_dies(rig: Ranks, dying: int) -> None:
    """The blocks that the other's loads may still write stay pinned until it writes no more."""
    mini = rig.start()
    ask(mini)
    rig.steer(seconds=0.01)
    requests = [mini.add(f"r{n}", TOKENS, p) for n, p in enumerate(("load", "adaptive"))]
    for _ in range(4):
        mini.step()
    depot = mini.depots[dying]
    depot._loop.call_soon_threadsafe(depot._loop.stop)
    depot._thread.join(5)
    mini.run(20.0)
    assert all(request in mini.done for request in requests)
    assert ask(mini).computed == 400


@pytest.mark.usefixtures("inside")
def test_the_dead_rank_is_not_waited_for_and_the_other_is(rig: Ranks) -> None:
    """Blocks are free when the rank that lives has said that it writes nothing more."""
    mini = rig.start()
    desk, request = mini.desk, mini.add("r", TOKENS, "load")
    assert desk.matched(request, 0) is None
    (opened,) = desk.orders({}, {}, ()).opened
    restore = opened.restore
    said = Report({restore: Found(0, BLOCKS)}, {restore: Progress(low=BLOCKS, waited=0.0)})
    desk.heard({0: said, 1: said})
    assert desk.matched(request, 0) == 0
    mini.allocate_slots(request, BLOCK)
    desk.allocated(request, 0)
    assert mini.pool.blocks[mini.tables["r"][0]].ref_cnt == 2
    desk.heard({0: said, 1: Report(lost=True)})
    assert desk.orders({}, {}, ()).closed == [restore]
    assert desk.pins.held == BLOCKS
    desk.heard({0: Report(ended=[restore]), 1: Report(lost=True)})
    assert not desk.pending
    mini.finish(request)


@pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways
def test_many_at_once(rig: Ranks) -> None:
    """Slow and failing loads on one rank, aborts, preemptions: every request ends right."""
    mini = learned(rig.start(pool_blocks=90, step_seconds=0.002))
    ask(mini)
    chance = random.Random(12)
    for number in range(40):
        if number % 4 == 0:
            fault = chance.choice(["error", "corrupt", "none", "none"])
            rig.steer(
                head=chance.choice([0, 1]),
                seconds=chance.choice([0.0, 0.001, 0.003]),
                fail_after=chance.randrange(40) if fault != "none" else -1,
                fail_count=2,
                fault=fault,
                number=number,
            )
        shared = chance.randrange(100, 400)
        tokens = [*TOKENS[:shared], *random.Random(number).choices(range(1000), k=60)]
        mini.add(f"r{number}", tokens, chance.choice(["adaptive", "load", "recompute"]))
        for _ in range(chance.randrange(6)):
            mini.step()
        if mini.running and chance.random() < 0.2:
            mini.preempt(chance.choice(mini.running))
        if (there := [*mini.running, *mini.waiting]) and chance.random() < 0.2:
            mini.finish(chance.choice(there))
    mini.run(60.0)
    assert len(mini.done) == 41


# -- passes that begin under their last loads ------------------------------------------------------


def behind(number: int) -> list[int]:
    """A prompt whose prefix is stored, with six whole blocks behind it."""
    return [*TOKENS[: BLOCKS * BLOCK], *random.Random(number).choices(range(1000), k=100)]


@pytest.fixture
def early(rig: Ranks, monkeypatch: pytest.MonkeyPatch) -> MiniVllm:
    """Passes begin as soon as the first layers are there on both ranks."""

    def eager(_: Admission, restore: Restore, computed: int) -> bool:
        return restore.progress is not None and restore.progress.row and not computed % BLOCK

    monkeypatch.setattr(Admission, "may_overlap", eager)
    monkeypatch.setattr(planner, "_LEAST_BLOCK", 0.0)
    mini = learned(rig.start(step_seconds=STEP))
    ask(mini)
    return mini


def ended(mini: MiniVllm, result: str) -> float:
    return mini.desk.counts.take().get(f"vllm:cacheflow_overlaps\t{result}", 0.0)


def tried(once: Callable[[int], bool]) -> None:
    """What a step sees of the loads is a matter of time."""
    assert any(once(number) for number in range(TRIES)), "it did not come to it"


@pytest.mark.parametrize("slow", [0, 1])
def test_a_pass_waits_for_the_layers_of_the_slower_rank(
    rig: Ranks, early: MiniVllm, slow: int
) -> None:
    """The other's are there."""
    rig.steer(head=slow, seconds=0.01)

    def once(number: int) -> bool:
        ask(early, "load", behind(number))
        return bool(ended(early, "complete"))

    tried(once)
    assert early.broken == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_nothing_is_stored_of_a_pass_that_one_rank_spoiled(
    rig: Ranks, early: MiniVllm, failing: int
) -> None:
    """Sums go over all ranks: the one whose loads came has computed rubbish too, and stores what
    the second pass makes of it. The miniature notices when that is loaded."""

    def once(number: int) -> bool:
        rig.steer(
            head=failing,
            seconds=0.01,
            fail_after=BLOCKS + number % 3,
            fail_count=1,
            fault="error",
            number=number,
        )
        ask(early, "load", behind(number))
        if not early.broken:
            return False
        rig.steer()
        for _ in range(2):
            again = ask(early, "load", [*behind(number), 1])
        return again.computed < 100

    tried(once)
