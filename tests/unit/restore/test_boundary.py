"""Boundary activations: what they are as objects, who may use them, how many are worth storing."""

from __future__ import annotations

import struct

import pytest

from cacheflow.costs import ChannelModel, ComputeModel
from cacheflow.errors import ConfigError, IntegrityError
from cacheflow.kv import Stamp, boundary_shard, seal, verify
from cacheflow.memory import buffer_from
from cacheflow.restore.boundary import WorthStoring
from cacheflow.testing.engine import FakeEngine
from cacheflow.testing.storage import MemoryBackend
from cacheflow.tiers import Encoded, locate
from cacheflow.types import (
    ChunkKey,
    Codec,
    KVLayout,
    ObjectKey,
    ObjectKind,
    Shard,
    Span,
    Write,
)

WHOLE = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float32", chunk_tokens=64)
STAGE = Shard(WHOLE, Span(2, 4), Span(0, 2))
BOUNDARY = boundary_shard(WHOLE, 48, "float32", 2)
KEY = ChunkKey(bytes(32))


def activation(grid_id: str = "g", *, canonical: bool = True, layer: int = 2) -> Write:
    """Of one chunk: 64 tokens of 48 numbers."""
    part = boundary_shard(WHOLE, 48, "float32", layer)
    payload = bytearray(struct.pack("<3072f", *(float(i % 13) for i in range(64 * 48))))
    payload += bytes(part.layout.payload_bytes() - len(payload))
    info, header = seal(
        ObjectKey(KEY, part.layers, part.heads, part.kind),
        part.whole,
        memoryview(payload),
        grid_id=grid_id,
        segments=(),
        canonical=canonical,
    )
    return Write(info, (buffer_from(header), buffer_from(payload)))


def test_an_activation_is_as_large_as_its_hidden_state() -> None:
    """Tokens times hidden size times item, in whole pages; named by its layer, of its own kind."""
    assert BOUNDARY.layout.layer_bytes() == 64 * 48 * 4
    assert BOUNDARY.layout.payload_bytes() == 12288
    assert BOUNDARY.kind is ObjectKind.HIDDEN
    assert BOUNDARY.layers == Span(2, 3)
    with pytest.raises(ConfigError, match="47 is odd"):
        boundary_shard(WHOLE, 47, "float32", 2)


def test_every_byte_of_an_activation_is_checked() -> None:
    """A flipped bit anywhere in the payload, padding included, is found."""
    write = activation()
    view = write.parts[1].view
    assert view is not None
    verify(write.info, BOUNDARY.layers, view)
    for at in range(0, len(view), 487):
        view[at] ^= 4
        with pytest.raises(IntegrityError):
            verify(write.info, BOUNDARY.layers, view)
        view[at] ^= 4


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (activation(), True),
        (activation("another torch"), False),
        (activation(canonical=False), False),
        (activation(layer=1), False),
    ],
)
async def test_only_exact_activations_of_the_own_layer_are_used(write: Write, found: bool) -> None:
    """Canonical, of the same grid id, at the stage's first layer; and never taken for KV."""
    store = MemoryBackend()
    await store.store([write])
    located = await locate("store", store, [KEY], STAGE, boundary=BOUNDARY, grid_id="g")
    coverage = located.coverage()
    assert coverage.hidden == (found,)
    assert coverage.layers == (0,)
    assert located.found == 0


async def test_nothing_is_lost_of_an_activation() -> None:
    """A tier with a lossy codec keeps it as it is; a lossless one makes it smaller."""
    for codec, expected in ((Codec.INT8, Codec.RAW), (Codec.ZSTD, Codec.ZSTD)):
        store = Encoded(MemoryBackend(), codec, Stamp())
        await store.store([activation()])
        [[info]] = await store.lookup([KEY])
        assert info.codec is expected
        assert info.canonical
        await store.aclose()


class TestWorthStoring:
    """How many leading chunks; KV of a chunk is 16 KiB in this layout's four layers."""

    engine = FakeEngine()
    tiles = engine.grid.split(0, 1024)

    def worth(self, hidden_size: int, compute: float | None, speed: float | None) -> int:
        model = ComputeModel(1.0, 0.0)
        for _ in range(8):
            for tile in self.tiles if compute is not None else ():
                model.observe(tile, (compute or 0.0) * tile.width)
        channel = ChannelModel()
        if speed is not None:
            for load in range(8):
                channel.started(load, 1 << 20, load * 10.0)
                channel.ended(load, load * 10.0 + (1 << 20) / speed, delivered=True)
        layout = self.engine.layout
        part = boundary_shard(layout, hidden_size, "float32", 0)
        return WorthStoring(self.engine, model, [channel])(64, part)  # type: ignore[arg-type]

    def test_all_while_nothing_is_known(self) -> None:
        """Activations smaller than the KV are stored, larger ones never."""
        small, large = 64, 1024
        assert self.worth(small, None, None) == 64
        assert self.worth(large, None, None) == 0
        assert self.worth(large, 1e-6, 1e6) == 0

    def test_the_head_that_recompute_reaches(self) -> None:
        """Where compute takes four times as long as loads, the leading part in whole tiles that it
        may still reach; none where recompute is hopeless."""
        chunk = self.engine.layout.payload_bytes()
        per_token = chunk / 1e6 / 16 / 4
        some = self.worth(64, 4 * per_token, 1e6)
        assert 32 < some < 64
        assert some * 16 in {tile.stop for tile in self.tiles}
        assert self.worth(64, 1000 * per_token, 1e6) == 0
