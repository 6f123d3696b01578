"""Pipeline stages that die, leave or are done before the others: no rank hangs, each is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.testing.processes import Ranks, run_ranks
from tests.e2e.stages import NEW, PROMPT, running

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.testing.processes import Seat


async def wait_to_be_killed(seat: Seat, folder: str, when: str, deadline: float) -> dict[str, Any]:
    """A turn that stops in the middle, until a rank dies; what every other rank then says."""
    import time

    from cacheflow.errors import PeerError

    async with running(seat, folder, deadline) as rank:
        await rank.turn(save=True)
        stored = dict(rank.store.objects)

        async def tell(read: object) -> None:
            seat.say("busy")
            await asyncio.sleep(3600.0)

        if when == "loading":
            rank.store.before_read = tell
            turn = rank.turn("load")
        elif when == "carrying":
            if seat.rank == 1:
                _stop_in_the_middle(seat, rank.engine._meeting.carriers.before)
            else:
                seat.say("busy")
            turn = rank.turn("recompute")
        elif seat.rank == 0:
            seat.say("busy")
            turn = rank.turn("recompute")
            await asyncio.to_thread(seat.hear)
        else:
            seat.say("busy")
            turn = rank.turn("recompute")
        start = time.monotonic()
        found: dict[str, Any] = {}
        try:
            await turn
        except PeerError as error:
            found["error"] = str(error)
        found["seconds"] = time.monotonic() - start
        try:
            await rank.turn("load")
        except PeerError as error:
            found["again"] = str(error)
        found["intact"] = stored == rank.store.objects
        found["left"] = [*rank.engine.open_requests, *map(str, rank.flow.restorer._jobs)]
        found["staged"] = rank.flow.restorer.pool.leased_bytes
    return found


def _stop_in_the_middle(seat: Seat, carrier: Any) -> None:
    """The next hidden state that is announced is never taken."""
    import time

    def receive(shape: object, dtype: object) -> None:
        seat.say("busy")
        time.sleep(3600.0)

    carrier.receive = receive


@pytest.mark.parametrize(
    ("stages", "victim", "when", "frozen"),
    [
        (3, 1, "carrying", False),
        (2, 1, "loading", False),
        (4, 1, "agreeing", False),
        (4, 3, "loading", False),
        (2, 0, "loading", True),
    ],
)
def test_a_killed_rank_is_an_error_everywhere(
    stages_folder: Path, stages: int, victim: int, when: str, *, frozen: bool
) -> None:
    """kill -9 of one rank, in the middle of loads, of a hidden state that it is sent, or before
    stages agree, or one that stands still: every other rank raises an error that names it, within
    the deadline, then again at once; no hang, nothing left behind, the stores as they were."""
    deadline = 6.0 if frozen else 20.0
    with Ranks(
        stages, wait_to_be_killed, str(stages_folder), when, deadline, deadline=90.0
    ) as ranks:
        for rank in range(stages):
            ranks.wait_for(rank, "busy")
        (ranks.freeze if frozen else ranks.kill)(victim)
        if when == "agreeing":
            ranks.tell(0, "go on")
        for rank in set(range(stages)) - {victim}:
            found = ranks.result(rank)
            assert f"rank {victim} is gone" in found["error"], (rank, found)
            assert f"rank {victim} is gone" in found["again"], (rank, found)
            assert found["seconds"] < 1.5 * deadline, (rank, found)
            assert found["intact"]
            assert found["left"] == []
            assert found["staged"] == 0


async def fall_out(seat: Seat, folder: str) -> dict[str, Any]:
    """Turns that end, or differ, on one rank only; and one after each that works."""
    from cacheflow.errors import PeerError

    found: dict[str, Any] = {}

    async def error_of(turn: Any) -> str:
        try:
            return str(await turn)
        except PeerError as error:
            return f"PeerError: {error}"

    async with running(seat, folder) as rank:
        await rank.turn(save=True)
        if seat.rank == 1:
            begun = asyncio.Event()

            async def wait(read: object) -> None:
                begun.set()
                await asyncio.sleep(3600.0)

            rank.store.before_read = wait
            task = asyncio.create_task(rank.turn("load"))
            await begun.wait()
            task.cancel()
            await asyncio.wait([task])
            rank.store.before_read = None
            found["cancelled"] = str(task.cancelled())
        else:
            found["cancelled"] = await error_of(rank.turn("load"))
        found["after"] = await rank.turn("load")
        other = PROMPT + [5] * (40 * seat.rank)
        found["different"] = await error_of(rank.turn("load", prompt=other))
        as_long = [PROMPT[0] + seat.rank, *PROMPT[1:]]
        found["other keys"] = await error_of(rank.turn("load", prompt=as_long))
        found["again"] = await rank.turn("recompute")
        found["left"] = [*rank.engine.open_requests, *map(str, rank.flow.restorer._jobs)]
    return found


def test_a_turn_that_ends_on_one_rank_ends_on_all(stages_folder: Path) -> None:
    """Cancelled on one rank it fails on the other and says which stage gave it up; asked different
    things, or things that have other keys, both say so. The next turn works, bit for bit, and
    nothing is left."""
    tokens = [int(token) for token in (stages_folder / "tokens").read_text().split()]
    ranks = run_ranks(2, fall_out, str(stages_folder), deadline=100.0)
    assert ranks[0]["cancelled"].startswith("PeerError: stage 1 gave up 'talk/")
    assert ranks[1]["cancelled"] == "True"
    for found in ranks:
        for what in ("different", "other keys"):
            assert found[what].startswith("PeerError: "), found
            assert "(tokens, resident, restorable, last key)" in found[what]
        for turn in (found["after"], found["again"]):
            assert turn["same"]
            assert turn["tokens"] == tokens
        assert found["left"] == []


async def close_after_the_last_token(seat: Seat, folder: str, slow: int) -> list[int]:
    """A turn; rank ``slow`` has its last token in hand, and passes it on when it is told to."""
    async with running(seat, folder) as rank:
        if seat.rank == slow:
            receive, last = rank.engine._talk.receive, len(PROMPT) + NEW - 2

            async def held(kind: str, request_id: str, key: str) -> Any:
                message = await receive(kind, request_id, key)
                if kind == "tokens" and key.endswith(f"[{last}]"):
                    seat.say("has it")
                    await asyncio.to_thread(seat.hear)
                return message

            rank.engine._talk.receive = held
        tokens: list[int] = (await rank.turn())["tokens"]
        await rank.engine.aclose()
        seat.say("closed")
    return tokens


@pytest.mark.parametrize("slow", [1, 2])
def test_a_rank_that_is_done_closes_before_others_have_their_last_token(
    stages_folder: Path, slow: int
) -> None:
    """A goodbye that is heard before a token was passed on ends nothing: all ranks get theirs."""
    tokens = [int(token) for token in (stages_folder / "tokens").read_text().split()]
    with Ranks(4, close_after_the_last_token, str(stages_folder), slow, deadline=100.0) as ranks:
        ranks.wait_for(slow, "has it")
        ranks.wait_for(3, "closed")
        ranks.tell(slow, "go on")
        assert ranks.results() == [tokens] * 4


async def leave_in_the_middle(seat: Seat, folder: str, leaver: int, when: str) -> dict[str, Any]:
    """A turn that ``leaver`` walks out of, without a word but goodbye."""
    import time

    from cacheflow.errors import PeerError

    found: dict[str, Any] = {}
    async with running(seat, folder) as rank:
        await rank.turn(save=True)
        begun = asyncio.Event()
        if when == "loading":

            async def hang(read: object) -> None:
                begun.set()
                await asyncio.sleep(3600.0)

            rank.store.before_read = hang
            task = asyncio.create_task(rank.turn("load"))
            await begun.wait()
        elif seat.rank == leaver:
            decode = rank.engine.decode

            async def stop(request_ids: Any, tokens: Any) -> Any:
                if begun.is_set():
                    await asyncio.sleep(3600.0)
                begun.set()
                return await decode(request_ids, tokens)

            rank.engine.decode = stop
            task = asyncio.create_task(rank.turn("load"))
            await begun.wait()
        else:
            task = asyncio.create_task(rank.turn("load"))
        seat.say("busy")
        await asyncio.to_thread(seat.hear)
        start = time.monotonic()
        if seat.rank == leaver:
            await rank.engine.aclose()
            task.cancel()
            await asyncio.wait([task])
            return found
        for name, turn in (("error", task), ("again", rank.turn("load"))):
            try:
                await turn
            except PeerError as error:
                found[name] = str(error)
            rank.store.before_read = None
        found["seconds"] = time.monotonic() - start
        found["left"] = list(map(str, rank.flow.restorer._jobs))
    return found


@pytest.mark.parametrize(("leaver", "when"), [(1, "loading"), (3, "loading"), (2, "decoding")])
def test_a_rank_that_leaves_in_the_middle_is_an_error_everywhere(
    stages_folder: Path, leaver: int, when: str
) -> None:
    """What still needs a rank that was closed ends, on every rank, with an error that names it."""
    with Ranks(4, leave_in_the_middle, str(stages_folder), leaver, when, deadline=100.0) as ranks:
        for rank in range(4):
            ranks.wait_for(rank, "busy")
        for rank in range(4):
            ranks.tell(rank, "go on")
        for rank in set(range(4)) - {leaver}:
            found = ranks.result(rank)
            assert f"rank {leaver} has left" in found["error"], (rank, found)
            assert f"rank {leaver} has left" in found["again"], (rank, found)
            assert found["seconds"] < 30.0, (rank, found)
            assert found["left"] == []
