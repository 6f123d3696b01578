"""Ranks on gloo that each hold some heads: restored together, bit for bit what they computed.

Ranks are real processes; what they do is in the functions whose names begin with ``rank_``, which
import what they need themselves.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.testing.processes import Ranks, run_ranks
from cacheflow.testing.tiny_model import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from cacheflow.testing.processes import Seat

CHUNK = 16
LAYERS = 4
TOKENS = [random.Random(11).randrange(320) for _ in range(265)]
KEPT = 256
"""Tokens of the prefix: four whole tiles."""
MADE = 4
DEADLINE = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of eight query and two KV heads, so that four ranks can share them."""
    return save_tiny_llama(
        tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS, num_attention_heads=8
    )


pytestmark = pytest.mark.allow_blocking  # other processes are waited for


def options() -> dict[str, Any]:
    from cacheflow.types import TileGrid

    grid = TileGrid((32, 32, 64), 128)
    sizes = {"chunk_tokens": CHUNK, "kv_bytes": 1 << 26}
    return {"dtype": "float32", "device": "cpu", "grid": grid, **sizes}


@asynccontextmanager
async def engine_of(folder: str, *, alone: bool = False) -> AsyncIterator[Any]:
    from cacheflow.plugins.tensor_parallel import TensorParallelEngine
    from cacheflow.plugins.transformers import TransformersEngine

    if alone:
        engine: Any = await TransformersEngine.open_model(folder, **options())
    else:
        engine = await TensorParallelEngine.open_model(folder, **options(), deadline=DEADLINE)
    try:
        yield engine
    finally:
        await engine.aclose()


@asynccontextmanager
async def flow_over(engine: Any, backends: Mapping[str, Any]) -> AsyncIterator[Any]:
    from cacheflow.session import CacheFlow
    from cacheflow.settings import Settings

    settings = Settings(tiers=[], staging_bytes=1 << 23, keep_costs=False)
    async with CacheFlow.open(settings, engine=engine, backends=backends) as flow:
        yield flow


@asynccontextmanager
async def folder_store(path: str) -> AsyncIterator[Any]:
    from cacheflow.storage_backends.nvme import NvmeBackend

    store = await NvmeBackend.open({"path": path})
    try:
        yield store
    finally:
        await store.aclose()


async def turn(flow: Any, policy: str, tokens: list[int] = TOKENS) -> dict[str, Any]:
    """A turn of a session that is forgotten again: tokens, KV of this rank's heads, sources."""
    from cacheflow.session import Generation

    report, session = Generation(), flow.session("talk")
    stream = session.generate(tokens, max_new_tokens=MADE, policy=policy, report=report)
    made = [token async for token in stream]
    engine, restoration = flow.engine, report.restoration
    assert restoration is not None
    (request_id,) = engine.open_requests
    kv = [digests(engine, request_id, head) for head in range(engine.layout.num_kv_heads)]
    await flow.flush()
    await flow.forget()
    return {
        "made": made,
        "kv": kv,
        "stored": sum(saved.stored for saved in (report.saved or {}).values()),
        "loaded": sum(restoration.loaded_cells.values()),
        "recomputed": restoration.recomputed_cells,
        "failed": restoration.failed_loads,
        "widths": [segment.width for segment in restoration.segments],
    }


def digests(engine: Any, request_id: str, head: int) -> list[str]:
    """Of one head's K and V, layer by layer, bit for bit."""
    import hashlib

    parts = (part for layer in range(LAYERS) for part in engine.kv(request_id, layer, KEPT))
    return [hashlib.sha256(p[head].contiguous().numpy().tobytes()).hexdigest() for p in parts]


# -- restores --------------------------------------------------------------------------------------


async def rank_restores(seat: Seat, folder: str) -> dict[str, Any]:
    """A cold run, then restores under several policies; then some with one rank's store failing."""
    from cacheflow.errors import BackendError
    from cacheflow.testing.storage import MemoryBackend

    store, chance = MemoryBackend(), random.Random(5)

    async def meddle(read: Any) -> None:
        if chance.random() < 0.05:
            raise BackendError("the disk says no", operation="load")

    async with engine_of(folder) as engine, flow_over(engine, {"mine": store}) as flow:
        told: dict[str, Any] = {"heads": [engine.shard.heads.start, engine.shard.heads.stop]}
        for policy in ("recompute", "load", "adaptive"):
            told[policy] = await turn(flow, policy)
        if seat.rank == 1:
            store.before_read = meddle
            for key in chance.sample(sorted(store.objects), 2):
                del store.objects[key]
            for data in chance.sample(list(store.objects.values()), 1):
                data[-1] ^= 1
        told["harmed"] = await turn(flow, "load")
        told["harmed again"] = await turn(flow, "adaptive")
        return told


