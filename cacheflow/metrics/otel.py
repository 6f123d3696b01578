"""Events -> OpenTelemetry spans, one trace a request, and the GenAI time-to-first-token metric.

Events of a sampled request are kept until its first token (or its end without one) and told then,
so that nothing is done on the way to it. Needs the extra ``otel`` (the API; an application brings
the SDK and its exporters).
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, TypeAlias

from cacheflow.errors import ConfigError
from cacheflow.metrics import genai
from cacheflow.types import (
    Admitted,
    FirstToken,
    LayersComputed,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    Published,
    RestoreEnded,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Tracer, TracerProvider

    from cacheflow.types import Event

__all__ = ["OtelObserver"]

_About: TypeAlias = "dict[str, str | bool | int | float]"

_NANOSECONDS: Final = 1_000_000_000
_OPEN_REQUESTS: Final = 4096
"""Requests whose events are kept at once; the oldest is dropped over that."""
_MOST_EVENTS: Final = 4096
"""Events kept of one request."""


class OtelObserver:
    """An observer that traces a share of the requests. Providers default to the global ones.

    ``ratio``: share of the requests that are traced; an SDK's own sampler comes on top.

    Raises:
        ConfigError: the extra ``otel`` is not installed.
        ValueError: ``ratio`` is not in [0, 1].
    """

    def __init__(
        self,
        *,
        model: str = "",
        ratio: float = 1.0,
        tracers: TracerProvider | None = None,
        meters: MeterProvider | None = None,
        seed: int | None = None,
    ) -> None:
        if not 0.0 <= ratio <= 1.0:
            raise ValueError(f"ratio is a share of the requests in [0, 1], got {ratio}")
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise ConfigError("traces need: pip install 'cacheflow-kv[otel]'") from error
        self._trace = trace
        self._tracer: Tracer = trace.get_tracer("cacheflow", tracer_provider=tracers)
        self._ttft = metrics.get_meter("cacheflow", meter_provider=meters).create_histogram(
            genai.TTFT_METRIC,
            unit="s",
            description="Arrival of a request to its first token.",
            explicit_bucket_boundaries_advisory=genai.TTFT_BUCKETS,
        )
        self._model = model
        self._ratio = ratio
        self._chance = random.Random(seed)
        self._kept: OrderedDict[str, list[Event] | None] = OrderedDict()
        """Events by request; None: it is not sampled."""
        self._epoch = time.time() - time.monotonic()
        """Adds up with the restorer's clock to wall time."""

    def __call__(self, event: Event) -> None:
        match event:
            case LookedUp() | Admitted() | LayersComputed() | LoadEnded() | Published():
                self._keep(event.request_id, event)
            case RestoreEnded() if event.outcome == "restored":
                self._keep(event.request_id, event)
            case RestoreEnded():
                self._tell(event.request_id, event)
            case FirstToken():
                attributes = self._common(event.policy, event.outcome)
                self._ttft.record(event.at - event.arrival, attributes)
                self._tell(event.request_id, event)
            case _:
                pass

    def _keep(self, request_id: str, event: Event) -> None:
        if request_id not in self._kept:
            sampled = self._chance.random() < self._ratio
            self._kept[request_id] = [] if sampled else None
            while len(self._kept) > _OPEN_REQUESTS:
                self._kept.popitem(last=False)
        kept = self._kept[request_id]
        if kept is not None and len(kept) < _MOST_EVENTS:
            kept.append(event)

    def _tell(self, request_id: str, last: RestoreEnded | FirstToken) -> None:
        events = self._kept.pop(request_id, None)
        if events is None:
            return
        stop = last.at if isinstance(last, FirstToken) else last.stop
        attributes = self._common(last.policy, last.outcome)
        if isinstance(last, FirstToken):
            attributes[genai.INPUT_TOKENS] = last.prompt_tokens
            attributes[genai.CACHE_READ_TOKENS] = last.cached_tokens
            for source, cells in last.cells.items():
                attributes[genai.tokens_from(source)] = cells / last.num_layers
        root = self._tracer.start_span(
            "restore", start_time=self._ns(last.arrival), attributes=attributes
        )
        context = self._trace.set_span_in_context(root)
        for name, start, end, about in _spans([*events, last]):
            span = self._tracer.start_span(
                name, context, start_time=self._ns(start), attributes=about
            )
            span.end(self._ns(end))
        root.end(self._ns(stop))

    def _common(self, policy: str, outcome: str) -> _About:
        return {
            genai.SYSTEM: "cacheflow",
            genai.OPERATION: "text_completion",
            genai.MODEL: self._model,
            genai.POLICY: policy,
            genai.OUTCOME: outcome,
        }

    def _ns(self, at: float) -> int:
        return int((self._epoch + at) * _NANOSECONDS)


def _spans(
    events: list[Event],
) -> Iterator[tuple[str, float, float, _About]]:
    """``(name, start, stop, attributes)`` of what was done for one request."""
    computed = 0.0
    for event in events:
        match event:
            case LookedUp():
                about: _About = {"cacheflow.tier": event.channel, "cacheflow.found": event.found}
                yield "lookup", event.start, event.stop, about
            case Admitted():
                about = {"cacheflow.stored_tokens": event.stored_tokens}
                about["cacheflow.expected_seconds"] = event.expected
                yield "plan", event.start, event.stop, about
            case LayersComputed():
                name = "suffix" if event.is_suffix else "recompute"
                about = _cells(event.tile, event.layers.start, event.layers.stop)
                yield name, event.starts[0], event.stop, about
            case LoadEnded():
                about = _cells(event.tile, event.layers.start, event.layers.stop)
                about["cacheflow.tier"] = event.channel
                about["cacheflow.bytes"] = event.nbytes
                about["cacheflow.outcome"] = event.outcome.value
                if event.outcome not in (LoadOutcome.PUBLISHED, LoadOutcome.DROPPED):
                    about["error.type"] = event.outcome.value
                yield "load", event.start, event.stop, about
            case Published():
                about = _cells(event.tile, event.layers.start, event.layers.stop)
                yield "publish", event.start, event.stop, about
            case RestoreEnded() if event.outcome == "restored":
                yield "prefix", event.arrival, event.restored, {}
                computed = event.stop
            case FirstToken():
                yield "first token", computed or event.at, event.at, {}
            case _:
                pass


def _cells(tile: int, first: int, stop: int) -> _About:
    return {
        "cacheflow.tile": tile,
        "cacheflow.layer.first": first,
        "cacheflow.layer.stop": stop,
    }
