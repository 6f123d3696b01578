"""Events turned into what people look at: Prometheus series and timelines."""

from __future__ import annotations

from cacheflow.metrics.endpoint import metrics_app, serve_metrics
from cacheflow.metrics.exposition import Exposition
from cacheflow.metrics.lag import LoopLag
from cacheflow.metrics.live import Live, LiveGauges, Sessions
from cacheflow.metrics.otel import OtelObserver
from cacheflow.metrics.prometheus import PrometheusObserver
from cacheflow.metrics.recording import EventRecorder, read_events
from cacheflow.metrics.timeline import Timeline
from cacheflow.metrics.together import together
from cacheflow.metrics.watch import watch

__all__ = [
    "EventRecorder",
    "Exposition",
    "Live",
    "LiveGauges",
    "LoopLag",
    "OtelObserver",
    "PrometheusObserver",
    "Sessions",
    "Timeline",
    "metrics_app",
    "read_events",
    "serve_metrics",
    "together",
    "watch",
]