async def alone(folder: Path) -> dict[str, Any]:
    async with engine_of(str(folder), alone=True) as engine, flow_over(engine, {}) as flow:
        return await turn(flow, "recompute")


async def test_two_ranks_restore_what_they_computed(folder: Path) -> None:
    """KV bit-identical to the cold run on every rank, whatever fails on one of them; tokens are
    those of a process that holds all heads."""
    ranks = await asyncio.to_thread(run_ranks, 2, rank_restores, str(folder), deadline=100)
    whole = await alone(folder)
    assert [rank["heads"] for rank in ranks] == [[0, 1], [1, 2]]
    cells = KEPT * LAYERS
    for rank in ranks:
        for name in ("recompute", "load", "adaptive", "harmed", "harmed again"):
            assert rank[name]["made"] == whole["made"], name
            assert rank[name]["kv"] == rank["recompute"]["kv"], name
            assert 0 not in rank[name]["widths"], "what was restored is canonical"
        assert rank["load"]["loaded"] == cells
    assert ranks[1]["harmed"]["failed"] > 0
    lost = [rank["harmed"]["recomputed"] for rank in ranks]
    assert 0 < lost[1] < cells, "rank 1 could not load some cells"
    assert lost[0] > 0, "which rank 0 then has to compute with it"


# -- other layouts ---------------------------------------------------------------------------------


async def rank_elastic(seat: Seat, folder: str, theirs: str, ours: str) -> dict[str, Any]:
    """Read what one process wrote; write for one process to read."""
    told = {}
    async with engine_of(folder) as engine:
        for name, path, policy in (("read", theirs, "load"), ("wrote", ours, "recompute")):
            async with folder_store(path) as store, flow_over(engine, {"disk": store}) as flow:
                told[name] = await turn(flow, policy)
    return told


async def names(path: str) -> list[str]:
    """Which heads the objects of a store hold, and how many there are of each."""
    async with folder_store(path) as store:
        heads = [(info.key.heads.start, info.key.heads.stop) async for info in store.scan()]
    return sorted(f"{start}-{stop} x {heads.count((start, stop))}" for start, stop in set(heads))


