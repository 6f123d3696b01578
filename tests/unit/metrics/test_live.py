"""What is read at the time of a scrape, how late the loop is, and the endpoint that shows it."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import generate_latest

from cacheflow.errors import ConfigError
from cacheflow.metrics import LoopLag, PrometheusObserver, metrics_app, serve_metrics, watch
from cacheflow.types import StorePart, TierDown, TierUp

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence


class Flow:
    """Any flow's live numbers."""

    active_restores = 3
    staging_bytes = (10, 64)

    def pending_loads(self) -> Mapping[str, int]:
        return {"disk": 2}

    def tier_parts(self) -> Mapping[str, Sequence[StorePart]]:
        return {
            "pool": (
                StorePart("a:1", True, "tcp"),
                StorePart("b:1", False, "", repaired=5, not_repaired=2),
            )
        }

    def quarantined_bytes(self) -> Mapping[str, int]:
        return {"disk": 4096}

    def session_counts(self) -> Mapping[str, int]:
        return {"resident": 2, "forgotten": 5}


async def test_live_state_is_read_when_scraped() -> None:
    """As long as it is watched, and not after."""
    observer, flow = PrometheusObserver(), Flow()
    value = observer.registry.get_sample_value
    with watch(observer, flow, sessions=flow, model="llama", policy="adaptive"):
        assert value("cacheflow_active_restores") == 3
        flow.active_restores = 1
        assert value("cacheflow_active_restores") == 1
        assert value("cacheflow_pending_loads", {"tier": "disk"}) == 2
        assert value("cacheflow_quarantined_bytes", {"tier": "disk"}) == 4096
        up = {"tier": "pool", "part": "a:1", "transport": "tcp"}
        assert value("cacheflow_tier_part_up", up) == 1
        down = {"tier": "pool", "part": "b:1", "transport": ""}
        assert value("cacheflow_tier_part_up", down) == 0
        for result, count in (("copied", 5), ("dropped", 2)):
            labels = {"tier": "pool", "part": "b:1", "result": result}
            assert value("cacheflow_tier_part_repairs_total", labels) == count
        assert value("cacheflow_sessions", {"state": "resident"}) == 2
        assert value("cacheflow_sessions", {"state": "forgotten"}) == 5
        assert value("cacheflow_staging_used_bytes") == 10
        assert value("cacheflow_staging_capacity_bytes") == 64
    assert value("cacheflow_active_restores") is None


async def test_a_blocked_loop_is_seen() -> None:
    """A callback that computes for 60 ms makes the next timer late by some of it."""
    lags: list[float] = []
    seen = asyncio.Event()

    def observe(late: float) -> None:
        lags.append(late)
        if late > 0.02:
            seen.set()

    lag = LoopLag(observe)
    lag.start()
    loop = asyncio.get_running_loop()

    def block() -> None:
        until = loop.time() + 0.06
        while loop.time() < until:
            pass
        if not seen.is_set():  # it may have ended before the timer was due
            loop.call_later(0.01, block)

    block()
    await asyncio.wait_for(seen.wait(), 20)
    lag.stop()
    lag.stop()
    assert max(lags) > 0.02
    assert min(lags) >= 0


def test_a_sick_tier_is_a_gauge() -> None:
    """1 from the moment it is set aside until it is used again; counted for ever."""
    observer = PrometheusObserver()
    value = observer.registry.get_sample_value
    labels = {"tier": "disk", "direction": "load"}
    observer(TierDown("disk", "load", "it failed", 1.0))
    assert value("cacheflow_tier_down", labels) == 1
    observer(TierUp("disk", "load", 2.0, 3.0))
    assert value("cacheflow_tier_down", labels) == 0
    assert value("cacheflow_tier_set_aside_total", labels) == 1


def test_the_endpoint_shows_one_instance() -> None:
    """Two endpoints in one process show each its own; the port is free again afterwards."""
    first, second = PrometheusObserver(), PrometheusObserver()
    first(TierDown("one", "load", "", 0.0))
    second(TierDown("two", "load", "", 0.0))
    with serve_metrics(first) as port, serve_metrics(second) as other:
        text = _get(port)
        assert 'cacheflow_tier_down{direction="load",tier="one"} 1.0' in text
        assert "two" not in text
        assert 'tier="two"' in _get(other)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be opened"):
            serve_metrics(first, port).__enter__()
    with serve_metrics(first, port) as again:
        assert again == port


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


async def test_the_endpoint_can_be_mounted() -> None:
    """As an ASGI application: a host app gives it the request."""
    observer = PrometheusObserver()
    observer(TierDown("one", "load", "", 0.0))
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []}
    await metrics_app(observer)(scope, receive, send)
    assert sent[0]["status"] == 200
    assert b'tier="one"' in sent[1]["body"]


def test_a_large_fleet_is_cheap_to_scrape() -> None:
    """50 tiers, each with every reason there is: under 2 MB of text."""
    observer = PrometheusObserver()
    series = observer.series
    for number in range(50):
        tier = f"tier-{number}"
        for direction in ("load", "store"):
            series.transfer_seconds.labels(tier, direction).observe(0.1)
            series.transfer_bytes.labels(tier, direction).inc(1)
            series.io_busy.labels(tier, direction).inc(1)
            series.tier_down.labels(tier, direction).set(0)
        for reason in ("late", "corrupt", "missing", "short", "failed", "refused", "cancelled"):
            series.load_failures.labels(tier, reason).inc()
            series.store_dropped.labels(tier, reason).inc()
            series.evictions.labels(tier, reason).inc()
        series.lookups.labels(tier, "hit").inc()
        series.lookup_seconds.labels(tier).observe(0.1)
    assert len(generate_latest(observer.registry)) < 2_000_000
