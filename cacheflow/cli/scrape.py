"""Two scrapes of a metrics page and what happened between them. Pure but for :func:`scrape`."""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Page", "between", "quantile", "scrape"]

_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Page:
    """All samples of one scrape: value by name and sorted labels."""

    at: float
    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def sums(self, name: str, by: str, **only: str) -> dict[str, float]:
        """``name`` added up by label ``by`` over the samples whose labels are ``only``."""
        sums: defaultdict[str, float] = defaultdict(float)
        for (found, pairs), value in self.samples.items():
            labels = dict(pairs)
            if found == name and all(labels.get(k) == v for k, v in only.items()):
                sums[labels.get(by, "")] += value
        return dict(sums)

    def total(self, name: str, **only: str) -> float:
        """``name`` added up."""
        return sum(self.sums(name, "", **only).values())


def scrape(url: str, at: float) -> Page:
    """Fetch and parse. ``url``: of the page, or ``HOST:PORT``.

    Raises:
        ConfigError: nobody answers there, or it is no metrics page.
    """
    url = url if "://" in url else f"http://{url}"
    try:
        if not urllib.parse.urlsplit(url).path.strip("/"):
            url = f"{url.rstrip('/')}/metrics"
        with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
            text = answer.read().decode()
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError(f"no metrics at {url}: {error}") from error
    return Page(at, samples)


def between(before: Page, after: Page) -> Page:
    """What counters and buckets grew by; ``at`` is the seconds between. A restarted server, whose
    counters began anew, counts from zero."""
    grown = {}
    for key, value in after.samples.items():
        was = before.samples.get(key, 0.0)
        grown[key] = value - was if value >= was else value
    return Page(after.at - before.at, grown)


def quantile(page: Page, name: str, q: float) -> float | None:
    """Of histogram ``name``, interpolated inside its bucket; None without observations."""
    buckets = sorted((float(le), n) for le, n in page.sums(f"{name}_bucket", "le").items())
    if not buckets or not buckets[-1][1]:
        return None
    wanted, floor, below = q * buckets[-1][1], 0.0, 0.0
    for le, count in buckets:
        if count >= wanted:
            if le == float("inf"):
                return floor
            return floor + (le - floor) * (wanted - below) / ((count - below) or 1.0)
        floor, below = le, count
    return floor
