"""A tier with a codec: what it stores, whose memory it holds, and which copy of two it keeps."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import ChunkAuth, Stamp, check_stamp, decode_layers, seal, tenant_id, verify
from cacheflow.memory import InFlight, buffer_from
from cacheflow.testing.objects import load_one
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Encoded, locate
from cacheflow.tiers.ranks import Rank, rank_here, rank_of, rank_stored
from cacheflow.types import ChunkKey, Codec, KVLayout, ObjectKey, Span, TransferStatus, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import ChunkInfo, TransferResult

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=64)
WHOLE = Span(0, 3)
AUTH = ChunkAuth(b"a secret of some length")


def raw(
    number: int = 0, hold: InFlight | None = None, *, canonical: bool = True
) -> tuple[Write, bytes]:
    """A raw chunk of whole numbers of some tenant, to be written; and its payload."""
    numbers = (float((number + i) % 7) for i in range(LAYOUT.payload_bytes() // 4))
    payload = bytearray(struct.pack(f"<{LAYOUT.payload_bytes() // 4}f", *numbers))
    info, header = seal(
        ObjectKey(ChunkKey(bytes([number]) * 32), WHOLE, Span(0, 2)),
        LAYOUT,
        memoryview(payload),
        grid_id="g",
        segments=(),
        canonical=canonical,
        stamp=Stamp(tenant_id=tenant_id(b"theirs")),
    )
    return Write(info, (buffer_from(header), buffer_from(payload, hold))), bytes(payload)


async def loaded(tier: Encoded, chunk: ChunkKey) -> tuple[ChunkInfo, bytes]:
    [[info]] = await tier.lookup([chunk])
    result, data = await load_one(tier, info.key, *info.layer_range(WHOLE))
    assert result.status is TransferStatus.OK
    stored, out = bytearray(data), bytearray(LAYOUT.payload_bytes())
    verify(info, WHOLE, memoryview(stored))
    decode_layers(info, WHOLE, memoryview(stored), memoryview(out))
    return info, bytes(out)


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.INT8, Codec.FP8])
async def test_what_is_stored_raw_comes_back(codec: Codec) -> None:
    """Smaller on the way, under the same key and tenant; results speak of the write given."""
    store = MemoryBackend()
    tier = Encoded(store, codec, Stamp(auth=AUTH))
    assert tier.capabilities.codec is codec
    pairs = [raw(number) for number in range(3)]
    results = await tier.store([write for write, _ in pairs])
    for (write, payload), result in zip(pairs, results, strict=True):
        assert (result.request, result.status) == (write, TransferStatus.OK)
        info, out = await loaded(tier, write.info.key.chunk)
        assert result.nbytes == info.nbytes == len(store.objects[info.key]) < write.nbytes
        assert (info.codec, info.tenant_id) == (codec, write.info.tenant_id)
        assert (info.canonical, info.lossy) == (not codec.is_lossy, codec.is_lossy)
        check_stamp(info, Stamp(auth=AUTH))
        assert (out == payload) == (codec is Codec.ZSTD)
        found = (await locate("t", tier, [info.key.chunk], LAYOUT, allow_lossy=True)).coverage()
        stored = info.nbytes - info.payload_offset
        assert found.stride == max(-(-stored // 3), LAYOUT.layer_stride() // 6)
    await tier.aclose()


async def test_what_is_encoded_is_stored_as_it_is() -> None:
    """A chunk that comes from another tier keeps its codec."""
    source, target = MemoryBackend(), MemoryBackend()
    write, payload = raw()
    await Encoded(source, Codec.ZSTD, Stamp()).store([write])
    [data] = source.objects.values()
    [[info]] = await source.lookup([write.info.key.chunk])
    tier = Encoded(target, Codec.INT8, Stamp())
    await tier.store([Write(info, (buffer_from(bytes(data)),))])
    assert target.objects == source.objects
    assert await loaded(tier, info.key.chunk) == (info, payload)


async def test_what_is_damaged_is_not_stored() -> None:
    """Memory that is not what its header says must not get a checksum that is right: that write
    fails, the others go on."""
    store = MemoryBackend()
    (bad, _), (good, _) = raw(0), raw(1)
    view = bad.parts[1].view
    assert view is not None
    view[77] ^= 1
    tier = Encoded(store, Codec.ZSTD, Stamp())
    first, second = await tier.store([bad, good])
    assert (first.request, first.status) == (bad, TransferStatus.FAILED)
    assert isinstance(first.error, IntegrityError)
    assert second.status is TransferStatus.OK
    assert list(store.objects) == [good.info.key]


class Hanging(MemoryBackend):
    """A store that goes on after its caller has given up."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.holds: list[InFlight] = []

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        for write in writes:
            for part in write.parts:
                part.hold.acquire()
        self.begun.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_the_callers_memory_is_held_as_long_as_its_copy() -> None:
    """Given up while the inner store hangs: the caller's hold says that I/O of its chunk is still
    in flight, though it is a copy that is read."""
    hold = InFlight()
    write, _ = raw(hold=hold)
    store = Hanging()
    task = asyncio.create_task(Encoded(store, Codec.ZSTD, Stamp()).store([write]))
    await store.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hold.in_flight == 2
    hold.release()
    hold.release()
    assert hold.in_flight == 0


