"""Sessions of a real engine over a pool in trouble: a part of `make bench-pool-faults`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from bench_pool_faults import FAULTS, Campaign, wrong

from cacheflow.storage_backends.nixl.agent import why_missing
from tests.faults.campaigns import small_engine

if TYPE_CHECKING:
    from pathlib import Path


WAYS: Final = [("tcp", "all"), ("nixl", "tcp"), ("nixl", "all")]
"""Transports, and what UCX may use."""


@pytest.mark.allow_blocking  # the bench reads what it likes between two requests
@pytest.mark.parametrize(("transport", "ucx"), WAYS)
async def test_requests_complete_whatever_becomes_of_the_store(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, ucx: str
) -> None:
    """kill -9 and restart, SIGSTOP, cut connections, a black hole: every request completes with the
    tokens of a cold run, no load is corrupt, and each time the same client finds back by itself."""
    if transport == "nixl" and (reason := why_missing()) is not None:
        pytest.skip(f"no NIXL here: {reason}")
    monkeypatch.setenv("UCX_TLS", ucx)
    async with small_engine(model_folder) as engine:
        phases = await Campaign(engine, tmp_path, 16, 405, transport).run()
    assert [phase.fault for phase in phases] == list(FAULTS)
    assert wrong(phases) == []
    assert all(phase.longest_s < 5.0 for phase in phases)
