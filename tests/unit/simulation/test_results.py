"""Summaries, the report and the map: figures that can be checked, pages that stand alone."""

from __future__ import annotations

import json
import re
import statistics
from array import array
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.errors import ConfigError
from cacheflow.simulation.maps import Point, win_map
from cacheflow.simulation.presets import load_link, load_machine
from cacheflow.simulation.report import busy_shares, render_report
from cacheflow.simulation.results import Quantiles
from cacheflow.simulation.scenario import Channel, Run, Scenario, mean_gap, simulate
from cacheflow.simulation.svg import Plot, nice_ticks
from cacheflow.simulation.workloads import Lengths, Synthetic, poisson, synthetic

SCENARIO = Scenario(load_machine("h100:llama-3.1-8b"), (Channel(load_link("25gbps")),))
LENGTHS = Lengths("lognormal", (8000.0, 1.0))


def batch(count: int = 8, seed: int = 0) -> Synthetic:
    return Synthetic("batch", synthetic(count, LENGTHS, chunk_tokens=512, seed=seed))


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40))
def test_quantiles_are_those_of_the_statistics_module(values: list[float]) -> None:
    """Linear between neighbours, both ends included."""
    found = Quantiles.of(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert (found.p50, found.p90, found.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]))
    assert found.longest == max(values)
    assert found.mean == pytest.approx(statistics.fmean(values))


