"""The launcher of ranks that the distributed tests stand on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from cacheflow.testing.processes import RankError, Ranks, run_ranks

if TYPE_CHECKING:
    from cacheflow.testing.processes import Seat


def add_up(seat: Seat, offset: int) -> dict[str, object]:
    import torch
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=seat.init_method, rank=seat.rank, world_size=seat.count
    )
    total = torch.tensor([seat.rank + offset])
    distributed.all_reduce(total)
    return {"rank": seat.rank, "sum": int(total), "as torchrun": os.environ["RANK"]}


async def fail_on_odd(seat: Seat) -> int:
    if seat.rank % 2:
        raise ValueError(f"rank {seat.rank} is odd")
    return seat.rank


def wait_for_ever(seat: Seat) -> str:
    seat.say("ready", seat.rank * 10)
    return seat.hear()


def test_ranks_meet_and_their_results_come_back() -> None:
    """Three processes form a gloo group; results come in rank order."""
    results = run_ranks(3, add_up, 5)
    assert results == [{"rank": r, "sum": 18, "as torchrun": str(r)} for r in range(3)]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    """Coroutines run too; the error of a rank reaches the starter."""
    with pytest.raises(RankError, match=r"rank 1: (?s:.*)ValueError: rank 1 is odd"):
        run_ranks(2, fail_on_odd)


def test_a_rank_is_talked_to_and_killed() -> None:
    """What a rank says is waited for, what it is told arrives, and a kill is told as one."""
    with Ranks(2, wait_for_ever) as ranks:
        assert [ranks.wait_for(rank, "ready") for rank in range(2)] == [0, 10]
        ranks.kill(1)
        ranks.tell(0, "go on")
        assert ranks.result(0) == "go on"
        with pytest.raises(RankError, match="rank 1: died with exit code -9"):
            ranks.result(1)


def test_a_rank_that_hangs_meets_the_deadline() -> None:
    """Nothing is waited for longer than the deadline, and nobody is left behind."""
    with Ranks(1, wait_for_ever) as ranks:
        assert ranks.wait_for(0, "ready") == 0
        with pytest.raises(RankError, match="does not answer"):
            ranks.result(0, within=0.2)
