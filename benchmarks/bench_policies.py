"""Policies against each other, bounds and published figures, in virtual time.

    make bench-policies                  (ARGS="--only open,map" to choose, ARGS=--json for figures)

The scheduler and its policies are the ones that serve; GPUs, models and links are the presets of
``cacheflow.simulation``. Every figure follows from the seeds. Prints markdown.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from policy_papers import claims, papers
from policy_powers import ablation, losing_map
from policy_runs import run
from policy_streams import closed, open_arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.pool import Pool

    from policy_runs import Case, Outcome, Runner, Table

EXPERIMENTS: Final[dict[str, Callable[[Runner], list[Table]]]] = {
    "open": open_arrivals,
    "closed": closed,
    "papers": papers,
    "claims": claims,
    "ablation": ablation,
    "map": losing_map,
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="(default: %(default)s)")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    unknown = set(options.only) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} not among {', '.join(EXPERIMENTS)}")
    return options


def _run_all(pool: Pool, cases: Sequence[Case]) -> list[Outcome]:
    return pool.map(run, cases, chunksize=1)


def main() -> None:
    """Run what was chosen, print as it comes."""
    options = parse()
    found: dict[str, list[Table]] = {}
    with multiprocessing.Pool(options.processes) as pool:
        run_all: Runner = partial(_run_all, pool)
        for name in options.only:
            found[name] = EXPERIMENTS[name](run_all)
            if not options.json:
                print(f"## {name}\n")
                for table in found[name]:
                    print(table.markdown(), flush=True)
    if options.json:
        tables = {name: [asdict(table) for table in each] for name, each in found.items()}
        print(json.dumps(tables, indent=2))


if __name__ == "__main__":
    main()
