"""The server's own series, in the registry of the flow's observer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

if TYPE_CHECKING:
    from cacheflow.plugins.openai_server.admission import Admission
    from cacheflow.plugins.openai_server.answering import Answer
    from cacheflow.plugins.openai_server.conversations import Conversations

__all__ = ["ServerSeries"]

_SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0),
)


class ServerSeries:
    """Counters and gauges of the HTTP side; what a restore did is in the core's series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        name = "cacheflow_server"
        self.requests = Counter(
            f"{name}_requests",
            "Requests that were answered, by HTTP status; 499: the client had gone.",
            ("endpoint", "status"),
            registry=registry,
        )
        self.seconds = Histogram(
            f"{name}_request_seconds",
            "From the first byte of a request to the last of its answer.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft = Histogram(
            f"{name}_ttft_seconds",
            "From a request's arrival, queueing and tokenizing included, to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.rejected = Counter(
            f"{name}_rejected", "Requests that were sent away.", ("reason",), registry=registry
        )
        self.tokens = Counter(
            f"{name}_tokens", "Tokens of answered requests.", ("kind",), registry=registry
        )
        self.divergences = Counter(
            f"{name}_prefix_divergences",
            "Turns whose prompt left what their conversation held.",
            ("reason",),
            registry=registry,
        )
        self.running = Gauge(f"{name}_running", "Requests in the engine.", registry=registry)
        self.waiting = Gauge(f"{name}_waiting", "Requests that wait.", registry=registry)
        self.conversations = Gauge(
            f"{name}_conversations", "Conversations that are known.", registry=registry
        )

    def watch(self, admission: Admission, conversations: Conversations) -> None:
        """Read the gauges from these when they are scraped."""
        self.running.set_function(lambda: admission.running)
        self.waiting.set_function(lambda: admission.waiting)
        self.conversations.set_function(lambda: len(conversations))

    def answered(self, answer: Answer) -> None:
        """Count one answer, finished or given up."""
        self.tokens.labels("prompt").inc(answer.prompt_tokens)
        self.tokens.labels("completion").inc(len(answer.tokens))
        self.tokens.labels("cached").inc(answer.report.cached_tokens)
        if answer.ttft_seconds is not None:
            self.ttft.observe(answer.ttft_seconds)
        if answer.divergence is not None:
            self.divergences.labels(answer.divergence.reason.value).inc()
