"""Every order of claims, landings, failures and cancellation: no cell is lost or written twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import make_spec
from cacheflow.types import Claim, ComputeDone, Coverage, Load, TileGrid, TileWork

LAYERS = 4
GRID = TileGrid((32, 32, 64), 128)


class Interleavings(RuleBasedStateMachine):
    """The environment's side of the contract, played in any order hypothesis likes.

    A model of the KV cache records who wrote which cell; the scheduler must never let a cell be
    written by both sides, or let compute read a cell that nobody has written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.scheduler = BatchScheduler(ComputeModel(1.0, 1e-3), self.clock)
        self.written: dict[tuple[int, int], str] = {}
        self.hidden: dict[int, int] = {}
        self.flying: list[Load] = []
        self.committed: list[tuple[Load, int]] = []
        self.work: TileWork | None = None
        self.layer = 0
        self.cancelled = False

    @initialize(
        chunks=st.integers(1, 20),
        holes=st.lists(
            st.tuples(st.integers(0, 19), st.integers(0, (1 << LAYERS) - 1)), max_size=6
        ),
        policy=st.sampled_from(["adaptive", "load", "recompute"]),
        second=st.booleans(),
    )
    def admit(self, chunks: int, holes: list[tuple[int, int]], policy: str, second: bool) -> None:
        self.spec = make_spec(chunks * 16, chunks * 16 + 40, layers=LAYERS, chunk=16, grid=GRID)
        self.scheduler.admit(self.spec, load_policy(policy))
        layers = [(1 << LAYERS) - 1] * chunks
        for chunk, mask in holes:
            if chunk < chunks:
                layers[chunk] &= mask
        self.scheduler.extend_coverage("r", Coverage("a", tuple(layers), 64))
        if second:
            every = ((1 << LAYERS) - 1,) * chunks
            self.scheduler.extend_coverage("r", Coverage("b", every, 64))

    @rule(seconds=st.floats(0, 50))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.work is None)
    @rule()
    def compute_begins(self) -> None:
        batch = self.scheduler.next_compute(self.clock.now())
        if batch is not None:
            (self.work,) = batch.work
            self.layer = self.work.first_layer
            if self.layer and not self.work.is_suffix:
                assert self.hidden[self.work.tile.index] == self.layer, "hidden state is elsewhere"

    @precondition(lambda self: self.work is not None)
    @rule(seconds=st.floats(0.01, 20))
    def compute_claims(self, seconds: float) -> None:
        assert self.work is not None
        answer = self.scheduler.claim(self.work, self.layer)
        tile, layer = self.work.tile, self.layer
        if answer is not Claim.REFUSED:
            earlier = self.spec.tiles if self.work.is_suffix else self.spec.tiles[: tile.index]
            for other in earlier:
                assert (other.index, layer) in self.written, "attention would read an unready cell"
        if answer is Claim.WRITE and not self.work.is_suffix:
            assert (tile.index, layer) not in self.written, "written twice"
            assert not any(
                load.tile == tile.index and granted >> layer & 1 for load, granted in self.committed
            ), "written while a part of it is being copied in"
            self.written[tile.index, layer] = "recompute"
        elif answer is Claim.THROUGH:
            assert (tile.index, layer) in self.written
        assert not self.cancelled or answer is Claim.REFUSED
        if answer is Claim.REFUSED:
            self._return()
        else:
            self.layer += 1
            self.clock.advance(seconds)

    def _return(self) -> None:
        assert self.work is not None
        if not self.work.is_suffix:
            self.hidden[self.work.tile.index] = self.layer
        work, self.work = self.work, None
        self.scheduler.computed(ComputeDone(work, self.layer, ()))

    @rule(channel=st.sampled_from(["a", "b"]))
    def load_begins(self, channel: str) -> None:
        load = self.scheduler.next_load(channel, self.clock.now())
        if load is not None:
            for layer in load.layers:
                assert (load.tile, layer) not in self.written, "loads what is there already"
            self.flying.append(load)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def load_commits(self, data: st.DataObject) -> None:
        load = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        granted = self.scheduler.commit(load)
        for layer in load.layers:
            if granted >> layer & 1:
                assert self.written.get((load.tile, layer)) is None
        self.committed.append((load, granted))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def load_lands(self, data: st.DataObject) -> None:
        load, granted = self.committed.pop(data.draw(st.integers(0, len(self.committed) - 1)))
        self.scheduler.loaded(load, granted, self.clock.now())
        if not self.cancelled:
            frontier = self.scheduler._requests["r"]
            for layer in load.layers:
                if frontier.tiles[load.tile].ready >> layer & 1:
                    self.written.setdefault((load.tile, layer), "load")

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), late=st.booleans())
    def load_fails(self, data: st.DataObject, late: bool) -> None:
        load = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        lost = data.draw(st.lists(st.sampled_from(load.chunks), min_size=1, unique=True))
        self.scheduler.failed(load, self.clock.now(), chunks=lost, late=late)

    @precondition(lambda self: not self.cancelled and self.spec.total_tokens < 800)
    @rule(more=st.integers(1, 150))
    def prompt_is_lengthened(self, more: int) -> None:
        total = self.spec.total_tokens + more
        self.spec = self.scheduler.lengthen("r", total, GRID)
        edges = [self.spec.prefix_tokens, *(piece.stop for piece in self.spec.suffix)]
        assert [piece.start for piece in self.spec.suffix] == edges[:-1], "in one row"
        assert edges[-1] == total

    @precondition(lambda self: len(self.written) > 2)
    @rule(chance=st.integers(0, 9))
    def request_is_cancelled(self, chance: int) -> None:
        if chance == 0:
            self.scheduler.cancel("r")
            self.cancelled = True

    @invariant()
    def restored_means_written(self) -> None:
        if "r" in self.scheduler._requests and self.scheduler.restored("r"):
            cells = {(t.index, layer) for t in self.spec.tiles for layer in range(LAYERS)}
            assert set(self.written) == cells

    def teardown(self) -> None:
        """From wherever it was left, the request still completes once everything answers."""
        if not hasattr(self, "spec"):
            return
        if self.cancelled:
            assert self.scheduler.next_compute(self.clock.now()) is None
            assert self.scheduler.next_load("a", self.clock.now()) is None
            return
        for _ in range(10_000):
            if self.work is None and self.scheduler.finished("r"):
                left = self.scheduler._outlook.all_suffixes
                assert abs(left.linear) < 1e-6, "no suffix is left of any request"
                return
            if self.work is None:
                self.compute_begins()
            if self.work is not None:
                self.compute_claims(1.0)
            for channel in "ab":
                self.load_begins(channel)
            while self.flying:
                load = self.flying.pop()
                self.committed.append((load, self.scheduler.commit(load)))
            while self.committed:
                load, granted = self.committed.pop()
                self.scheduler.loaded(load, granted, self.clock.now())
                for layer in load.layers:
                    if self.scheduler._requests["r"].tiles[load.tile].ready >> layer & 1:
                        self.written.setdefault((load.tile, layer), "load")
            self.clock.advance(1.0)
        raise AssertionError("the request never completes")


Interleavings.TestCase.settings = settings(stateful_step_count=60)
TestInterleavings = Interleavings.TestCase
