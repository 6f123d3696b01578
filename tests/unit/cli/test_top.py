"""`cacheflow top` against a real endpoint: rates between two looks."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cacheflow.cli import app
from cacheflow.cli.scrape import Page, between, quantile, scrape
from cacheflow.cli.top import figures_of, view
from cacheflow.errors import ConfigError
from cacheflow.metrics import PrometheusObserver, serve_metrics
from cacheflow.types import (
    FirstToken,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    Span,
    TierDown,
    TierUsage,
)


def serve_one(observer: PrometheusObserver, seconds: float) -> None:
    """As after a request whose first token took ``seconds``."""
    observer(LookedUp("r", "disk", 4, 3, 0.0, 0.1))
    observer(LoadEnded("r", "disk", 0, Span(0, 2), 2, 1000, 0.0, 0.5, LoadOutcome.PUBLISHED))
    cells = {"disk": 64, "suffix": 16}
    observer(FirstToken("r", "adaptive", "hit", 0.0, seconds, 40, 32, 2, cells))


def test_rates_are_of_the_time_between_two_looks() -> None:
    """What was counted before the first look does not count."""
    observer = PrometheusObserver()
    with serve_metrics(observer) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        serve_one(observer, 100.0)
        observer(TierUsage("disk", 1, 512, 1024, 0.0))
        before = scrape(url, 10.0)
        for _ in range(10):
            serve_one(observer, 0.15)
        observer(TierDown("disk", "load", "", 0.0))
        after = scrape(url, 12.0)
    found = figures_of(between(before, after), after)
    assert found["requests_per_second"] == pytest.approx(5)
    assert found["ttft_seconds"]["p50"] == pytest.approx(0.15, abs=0.05)
    assert found["tokens_per_second"] == {"disk": 160, "suffix": 40}
    disk = found["tiers"]["disk"]
    assert disk["found"] == pytest.approx(0.75)
    assert disk["load_bytes_per_second"] == pytest.approx(5000)
    assert (disk["used_bytes"], disk["capacity_bytes"], disk["down"]) == (512, 1024, 1)
    assert view(found)


def test_a_tier_is_shown_before_anything_was_looked_up() -> None:
    """Its size is known from the start; prompts shorter than a chunk ask no tier."""
    observer = PrometheusObserver()
    observer(TierUsage("disk", 0, 0, 1024, 0.0))
    with serve_metrics(observer) as port:
        page = scrape(f"http://127.0.0.1:{port}", 1.0)
    disk = figures_of(between(page, page), page)["tiers"]["disk"]
    assert (disk["found"], disk["capacity_bytes"]) == (None, 1024)


def test_a_restarted_server_counts_from_zero() -> None:
    """Its counters are lower than before: nothing negative is shown."""
    key = ("cacheflow_ttft_seconds_count", ())
    assert between(Page(0.0, {key: 9.0}), Page(1.0, {key: 2.0})).samples[key] == 2.0


def test_quantiles_without_observations() -> None:
    assert quantile(Page(0.0, {}), "cacheflow_ttft_seconds", 0.5) is None


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, as JSON and for people; nobody there is one line."""
    observer = PrometheusObserver()
    serve_one(observer, 0.1)
    with serve_metrics(observer) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        result = CliRunner().invoke(app, ["top", url, "-i", "0.1", "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["tiers"]["disk"]["found"] is None
        shown = CliRunner().invoke(app, ["top", url, "-i", "0.1", "--once"])
        assert "disk" in shown.output
        short = CliRunner().invoke(app, ["top", f"127.0.0.1:{port}", "-i", "0.1", "--json"])
        assert short.exit_code == 0, short.output
    gone = CliRunner().invoke(app, ["top", url])
    assert gone.exit_code == 2


@pytest.mark.parametrize("url", ["http://[::1", "http://x:y", "ftp://[", "//"])
def test_what_is_no_address_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="no metrics at"):
        scrape(url, 0.0)
