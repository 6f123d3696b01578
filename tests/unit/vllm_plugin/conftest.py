"""Miniature engines that are closed, and proved to have leaked nothing, after each test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.plugins.vllm.settings import VllmSettings
from tests.unit.vllm_plugin.minivllm import MiniVllm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def engine() -> Iterator[Callable[..., MiniVllm]]:
    made: list[MiniVllm] = []

    def make(*, bandwidth: float = 0.0, latency: float = 0.0, **options: Any) -> MiniVllm:
        tier = {
            "name": "store",
            "backend": "throttled",
            "options": {
                "inner": "dram",
                "inner_options": {"capacity_bytes": 64 << 20},
                "bandwidth": bandwidth,
                "latency": latency,
            },
        }
        settings = VllmSettings.parse(
            {"tiers": [tier], "staging_bytes": 4 << 20, "lookup_patience": 2.0}
        )
        made.append(MiniVllm(settings, **options))
        return made[-1]

    yield make
    for mini in made:
        mini.depot.close()
        assert len(mini.pool.free) == mini.pool_blocks - 1, "blocks leaked"
        assert not mini.desk.pending