async def test_it_wraps_and_is_not_opened() -> None:
    """By name there is nothing to open."""
    with pytest.raises(ConfigError, match="made by Encoded"):
        await Encoded.open({})


async def test_lossy_chunks_are_only_located_where_allowed() -> None:
    """By default they are not there."""
    tier = Encoded(MemoryBackend(), Codec.INT8, Stamp())
    write, _ = raw()
    await tier.store([write])
    keys = [write.info.key.chunk]
    assert (await locate("t", tier, keys, LAYOUT)).found == 0
    assert (await locate("t", tier, keys, LAYOUT, allow_lossy=True)).found == 1
    assert (await locate("t", tier, keys, LAYOUT, Stamp(auth=AUTH), allow_lossy=True)).found == 0


def test_better_copies_replace_others() -> None:
    """Canonical before exact before lossy before none; in a lossy tier everything is lossy; what a
    reader would not take is none."""
    write, _ = raw()
    plain, _ = raw(canonical=False)
    assert rank_stored([write.info, plain.info], LAYOUT, Stamp()) is Rank.CANONICAL
    assert rank_stored([plain.info], LAYOUT, Stamp()) is Rank.EXACT
    assert rank_stored([], LAYOUT, Stamp()) is Rank.NONE
    assert rank_stored([write.info], LAYOUT, Stamp(auth=AUTH)) is Rank.NONE
    assert rank_stored([write.info], LAYOUT, Stamp(tenant_id=bytes(15) + b"x")) is Rank.NONE
    assert rank_of(canonical=True, lossy=True) is Rank.LOSSY
    assert rank_here(Rank.CANONICAL, Codec.INT8) is Rank.LOSSY
    assert rank_here(Rank.CANONICAL, Codec.ZSTD) is Rank.CANONICAL
    assert rank_here(Rank.NONE, Codec.FP8) is Rank.NONE


def test_opening_a_tier_imports_what_coding_needs() -> None:
    """The first store does not wait for imports: they may take longer than its deadline."""
    script = (
        "import asyncio, sys\n"
        "from contextlib import AsyncExitStack\n"
        "from cacheflow import Settings\n"
        "from cacheflow.clock import SystemClock\n"
        "from cacheflow.kv import Stamp\n"
        "from cacheflow.tiers.opening import open_tiers\n"
        "from cacheflow.tiers.value import FLAT\n"
        "async def main(codec):\n"
        "    tier = {'name': 'm', 'backend': 'dram', 'codec': codec}\n"
        "    async with AsyncExitStack() as stack:\n"
        "        settings = Settings(tiers=[tier], keep_costs=False)\n"
        "        await open_tiers(\n"
        "            settings, stack, FLAT, Stamp(), SystemClock(), lambda event: None\n"
        "        )\n"
        "    return sorted({'torch', 'zstandard'} & sys.modules.keys())\n"
        "print(*asyncio.run(main('zstd')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["torch", "zstandard"], done.stderr


async def test_questions_of_who_stores_reach_what_is_behind() -> None:
    """With the whole prompt's keys: a tier that evicts has to know where chunks lie in it."""
    asked: list[tuple[Sequence[ChunkKey], Sequence[int]]] = []

    class Behind(MemoryBackend):
        async def survey(
            self, keys: Sequence[ChunkKey], wanted: Sequence[int]
        ) -> list[Sequence[ChunkInfo]]:
            asked.append((keys, wanted))
            return await super().survey(keys, wanted)

    keys = [ChunkKey(bytes([number]) * 32) for number in range(4)]
    tier = Encoded(Behind(), Codec.ZSTD, Stamp())
    assert await tier.survey(keys, [2, 3]) == [[], []]
    assert asked == [(keys, [2, 3])]
    await tier.aclose()
