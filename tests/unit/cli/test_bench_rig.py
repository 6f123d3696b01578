"""The rig that benchmarks share: prompts, and runs that arrive together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.cli.bench_rig import Rig
from cacheflow.testing.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHUNK = 16


class RigEngine(FakeEngine):
    """The fake engine with what the rig asks of a serving one."""

    identity = {"model": "fake"}  # noqa: RUF012 (read only)
    layer_flops = (1.0, 1e-3)

    def segments(self, request_id: str) -> tuple[Any, ...]:
        return ()

    async def first_token(self, request_id: str) -> int:
        return 0

    async def aclose(self) -> None:
        self.shutdown()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(RigEngine(), tmp_path / "kv")
    yield made
    await made.aclose()


async def test_runs_that_arrive_together_restore_what_was_filled(rig: Rig) -> None:
    """Every chunk is stored, results come in the order given, and nothing stays open."""
    prompts = [rig.prompt([(k * i) % 97 for i in range(n)], 3) for k, n in ((3, 99), (5, 195))]
    assert [prompt.prefix for prompt in prompts] == [96, 192]
    told: list[int] = []
    await rig.fill(prompts, lambda: told.append(1))
    assert len(told) == 3 + 4
    link = await rig.open_link(1e9)
    for prompt in prompts:
        assert all(await link.lookup(prompt.keys))
    async with rig.restorer({"link": link}) as restorer:
        run = await rig.together(restorer, prompts, "load")
        again = await rig.alone(restorer, prompts[0], "recompute")
    await link.aclose()
    layers = rig.engine.layout.num_layers
    assert [each.prefix_tokens for each in run.restorations] == [96, 192]
    for each in run.restorations:
        cells = each.recomputed_cells + sum(each.loaded_cells.values())
        assert cells == each.prefix_tokens * layers
    assert run.last == max(run.ttft) >= run.mean > 0
    assert all(first >= done for first, done in zip(run.first_tokens, run.ttft, strict=True))
    assert again.recomputed_share == 1.0
    assert rig.engine.open_requests == []
    assert rig.nbytes(192) == 12 * rig.engine.layout.payload_bytes()
