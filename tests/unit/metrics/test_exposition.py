"""The page that is scraped: the same samples as the client library writes, however odd they are."""

from __future__ import annotations

import asyncio
import gzip
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import bench_scrape
import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    Summary,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families

from cacheflow.metrics import Exposition, PrometheusObserver, metrics_app, serve_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

ODD = 'a "b" \\ c\nd ü {}=,'


def samples(text: bytes) -> list[tuple[Any, ...]]:
    """What a scraper makes of it, without what we leave out."""
    return [
        (family.name, family.type, family.documentation, sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def test_all_that_can_happen_is_written_as_the_library_does() -> None:
    """Fifty tiers with every kind of event, twice: what is kept between two pages is right too."""
    observer = PrometheusObserver(max_tenants=3)
    page = Exposition(observer.registry)
    for number in range(10):
        for event in bench_scrape.of_a_tier(f"tier-{number}"):
            observer(event)
        for event in bench_scrape.of_a_request(f"tier-{number}", f"tenant-{number}"):
            observer(event)
        seen = samples(page.text())
        assert seen == samples(generate_latest(observer.registry))
    assert len(seen) > 700


def test_odd_labels_numbers_and_types() -> None:
    """Quotes, backslashes, newlines; infinities; types that are left to the library."""
    registry = CollectorRegistry()
    gauge = Gauge("a_gauge", f"Help: {ODD}", ("x", "b"), registry=registry)
    for number, value in enumerate((float("inf"), float("-inf"), 1e300, 1e-9, 12345678901, -0.5)):
        gauge.labels(ODD, str(number)).set(value)
    Counter("plain", "Without labels.", registry=registry).inc(3)
    Histogram("h", "Buckets.", ("x",), buckets=(0.1, 1), registry=registry).labels(ODD).observe(2)
    Summary("s", "A summary.", ("x",), registry=registry).labels("1").observe(2)
    Info("i", "Info.", registry=registry).info({"version": ODD})
    page = Exposition(registry)
    assert samples(page.text()) == samples(generate_latest(registry))
    gauge.remove(ODD, "0")
    gauge.labels("new", "0").set(float("nan"))
    assert b'a_gauge{b="0",x="new"} NaN\n' in page.text()


def test_prometheus_gets_it_compressed() -> None:
    """Asked with the headers of a real one; not asked, plain."""
    observer = PrometheusObserver()
    with serve_metrics(observer) as port:
        _, text = bench_scrape.scraped(port)
        assert b"cacheflow_fallbacks_total" in text
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.headers["Content-Encoding"] is None
            assert answer.read() == text


class Broken:
    """A collector of the host's that cannot be read."""

    def collect(self) -> Iterator[Metric]:
        raise OSError("no /proc")


def test_a_collector_that_fails_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """500 and a line in the log, not a connection that breaks; the next scrape is tried again."""
    observer = PrometheusObserver()
    broken = Broken()
    observer.registry.register(broken)
    with serve_metrics(observer) as port:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            bench_scrape.scraped(port)
        assert "the metrics page could not be made" in caplog.text
        observer.registry.unregister(broken)
        assert bench_scrape.scraped(port)[1]


class Elsewhere:
    """Notes which thread reads it."""

    threads: list[int]

    def __init__(self) -> None:
        self.threads = []

    def collect(self) -> Iterator[Metric]:
        self.threads.append(threading.get_ident())
        return iter(())


async def test_the_event_loop_does_not_write_the_page() -> None:
    """A mounted app hands it to a thread, and compresses it for who takes that."""
    observer, elsewhere = PrometheusObserver(), Elsewhere()
    observer.registry.register(elsewhere)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "headers": [(b"accept-encoding", b"gzip, br")]}
    await asyncio.wait_for(metrics_app(observer)(scope, receive, send), 20)
    assert elsewhere.threads
    assert threading.get_ident() not in elsewhere.threads
    assert (b"content-encoding", b"gzip") in sent[0]["headers"]
    assert b"cacheflow_fallbacks_total" in gzip.decompress(sent[1]["body"])
