"""Events turned into what people look at: Prometheus series and timelines."""

from __future__ import annotations

from cacheflow.metrics.prometheus import PrometheusObserver
from cacheflow.metrics.timeline import Timeline

__all__ = ["PrometheusObserver", "Timeline"]
