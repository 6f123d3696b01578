"""Ranks that load on their own and compute together: they never diverge, and always end."""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.distributed import Act, Proposal, Vote, agree, combine
from cacheflow.errors import PeerError
from cacheflow.testing.virtual import Link, make_spec
from cacheflow.testing.virtual_ranks import VirtualRanks
from cacheflow.types import Coverage, Offering

if TYPE_CHECKING:
    from cacheflow.testing.virtual_ranks import VirtualRank
    from cacheflow.types import Load, RequestSpec, Tile

LAYERS = 6
STRIDE = 1 << 16
SCHEDULES = 1000 if os.environ.get("CACHEFLOW_FULL") == "1" else 100
FULL = (1 << LAYERS) - 1


def layer_seconds(tile: Tile) -> float:
    return tile.width * (1e-4 + 1e-7 * (tile.start + tile.width / 2)) / LAYERS


class Schedule:
    """A random cast: ranks, links of different speed, holes, loads that fail, hang or come late."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        ranks = self.chance.choice([2, 2, 3, 4])
        self.failing = self.chance.choice([0.0, 0.1, 0.5])
        self.hanging = self.chance.choice([0.0, 0.0, 0.2])
        speeds = [self.chance.choice([0.1, 1.0, 1.0, 10.0]) for _ in range(ranks)]
        self.specs = [self._spec(number) for number in range(self.chance.choice([1, 1, 1, 2, 3]))]
        alone = sum(layer_seconds(tile) for tile in self.specs[0].tiles) * LAYERS or 0.1
        total = STRIDE * LAYERS * max(1, self.specs[0].prefix_tokens // 256)
        self.play = VirtualRanks(
            [{"a": Link(total * speed / alone, 1e-4)} for speed in speeds],
            layer_seconds,
            linear=1e-4,
            attention=1e-7,
            exchange_seconds=self.chance.choice([0.0, 2e-4]),
        )
        for rank in self.play.ranks:
            rank.links["a"].outcome = partial(self._fate, rank)
        for spec in self.specs:
            self.play.arrive(spec, [[self._found(spec)] for _ in range(ranks)])

    def _spec(self, number: int) -> RequestSpec:
        prefix = 256 * self.chance.randrange(0, 14)
        return make_spec(
            prefix,
            prefix + self.chance.randrange(1, 900),
            layers=LAYERS,
            request_id=f"r{number}",
            arrival=self.chance.random() * number,
        )

    def _found(self, spec: RequestSpec) -> Coverage:
        holes = self.chance.choice([0.0, 0.0, 0.1, 0.7])
        chunks = spec.prefix_tokens // 256
        masks = [
            self.chance.randrange(FULL) if self.chance.random() < holes else FULL
            for _ in range(chunks)
        ]
        return Coverage("a", tuple(masks), STRIDE)

    def _fate(self, rank: VirtualRank, load: Load) -> bool | None:
        if self.chance.random() < self.hanging:
            when = self.play.clock.now() + 1.0
            late = self.chance.random() < 0.5
            self.play.at(when, lambda: self.play.lose(rank, load, late=late))
            return None
        return self.chance.random() >= self.failing

    def check(self) -> None:
        """The same compute everywhere, every cell written once on each rank."""
        first, *others = self.play.ranks
        assert all(rank.computed == first.computed for rank in others)
        assert len(set(first.computed)) == len(first.computed), "computed twice"
        cells = {
            (spec.id, tile.index, layer)
            for spec in self.specs
            for tile in spec.tiles
            for layer in range(LAYERS)
        }
        for rank in self.play.ranks:
            assert rank.written.keys() == cells
            computed = [who for who in rank.written.values() if "recompute" in who]
            assert all(who.count("recompute") == 1 for who in computed)
        assert self.play.finished_at.keys() == {spec.id for spec in self.specs}


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
def test_random_schedules_never_diverge() -> None:
    """Failures, holes, hung and late loads on any rank: all compute the same in the same order,
    and every request is completed. A tenth of the thousand schedules of ``CACHEFLOW_FULL=1``."""
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        schedule.play.run()
        schedule.check()
        seen["recomputed"] += any("recompute" in w for w in schedule.play.ranks[0].written.values())
        seen["loaded"] += any("a" in w for w in schedule.play.ranks[0].written.values())
        seen["differ"] += any(
            rank.written != schedule.play.ranks[0].written for rank in schedule.play.ranks
        )
    assert min(seen.values()) > SCHEDULES // 2, seen  # the schedules are not all alike


def full(spec: RequestSpec) -> Coverage:
    return Coverage("a", (FULL,) * (spec.prefix_tokens // 256), STRIDE)


def restored_in(speeds: list[float], prefix: int = 8192) -> tuple[float, VirtualRanks]:
    """Seconds of a warm restore of ranks whose links are ``speeds`` times as fast as compute."""
    spec = make_spec(prefix, prefix + 1, layers=LAYERS)
    alone = sum(layer_seconds(tile) for tile in spec.tiles) * LAYERS
    total = STRIDE * LAYERS * prefix // 256
    play = VirtualRanks(
        [{"a": Link(total * speed / alone, 1e-4)} for speed in speeds],
        layer_seconds,
        linear=1e-4,
        attention=1e-7,
        exchange_seconds=1e-4,
    )
    began = 0.0
    for name in ("warm-up", "again"):
        play.settle()
        began = play.clock.now()
        spec = make_spec(prefix, prefix + 1, layers=LAYERS, request_id=name, arrival=began)
        play.exchanges = 0
        play.arrive(spec, [[full(spec)] for _ in speeds])
        play.run()
    return max(rank.restored_at["again"] for rank in play.ranks) - began, play


@pytest.mark.parametrize("speed", [1 / 3, 1.0, 3.0])
def test_ranks_with_like_links_are_as_fast_as_one(speed: float) -> None:
    """Agreeing costs what the exchanges take, and there are fewer of them than cells."""
    alone, _ = restored_in([speed])
    together, play = restored_in([speed] * 4)
    assert together <= alone * 1.02
    recomputed = sum("recompute" in who for who in play.ranks[0].written.values())
    assert play.exchanges <= recomputed + 10


@pytest.mark.parametrize("slow", [0.25, 0.5])
def test_the_slowest_rank_decides_how_much_is_recomputed(slow: float) -> None:
    """What one rank loads too slowly all compute: as long as if all were as slow, no longer."""
    alone, _ = restored_in([slow])
    together, _ = restored_in([4.0, slow, 1.0])
    assert together <= alone * 1.03


def proposal(work: tuple[int, bool, int, int], want: int = 1, able: int = 9) -> Proposal:
    return Proposal(work, want, able)


def test_what_any_rank_wants_all_do() -> None:
    """Who does not propose the work is asked for it; once all do, they run as far as wanted."""
    work = (0, False, 512, 3)
    asked = agree([Vote(proposal=proposal(work, 2)), Vote()])
    assert (asked.act, asked.work, asked.layers) == (Act.ASK, work, 2)
    run = agree([Vote(proposal=proposal(work, 2)), Vote(proposal=proposal(work, 5, 4))])
    assert (run.act, run.work, run.layers) == (Act.RUN, work, 4)


def test_the_lowest_work_goes_first() -> None:
    """By request, prefix before suffix, by position."""
    works = [(1, False, 0, 0), (0, True, 900, 0), (0, False, 512, 1)]
    assert agree([Vote(proposal=proposal(work)) for work in works]).work == works[-1]
    assert agree([Vote(proposal=proposal(work)) for work in works[:2]]).work == works[1]


def test_work_that_a_rank_cannot_do_yet_waits() -> None:
    """Something else is done meanwhile, or nothing."""
    first, second = (0, False, 0, 0), (1, False, 0, 0)
    votes = [Vote(proposal=proposal(first)), Vote(proposal=proposal(second), blocked=((0, 0),))]
    assert agree(votes).work == second
    assert agree([votes[0], Vote(blocked=((0, 0),))]).act is Act.NOTHING
    assert agree([Vote(proposal=proposal(first, able=0)), Vote()]).act is Act.NOTHING


def test_calls_go_first_once_all_ranks_make_them() -> None:
    votes = [Vote(calls=(7, 8), proposal=proposal((0, False, 0, 0))), Vote(calls=(8,))]
    assert (agree(votes).act, agree(votes).calls) == (Act.CALL, (8,))
    assert agree([votes[0], Vote(calls=(9,))]).act is Act.ASK


def test_ranks_that_have_diverged_are_told() -> None:
    """Hidden states at different layers of one tile: nothing computed from there would be right."""
    votes = [Vote(proposal=proposal((0, False, 512, layer))) for layer in (3, 4)]
    with pytest.raises(PeerError, match="layers 3 and 4 of the tile at token 512"):
        agree(votes)


def test_a_request_that_one_rank_gave_up_is_not_computed() -> None:
    votes = [Vote(proposal=proposal((4, False, 0, 0))), Vote(gone=(4,))]
    decision = agree(votes)
    assert (decision.act, decision.gone) == (Act.NOTHING, (4,))


masks = st.lists(st.integers(0, FULL), max_size=5)


@given(st.lists(st.lists(masks, min_size=1, max_size=3), min_size=2, max_size=4))
def test_coverage_is_the_least_of_all_ranks(found: list[list[list[int]]]) -> None:
    """A cell counts if every rank has it in some tier; each keeps the tiers that have it."""
    offers = [
        Offering(tuple(Coverage(str(i), tuple(m), STRIDE) for i, m in enumerate(tiers)), rank, 1)
        for rank, tiers in enumerate(found)
    ]
    for rank, tiers in enumerate(found):
        combined = combine(offers, rank)
        assert combined.strange == (1 if len(found) == 2 else 3)
        for mine, coverage in zip(tiers, combined.coverage, strict=True):
            for chunk, (had, kept) in enumerate(zip(mine, coverage.layers, strict=True)):
                for layer in range(LAYERS):
                    everywhere = all(
                        any(chunk < len(t) and t[chunk] >> layer & 1 for t in theirs)
                        for theirs in found
                    )
                    assert (kept >> layer & 1) == (had >> layer & 1 and everywhere)


def test_ranks_that_forgot_different_things_are_told() -> None:
    """Or one would compute what the other has in memory, and both would wait for ever."""
    offers = [Offering((), subject="9 tokens"), Offering((), subject="9 tokens", resident=8)]
    with pytest.raises(PeerError, match="of a prompt of 9 tokens the ranks have 0, 8 tokens"):
        combine(offers, 0)
