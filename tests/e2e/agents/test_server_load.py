"""A small part of ``make bench-server``: a real server whose clients come and go."""

from __future__ import annotations

from argparse import Namespace

import pytest
from bench_server import measure


@pytest.mark.timeout(300)
async def test_clients_that_go_away_leave_nothing() -> None:
    """A dozen clients for some seconds, a third of whose answers are left half way: every text is
    that of a cold run, nothing stays in the server, nobody is left waiting, and it ends with 0."""
    found = await measure(Namespace(seconds=2.0, sessions=12, seed=3))
    assert not found["wrong"]
    assert found["turns"]["whole"] > 0
    assert found["texts_compared"] == sum(found["turns"].values())
    assert found["worst_client_over_median_client"] < 5.0
