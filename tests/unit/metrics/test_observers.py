"""Events become series and timelines that say what happened."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import bench_scrape
import pytest
from prometheus_client import generate_latest

from cacheflow.metrics import PrometheusObserver, Timeline, together
from cacheflow.types import (
    FirstToken,
    LayersComputed,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    Published,
    RestoreEnded,
    Span,
    StoreEnded,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.types import Event

EVENTS: list[Event] = [
    LookedUp("r", "disk", 4, 3, 10.0, 10.1),
    LayersComputed("r", 0, 512, False, Span(0, 2), (10.1, 10.3), 10.6),
    LoadEnded("r", "disk", 1, Span(1, 2), 2, 1000, 10.1, 10.4, LoadOutcome.PUBLISHED),
    LoadEnded("r", "disk", 1, Span(0, 1), 2, 500, 10.2, 10.5, LoadOutcome.CORRUPT, "bad"),
    Published("r", 1, Span(1, 2), 1000, 10.39, 10.4),
    LayersComputed("r", 1, 16, True, Span(0, 2), (10.7, 10.8), 10.9),
    RestoreEnded(
        "r",
        "adaptive",
        "restored",
        10.0,
        10.6,
        10.9,
        1024,
        16,
        2,
        {"recompute": 1024, "disk": 1024},
    ),
    StoreEnded("disk", 1, 2000, 11.0, 11.5, "ok"),
    StoreEnded("disk", 1, 2000, 11.2, 11.6, "full"),
]


def test_series_add_up() -> None:
    """Tokens by source, busy seconds without double counting, failures and drops by reason."""
    observer = PrometheusObserver()
    for event in EVENTS:
        observer(event)
    value = observer.registry.get_sample_value
    tier = {"tier": "disk", "direction": "load"}
    assert value("cacheflow_restore_tokens_total", {"source": "recompute"}) == 512
    assert value("cacheflow_restore_tokens_total", {"source": "disk"}) == 512
    assert value("cacheflow_compute_busy_seconds_total", {"stage": "prefix"}) == pytest.approx(0.5)
    assert value("cacheflow_compute_busy_seconds_total", {"stage": "suffix"}) == pytest.approx(0.2)
    assert value("cacheflow_io_busy_seconds_total", tier) == pytest.approx(0.4)
    assert value("cacheflow_transfer_bytes_total", tier) == 1000
    failed = {"tier": "disk", "reason": "corrupt"}
    assert value("cacheflow_load_failures_total", failed) == 1
    assert value("cacheflow_lookup_chunks_total", {"tier": "disk", "result": "hit"}) == 3
    assert value("cacheflow_lookup_chunks_total", {"tier": "disk", "result": "miss"}) == 1
    assert value("cacheflow_store_dropped_total", {"tier": "disk", "reason": "full"}) == 1
    ended = {"policy": "adaptive", "outcome": "restored"}
    assert value("cacheflow_restore_seconds_sum", ended) == pytest.approx(0.6)


def test_what_was_loaded_in_vain_is_the_tiers() -> None:
    """Cells whose load came after recompute had taken them count for the tier that was too slow;
    one that was never late is known with 0."""
    observer = PrometheusObserver()
    arrived = next(each for each in EVENTS if isinstance(each, LoadEnded))
    dropped = replace(arrived, channel="slow", layers=Span(0, 4), outcome=LoadOutcome.DROPPED)
    for event in (arrived, dropped, dropped, replace(dropped, hidden=True)):
        observer(event)
    value = observer.registry.get_sample_value
    assert value("cacheflow_hedged_cells_total", {"tier": "disk"}) == 0
    assert value("cacheflow_hedged_cells_total", {"tier": "slow"}) == 2 * 4 * arrived.chunks


def test_a_pipeline_stage_has_its_number_in_the_label() -> None:
    """What compute did in stage 1 is told apart from what it did in others."""
    observer = PrometheusObserver(stage=1)
    for event in EVENTS:
        observer(event)
    value = observer.registry.get_sample_value
    for stage, seconds in (("1/prefix", 0.5), ("1/suffix", 0.2)):
        busy = value("cacheflow_compute_busy_seconds_total", {"stage": stage})
        assert busy == pytest.approx(seconds)


def test_the_balance_of_a_pipeline_is_a_gauge() -> None:
    """Each restore says how evenly the stages ended the one before; nothing of it elsewhere."""
    observer, alone = PrometheusObserver(stage=1), PrometheusObserver()
    for event in EVENTS:
        alone(event)
        if isinstance(event, RestoreEnded):
            for balance in (None, 0.9, 0.7):
                observer(replace(event, stage_balance=balance))
    name = "cacheflow_stage_balance_ratio"
    assert observer.registry.get_sample_value(name, {"stage": "1"}) == 0.7
    assert f"{name}{{" not in generate_latest(alone.registry).decode()


def test_instances_do_not_clash() -> None:
    """Two in one process have registries of their own."""
    first, second = PrometheusObserver(), PrometheusObserver()
    first(EVENTS[0])
    labels = {"tier": "disk", "result": "hit"}
    assert first.registry.get_sample_value("cacheflow_lookup_chunks_total", labels) == 3
    assert second.registry.get_sample_value("cacheflow_lookup_chunks_total", labels) is None


def test_a_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    """Complete events in microseconds, a named lane each for compute, channel and publication; a
    channel has as many as it has loads in flight."""
    timeline = Timeline()
    for event in EVENTS:
        timeline(event)
    timeline.write_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    loads = {"load disk", "load disk (2)"}
    assert set(lanes.values()) == {"lookup disk", "compute", *loads, "publish"}
    for row in lanes:  # a viewer shows nothing sensible of spans that overlap on one row
        spans = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == row)
        assert all(a + d <= b + 1e-3 for (a, d), (b, _) in pairwise(spans))
    layers = [e for e in events if e["ph"] == "X" and lanes[e["tid"]] == "compute"]
    assert [e["name"] for e in layers] == [
        "tile 0 layer 0",
        "tile 0 layer 1",
        "suffix 1 layer 0",
        "suffix 1 layer 1",
    ]
    assert [round(e["ts"]) for e in layers] == [100_000, 300_000, 700_000, 800_000]
    assert [round(e["dur"]) for e in layers] == [200_000, 300_000, 100_000, 100_000]


def test_a_timeline_is_a_picture(tmp_path: Path) -> None:
    """The PNG is one."""
    timeline = Timeline()
    for event in EVENTS:
        timeline(event)
    timeline.write_png(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_one_that_fails_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Promise 9, for several observers: it is logged, and the next one is told."""

    def failing(event: Event) -> None:
        raise RuntimeError("no room on the dashboard")

    seen: list[Event] = []
    together(failing, seen.append)(EVENTS[0])
    assert seen == EVENTS[:1]
    assert "an observer failed on LookedUp" in caplog.text


