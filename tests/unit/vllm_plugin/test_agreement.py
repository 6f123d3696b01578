"""What the reports of several ranks come to: only what holds on all of them."""

from __future__ import annotations

from typing import Any

import pytest

from cacheflow.plugins.vllm.agreement import Agreement
from cacheflow.plugins.vllm.records import Found, Progress, Report, SaveOutcome

R = 7
"""A restore."""


def progress(low: int, **other: Any) -> Progress:
    return Progress(**{"low": low, "waited": 0.0, **other})


def merged(*each: Progress, found: Found | None = None) -> Progress:
    """Of one restore that every rank reports."""
    reports = {
        rank: Report(found={R: found} if found else {}, progress={R: said})
        for rank, said in enumerate(each)
    }
    report, _ = Agreement(len(each)).merge(reports)
    return report.progress[R]


def test_one_rank_says_what_it_says() -> None:
    """Nothing is changed, and nothing is waited for."""
    said = progress(3, part=0.5, row=True, whole=2, block_seconds=0.1)
    told = Report({R: Found(1, 5)}, {R: said}, [1], [2], [SaveOutcome(3, stored=True)], [b"k"])
    report, tops = Agreement(1).merge({0: told})
    assert (report, tops) == (told, {})


def test_a_block_is_found_where_all_have_it() -> None:
    """And a rank that has more of them is told where the common ones end."""
    agreement = Agreement(3)
    found = (Found(0, 9), Found(2, 8), Found(1, 9))
    reports = {r: Report({R: f}, {R: progress(f.top)}) for r, f in enumerate(found)}
    report, tops = agreement.merge(reports)
    assert report.found == {R: Found(2, 8)}
    assert tops == {R: 8}
    assert report.progress[R].low == 8  # nothing of it has come, where one begins further up


def test_ranks_that_have_nothing_in_common_have_nothing() -> None:
    """Whatever each of them has."""
    reports = {0: Report({R: Found(4, 9)}), 1: Report({R: Found(0, 3)})}
    report, tops = Agreement(2).merge(reports)
    assert report.found == {R: Found(3, 3)}
    assert tops == {R: 3}


def test_a_rank_that_still_looks_is_waited_for() -> None:
    """Nothing is known of a restore before all have said what they have."""
    agreement = Agreement(2)
    first = Report({R: Found(0, 9)}, {R: progress(9)})
    assert agreement.merge({0: first})[0].found == {}
    report, _ = agreement.merge({0: first, 1: Report(ended=[1])})
    assert (report.found, report.progress) == ({}, {})
    assert agreement.merge({1: first, 0: first})[0].found == {R: Found(0, 9)}


def test_the_rank_that_is_least_far_counts() -> None:
    """Others have what it has, and the part that they have beyond that is there."""
    ahead = progress(2, part=0.5, row=True, block_seconds=0.1, waited=0.1, first_seconds=0.2)
    behind = progress(5, part=0.2, row=True, block_seconds=0.3, waited=0.4, whole=2)
    both = merged(ahead, behind, found=Found(0, 9))
    assert both == progress(
        5, part=0.2, row=True, block_seconds=0.3, waited=0.4, first_seconds=0.2, whole=2
    )
    assert merged(behind, ahead) == both
    assert merged(ahead, progress(5, row=False)).row is False


def test_a_rank_that_is_done_does_not_hold_up_the_others() -> None:
    """It will not get any lower because all is there, and has its first layers, too."""
    done = progress(0, dead=True, waited=9.0)
    behind = progress(2, part=1.5, row=True, waited=0.1)
    both = merged(done, behind)
    assert (both.low, both.dead, both.row, both.waited) == (2, False, True, 0.1)
    assert both.part == 1.5
    assert merged(done, done).dead


@pytest.mark.parametrize("failed", [4, 6])
def test_a_failed_load_fails_all(failed: int) -> None:
    """The others go on down to where it failed, and no further."""
    dead = progress(failed, dead=True)
    behind = progress(6)
    both = merged(dead, behind)
    assert (both.low, both.dead) == (6, failed == 6)
    assert (merged(dead, progress(2)).low, merged(dead, progress(2)).dead) == (failed, True)


def test_what_is_said_once_is_waited_for() -> None:
    """Blocks stay pinned until the last rank lets go of them, whenever that is."""
    agreement = Agreement(2)
    first = agreement.merge({0: Report(ended=[1, 2], copied=[5])})[0]
    assert (first.ended, first.copied) == ([], [])
    second = agreement.merge({1: Report(ended=[2], copied=[5, 6])})[0]
    assert (second.ended, second.copied) == ([2], [5])
    third = agreement.merge({0: Report(copied=[6]), 1: Report(ended=[1])})[0]
    assert (third.ended, third.copied) == ([1], [6])


@pytest.mark.parametrize(("one", "other"), [(True, True), (True, False), (False, True)])
def test_stored_is_what_all_have_stored(*, one: bool, other: bool) -> None:
    """Whoever says so first."""
    agreement = Agreement(2)
    assert agreement.merge({1: Report(saves=[SaveOutcome(3, one)])})[0].saves == []
    report, _ = agreement.merge({0: Report(saves=[SaveOutcome(3, other)])})
    assert report.saves == [SaveOutcome(3, one and other)]


def test_a_rank_whose_storage_died_is_not_waited_for() -> None:
    """What only it has not said is over; what it had is not stored. The others are heard out."""
    agreement = Agreement(2)
    agreement.merge({0: Report(ended=[1], saves=[SaveOutcome(3, stored=True)])})
    report, _ = agreement.merge({1: Report(lost=True)})
    assert (report.lost, agreement.all_lost) == (True, False)
    assert report.ended == [1]
    assert report.saves == [SaveOutcome(3, stored=False)]
    assert agreement.merge({0: Report(ended=[2]), 1: Report(lost=True)})[0].ended == [2]
    agreement.merge({0: Report(lost=True), 1: Report(lost=True)})
    assert agreement.all_lost


def test_layers_are_asked_for_where_all_ranks_do() -> None:
    """It is told when it is known of all, and when it changes."""
    agreement = Agreement(2)
    assert agreement.merge({0: Report(by_layer=True)})[0].by_layer is None
    assert agreement.merge({1: Report(by_layer=True)})[0].by_layer is True
    assert agreement.merge({0: Report(ended=[1])})[0].by_layer is None
    assert agreement.merge({0: Report(by_layer=False)})[0].by_layer is False
