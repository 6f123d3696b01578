"""Requests that begin alike: their common tiles are restored once, for all, by whoever is left."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import Link, VirtualRun, make_spec
from cacheflow.types import Coverage, TileGrid
from tests.unit.scheduling.harness import OBJECTIVES
from tests.unit.scheduling.plays import Instance, Play, instances

if TYPE_CHECKING:
    from cacheflow.types import Load, RequestSpec

GRID = TileGrid((32, 32, 64), 128)
CHUNK, LAYERS, STRIDE = 16, 4, 1 << 12
FULL = (1 << LAYERS) - 1


@given(instance=instances(sharing=True), objective=st.sampled_from(OBJECTIVES))
def test_what_requests_share_is_made_ready_once(instance: Instance, objective: str) -> None:
    """Any tree of common beginnings, stores that fail or hang, costs that drift, cancellations:
    whoever is not cancelled finishes, every cell is written once for all that share it (by a load
    or by recompute, from the layer at which its hidden state is), and nothing is left."""
    play = Play(instance, "adaptive", objective)
    play.play()
    written, now = play.checked.written, play.run.clock.now()
    for spec in play.specs:
        if spec.id not in play.checked.cancelled:
            assert spec.id in play.run.finished_at
            assert play.checked.missing(spec.id) == 0
    homes = {
        (play.checked.home(spec.id, tile.index), tile.index)
        for spec in play.specs
        for tile in spec.tiles
    }
    assert {cell[:2] for cell in written} <= homes
    assert len(play.run.writes) >= len(written)
    assert play.run.scheduler.next_compute(now) is None
    assert play.run.scheduler.wake_at(now) == float("inf")
    assert play.checked.removed == {spec.id for spec in play.specs}
    _check_books(play.run.scheduler)


def _check_books(scheduler: BatchScheduler) -> None:
    """Nobody is left, so nothing is left in the sums over all requests."""
    outlook = scheduler._outlook
    assert outlook.requests == 0
    for work in (outlook.all_work, outlook.all_suffixes, *outlook.work_ahead.values()):
        assert (work.count, work.linear, work.attention) == (0, 0.0, 0.0)
    assert not any(outlook.all_bytes.values())
    assert not any(outlook.bytes_ahead.values())


class Once:
    """One link, requests on one prefix; counts what is loaded and computed."""

    def __init__(self, *, tokens: int = 512, bandwidth: float = 1e6, cost: float = 1e-3) -> None:
        self.loaded = 0
        self.tokens = tokens
        self.link = Link(bandwidth, outcome=self._count)
        self.run = VirtualRun(lambda tile: cost * tile.width / 32, {"link": self.link})
        layers = (FULL,) * (tokens // CHUNK)
        self.coverage = Coverage("link", layers, STRIDE)

    def _count(self, load: object) -> bool:
        self.loaded += 1
        return True

    def spec(self, name: str, total: int, arrival: float = 0.0) -> RequestSpec:
        return make_spec(
            self.tokens,
            total,
            layers=LAYERS,
            chunk=CHUNK,
            grid=GRID,
            request_id=name,
            arrival=arrival,
        )

    def arrive(self, name: str, total: int, arrival: float, *others: str) -> None:
        spec = self.spec(name, total, arrival)
        alike = [(other, len(spec.tiles)) for other in others]
        self.run.arrive(spec, [self.coverage], alike=alike)

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [(tile, layer) for _, tile, layer, _ in self.run.writes]


def test_eight_requests_on_one_prefix_restore_it_once() -> None:
    """Bytes over the link and computed cells are those of one request; all of them finish, none
    before the prefix is there."""
    once = Once()
    names = [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        once.arrive(name, 512 + 8 * (i + 1), 1e-4 * i, *names[:i])
    once.run.run(*names)
    once.run.settle()
    tiles = once.spec("x", 513).tiles
    assert sorted(once.cells) == [(tile.index, layer) for tile in tiles for layer in range(LAYERS)]
    alone = Once()
    alone.arrive("a", 520, 0.0)
    alone.run.run("a")
    alone.run.settle()
    assert once.link.busy <= alone.link.busy * 1.1
    ready = {once.run.restored_at[name] for name in names}
    assert len(ready) == 1


@pytest.mark.parametrize("after", [0.0, 1e-3, 5e-3, 2e-2, 5e-2])
def test_the_next_one_goes_on_where_a_cancelled_leader_stopped(after: float) -> None:
    """Whenever the first of two is cancelled, the second finishes no later than it would have with
    the first still there, and nothing that was ready is made ready again."""
    ends = []
    for cancelled in (False, True):
        once = Once()
        once.arrive("a", 520, 0.0)
        once.arrive("b", 528, 1e-4, "a")
        if cancelled:
            once.run.at(2e-4 + after, partial(once.run.cancel, "a"))
        once.run.run("b")
        once.run.settle()
        assert len(once.cells) == len(set(once.cells))
        ends.append(once.run.finished_at["b"])
    assert ends[1] <= ends[0] * 1.02 + 4e-3  # a layer block, which nobody can take back


def test_an_urgent_latecomer_restores_the_common_part_from_both_ends() -> None:
    """A long request is under way when a short one arrives that is its beginning: the short one
    takes the common tiles over, and ends nearly as soon as it would have alone."""
    short, ends = 256, []
    for others in ((), ("long",)):
        once = Once(tokens=8192)
        once.run.arrive(once.spec("long", 8200), [once.coverage])
        spec = make_spec(
            short, short + 8, layers=LAYERS, chunk=CHUNK, grid=GRID, request_id="s", arrival=1e-2
        )
        coverage = Coverage("link", (FULL,) * (short // CHUNK), STRIDE)
        once.run.arrive(spec, [coverage], alike=[(name, len(spec.tiles)) for name in others])
        once.run.run("s", "long")
        ends.append(once.run.finished_at["s"])
    assert ends[1] <= ends[0] * 1.02 + 8e-3


def test_an_heir_asks_only_for_what_its_own_lookup_found() -> None:
    """The leader found all chunks, the other only the first half: when the leader goes, the rest is
    computed, however slowly. (What a request reads is laid out by its own lookup.)"""
    once = Once(cost=10.0)
    asked: list[Load] = []

    def note(load: Load) -> bool:
        asked.append(load)
        return True

    once.link.outcome = note
    spec = once.spec("b", 528, 1e-4)
    half = len(once.coverage.layers) // 2
    found = Coverage("link", (FULL,) * half + (0,) * half, STRIDE)
    once.arrive("a", 520, 0.0)
    once.run.arrive(spec, [found], alike=[("a", len(spec.tiles))])
    once.run.at(2e-2, lambda: once.run.cancel("a"))
    once.run.run("b")
    mine = [load for load in asked if load.request_id == "b"]
    assert mine
    assert all(chunk < half for load in mine for chunk in load.chunks)


def test_what_is_resident_is_neither_loaded_nor_computed() -> None:
    """Tiles that are in the KV cache on arrival are ready from the start."""
    once = Once()
    spec = once.spec("r", 520)
    once.run.scheduler.admit(spec, load_policy("adaptive"), tiles=len(spec.tiles))
    assert once.run.scheduler.restored("r")
    once.run.scheduler.extend_coverage("r", once.coverage)
    assert once.run.scheduler.next_load("link", 0.0) is None
    batch = once.run.scheduler.next_compute(0.0)
    assert batch is not None
    assert batch.work[0].is_suffix
