"""An observer that also sees what events do not tell: live state, loop lag, who we are."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cacheflow.metrics.lag import LoopLag
from cacheflow.metrics.live import LiveGauges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.metrics.live import Live, Sessions
    from cacheflow.metrics.prometheus import PrometheusObserver

__all__ = ["watch"]


@contextmanager
def watch(
    observer: PrometheusObserver,
    live: Live,
    *,
    sessions: Sessions | None = None,
    model: str = "",
    policy: str = "",
) -> Iterator[None]:
    """Add live gauges of ``live`` (a restorer is one) and ``sessions`` (a flow knows them), loop
    lag and ``cacheflow_info`` to ``observer`` while the block runs. Use it on the event loop that
    serves."""
    from cacheflow import __version__

    gauges, lag = LiveGauges(live, sessions), LoopLag(observer.series.loop_lag.observe)
    observer.registry.register(gauges)
    observer.series.info.labels(__version__, model, policy).set(1)
    lag.start()
    try:
        yield
    finally:
        lag.stop()
        observer.registry.unregister(gauges)
