"""Requests of a real engine while stores join and die: a small part of `make bench-pool-peers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench_pool_peers import PHASES, Campaign, wrong

from cacheflow.storage_backends.nixl.agent import why_missing
from cacheflow.testing.etcd_server import find_etcd
from tests.faults.campaigns import small_engine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.allow_blocking  # the bench reads what it likes between two requests
@pytest.mark.skipif(find_etcd() is None, reason="no etcd here: apt-get install etcd-server")
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
async def test_stores_come_and_go_and_no_request_notices(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Of three stores under load, found through etcd, one is killed after a fourth has joined: no
    request fails, all have the tokens of a cold run, each phase loads from the pool; both times the
    keys that move are a store's share, to 5 %, and none moves between stores that stay."""
    if transport == "nixl" and (reason := why_missing()) is not None:
        pytest.skip(f"no NIXL here: {reason}")
    monkeypatch.setenv("UCX_TLS", "all")
    async with small_engine(model_folder) as engine:
        found = await Campaign(engine, tmp_path, 18, 405, transport).run()
    assert [phase.name for phase in found.phases] == list(PHASES)
    assert wrong(found) == []
