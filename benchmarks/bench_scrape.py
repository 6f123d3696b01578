"""What monitoring costs: a scrape with many tiers and tenants, and the events of one request.

make bench-scrape

Every series that can exist does: each tier has had each kind of event, each tenant a first token.
``scrape_ms``: over HTTP, with the headers of a real Prometheus; ``client_cpu_ms``: to write the
same series with the client library, in the format and compression that it would choose for these.
Time of the processor (``_cpu_ms``) counts both ends and says more where others use the machine too.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Final

from prometheus_client.exposition import choose_encoder

from cacheflow.metrics import PrometheusObserver, serve_metrics
from cacheflow.types import (
    Evicted,
    FirstToken,
    LayersComputed,
    LoadEnded,
    LoadOutcome,
    LookedUp,
    RestoreEnded,
    Span,
    StoreDropped,
    StoreEnded,
    TierDown,
    TierUp,
    TierUsage,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.types import Event

TIERS: Final = 50
TENANTS: Final = 20
LIMITS: Final = {"scrape_ms": 50.0, "bytes": 2_000_000}
ASKED: Final = {
    "Accept": "application/openmetrics-text;version=1.0.0;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
}
"""Headers of Prometheus 2.42."""
_LAYERS: Final = 32
_LOADS: Final = 60
"""Of one request of 16k tokens."""


def of_a_tier(tier: str) -> Iterator[Event]:
    """Every kind of event a tier can have."""
    yield LookedUp("r", tier, 4, 3, 0.0, 0.1)
    for outcome in LoadOutcome:
        yield LoadEnded("r", tier, 0, Span(0, 1), 2, 10, 0.0, 0.1, outcome)
    for ended in ("ok", "failed", "late"):
        yield StoreEnded(tier, 1, 10, 0.0, 0.1, ended)
    for reason in ("full", "leased", "quota", "late"):
        yield StoreDropped(tier, reason, 1, 10, 0.0)
    for reason in ("capacity", "quota", "full", "ttl", "pin", "corrupt", "deleted", "vanished"):
        yield Evicted(tier, reason, 1, 10, 0.0)
    yield TierUsage(tier, 1, 10, 100, 0.0)
    for direction in ("load", "store"):
        yield TierDown(tier, direction, "slow", 0.0)
        yield TierUp(tier, direction, 1.0, 1.0)


def of_a_request(tier: str, tenant: str) -> list[Event]:
    """What one restore of 16k tokens tells: lookups, tiles, loads, its end and first token."""
    cells = {"recompute": 8192 * _LAYERS, tier: 8192 * _LAYERS}
    loads = [
        LoadEnded("r", tier, 1, Span(0, 8), 2, 10, i, i + 1.0, LoadOutcome.PUBLISHED)
        for i in range(_LOADS)
    ]
    tiles = [
        LayersComputed("r", i, 512, False, Span(0, 32), (float(i),), i + 1.0) for i in range(16)
    ]
    ended = RestoreEnded(
        "r", "adaptive", "restored", 0.0, 1.0, 2.0, 16384, 256, _LAYERS, cells, 16384
    )
    first = FirstToken(
        "r", "adaptive", "hit", 0.0, 2.0, 16640, 16384, _LAYERS, {**cells, "suffix": 256}, tenant
    )
    return [LookedUp("r", tier, 64, 64, 0.0, 0.1), *tiles, *loads, ended, first]


def scraped(port: int) -> tuple[float, bytes]:
    """Seconds of one scrape as Prometheus does it, and the page."""
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=ASKED)
    start = time.perf_counter()
    with urllib.request.urlopen(asked, timeout=60) as answer:
        body = answer.read()
    seconds = time.perf_counter() - start
    return seconds, gzip.decompress(body)


def measure(rounds: int) -> dict[str, float]:
    """Seconds and bytes of a scrape, and seconds of one request's events."""
    observer = PrometheusObserver(max_tenants=TENANTS)
    for number in range(TIERS):
        for event in of_a_tier(f"tier-{number}"):
            observer(event)
    for number in range(2 * TENANTS):  # more than have a label of their own
        for event in of_a_request(f"tier-{number}", f"tenant-{number}"):
            observer(event)
    events = of_a_request("tier-0", "tenant-0")
    scrapes: list[float] = []
    cpu: list[float] = []
    client: list[float] = []
    requests: list[float] = []
    with serve_metrics(observer) as port:
        for _ in range(rounds):
            used = time.process_time()
            seconds, text = scraped(port)
            cpu.append(time.process_time() - used)
            scrapes.append(seconds)
            used = time.process_time()
            gzip.compress(choose_encoder(ASKED["Accept"])[0](observer.registry))
            client.append(time.process_time() - used)
            start = time.perf_counter()
            for event in events:
                observer(event)
            requests.append(time.perf_counter() - start)
    return {
        "tiers": TIERS,
        "tenants": TENANTS,
        "scrape_ms": statistics.median(scrapes) * 1e3,
        "scrape_cpu_ms": statistics.median(cpu) * 1e3,
        "client_cpu_ms": statistics.median(client) * 1e3,
        "bytes": len(text),
        "samples": sum(1 for line in text.splitlines() if not line.startswith(b"#")),
        "events": len(events),
        "request_us": statistics.median(requests) * 1e6,
    }


def main() -> int:
    """Exit code 1 if a scrape is over its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in found.items():
            limit = f"  (at most {LIMITS[name]:,.0f})" if name in LIMITS else ""
            print(f"{name:>12} {value:>12,.1f}{limit}")
    return int(any(found[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
