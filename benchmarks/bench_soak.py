"""A long mixed load, compressed: four tenants, two tiers over their caps, faults now and then.

What is done is in ``soak_load``. At the end memory, open files and staging bytes are where they
were after the first third, nothing is leased, and the books agree: the index, the last event and
the medium have the same objects and bytes, all of it within its cap; every key asked for was found
or not, and every read and store ended in one way.

    make bench-soak
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rigs import show, start
from soak_load import CAPS, STAGING, TENANTS, WORKERS, Soak

RSS_SLACK: Final = 8 << 20
FILES_SLACK: Final = 4
"""I/O under way at the moment of looking."""


async def soak(operations: int, folder: Path, seed: int = 1) -> dict[str, Any]:
    """Run it; the figures, with what is wrong in ``wrong``."""
    async with AsyncExitStack() as stack:
        run = Soak(seed)
        stack.push_async_callback(run.pool.aclose)
        await run.open(folder, stack)
        seconds = await run.run(operations)
        await run.settle()
        wrong = [*flatness(run), *await books(run)]
        ledger = run.ledger
        return {
            "operations": ledger.operations,
            "seconds": seconds,
            "hit_rate": ledger.found / ledger.asked,
            "reads": dict(ledger.read_as),
            "stores": dict(ledger.stored_as),
            "evicted": dict(ledger.evicted),
            "given_up": ledger.given_up,
            "rss_mib": [round(each.rss / (1 << 20), 1) for each in ledger.samples],
            "files": [each.files for each in ledger.samples],
            "leased": [each.leased for each in ledger.samples],
            "wrong": wrong,
        }


def flatness(run: Soak) -> list[str]:
    """What has grown since the first third."""
    samples, wrong = run.ledger.samples, []
    third = len(samples) // 3
    early, late = samples[third : 2 * third], samples[2 * third :]
    grown = max(each.rss for each in late) - max(each.rss for each in early)
    if grown > RSS_SLACK:
        wrong.append(f"memory grew by {grown} bytes")
    files = max(each.files for each in late) - max(each.files for each in early)
    if files > FILES_SLACK:
        wrong.append(f"{files} more open files")
    if max(each.leased + each.quarantined for each in samples) > STAGING:
        wrong.append("more staging memory than there is")
    left = run.pool.leased_bytes + run.pool.quarantined_bytes()
    if left:
        wrong.append(f"{left} staging bytes left")
    return wrong


async def books(run: Soak) -> list[str]:
    """Where the books do not agree."""
    ledger, wrong = run.ledger, []
    if ledger.asked != ledger.found + ledger.missed:
        wrong.append("keys asked for are neither found nor missed")
    if sum(ledger.read_as.values()) != ledger.reads:
        wrong.append("reads that ended in no way, or twice")
    if sum(ledger.stored_as.values()) != ledger.stores:
        wrong.append("stores that ended in no way, or twice")
    for name, tier in run.tiers.items():
        medium = run.faulty[name].inner
        listed = [info async for info in medium.scan()]
        usage, catalogue = ledger.usage[name], tier.catalogue
        sizes = sum(info.nbytes for info in listed)
        there = {info.key for info in listed}
        known = {entry.key for entry in catalogue}
        if there - known:
            wrong.append(f"{name}: {len(there - known)} objects that the index does not know of")
        if known - there:
            wrong.append(f"{name}: {len(known - there)} objects of the index are not there")
        if sizes != await medium.used_bytes():
            wrong.append(f"{name}: the medium does not agree with itself")
        if (usage.objects, usage.used_bytes) != (len(known), catalogue.used):
            wrong.append(f"{name}: the last event does not agree with the index")
        if sizes > CAPS[name]:
            wrong.append(f"{name}: over its cap by {sizes - CAPS[name]} bytes")
    return wrong


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """In a folder of its own."""
    with TemporaryDirectory() as scratch:
        return await soak(options.operations, Path(scratch), options.seed)


def tell(found: dict[str, Any]) -> None:
    """What was done, and whether it held."""
    third = len(found["rss_mib"]) // 3
    rows = [
        ("operations", f"{found['operations']:,} in {found['seconds']:.0f} s"),
        ("hit rate", f"{found['hit_rate']:.1%}"),
        ("reads", _counts(found["reads"])),
        ("stores", _counts(found["stores"])),
        ("evicted", _counts(found["evicted"])),
        ("given up half way", f"{found['given_up']:,}"),
        ("memory, MiB", f"{found['rss_mib'][third]} after a third, {found['rss_mib'][-1]} at last"),
        ("open files", f"{found['files'][third]} after a third, {found['files'][-1]} at last"),
        ("most leased", f"{max(found['leased']) >> 10:,} KiB of {STAGING >> 10:,}"),
        ("wrong", "; ".join(found["wrong"]) or "nothing"),
    ]
    show("soak", ("what", "figure"), rows, f"{TENANTS} tenants, {WORKERS} workers")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--operations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # every fault is logged
    sys.exit(start(parse(), measure, tell))
