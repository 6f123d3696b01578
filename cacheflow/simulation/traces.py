"""Request traces in Mooncake's format: JSON lines with the names of each prompt's blocks.

A line is ``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`` with one
id for every 512 tokens of the prompt (Mooncake, arXiv 2407.00079, and its published traces). Two
prompts that share ids share those blocks from the start. Knows no hardware.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import ConfigError
from cacheflow.simulation.jobs import Job
from cacheflow.simulation.workloads import Synthetic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["BLOCK_TOKENS", "generate_trace", "load_trace", "parse_trace"]

BLOCK_TOKENS: Final = 512
_INTEGERS: Final = ("input_length", "output_length")


def load_trace(path: Path, *, limit: int | None = None, speed: float = 1.0) -> Synthetic:
    """The first ``limit`` requests of the trace at ``path``, ``speed`` times as fast.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request (the line is named).
    """
    try:
        with path.open(encoding="utf-8") as lines:
            jobs = list(_first(parse_trace(lines, str(path), speed=speed), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {error}") from error
    if not jobs:
        raise ConfigError(f"--trace {path} holds no requests")
    return Synthetic(path.name, jobs)


def _first(jobs: Iterator[Job], limit: int | None) -> Iterator[Job]:
    for count, job in enumerate(jobs):
        if count == limit:
            return
        yield job


def parse_trace(lines: Iterable[str], name: str, *, speed: float = 1.0) -> Iterator[Job]:
    """Jobs of ``lines`` (empty ones are passed over); ConfigError names file, line and key."""
    if not speed > 0:
        raise ConfigError(f"--speed {speed} must be positive")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _job(line, number, name, speed)


def _job(line: str, number: int, name: str, speed: float) -> Job:
    where = f"--trace {name}, line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: not a JSON object")
    _check(entry, where)
    total = entry["input_length"]
    ids = tuple(entry["hash_ids"])
    return Job(
        id=f"t{number}",
        arrival=entry["timestamp"] / 1e3 / speed,
        total_tokens=total,
        output_tokens=entry["output_length"],
        hash_ids=ids,
        leaves=ids[: total // BLOCK_TOKENS],
    )


def _check(entry: dict[str, Any], where: str) -> None:
    timestamp = entry.get("timestamp")
    if not _is_time(timestamp):
        raise ConfigError(f"{where}: timestamp must be milliseconds from 0 on, got {timestamp!r}")
    for key, least in zip(_INTEGERS, (1, 0), strict=True):
        value = entry.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{where}: {key} must be an integer from {least} on, got {value!r}")
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise ConfigError(f"{where}: hash_ids must be a list of integers")
    expected = -(-entry["input_length"] // BLOCK_TOKENS)
    if len(ids) != expected:
        raise ConfigError(
            f"{where}: input_length {entry['input_length']} has {expected} blocks of "
            f"{BLOCK_TOKENS} tokens but hash_ids has {len(ids)} entries"
        )


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < float("inf")


def generate_trace(
    count: int, *, seed: int = 0, gap_ms: float = 250.0, conversations: int = 20
) -> Iterator[str]:
    """Lines of a made-up trace: conversations over one system prompt that grow turn by turn.

    For tests and for trying things out; it says nothing about real traffic.
    """
    chance = random.Random(f"trace:{seed}")
    talks = [[*range(4)] for _ in range(conversations)]
    fresh, now = 1000, 0.0
    for _ in range(count):
        talk = chance.choice(talks)
        for _ in range(chance.randint(1, 12)):
            talk.append(fresh)
            fresh += 1
        if len(talk) > 200:
            del talk[4:]
        # The last block is not full: the next turn fills it, so its name changes.
        entry = {
            "timestamp": int(now),
            "input_length": len(talk) * BLOCK_TOKENS + chance.randint(1, BLOCK_TOKENS),
            "output_length": chance.randint(1, 400),
            "hash_ids": [*talk, fresh],
        }
        fresh += 1
        now += chance.expovariate(1.0) * gap_ms
        yield json.dumps(entry)
