"""Synthetic requests: lengths from a distribution, all at once or arriving at random.

Everything follows from the seed. Knows no hardware: what a load means in requests a second is
worked out by :mod:`cacheflow.simulation.scenario`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError
from cacheflow.simulation.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.simulation.records import Record

__all__ = ["Lengths", "Synthetic", "parse_lengths", "parse_tokens", "poisson", "synthetic"]

_LONGEST: Final = 131072


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of prefix lengths in tokens.

    ``kind``: ``fixed`` (``values`` in turn), ``uniform`` (between two values) or ``lognormal``
    (mean and sigma of the logarithm; cut at 131,072).
    """

    kind: str
    values: tuple[float, ...]

    def draw(self, index: int, chance: random.Random) -> int:
        """The length of request ``index``, at least 1."""
        if self.kind == "fixed":
            return int(self.values[index % len(self.values)])
        if self.kind == "uniform":
            return chance.randint(int(self.values[0]), int(self.values[1]))
        mean, sigma = self.values
        length = chance.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return min(max(1, round(length)), _LONGEST)


def parse_tokens(text: str) -> int:
    """``"512"``, ``"4k"`` (1,024s): a positive number of tokens, or ConfigError."""
    number, scale = (text[:-1], 1024) if text[-1:] in "kK" and len(text) > 1 else (text, 1)
    try:
        tokens = float(number) * scale
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens <= 1 << 24 or tokens != int(tokens):
        raise ConfigError(f"{text!r} is not a number of tokens such as 512 or 16k")
    return int(tokens)


def parse_lengths(text: str) -> Lengths:
    """``lognormal:15000:1.0``, ``uniform:1k:32k``, ``8k`` or ``512,1k,2k`` (taken in turn).

    Raises:
        ConfigError: none of these.
    """
    kind, *rest = text.strip().lower().split(":")
    if kind == "lognormal" and len(rest) == 2:
        return Lengths(kind, (float(parse_tokens(rest[0])), _sigma(rest[1])))
    if kind == "uniform" and len(rest) == 2:
        low, high = (parse_tokens(part) for part in rest)
        if low <= high:
            return Lengths(kind, (low, high))
    elif not rest and kind:
        return Lengths("fixed", tuple(parse_tokens(part.strip()) for part in kind.split(",")))
    raise ConfigError(
        f"--lengths {text!r} is not of the form lognormal:15000:1.0, uniform:1k:32k, 8k or "
        "512,1k,2k"
    )


def _sigma(text: str) -> float:
    try:
        sigma = float(text)
    except ValueError:
        sigma = -1.0
    if not 0 <= sigma <= 4:
        raise ConfigError(f"--lengths: sigma {text!r} is not a number between 0 and 4")
    return sigma


class Synthetic:
    """Jobs that do not depend on each other."""

    def __init__(self, name: str, jobs: Sequence[Job]) -> None:
        self.name = name
        self._jobs = tuple(jobs)

    def first(self) -> Sequence[Job]:
        return self._jobs

    def then(self, job: Job, record: Record) -> None:
        return None


def synthetic(
    count: int,
    lengths: Lengths,
    *,
    chunk_tokens: int,
    suffix_tokens: int = 256,
    coverage: float = 1.0,
    holes: float = 0.0,
    seed: int = 0,
) -> list[Job]:
    """``count`` jobs, all arriving at 0.

    Of every drawn length the first ``coverage`` share is stored, less each chunk with probability
    ``holes``; the rest and ``suffix_tokens`` new ones are always computed. Lengths are rounded to
    chunks, at least one.
    """
    for option, least in (("--requests", count), ("--suffix", suffix_tokens)):
        if least < 1:
            raise ConfigError(f"{option} {least} must be at least 1")
    for option, share in (("--coverage", coverage), ("--holes", holes)):
        if not 0 <= share <= 1:
            raise ConfigError(f"{option} {share:g} must be between 0 and 1")
    chance = random.Random(f"synthetic:{seed}")
    jobs = []
    for index in range(count):
        chunks = max(1, round(lengths.draw(index, chance) / chunk_tokens))
        stored = math.floor(chunks * coverage)
        gaps = frozenset(c for c in range(stored) if holes and chance.random() < holes)
        prefix, total = stored * chunk_tokens, chunks * chunk_tokens + suffix_tokens
        jobs.append(Job(f"r{index}", 0.0, total, prefix_tokens=prefix, holes=gaps))
    return jobs


def poisson(jobs: Sequence[Job], mean_gap: float, seed: int = 0) -> list[Job]:
    """The same jobs arriving one after the other, ``mean_gap`` seconds apart on average."""
    chance, now, arriving = random.Random(f"poisson:{seed}"), 0.0, []
    for job in jobs:
        now += chance.expovariate(1.0) * mean_gap
        arriving.append(replace(job, arrival=now))
    return arriving
