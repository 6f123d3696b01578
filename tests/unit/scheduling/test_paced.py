"""Engines that schedule themselves: they are granted tokens, and say how far they got."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.clock import ManualClock
from cacheflow.costs import ComputeModel
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.virtual import make_spec
from cacheflow.types import Coverage, TileGrid

if TYPE_CHECKING:
    from cacheflow.types import Load, RequestSpec

GRID = TileGrid((), 64)
CHUNK, LAYERS, STRIDE = 16, 4, 1 << 12
FULL = (1 << LAYERS) - 1
TOKEN = 1e-3
"""Seconds that a token takes through all layers."""


class Engine:
    """Steps of at most ``budget`` tokens for all requests in turn; a link that loads meanwhile."""

    def __init__(self, bandwidth: float, budget: int = 64, *, failing: float = 0.0) -> None:
        self.clock = ManualClock()
        self.scheduler = BatchScheduler(ComputeModel(1.0, 0.0), self.clock)
        self.bandwidth = bandwidth
        self.budget = budget
        self.failing = failing
        self.specs: dict[str, RequestSpec] = {}
        self.computed: dict[str, list[tuple[int, int]]] = {}
        self.finished: dict[str, float] = {}
        self._flying: list[tuple[float, int, Load]] = []
        self._free_at = 0.0
        self._lost = 0.0

    def admit(self, name: str, prefix: int, total: int, stored: int | None = None) -> None:
        spec = make_spec(prefix, total, layers=LAYERS, chunk=CHUNK, grid=GRID, request_id=name)
        self.scheduler.admit(spec, load_policy("adaptive"), paced=True)
        chunks = (prefix if stored is None else stored) // CHUNK
        self.scheduler.extend_coverage(name, Coverage("link", (FULL,) * chunks, STRIDE))
        self.specs[name], self.computed[name] = spec, []

    def run(self) -> float:
        """Until all are finished; seconds."""
        steps = 0
        while len(self.finished) < len(self.specs):
            steps += 1
            assert steps < 100_000, "no progress"
            self._load()
            if not self._step():
                assert self._flying, "nothing granted and nothing on its way"
                self._pass_to(self._flying[0][0])
        return self.clock.now()

    def _step(self) -> int:
        left, taken = self.budget, []
        for name in [name for name in self.specs if name not in self.finished]:
            tokens = self.scheduler.grant_compute(name, left, self.clock.now())
            assert 0 <= tokens <= left
            if tokens:
                position = self.scheduler.position(name)
                before = self.computed[name][-1][1] if self.computed[name] else 0
                assert position >= before, "goes back"
                taken.append((name, position, tokens))
                left -= tokens
        seconds = (self.budget - left) * TOKEN
        if taken:
            self._pass_to(self.clock.now() + seconds)
        for name, position, tokens in taken:
            self.computed[name].append((position, position + tokens))
            alone = seconds if len(taken) == 1 else 0.0
            self.scheduler.advanced(name, tokens, alone, self.clock.now())
            if self.scheduler.finished(name):
                self.finished[name] = self.clock.now()
                self.scheduler.cancel(name)
        return self.budget - left

    def _load(self) -> None:
        while (load := self.scheduler.next_load("link", self.clock.now())) is not None:
            self._free_at = max(self._free_at, self.clock.now()) + load.nbytes / self.bandwidth
            heapq.heappush(self._flying, (self._free_at, load.id, load))

    def _pass_to(self, when: float) -> None:
        while self._flying and self._flying[0][0] <= when:
            at, _, load = heapq.heappop(self._flying)
            self.clock.advance(max(0.0, at - self.clock.now()))
            self._lost += self.failing
            if self._lost >= 1.0:
                self._lost -= 1.0
                self.scheduler.failed(load, at, chunks=load.chunks)
            else:
                self.scheduler.loaded(load, self.scheduler.commit(load), at)
            self._load()
        self.clock.advance(max(0.0, when - self.clock.now()))

    def tokens(self, name: str) -> int:
        """How many the engine computed."""
        return sum(stop - start for start, stop in self.computed[name])


def seconds_per_token(bandwidth: float) -> float:
    return LAYERS * STRIDE / CHUNK / bandwidth


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.0, 10.0])
def test_both_ends_meet_near_the_fluid_bound(ratio: float) -> None:
    """One request, compute to I/O 1:10 to 10:1, cold: about as fast as both ends together can be, a
    tile and a few probes aside; never slower than the better single way by more than that."""
    prefix, suffix = 4096, 16
    bandwidth = LAYERS * STRIDE / CHUNK / TOKEN * ratio
    engine = Engine(bandwidth)
    engine.admit("r", prefix, prefix + suffix)
    taken = engine.run()
    recompute, load = prefix * TOKEN, prefix * seconds_per_token(bandwidth)
    fluid = recompute * load / (recompute + load)
    tile = 64 * (TOKEN + seconds_per_token(bandwidth))
    assert taken <= 1.05 * fluid + suffix * TOKEN + 2 * tile
    assert taken <= 1.02 * min(recompute, load) + suffix * TOKEN + 2 * tile


def test_what_nobody_has_is_granted_to_the_end() -> None:
    """Without a store all tokens are granted, step by step, budget by budget."""
    engine = Engine(1e6, budget=100)
    engine.admit("r", 512, 530, stored=0)
    engine.run()
    assert engine.tokens("r") == 530
    assert engine.computed["r"][0] == (0, 100)


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    suffix=st.integers(1, 200),
    stored=st.floats(0.0, 1.0),
    budget=st.integers(1, 300),
    power=st.floats(-2.0, 2.0),
    failing=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_token_is_computed_once_or_loaded(
    lengths: list[int], suffix: int, stored: float, budget: int, power: float, failing: float
) -> None:
    """Any lengths, budgets, speeds, failing loads: all requests finish, no token is granted twice,
    the suffix is computed in full, and nothing is left in the books."""
    engine = Engine(LAYERS * STRIDE / CHUNK / TOKEN * 10**power, budget, failing=failing)
    for i, length in enumerate(lengths):
        prefix = length * 64 - 16 * (i % 3)
        has = int(prefix * stored) // CHUNK * CHUNK
        engine.admit(f"r{i}", prefix, prefix + suffix, has)
    engine.run()
    for name, spec in engine.specs.items():
        spans = engine.computed[name]
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert spans[-1][1] == spec.total_tokens
        late = sum(
            stop - max(start, spec.prefix_tokens)
            for start, stop in spans
            if stop > spec.prefix_tokens
        )
        assert late == suffix
    engine._pass_to(float("1e12"))
    for name in engine.specs:
        engine.scheduler.remove(name)
    outlook = engine.scheduler._outlook
    assert outlook.requests == 0
    assert outlook.all_work.count == outlook.all_suffixes.count == 0
    assert not any(outlook.all_bytes.values())


def test_an_engine_cannot_compute_what_it_was_not_granted() -> None:
    """More tokens than were granted, or a request that the engine does not pace, are mistakes."""
    engine = Engine(1e6)
    engine.admit("r", 512, 530, stored=0)
    assert engine.scheduler.grant_compute("r", 10, 0.0) == 10
    with pytest.raises(ValueError, match="was granted 10"):
        engine.scheduler.advanced("r", 11, 0.0, 0.0)
    spec = make_spec(512, 530, layers=LAYERS, chunk=CHUNK, grid=GRID, request_id="other")
    engine.scheduler.admit(spec, load_policy("adaptive"))
    with pytest.raises(KeyError, match="not paced"):
        engine.scheduler.grant_compute("other", 10, 0.0)


def test_compute_of_a_paced_request_is_handed_to_nobody() -> None:
    """`next_compute` has nothing for the compute worker, and no timer wakes it."""
    engine = Engine(1e6)
    engine.admit("r", 512, 530)
    assert engine.scheduler.next_compute(0.0) is None
    assert engine.scheduler.wake_at(0.0) == float("inf")
