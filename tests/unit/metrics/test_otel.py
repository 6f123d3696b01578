"""Traces as an SDK's exporter gets them: one a request, the parts inside it, wall-clock times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from cacheflow.metrics import OtelObserver, genai
from cacheflow.types import (
    Admitted,
    FirstToken,
    LayersComputed,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    Published,
    RestoreEnded,
    Span,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from cacheflow.types import Event


def request(name: str, at: float, outcome: str = "restored") -> list[Event]:
    """All that happens to one request from ``at`` on."""
    cells = {"recompute": 1024, "disk": 1024}
    ended = RestoreEnded(
        name, "adaptive", outcome, at, at + 0.6, at + 0.9, 1024, 16, 2, cells, 1024
    )
    events: list[Event] = [
        LookedUp(name, "disk", 4, 3, at, at + 0.1),
        Admitted(name, "adaptive", at + 0.1, at + 0.1, 768, 0.7),
        LayersComputed(name, 0, 512, False, Span(0, 2), (at + 0.1, at + 0.3), at + 0.6),
        LoadEnded(name, "disk", 1, Span(0, 2), 2, 9, at + 0.1, at + 0.4, LoadOutcome.PUBLISHED),
        LoadEnded(name, "disk", 1, Span(0, 2), 2, 9, at + 0.1, at + 0.4, LoadOutcome.CORRUPT, "x"),
        Published(name, 1, Span(0, 2), 9, at + 0.39, at + 0.4),
        LayersComputed(name, 1, 16, True, Span(0, 2), (at + 0.7, at + 0.8), at + 0.9),
        ended,
    ]
    if outcome == "restored":
        sources = {"suffix": 32, **cells}
        events.append(FirstToken(name, "adaptive", "hit", at, at + 0.95, 1040, 1024, 2, sources))
    return events


class Traced:
    """An observer with providers of its own and what they got."""

    def __init__(self, **options: float) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self._tracers = TracerProvider()
        self._tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.observer = OtelObserver(
            model="llama",
            tracers=self._tracers,
            meters=MeterProvider([self.reader]),
            seed=1,
            **options,
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


def test_a_request_is_one_trace() -> None:
    """Its parts are children of one span that lasts from arrival to the first token."""
    traced, now = Traced(), time.monotonic()
    for event in request("r", now):
        traced.observer(event)
    (root,) = traced.spans("restore")
    attributes = root.attributes or {}
    assert attributes["gen_ai.usage.input_tokens"] == 1040
    assert attributes["gen_ai.usage.cache_read.input_tokens"] == 1024
    assert attributes["cacheflow.tokens.disk"] == 512
    assert attributes["gen_ai.request.model"] == "llama"
    assert root.start_time is not None
    assert root.end_time is not None
    assert (root.end_time - root.start_time) / 1e9 == pytest.approx(0.95, abs=1e-3)
    assert root.start_time / 1e9 == pytest.approx(time.time(), abs=5)
    children = [span for span in traced.exporter.get_finished_spans() if span is not root]
    names = sorted(span.name for span in children)
    parts = ["load", "load", "lookup", "plan", "prefix", "publish", "recompute", "suffix"]
    assert names == ["first token", *parts]
    for span in children:
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    outcomes = {(span.attributes or {})["cacheflow.outcome"] for span in traced.spans("load")}
    assert outcomes == {"published", "corrupt"}


def test_a_cancelled_request_is_told_too() -> None:
    """It has no first token, and no tokens."""
    traced = Traced()
    for event in request("r", 1.0, "cancelled"):
        traced.observer(event)
    (root,) = traced.spans("restore")
    assert (root.attributes or {})["cacheflow.outcome"] == "cancelled"
    assert "gen_ai.usage.input_tokens" not in (root.attributes or {})


def test_a_share_is_traced_and_all_are_measured() -> None:
    """A tenth of a thousand requests, near enough; every first token is in the histogram."""
    traced = Traced(ratio=0.1)
    for number in range(1000):
        for event in request(f"r{number}", float(number)):
            traced.observer(event)
    assert 70 <= len(traced.spans("restore")) <= 130
    data = traced.reader.get_metrics_data()
    assert data is not None
    metric = data.resource_metrics[0].scope_metrics[0].metrics[0]
    assert metric.name == "gen_ai.server.time_to_first_token"
    points: list[Any] = list(metric.data.data_points)
    assert points[0].explicit_bounds == genai.TTFT_BUCKETS
    assert sum(point.count for point in points) == 1000


def test_names_are_those_of_the_conventions() -> None:
    """As the released package of OpenTelemetry's semantic conventions spells them."""
    assert genai.SYSTEM == gen_ai_attributes.GEN_AI_PROVIDER_NAME
    assert genai.OPERATION == gen_ai_attributes.GEN_AI_OPERATION_NAME
    assert genai.MODEL == gen_ai_attributes.GEN_AI_REQUEST_MODEL
    assert genai.INPUT_TOKENS == gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS
    assert genai.CACHE_READ_TOKENS == gen_ai_attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS
    assert genai.TTFT_METRIC == gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN


def test_requests_that_never_end_do_not_pile_up() -> None:
    """The oldest are dropped."""
    traced = Traced()
    for number in range(5000):
        traced.observer(LookedUp(f"r{number}", "disk", 1, 1, 0.0, 0.1))
    assert len(traced.observer._kept) == 4096


def test_ratio_is_a_share() -> None:
    with pytest.raises(ValueError, match="ratio"):
        OtelObserver(ratio=2.0)
