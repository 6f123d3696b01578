"""Pipeline stages as real processes: each restores its own layers, and all are bit-exact."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.distributed import Mode
from cacheflow.testing.processes import Ranks, run_ranks
from cacheflow.types import LoadEnded, TileGrid

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from cacheflow.session import CacheFlow
    from cacheflow.testing.processes import Seat
    from cacheflow.testing.storage import MemoryBackend
    from cacheflow.types import Event

LAYERS, CHUNK = 4, 16
GRID = TileGrid((32, 32, 64), 128)
PREFIX = 384
"""Five whole tiles."""
HIDDEN_BYTES = 8192
"""Of one chunk: 16 tokens x 96 x 4 bytes, in whole pages."""
NEW = 6
PROMPT = [random.Random(3).randrange(320) for _ in range(PREFIX + 9)]


@dataclass
class Rank:
    """One stage of a running pipeline, and what is compared."""

    seat: Seat
    engine: Any
    flow: CacheFlow
    store: MemoryBackend
    reference: dict[str, Any]
    events: list[Event] = field(default_factory=list)

    async def turn(
        self, policy: str = "adaptive", *, save: bool = False, prompt: list[int] = PROMPT
    ) -> dict[str, Any]:
        """Generate after the prompt with nothing in memory; what came of it, and compare the KV."""
        from cacheflow.session import Generation

        self.events.clear()
        report = Generation()
        session = self.flow.session("talk")
        options: dict[str, Any] = {"max_new_tokens": NEW, "policy": policy}
        turns = session.generate(prompt, save=save, report=report, **options)
        tokens = [token async for token in turns]
        same = self.is_same_as_reference(self.engine.open_requests[0])
        await self.flow.flush(30.0)
        await self.flow.forget()
        restoration = report.restoration
        assert restoration is not None
        return {
            "tokens": tokens,
            "same": same,
            "prefix": restoration.prefix_tokens,
            "recomputed": restoration.recomputed_share,
            "activations": restoration.hidden_chunks,
            "hidden bytes": sum(
                e.nbytes for e in self.events if isinstance(e, LoadEnded) and e.hidden
            ),
            "failed": restoration.failed_loads,
            "balance": self.flow.restorer.stage.balance if self.flow.restorer.stage else None,
        }

    def is_same_as_reference(self, request: str) -> bool:
        """Every bit of the prefix's KV in this stage's layers."""
        import torch

        found = True
        for local, layer in enumerate(self.engine.shard.layers):
            keys, values = self.engine.kv(request, local, PREFIX)
            found &= torch.equal(keys, self.reference[f"k{layer}"])
            found &= torch.equal(values, self.reference[f"v{layer}"])
        return found

    def stored(self, kind: str) -> list[Any]:
        """Keys of the objects of a kind."""
        return [key for key in self.store.objects if key.kind.value == kind]


@asynccontextmanager
async def running(seat: Seat, folder: str, deadline: float = 30.0) -> AsyncIterator[Rank]:
    from safetensors.torch import load_file

    from cacheflow.plugins.pipeline import PipelineEngine
    from cacheflow.session import CacheFlow
    from cacheflow.settings import Settings
    from cacheflow.testing.storage import MemoryBackend

    engine = await PipelineEngine.open_model(
        Path(folder) / "model",
        dtype="float32",
        grid=GRID,
        chunk_tokens=CHUNK,
        kv_bytes=1 << 26,
        rank=seat.rank,
        ranks=seat.count,
        init_method=seat.init_method,
        deadline=deadline,
    )
    store, events = MemoryBackend(), []  # type: ignore[var-annotated]
    settings = Settings(staging_bytes=1 << 24, keep_costs=False)
    try:
        async with CacheFlow.open(
            settings, engine=engine, backends={"store": store}, observer=events.append
        ) as flow:
            reference = load_file(Path(folder) / "reference.safetensors")
            yield Rank(seat, engine, flow, store, reference, events)
    finally:
        await engine.aclose()


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the KV and tokens of its cold run in a single process."""
    from safetensors.torch import save_file

    from cacheflow.testing.tiny_model import save_tiny_llama

    folder = tmp_path_factory.mktemp("pipeline")
    save_tiny_llama(folder / "model", num_key_value_heads=6)
    kv, tokens = asyncio.run(cold_run(folder / "model"))
    save_file(kv, folder / "reference.safetensors")
    (folder / "tokens").write_text(" ".join(map(str, tokens)))
    return folder


