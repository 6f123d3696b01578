"""What a tool's pause is good for, and what branches share: prefetches and forks, measured.

Works on a flow whose store has the agent's history, and says what happened; knows no process and
no conversation.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from cacheflow.session import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.session import CacheFlow, Session

__all__ = ["FRACTIONS", "RESIDENT", "branches", "pauses"]

FRACTIONS: Final = (0.0, 0.25, 0.5, 0.75, 1.5)
"""Pauses by what the restore takes without one."""
RESIDENT: Final = "resident"
ROUNDS: Final = 3


async def pauses(
    flow: CacheFlow, history: Sequence[int], prompt: Sequence[int], restore: float
) -> dict[str, list[float]]:
    """TTFT of ``prompt`` by the pause before it, during which ``history``, what it goes on from, is
    prefetched; and with all of that resident."""
    found: dict[str, list[float]] = defaultdict(list)
    session = flow.session("paused")
    for _ in range(ROUNDS):
        for fraction in FRACTIONS:
            await session.forget()
            prefetch = asyncio.create_task(session.prefetch(history, policy="adaptive"))
            await asyncio.sleep(fraction * restore)  # the tool
            found[str(fraction)].append(await _ttft(session, prompt))
            await prefetch
        await session.truncate(len(history))
        found[RESIDENT].append(await _ttft(session, prompt))
    await session.forget()
    return found


async def _ttft(session: Session, prompt: Sequence[int]) -> float:
    report = Generation()
    async for _ in session.generate(prompt, max_new_tokens=1, save=False, report=report):
        pass
    assert report.ttft_seconds is not None
    return report.ttft_seconds


async def branches(
    flow: CacheFlow, history: Sequence[int], results: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Restore a session, fork it once for each of ``results`` and let the forks go on; then forget
    all, and let them go on together once more, each by itself."""
    parent, restored = flow.session("parent"), Generation()
    await parent.prefetch(history, report=restored)
    forks = [await parent.fork() for _ in results]
    prompts = [[*history, *result] for result in results]
    once = await _together(forks, prompts)
    await flow.flush()
    await flow.forget()
    again = await _together(forks, prompts)
    await flow.forget()
    assert restored.restoration is not None
    whole = restored.restoration.prefix_tokens * flow.engine.layout.num_layers
    return {
        "branches": len(forks),
        "forked": {
            "restored": _cells([restored, *once]) / whole,
            "ttft_s": [report.ttft_seconds for report in once],
        },
        "forgotten": {
            "restored": _cells(again) / whole,
            "ttft_s": [report.ttft_seconds for report in again],
        },
    }


async def _together(
    sessions: Sequence[Session], prompts: Sequence[Sequence[int]]
) -> list[Generation]:
    reports = [Generation() for _ in sessions]

    async def go_on(session: Session, prompt: Sequence[int], report: Generation) -> None:
        async for _ in session.generate(prompt, max_new_tokens=1, save=False, report=report):
            pass

    async with asyncio.TaskGroup() as group:
        for each in zip(sessions, prompts, reports, strict=True):
            group.create_task(go_on(*each))
    return reports


def _cells(reports: Sequence[Generation]) -> int:
    """Token-layers that were recomputed or loaded."""
    done = [report.restoration for report in reports if report.restoration is not None]
    return sum(each.recomputed_cells + sum(each.loaded_cells.values()) for each in done)
