"""What counting costs a restore: pairs with and without metrics, and the price of its events.

One prompt over a link as fast as compute, restored again and again, alternately with nobody told
and with a ``PrometheusObserver`` that is watched as in a server. A pair of restores differs by more
than metrics cost, so the events of one restore are also counted by themselves, many times: their
seconds by the seconds to the first token is the share that has to be below 1 %.

    make bench-observing ARGS="--quick"
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

from rigs import (
    balanced,
    fill,
    model_name,
    model_options,
    opened,
    prompts_of,
    recomputed,
    show,
    spread,
    start,
)

from cacheflow.cli.bench_rig import SUFFIX_TOKENS
from cacheflow.cli.output import progress
from cacheflow.metrics import Exposition, PrometheusObserver, watch
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.restore.answered import first_token
from cacheflow.scheduling import BatchScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import StorageBackend
    from cacheflow.cli.bench_rig import Prompt, Rig
    from cacheflow.types import Event, Observer

LIMIT: Final = 0.01
"""Of the time to the first token."""
_REPEATS: Final = 200
_SCRAPE_SECONDS: Final = 10.0
"""Between two scrapes, as dashboards/prometheus/prometheus.yml has it."""


def restorer(rig: Rig, link: StorageBackend, observer: Observer | None) -> Restorer:
    """One that tells ``observer``; compute costs are the rig's, so both kinds know the same."""
    scheduler = BatchScheduler(rig.costs, rig.clock, claim_ahead=rig.engine.claim_ahead)
    return Restorer(
        rig.engine, scheduler, {"link": link}, rig.pool, clock=rig.clock, observer=observer
    )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All pairs, and the events of one restore by themselves."""
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    observer = PrometheusObserver()
    async with opened(options) as rig, AsyncExitStack() as stack:
        (prompt,) = await prompts_of(rig, [options.tokens], SUFFIX_TOKENS)
        with progress() as bar:
            await fill(rig, [prompt], bar)
            _, recompute = await recomputed(rig, prompt, stack)
            link = await rig.open_link(balanced(rig, prompt, recompute, 1.0))
            stack.push_async_callback(link.aclose)
            ways = {"off": restorer(rig, link, None), "on": restorer(rig, link, observer)}
            for way in ways.values():
                await stack.enter_async_context(way)
                await rig.alone(way, prompt, "adaptive")
            task = bar.add_task("restoring", total=options.rounds * len(ways))
            for number in range(options.rounds):
                for name in list(ways)[:: 1 if number % 2 else -1]:
                    with watch(observer, ways["on"], model="bench"):
                        done = await rig.alone(ways[name], prompt, "adaptive")
                    seconds[name].append(done.computed_seconds)
                    bar.advance(task)
        events = await _events(rig, link, prompt)
    ttft, cost = statistics.median(seconds["off"]), _price(events)
    scrape = _scrape_seconds(observer)
    options.over = cost / ttft >= LIMIT
    pairs = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "model": model_name(options),
        "tokens": options.tokens,
        "ttft_s": {name: spread(each) for name, each in seconds.items()},
        "on_by_off": spread(pairs),
        "events": len(events),
        "events_s": cost,
        "share_of_ttft": cost / ttft,
        "scrape_s": scrape,
        "scrapes_share_of_a_core": scrape / _SCRAPE_SECONDS,
    }


async def _events(rig: Rig, link: StorageBackend, prompt: Prompt) -> list[Event]:
    """All that one restore tells, its first token too."""
    events: list[Event] = []
    async with restorer(rig, link, events.append) as way:
        done = await rig.alone(way, prompt, "adaptive")
    asked = RestoreRequest("r", prompt.tokens, prompt.keys, 0.0)
    return [*events, first_token(asked, done, rig.engine.layout, done.computed_seconds)]


def _price(events: Sequence[Event]) -> float:
    """Seconds to count ``events``: the median of many times."""
    observer, took = PrometheusObserver(), []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        for event in events:
            observer(event)
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def _scrape_seconds(observer: PrometheusObserver) -> float:
    page, took = Exposition(observer.registry), []
    for _ in range(20):
        begun = time.perf_counter()
        page.answer("gzip")
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def tell(found: dict[str, Any]) -> None:
    """The table."""
    rows = [
        (
            name,
            *(f"{found['ttft_s'][name][key] * 1e3:.1f}" for key in ("median", "min", "max")),
        )
        for name in ("off", "on")
    ]
    title = f"{found['tokens']} tokens, {found['model']}: ms to the first token"
    caption = (
        f"pairs, on / off: {found['on_by_off']['median']:.3f}; {found['events']} events take "
        f"{found['events_s'] * 1e3:.2f} ms: {found['share_of_ttft']:.3%} of it "
        f"(limit {LIMIT:.0%}); a scrape {found['scrape_s'] * 1e3:.1f} ms"
    )
    show(title, ("metrics", "median", "least", "most"), rows, caption)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model_options(parser)
    parser.add_argument("--tokens", type=int, help="of the prefix, a multiple of 256")
    parser.add_argument("--rounds", type=int, help="pairs")
    options = parser.parse_args()
    options.tokens = options.tokens or (2048 if options.quick else 4096)
    options.rounds = options.rounds or (10 if options.quick else 30)
    options.over = False
    return options


if __name__ == "__main__":
    asked = parse()
    sys.exit(start(asked, measure, tell) or int(asked.over))