async def cold_run(model: Path) -> tuple[dict[str, Any], list[int]]:
    from cacheflow.plugins.transformers import TransformersEngine
    from cacheflow.session import CacheFlow
    from cacheflow.settings import Settings

    engine = await TransformersEngine.open_model(
        model, dtype="float32", grid=GRID, chunk_tokens=CHUNK, kv_bytes=1 << 26
    )
    kv: dict[str, Any] = {}
    try:
        async with CacheFlow.open(Settings(keep_costs=False), engine=engine, backends={}) as flow:
            turns = flow.session("cold").generate(PROMPT, max_new_tokens=NEW)
            tokens = [token async for token in turns]
            for layer in range(LAYERS):
                keys, values = engine.kv(engine.open_requests[0], layer, PREFIX)
                kv |= {f"k{layer}": keys.contiguous(), f"v{layer}": values.contiguous()}
    finally:
        await engine.aclose()
    return kv, tokens


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_restore_bit_for_bit(folder: Path, stages: int) -> None:
    """Cold, from activations, from loads, from both, and after losses: the KV of every stage is the
    single process's (torch.equal), and so are the tokens in every rank."""
    tokens = [int(token) for token in (folder / "tokens").read_text().split()]
    ranks = run_ranks(stages, forget_and_restore, str(folder), deadline=100.0)
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


def test_random_losses_are_bit_exact(folder: Path) -> None:
    """Three stages whose stores lost what they like: the restore ends, with the cold run's bits."""
    rounds = 100 if os.environ.get("CACHEFLOW_FULL") == "1" else 15
    tokens = [int(token) for token in (folder / "tokens").read_text().split()]
    ranks = run_ranks(3, lose_at_random, str(folder), rounds, deadline=100.0)
    for number, turns in enumerate(ranks):
        for turn in turns:
            assert turn["same"], (number, turn)
            assert turn["tokens"] == tokens, (number, turn)
    assert any(turn["failed"] for turns in ranks for turn in turns)


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


@pytest.mark.parametrize(
    ("stages", "victim", "when", "frozen"),
    [
        (2, 1, "loading", False),
        (4, 1, "agreeing", False),
        (4, 3, "loading", False),
        (2, 0, "loading", True),
    ],
)
def test_a_killed_rank_is_an_error_everywhere(
    folder: Path, stages: int, victim: int, when: str, *, frozen: bool
) -> None:
    """kill -9 of one rank, in the middle of loads or before stages agree, or one that stands still:
    every other rank raises an error that names it, within the deadline, then again at once; no
    hang, nothing left behind, the stores as they were."""
    deadline = 6.0 if frozen else 20.0
    with Ranks(stages, wait_to_be_killed, str(folder), when, deadline, deadline=90.0) as ranks:
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
        found["again"] = await rank.turn("recompute")
        found["left"] = [*rank.engine.open_requests, *map(str, rank.flow.restorer._jobs)]
    return found


def test_a_turn_that_ends_on_one_rank_ends_on_all(folder: Path) -> None:
    """Cancelled on one rank it fails on the other and says which stage gave it up; asked different
    things, both say so. The next turn works, bit for bit, and nothing is left."""
    tokens = [int(token) for token in (folder / "tokens").read_text().split()]
    ranks = run_ranks(2, fall_out, str(folder), deadline=100.0)
    assert ranks[0]["cancelled"].startswith("PeerError: stage 1 gave up 'talk/")
    assert ranks[1]["cancelled"] == "True"
    for found in ranks:
        assert found["different"].startswith("PeerError: "), found
        assert "(tokens, resident, restorable)" in found["different"]
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
    folder: Path, slow: int
) -> None:
    """A goodbye that is heard before a token was passed on ends nothing: all ranks get theirs."""
    tokens = [int(token) for token in (folder / "tokens").read_text().split()]
    with Ranks(4, close_after_the_last_token, str(folder), slow, deadline=100.0) as ranks:
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
    folder: Path, leaver: int, when: str
) -> None:
    """What still needs a rank that was closed ends, on every rank, with an error that names it."""
    with Ranks(4, leave_in_the_middle, str(folder), leaver, when, deadline=100.0) as ranks:
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