def test_tenants_have_a_bounded_number_of_labels() -> None:
    """The first ones have their own, the others are summed, and tokens are by how they came."""
    observer = PrometheusObserver(max_tenants=2)
    cells = {"resident": 2, "suffix": 4, "recompute": 6, "disk": 8, "other-disk": 10}
    for tenant in ("", "a", "b", "c", "d", "a"):
        observer(FirstToken("r", "adaptive", "hit", 1.0, 3.0, 15, 9, 2, cells, tenant))
    value = observer.registry.get_sample_value
    counts = {
        name: value("cacheflow_tenant_ttft_seconds_count", {"tenant": name})
        for name in ("default", "a", "b", "c", "other")
    }
    assert counts == {"default": 1, "a": 2, "b": 1, "c": None, "other": 2}
    for source, tokens in {"resident": 2, "loaded": 18, "computed": 10}.items():
        labels = {"tenant": "a", "source": source}
        assert value("cacheflow_tenant_prompt_tokens_total", labels) == tokens


def test_a_scrape_of_many_tiers_and_tenants_is_bounded() -> None:
    """Fifty tiers and forty tenants, twenty of them with labels: under two megabytes."""
    found = bench_scrape.measure(rounds=1)
    assert found["samples"] > 50 * 100
    assert found["bytes"] < bench_scrape.LIMITS["bytes"]
