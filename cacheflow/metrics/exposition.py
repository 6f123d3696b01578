"""A registry as the text that Prometheus scrapes (format 0.0.4), in half the time that the client
library takes, and a quarter of what it takes for what Prometheus asks by itself (OpenMetrics).

What makes the library slow is putting together each line's name and labels anew. They never change
once a series exists, so they are kept here. Left out are the ``_created`` samples, which in this
format are series of their own that nothing asks for.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Final

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["Exposition"]

_SUFFIXES: Final = {"counter": "_total", "gauge": "", "histogram": ""}
"""Of a family's name in its HELP and TYPE lines; the library writes types that are not here."""
_NOT_FINITE: Final = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_LEVEL: Final = 1
"""Of gzip: a fifteenth of the time of the library's, for a third more bytes."""


class Exposition:
    """Writes ``registry`` again and again. Safe in any thread, one call at a time or several."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._heads: dict[tuple[str, ...], str] = {}
        """What stands before the value, by sample name and label values: as many as series."""

    def text(self) -> bytes:
        """The page, as UTF-8."""
        parts: list[str] = []
        for metric in self._registry.collect():
            suffix = _SUFFIXES.get(metric.type)
            if suffix is None:
                parts.append(generate_latest(_One(metric)).decode())
                continue
            name = metric.name + suffix
            about = metric.documentation.replace("\\", r"\\").replace("\n", r"\n")
            parts.append(f"# HELP {name} {about}\n# TYPE {name} {metric.type}\n")
            parts += self._lines(metric)
        return "".join(parts).encode()

    def answer(self, accepted: str = "") -> tuple[bytes, dict[str, str]]:
        """The page and its HTTP headers, for a client whose Accept-Encoding is ``accepted``."""
        text, headers = self.text(), {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        if "gzip" in accepted:
            headers["Content-Encoding"] = "gzip"
            text = gzip.compress(text, _LEVEL)
        return text, headers

    def _lines(self, metric: Metric) -> Iterator[str]:
        heads, created = self._heads, metric.name + "_created"
        for name, labels, value, *_ in metric.samples:
            if name == created:
                continue
            key = (name, *labels.values())
            head = heads.get(key)
            if head is None:
                head = heads[key] = _head(name, labels)
            number = repr(float(value))
            if "n" in number:  # nan, inf, -inf
                number = _NOT_FINITE[number]
            yield f"{head} {number}\n"


class _One:
    """A registry of one family that has been collected already."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _head(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    pairs = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