@pytest.mark.parametrize("ranks", [2, 4])
async def test_stores_are_read_across_layouts(folder: Path, tmp_path: Path, ranks: int) -> None:
    """Written by one process and read by two ranks, or by four that share two heads; and back.
    Heads that several ranks hold are stored once."""
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    async with engine_of(str(folder), alone=True) as engine:
        async with folder_store(theirs) as store, flow_over(engine, {"disk": store}) as flow:
            wrote = await turn(flow, "recompute")
        told = await asyncio.to_thread(
            run_ranks, ranks, rank_elastic, str(folder), theirs, ours, deadline=100
        )
        async with folder_store(ours) as store, flow_over(engine, {"disk": store}) as flow:
            read = await turn(flow, "load")
    for number, rank in enumerate(told):
        head = number * 2 // ranks
        assert rank["read"]["loaded"] == KEPT * LAYERS
        assert rank["read"]["kv"] == [wrote["kv"][head]]
        assert read["kv"][head] == rank["wrote"]["kv"][0]
        assert rank["read"]["made"] == rank["wrote"]["made"] == wrote["made"]
        assert set(rank["read"]["widths"]) == {0}, "of another summation order: not canonical here"
    assert read["loaded"] == KEPT * LAYERS
    assert read["made"] == wrote["made"]
    chunks = (len(TOKENS) + MADE - 1) // CHUNK
    owners = range(0, ranks, ranks // 2)
    assert [rank["wrote"]["stored"] for rank in told] == [
        chunks if number in owners else 0 for number in range(ranks)
    ]
    assert await names(ours) == [f"0-1 x {chunks}", f"1-2 x {chunks}"]


# -- several at once -------------------------------------------------------------------------------


async def rank_crowd(seat: Seat, folder: str) -> dict[str, Any]:
    """Three conversations at once, begun in another order on each rank; then one that rank 1 gives
    up in the middle of its restore; then another one."""
    from cacheflow.errors import PeerError
    from cacheflow.testing.storage import MemoryBackend

    store, told = MemoryBackend(), dict[str, Any]()
    prompts = {name: [number, *TOKENS[: 200 + 16 * number]] for number, name in enumerate("abc")}
    prompts["grown"] = TOKENS[:40]

    async def talk(name: str) -> None:
        stream = flow.session(name).generate(prompts[name], max_new_tokens=MADE)
        told[name].append([token async for token in stream])

    loading = asyncio.Event()

    async def hang(read: Any) -> None:
        loading.set()
        await asyncio.Event().wait()

    async with engine_of(folder) as engine, flow_over(engine, {"mine": store}) as flow:
        for _ in ("cold", "restored"):
            order = sorted("abc", reverse=bool(seat.rank))
            for name in order:
                told.setdefault(name, [])
            await asyncio.gather(*(talk(name) for name in order))
            await flow.flush()
            await flow.forget()
        store.before_read = hang
        session = flow.session("doomed").generate(prompts["a"], max_new_tokens=1, policy="load")
        first = asyncio.ensure_future(anext(session))
        await loading.wait()
        if seat.rank:
            first.cancel()
        await asyncio.wait([first])
        told["doomed"] = "cancelled" if first.cancelled() else str(first.exception())
        store.before_read = None
        told["after"] = (await turn(flow, "load", prompts["b"][:200]))["made"]
        told["grown"] = []
        await talk("grown")
        if seat.rank:
            await flow.session("grown").forget()
        prompts["grown"] = [*prompts["grown"], *told["grown"][0], 5]
        with pytest.raises(PeerError, match="they have to forget the same"):
            await talk("grown")
        await talk("grown")
    return told


async def test_ranks_need_not_begin_in_the_same_order(folder: Path) -> None:
    """Conversations at once are answered as one after another; one that a rank gives up ends on
    the other with an error that says so, and neither is disturbed by it. Nor by one that only one
    rank forgot: it is refused once, then restored."""
    one, other = await asyncio.to_thread(run_ranks, 2, rank_crowd, str(folder), deadline=100)
    for name in "abc":
        assert one[name][0] == one[name][1] == other[name][0] == other[name][1], name
    assert one["doomed"] == "another rank gave request 'doomed/1' up"
    assert other["doomed"] == "cancelled"
    assert one["after"] == other["after"]
    assert one["grown"] == other["grown"]
    assert len(one["grown"]) == 2


# -- death -----------------------------------------------------------------------------------------


async def rank_mourns(seat: Seat, folder: str, path: str) -> dict[str, Any]:
    """Go on until another rank dies; then say what was heard, and when."""
    from cacheflow.errors import PeerError

    async with engine_of(folder) as engine, folder_store(path) as store:
        async with flow_over(engine, {"disk": store}) as flow:
            await turn(flow, "recompute")
            seat.say("stored")
            began = time.monotonic()
            heard = []
            try:
                while True:
                    began = time.monotonic()
                    await turn(flow, "adaptive")
            except PeerError as error:
                heard.append(str(error))
            seconds = time.monotonic() - began
            try:
                await turn(flow, "adaptive")
            except PeerError as error:
                heard.append(str(error))
        return {"heard": heard, "seconds": seconds}


async def test_a_rank_that_is_killed_is_mourned_everywhere(folder: Path, tmp_path: Path) -> None:
    """kill -9 of one of four ranks in the middle of restores: the others raise PeerError within the
    deadline, again if asked again, close, and leave a store that is whole."""
    path = str(tmp_path / "store")

    def killed() -> list[dict[str, Any]]:
        with Ranks(4, rank_mourns, str(folder), path, deadline=100) as ranks:
            for rank in range(4):
                ranks.wait_for(rank, "stored")
            time.sleep(0.1)  # any moment will do; they restore one after another
            ranks.kill(3)
            return [ranks.result(rank) for rank in range(3)]

    for survivor in await asyncio.to_thread(killed):
        assert len(survivor["heard"]) == 2
        assert all("another rank is gone" in text for text in survivor["heard"])
        assert survivor["seconds"] < DEADLINE
    async with (
        engine_of(str(folder), alone=True) as engine,
        folder_store(path) as store,
        flow_over(engine, {"disk": store}) as flow,
    ):
        assert (await turn(flow, "load"))["loaded"] == KEPT * LAYERS
