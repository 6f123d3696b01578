"""Pipeline stages as real processes: each restores its own layers, and all are bit-exact."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.distributed import Mode
from cacheflow.testing.processes import run_ranks
from tests.e2e.stages import CHUNK, HIDDEN_BYTES, PREFIX, running

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.testing.processes import Seat


async def forget_and_restore(seat: Seat, folder: str) -> dict[str, Any]:
    """A cold turn, then the same from what it stored: in every way, with every kind of loss."""
    found: dict[str, Any] = {}
    async with running(seat, folder) as rank:
        assert rank.flow.restorer.stage is not None
        rank.flow.restorer.stage.mode = Mode.INDEPENDENT
        found["cold"] = await rank.turn(save=True)
        found["stored"] = Counter(key.kind.value for key in rank.store.objects)
        found["recompute"] = await rank.turn("recompute")
        found["load"] = await rank.turn("load")

        async def slow(read: object) -> None:
            await asyncio.sleep(0.002)

        rank.store.before_read = slow
        found["adaptive"] = await rank.turn("adaptive")
        rank.store.before_read = None
        chunks = sorted(rank.stored("kv"), key=lambda key: key.chunk)
        if seat.rank:
            for key in rank.stored("hidden"):
                rank.store.objects[key][-40] ^= 1
        del rank.store.objects[chunks[seat.rank]]
        found["corrupt"] = await rank.turn("load")
        found["lost"] = await rank.turn("recompute")
        for key in rank.stored("hidden"):
            del rank.store.objects[key]
        found["missing"] = await rank.turn("load")
        rank.flow.restorer.stage.mode = None
        found["dependent"] = await rank.turn("recompute")
        rank.store.objects.clear()
        found["nothing"] = await rank.turn("adaptive")
    return found


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_restore_bit_for_bit(stages_folder: Path, stages: int) -> None:
    """Cold, from activations, from loads, from both, and after losses: the KV of every stage is the
    single process's (torch.equal), and so are the tokens in every rank."""
    tokens = [int(token) for token in (stages_folder / "tokens").read_text().split()]
    ranks = run_ranks(stages, forget_and_restore, str(stages_folder), deadline=100.0)
    for number, found in enumerate(ranks):
        stored = found.pop("stored")
        assert stored.get("hidden", 0) == (PREFIX // CHUNK if number else 0)
        for way, turn in found.items():
            assert turn["tokens"] == tokens, (number, way, turn)
            assert turn["same"], (number, way, turn)
        assert found["recompute"]["recomputed"] == 1.0
        assert found["recompute"]["activations"] == (PREFIX // CHUNK if number else 0)
        assert found["load"]["recomputed"] == 0.0
        assert found["dependent"]["recomputed"] == 1.0
        assert found["dependent"]["activations"] == 0
        assert found["nothing"]["prefix"] == 0
        if number:
            assert found["corrupt"]["failed"] > 0
            assert found["lost"]["failed"] > 0
        assert found["lost"]["recomputed"] == 1.0
        extra = found["recompute"]["hidden bytes"]
        assert extra == (PREFIX // CHUNK * HIDDEN_BYTES if number else 0)
        assert 0.0 < found["adaptive"]["balance"] <= 1.0
        assert found["adaptive"]["balance"] == ranks[0]["adaptive"]["balance"]


async def lose_at_random(seat: Seat, folder: str, rounds: int) -> list[dict[str, Any]]:
    """Any KV and any activations missing or corrupt, any policy, any way to be fed."""
    common, own = random.Random(1), random.Random(100 + seat.rank)
    found = []
    async with running(seat, folder) as rank:
        assert rank.flow.restorer.stage is not None
        await rank.turn(save=True)
        whole = {key: bytes(data) for key, data in rank.store.objects.items()}
        for _ in range(rounds):
            kept = own.choice([0.3, 0.7, 0.95])
            rank.store.objects = {k: bytearray(v) for k, v in whole.items() if own.random() < kept}
            for data in rank.store.objects.values():
                if own.random() < 0.1:
                    data[own.randrange(4096, len(data))] ^= 1
            rank.flow.restorer.stage.mode = own.choice([None, *Mode])
            policy = common.choice(["adaptive", "load", "recompute", "two-pointer", "cake"])
            found.append({"policy": policy, **await rank.turn(policy)})
    return found


def test_random_losses_are_bit_exact(stages_folder: Path) -> None:
    """Three stages whose stores lost what they like: the restore ends, with the cold run's bits."""
    rounds = 100 if os.environ.get("CACHEFLOW_FULL") == "1" else 15
    tokens = [int(token) for token in (stages_folder / "tokens").read_text().split()]
    ranks = run_ranks(3, lose_at_random, str(stages_folder), rounds, deadline=100.0)
    for number, turns in enumerate(ranks):
        for turn in turns:
            assert turn["same"], (number, turn)
            assert turn["tokens"] == tokens, (number, turn)
    assert any(turn["failed"] for turns in ranks for turn in turns)
