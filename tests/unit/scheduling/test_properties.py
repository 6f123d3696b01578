"""Whatever the costs, the stores and the users do: the scheduler's promises hold."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.scheduling import POLICIES
from cacheflow.scheduling.policies.adaptive import Adaptive
from tests.unit.scheduling.harness import OBJECTIVES
from tests.unit.scheduling.plays import Instance, Play, Trouble, instances

if TYPE_CHECKING:
    from cacheflow.types import RequestSpec

pytestmark = pytest.mark.no_cover  # seconds under a tracer; other tests go the same ways


def cells(spec: RequestSpec) -> int:
    return len(spec.tiles) * spec.num_layers


@pytest.mark.parametrize("policy", POLICIES)
@given(instance=instances(), data=st.data())
def test_every_cell_is_made_ready_exactly_once(
    policy: str, instance: Instance, data: st.DataObject
) -> None:
    """Holes, drift by ten, stores that fail or hang, requests that come and go: whoever is not
    cancelled finishes with each cell written by one side, and the sources add up to all cells."""
    play = Play(instance, policy, data.draw(st.sampled_from(OBJECTIVES)))
    play.play()
    made = Counter(request for request, _, _ in play.checked.written)
    for spec in play.specs:
        if spec.id in play.checked.cancelled:
            assert made[spec.id] <= cells(spec)
            continue
        assert spec.id in play.run.finished_at
        assert play.run.restored_at[spec.id] <= play.run.finished_at[spec.id]
        assert made[spec.id] == cells(spec)
    recorded = Counter(
        (request, tile, layer)
        for request, tile, layer, source in play.run.writes
        if source == "recompute"
    )
    assert set(recorded) == {
        cell for cell, source in play.checked.written.items() if source == "recompute"
    }
    assert max(recorded.values(), default=1) == 1


@pytest.mark.parametrize("policy", POLICIES)
@given(instance=instances())
def test_nothing_is_left_of_requests_that_are_over(policy: str, instance: Instance) -> None:
    """Finished or cancelled, and its loads ended: no work, no load, no bytes in flight are left."""
    play = Play(instance, policy, OBJECTIVES[0])
    play.play()
    now = play.run.clock.now()
    assert play.checked.removed == {spec.id for spec in play.specs}
    assert play.run.scheduler.next_compute(now) is None
    for name in play.run.links:
        assert play.run.scheduler.next_load(name, now) is None
        assert play.run.scheduler.channel(name).in_flight == 0
    assert play.run.scheduler.wake_at(now) == float("inf")
    for spec in play.specs:
        assert play.run.scheduler.paused_tiles(spec.id) == []


steady = st.builds(Trouble)


@pytest.mark.parametrize("policy", POLICIES)
@given(instance=instances(steady))
def test_without_holes_the_recomputed_set_is_a_staircase(policy: str, instance: Instance) -> None:
    """One steady channel that has everything: in each layer recompute takes leading tiles, never
    more of them than in the layer below. (Suffix deadlines turn the order of the last loads round,
    so a load that is late against what was believed can leave recomputed cells above it: off.)"""
    one = Instance(
        **{
            **{name: getattr(instance, name) for name in Instance.__slots__},
            "holes": 0.0,
            "bandwidths": instance.bandwidths[:1],
        }
    )
    play = Play(one, policy, OBJECTIVES[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adaptive, "overlaps", False)
        play.play()
    for spec in play.specs:
        heights = []
        for layer in range(spec.num_layers):
            taken = [
                play.checked.written[spec.id, tile.index, layer] == "recompute"
                for tile in spec.tiles
            ]
            assert taken == sorted(taken, reverse=True), f"layer {layer} has a gap"
            heights.append(sum(taken))
        assert heights == sorted(heights, reverse=True)


@given(instance=instances())
def test_the_single_ways_keep_to_themselves(instance: Instance) -> None:
    """``recompute`` never loads; ``load`` computes nothing that it could have."""
    play = Play(instance, "recompute", OBJECTIVES[0])
    play.play()
    assert set(play.checked.written.values()) <= {"recompute"}
    assert all(link.busy == 0 for link in play.run.links.values())


@pytest.mark.parametrize("channels", [1, 2])
def test_channels_that_never_answer_hold_nobody_up(channels: int) -> None:
    """Cold, and everything hangs: all requests are recomputed, one after the other, though the
    first one's loads block every channel."""
    hang = Trouble(hanging=1.0, patience=1e3)
    instance = Instance(
        [21, 24], [29, 200], [0.0, 0.1], 1, 0.02, 1e-3, [1e6] * channels, 0.0, hang, 0
    )
    play = Play(instance, "adaptive", "mean")
    play.play()
    work = sum(play._cost(tile) for spec in play.specs for tile in (*spec.tiles, *spec.suffix))
    assert max(play.run.finished_at.values()) <= work * 1.05
