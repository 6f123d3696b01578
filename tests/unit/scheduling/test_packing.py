"""Fast mode: passes of several tiles, of one or several requests. Exact mode: one tile a pass."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import make_spec
from cacheflow.types import Claim, ComputeBatch, ComputeDone, Coverage, Tile, TileGrid

GRID = TileGrid((), 16)
LAYERS = 3
LAUNCH, TOKEN = 0.01, 0.001


class Driver:
    """Computes what the scheduler hands out, a layer of a whole pass at a time."""

    def __init__(self, pack_tokens: int, *, warm: bool = True) -> None:
        self.clock = ManualClock()
        self.model = ComputeModel(1.0, 0.0)
        if warm:
            for width in (16, 64, 32) * 10:
                self.model.observe(Tile(0, 0, width), LAUNCH + TOKEN * width)
        self.scheduler = BatchScheduler(
            self.model, self.clock, objective="mean", pack_tokens=pack_tokens
        )
        self.passes: list[ComputeBatch] = []

    def admit(self, name: str, prefix: int, total: int) -> None:
        spec = make_spec(prefix, total, layers=LAYERS, chunk=16, grid=GRID, request_id=name)
        self.scheduler.admit(spec, load_policy("adaptive"))

    def next(self) -> ComputeBatch | None:
        batch = self.scheduler.next_compute(self.clock.now())
        if batch is not None:
            self.passes.append(batch)
        return batch

    def compute(self, batch: ComputeBatch) -> None:
        reached = {work: work.first_layer for work in batch.work}
        active = list(batch.work)
        for layer in range(batch.work[0].first_layer, LAYERS):
            active = [w for w in active if self.scheduler.claim(w, layer) is not Claim.REFUSED]
            if not active:
                break
            reached |= dict.fromkeys(active, layer + 1)
            self.clock.advance(LAUNCH + TOKEN * sum(work.tile.width for work in active))
        for work in batch.work:
            self.scheduler.computed(ComputeDone(work, reached[work], ()))

    def run(self) -> None:
        while (batch := self.next()) is not None:
            self.compute(batch)


def test_exact_mode_has_a_pass_for_every_tile() -> None:
    """Without a width to pack to, however many small tiles wait."""
    driver = Driver(0)
    for name in "abc":
        driver.admit(name, 48, 60)
    driver.run()
    assert len(driver.passes) == 12
    assert all(len(batch.work) == 1 for batch in driver.passes)


def test_small_tiles_of_several_requests_share_passes() -> None:
    """Three prompts of three tiles and a suffix each: no pass is wider than allowed, tiles of a
    request are in order, every cell is computed once, and everybody ends."""
    driver = Driver(96)
    for name in "abc":
        driver.admit(name, 48, 60)
    driver.run()
    assert max(len({work.request_id for work in batch.work}) for batch in driver.passes) >= 2
    for batch in driver.passes:
        assert sum(work.tile.width for work in batch.work) <= 96
        for one, other in pairwise(batch.work):
            assert one.first_layer == other.first_layer
            assert one.request_id != other.request_id or one.tile.stop == other.tile.start
    done = [(work.request_id, work.tile.start) for batch in driver.passes for work in batch.work]
    assert sorted(done) == [(name, start) for name in "abc" for start in (0, 16, 32, 48)]
    assert all(driver.scheduler.finished(name) for name in "abc")
    assert len(driver.passes) < 6


def test_a_pass_goes_as_far_as_compute_is_expected_to() -> None:
    """Loads will bring half of the prefix: a pass of sixteen tiles would begin what they have."""
    driver = Driver(256)
    driver.scheduler.channel("a").started(-1, 1600, 0.0)
    per_tile = LAYERS * (LAUNCH + TOKEN * 16)
    driver.clock.advance(per_tile)
    driver.scheduler.channel("a").ended(-1, driver.clock.now(), delivered=True)
    driver.admit("r", 256, 257)
    driver.scheduler.extend_coverage("r", Coverage("a", (7,) * 16, 1600 // LAYERS))
    batch = driver.next()
    assert batch is not None
    assert 4 <= len(batch.work) <= 10


def test_what_a_pass_took_is_learned_as_one_launch() -> None:
    """The moments between the claims of one pass are no measurements: rates stay true."""
    driver = Driver(96)
    for name in "abc":
        driver.admit(name, 48, 60)
    driver.run()
    for width in (16, 64):
        expected = driver.model.layer_seconds(Tile(0, 0, width))
        assert expected == pytest.approx(LAUNCH + TOKEN * width, rel=0.02)


def test_a_piece_of_the_suffix_never_passes_the_one_before_it() -> None:
    """Both are in one pass, the first is refused a layer and the second asked: refused as well."""
    driver = Driver(96)
    driver.admit("r", 16, 60)
    driver.compute(driver.next() or ComputeBatch(()))
    batch = driver.next()
    assert batch is not None
    first, second, *_ = batch.work
    assert first.is_suffix
    assert second.is_suffix
    assert driver.scheduler.claim(second, 0) is Claim.REFUSED
    assert driver.scheduler.claim(first, 0) is Claim.WRITE
    assert driver.scheduler.claim(second, 0) is Claim.WRITE