def test_no_requests_have_no_times() -> None:
    """Zeros, not an error."""
    assert Quantiles.of([]) == Quantiles(0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
@pytest.mark.parametrize("policy", ["recompute", "load", "cake", "adaptive"])
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_beats_the_bounds(policy: str, seed: int) -> None:
    """Efficiency and the mean's bound are at most 1, utilisation too, for batch and arrivals."""
    closed = simulate(SCENARIO, batch(seed=seed), policy).summary
    assert closed.mean_bound is not None
    assert 0 < closed.mean_bound <= 1 + 1e-9
    jobs = synthetic(60, LENGTHS, chunk_tokens=512, seed=seed)
    open_ = Synthetic("open", poisson(jobs, mean_gap(SCENARIO, jobs, 0.7), seed))
    for summary in (closed, simulate(SCENARIO, open_, policy).summary):
        assert 0 < summary.efficiency <= 1 + 1e-9
        assert all(0 <= share <= 1 + 1e-9 for share in summary.utilisation.values())
        assert summary.requests == (8 if summary is closed else 60)


def test_both_ends_use_both_resources() -> None:
    """A batch under the default policy keeps GPU and link at work nearly all the time."""
    summary = simulate(SCENARIO, batch(12), "adaptive").summary
    assert min(summary.utilisation.values()) > 0.9
    assert summary.efficiency > 0.9


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
def test_same_seed_same_bytes() -> None:
    """A run depends on its inputs only; another seed is another run."""

    def page(seed: int) -> str:
        scenario = replace(SCENARIO, gpus=2, failing=0.1, seed=seed)
        jobs = poisson(synthetic(40, LENGTHS, chunk_tokens=512, seed=seed), 0.1, seed)
        return json.dumps(simulate(scenario, Synthetic("x", jobs), "adaptive").summary.as_json())

    assert page(3) == page(3) != page(4)


def test_a_cold_start_still_ends() -> None:
    """Without any knowledge of costs the same requests are served, not much later."""
    warm = simulate(SCENARIO, batch(), "adaptive").summary
    cold = simulate(replace(SCENARIO, warm=False), batch(), "adaptive").summary
    assert cold.requests == warm.requests
    assert cold.ttft.mean < 1.5 * warm.ttft.mean


def test_load_is_a_share_of_what_both_carry() -> None:
    """Twice the load, half the gap; twice the GPUs, half the gap."""
    jobs = synthetic(50, LENGTHS, chunk_tokens=512)
    gap = mean_gap(SCENARIO, jobs, 0.4)
    assert mean_gap(SCENARIO, jobs, 0.8) == pytest.approx(gap / 2)
    assert mean_gap(replace(SCENARIO, gpus=2), jobs, 0.4) == pytest.approx(gap / 2)
    with pytest.raises(ConfigError, match="--load"):
        mean_gap(SCENARIO, jobs, 0.0)


def test_impossible_scenarios_are_refused() -> None:
    """The same link twice, no GPU, loads that always fail."""
    channel = SCENARIO.channels[0]
    for change in ({"channels": (channel, channel)}, {"gpus": 0}, {"failing": 1.0}):
        with pytest.raises(ConfigError, match=r"--link|--gpus|--failing"):
            replace(SCENARIO, **change)


# -- what is drawn -----------------------------------------------------------------------------


def test_the_map_knows_where_single_ways_suffice() -> None:
    """Over a slow link recompute is hard to beat; at 1:1 both ends win; nowhere they lose."""
    points = win_map(
        SCENARIO, ["recompute", "load", "adaptive"], ratios=(0.05, 1.0, 20.0), lengths=(8192,)
    )
    slow, even, fast = (point.gain("adaptive", ("recompute", "load")) for point in points)
    assert slow is not None
    assert even is not None
    assert fast is not None
    assert even > 1.4
    assert 0.95 < slow < 1.2
    assert fast > 0.95
    assert points[1].winner == "adaptive"


def test_busy_shares_add_up() -> None:
    """Intervals are spread over the bins they cover; two resources are averaged."""
    shares = busy_shares([array("d", [0.0, 2.5, 3.0, 4.0]), array("d")], 4.0, bins=4)
    assert shares == pytest.approx([0.5, 0.5, 0.25, 0.5])
    assert busy_shares([], 0.0, bins=2) == [0.0, 0.0]


@pytest.mark.parametrize(("low", "high", "log"), [(0, 1, False), (0.01, 30, True), (3, 3, False)])
def test_ticks_are_round_and_inside(low: float, high: float, log: bool) -> None:
    """A handful of them, in order."""
    ticks = nice_ticks(low, high, log=log)
    assert 1 <= len(ticks) <= 16
    assert ticks == sorted(ticks)
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def report() -> str:
    scenario = replace(SCENARIO, gpus=2)
    runs = [simulate(scenario, batch(), name, record=True) for name in ("load", "adaptive")]
    small: Run = simulate(SCENARIO, batch(2), "adaptive", timeline=True)
    points = [Point(0.5, 1024, {"load": 2.0, "adaptive": 1.0}), Point(2.0, 1024, {"load": 1.0})]
    return render_report("A <title>", {"link": "a & b"}, runs, small, points)


def test_the_report_stands_alone() -> None:
    """No scripts, nothing from elsewhere, every picture well-formed, text escaped."""
    page = report()
    assert "<script" not in page
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?:", page)
    assert "A &lt;title&gt;" in page
    assert "a &amp; b" in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        ET.fromstring(picture)
    for heading in ("Time to first token", "Busy over time", "Both pointers", "each policy wins"):
        assert heading in page


def test_the_report_leaves_out_what_it_has_not_got() -> None:
    """Without a batch and a map there are no empty pictures."""
    runs = [simulate(SCENARIO, batch(2), "load", record=True)]
    page = render_report("t", {}, runs, None, [])
    assert page.count("<svg") == 2
    assert page == render_report("t", {}, runs, None, [])


def test_plots_map_data_to_pixels() -> None:
    """Left is left, up is up, on both kinds of axes; nothing has a negative size."""
    plot = Plot((1.0, 100.0), (0.0, 2.0), log_x=True)
    assert plot.px(1.0) < plot.px(10.0) < plot.px(100.0)
    assert plot.px(10.0) - plot.px(1.0) == pytest.approx(plot.px(100.0) - plot.px(10.0))
    assert plot.py(2.0) < plot.py(0.0)
    plot.box((10.0, 10.0), (1.0, 1.0), "#000", "a <b>")
    assert 'width="0.40"' in plot.render()
    assert "a &lt;b&gt;" in plot.render()
