"""A rank's heads of a block, out of whatever objects hold them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cacheflow.distributed import cut_layout
from cacheflow.kv import seal
from cacheflow.plugins.vllm.sources import CorruptPart, source
from cacheflow.types import ChunkInfo, ChunkKey, KVLayout, ObjectKey, Shard, Span

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=32, dtype="float32", chunk_tokens=16)
HEAD = 2 * LAYOUT.head_bytes
Objects = list[tuple[ChunkInfo, bytes]]


def block(layer: int, head: int) -> bytes:
    """K and V of a head in a layer."""
    return bytes([10 * layer + head + 1]) * HEAD


def stored(*edges: int, layout: KVLayout = LAYOUT) -> Objects:
    """A block's objects, cut at these heads."""
    objects = []
    for first, stop in pairwise(edges):
        key = ObjectKey(ChunkKey(bytes(32)), Span(0, layout.num_layers), Span(first, stop))
        stride, used = layout.layer_stride(stop - first), layout.layer_bytes(stop - first)
        data = bytearray(layout.num_layers * stride)
        for layer in range(layout.num_layers):
            packed = b"".join(block(layer, head) for head in range(first, stop))
            data[layer * stride : layer * stride + used] = packed[:used]
        info, header = seal(
            key, layout, memoryview(data), grid_id="g", segments=(), canonical=False, layout_id="v"
        )
        objects.append((info, header + bytes(data)))
    return objects


def read(objects: Objects, shard: Shard, layers: Span) -> bytes:
    """As the worker does: every range to its place, then checked."""
    found = source("tier", [info for info, _ in objects], shard)
    assert found is not None
    data = bytearray(shard.layout.payload_bytes(len(layers)))
    content = {info.key: data for info, data in objects}
    for key, offset, nbytes, place in found.ranges(layers):
        data[place : place + nbytes] = content[key][offset : offset + nbytes]
    found.verify(layers, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("edges", [(0, 4), (0, 2, 4), (0, 1, 2, 3, 4), (0, 1, 4)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_cut_reads_any_other(edges: tuple[int, ...], ranks: int) -> None:
    """Whole layers of it, or some: each head where the rank's own cache has it."""
    (shards,) = cut_layout(LAYOUT, ranks=ranks)
    for shard in shards:
        for layers in (Span(0, 3), Span(1, 2), Span(1, 3)):
            expected = [b"".join(block(layer, head) for head in shard.heads) for layer in layers]
            assert read(stored(*edges), shard, layers) == b"".join(expected)


def test_its_own_object_is_read_in_one_piece() -> None:
    """Where there is one, whatever else there is."""
    (shards,) = cut_layout(LAYOUT, ranks=2)
    infos = [info for info, _ in [*stored(0, 4), *stored(0, 2, 4)]]
    found = source("tier", infos, shards[1])
    assert found is not None
    assert found.is_whole
    assert [part.key.heads for part in found.ranges(Span(0, 3))] == [Span(2, 4)]


def test_some_heads_are_not_enough() -> None:
    """A block of which a head is missing is not there."""
    objects = stored(0, 1, 2, 3, 4)
    infos = [info for info, _ in objects]
    assert source("tier", infos[:3], Shard.of(LAYOUT)) is None
    assert source("tier", [], Shard.of(LAYOUT)) is None


def test_padding_is_not_cut() -> None:
    """The checksum of an object's last head covers it: only its own rank reads such an object."""
    layout = replace(LAYOUT, head_dim=24)
    (halves,) = cut_layout(layout, ranks=2)
    objects = stored(0, 2, 4, layout=layout)
    infos = [info for info, _ in objects]
    assert source("tier", infos, Shard.of(layout)) is None
    assert source("tier", infos, halves[0]) is not None
    (whole,) = stored(0, 4, layout=replace(layout, num_kv_heads=4))
    assert source("tier", [whole[0]], halves[0]) is not None  # all four fill whole pages


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("head", range(4))
def test_a_changed_bit_is_noticed(ranks: int, head: int) -> None:
    """By the rank that reads the head, and it names the object that has it."""
    objects = stored(0, 2, 4)
    info, data = objects[head // 2]
    wrong = bytearray(data)
    wrong[info.layer_offset(1) + head % 2 * HEAD + HEAD // 2] ^= 1
    objects[head // 2] = (info, bytes(wrong))
    (shards,) = cut_layout(LAYOUT, ranks=ranks)
    for shard in shards:
        if head not in shard.heads:
            read(objects, shard, Span(0, 3))
            continue
        with pytest.raises(CorruptPart, match=f"layer 1.* head {head}|layer 1") as caught:
            read(objects, shard, Span(0, 3))
        assert caught.value.info.key == info.key
        read(objects, shard, Span(2, 3))
