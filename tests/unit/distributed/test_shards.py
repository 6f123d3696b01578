"""A store written with one layout is read with any other that the model can be cut into."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.clock import SystemClock
from cacheflow.costs import ComputeModel
from cacheflow.distributed import cut_heads, cut_layers, cut_layout
from cacheflow.errors import ConfigError
from cacheflow.kv import ChunkAuth, Stamp, chunk_keys, seal
from cacheflow.memory import StagingPool, buffer_from
from cacheflow.restore import Restorer, RestoreRequest
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers.ranks import Rank, rank_stored
from cacheflow.types import Codec, KVLayout, ObjectKey, Shard, Span, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 16
TOKENS = [random.Random(3).randrange(1000) for _ in range(9 * CHUNK + 5)]
ROOT = bytes(32)
AUTH = ChunkAuth(b"a secret of some length")


def layout_of(layers: int = 4, heads: int = 4, dim: int = 8) -> KVLayout:
    return KVLayout(layers, heads, dim, "float32", chunk_tokens=CHUNK)


def sealed(shard: Shard, chunk: int, stamp: Stamp, codec: Codec) -> Write:
    """What the rank that holds ``shard`` stores of a chunk; for threads, as sealing always is."""
    engine = FakeEngine(shard=shard)
    layers = range(len(shard.layers))
    payload = bytearray(b"".join(engine.expected(TOKENS, chunk, layer) for layer in layers))
    engine.shutdown()
    info, header = seal(
        ObjectKey(chunk_keys(ROOT, TOKENS, CHUNK)[chunk], shard.layers, shard.heads),
        shard.whole,
        memoryview(payload),
        grid_id="g",
        segments=(),
        canonical=True,
        stamp=stamp,
        codec=codec,
    )
    kept = payload[: info.nbytes - info.payload_offset]
    return Write(info, (buffer_from(header), buffer_from(kept)))


async def stored(
    store: MemoryBackend, shard: Shard, chunk: int, stamp: Stamp, codec: Codec
) -> None:
    await store.store([await asyncio.to_thread(sealed, shard, chunk, stamp, codec)])


async def restored(store: MemoryBackend, shard: Shard, stamp: Stamp) -> tuple[int, list[Any]]:
    """Restore what the rank with ``shard`` needs: cells that loads wrote, and wrong cells."""
    engine = FakeEngine(shard=shard)
    scheduler = BatchScheduler(ComputeModel(1.0, 1e-4), SystemClock())
    keys = chunk_keys(ROOT, TOKENS, CHUNK)
    await engine.open("r", TOKENS)
    pool = StagingPool(1 << 22)
    async with Restorer(engine, scheduler, {"store": store}, pool, stamp=stamp) as restorer:
        await restorer.run(RestoreRequest("r", TOKENS, keys, 0.0), load_policy("load"))
    wrong = engine.wrong_cells("r", 9 * CHUNK)
    published = engine.published
    engine.shutdown()
    await pool.aclose()
    return published, wrong


def shards(layout: KVLayout, stages: int, ranks: int) -> list[Shard]:
    return [shard for row in cut_layout(layout, stages=stages, ranks=ranks) for shard in row]


@pytest.mark.parametrize("stamp", [Stamp(), Stamp(auth=AUTH)], ids=["trusted", "authenticated"])
@pytest.mark.parametrize("codec", [Codec.RAW, Codec.ZSTD])
@pytest.mark.parametrize(
    ("written", "read"),
    [((1, 1), (1, 2)), ((1, 2), (1, 1)), ((1, 1), (2, 1)), ((4, 1), (2, 1)), ((2, 2), (1, 4))],
)
async def test_another_layout_reads_it(
    written: tuple[int, int], read: tuple[int, int], codec: Codec, stamp: Stamp
) -> None:
    """Every cell is loaded, none recomputed, and every byte is right."""
    layout, store = layout_of(), MemoryBackend()
    for shard in shards(layout, *written):
        for chunk in range(9):
            await stored(store, shard, chunk, stamp, codec)
    for shard in shards(layout, *read):
        published, wrong = await restored(store, shard, stamp)
        assert wrong == []
        assert published == 9 * len(shard.layers)


CUTS = [(s, r) for s in (1, 2, 3, 5) for r in (1, 2, 3, 6, 12)]


@given(
    dim=st.sampled_from([8, 24, 64]),
    chunks=st.lists(st.lists(st.sampled_from(CUTS), max_size=2), min_size=9, max_size=9),
    read=st.sampled_from(CUTS),
    which=st.integers(0, 59),
    lost=st.sets(st.integers(0, 200), max_size=12),
)
@settings(max_examples=25)
async def test_any_mixture_of_layouts(
    dim: int,
    chunks: Sequence[Sequence[tuple[int, int]]],
    read: tuple[int, int],
    which: int,
    lost: set[int],
) -> None:
    """Each chunk written by up to two layouts, objects missing: what is there is loaded, what is
    not recomputed, every byte right, padded layers or not."""
    layout, store = layout_of(5, 6, dim), MemoryBackend()
    for chunk, cuts in enumerate(chunks):
        for cut in cuts:
            for shard in shards(layout, *cut):
                if shard.stores:
                    await stored(store, shard, chunk, Stamp(), Codec.RAW)
    for number, key in enumerate(sorted(store.objects)):
        if number in lost:
            del store.objects[key]
    mine = shards(layout, *read)
    _, wrong = await restored(store, mine[which % len(mine)], Stamp())
    assert wrong == []


async def test_a_flipped_bit_of_a_head_fails_its_chunk_alone() -> None:
    """Heads read alone are checked alone: the wrong one is recomputed, a rank without it is not
    concerned."""
    layout, store = layout_of(), MemoryBackend()
    for chunk in range(9):
        await stored(store, Shard.of(layout), chunk, Stamp(), Codec.RAW)
    key = sorted(store.objects)[4]
    store.objects[key][-1] ^= 1  # the padding behind the last layer's last head
    with_it, without = shards(layout, 1, 2)[1], shards(layout, 1, 2)[0]
    published, wrong = await restored(store, with_it, Stamp())
    assert (published < 9 * 4, wrong) == (True, [])
    assert await restored(store, without, Stamp()) == (9 * 4, [])


async def test_sliced_reads_move_no_more_than_the_heads_take() -> None:
    """A rank with one of four heads reads a quarter of the payload, and the padding."""
    layout = layout_of(heads=4, dim=256)
    store = MemoryBackend()
    moved = 0

    async def count(read: Any) -> None:
        nonlocal moved
        moved += read.buffer.nbytes

    for chunk in range(9):
        await stored(store, Shard.of(layout), chunk, Stamp(), Codec.RAW)
    store.before_read = count
    await restored(store, shards(layout, 1, 4)[1], Stamp())
    assert moved == 9 * layout.payload_bytes() // 4


def test_replicated_heads_are_stored_once() -> None:
    """Four ranks, two heads: ranks 0 and 2 store, each object once."""
    cut = cut_heads(2, 4)
    assert cut == [(Span(0, 1), True), (Span(0, 1), False), (Span(1, 2), True), (Span(1, 2), False)]
    for ranks in (1, 2, 3, 4, 6, 12, 24):
        stored_heads = [span for span, stores in cut_heads(12, ranks) if stores]
        assert [head for span in stored_heads for head in span] == list(range(12))


@pytest.mark.parametrize(("heads", "ranks"), [(4, 3), (3, 2), (2, 3), (4, 0), (4, 6)])
def test_heads_that_cannot_be_shared_out(heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"{heads} KV heads .* {ranks} tensor-parallel ranks"):
        cut_heads(heads, ranks)


def test_layers_cut_into_stages() -> None:
    """Contiguous, complete, no stage longer than another by more than a layer."""
    assert cut_layers(5, 2) == [Span(0, 3), Span(3, 5)]
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            cut = cut_layers(layers, stages)
            assert [layer for span in cut for layer in span] == list(range(layers))
            assert max(map(len, cut)) - min(map(len, cut)) <= 1
    with pytest.raises(ConfigError, match="5 layers cannot be cut into 6"):
        cut_layers(5, 6)


async def test_copies_of_another_layout_count_as_stored() -> None:
    """Two halves are a whole copy to a rank that holds all, and a whole one is to each half; a half
    alone is none."""
    layout, store = layout_of(), MemoryBackend()
    left, right = shards(layout, 1, 2)
    await stored(store, left, 0, Stamp(), Codec.RAW)
    infos = [info async for info in store.scan()]
    assert rank_stored(infos, layout, Stamp()) is Rank.NONE
    assert rank_stored(infos, left, Stamp()) is Rank.CANONICAL
    assert rank_stored(infos, right, Stamp()) is Rank.NONE
    await stored(store, right, 0, Stamp(), Codec.RAW)
    infos = [info async for info in store.scan()]
    assert rank_stored(infos, layout, Stamp()) is Rank.CANONICAL
