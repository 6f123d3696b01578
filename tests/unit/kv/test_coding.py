"""Codecs: what lossless ones store comes back bit for bit, what lossy ones store comes near it."""

from __future__ import annotations

import random
import resource
import struct
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.errors import IntegrityError
from cacheflow.kv import decode_header, decode_layers, encode_header, seal, verify
from cacheflow.types import (
    DTYPE_BYTES,
    PAGE,
    ChecksumKind,
    ChunkInfo,
    ChunkKey,
    Codec,
    KVLayout,
    ObjectKey,
    Segment,
    Span,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ENCODED = [codec for codec in Codec if codec is not Codec.RAW]
LOSSY = [codec for codec in Codec if codec.is_lossy]
DIGEST = ChunkKey(bytes(range(32)))
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=24, dtype="float32", chunk_tokens=96)
"""Layer blocks of 36,864 bytes: nine pages, three groups of 32 tokens."""


def values(layout: KVLayout, seed: int = 0, layers: int | None = None) -> torch.Tensor:
    """``[layer, k/v, head, token, dim]``: like a KV cache, with channels of very different size; in
    steps, so that there is something to compress."""
    chance = torch.Generator().manual_seed(seed)
    shape = (layers or layout.num_layers, 2, layout.num_kv_heads, layout.chunk_tokens)
    numbers = torch.randn(*shape, layout.head_dim, generator=chance)
    sizes = torch.rand(layout.head_dim, generator=chance) * 8
    return ((numbers * sizes * 4).round() / 4).to(getattr(torch, layout.dtype))


def payload_of(numbers: torch.Tensor, layout: KVLayout) -> bytearray:
    stride = layout.layer_stride()
    data = bytearray(len(numbers) * stride)
    for layer, block in enumerate(numbers):
        raw = bytearray(layout.layer_bytes())
        torch.frombuffer(raw, dtype=torch.uint8).copy_(block.flatten().view(torch.uint8))
        data[layer * stride : layer * stride + len(raw)] = raw
    return data


def sealed(
    payload: bytearray, layout: KVLayout, codec: Codec, kind: ChecksumKind = ChecksumKind.XXH3
) -> tuple[ChunkInfo, bytearray]:
    """The object as it is stored."""
    layers = len(payload) // layout.layer_stride()
    data = bytearray(payload)
    info, header = seal(
        ObjectKey(DIGEST, Span(0, layers), Span(0, layout.num_kv_heads)),
        layout,
        memoryview(data),
        grid_id="g",
        segments=(Segment(0, layout.chunk_tokens, layout.chunk_tokens),),
        canonical=True,
        codec=codec,
        checksum_kind=kind,
    )
    return info, bytearray(header) + data[: info.nbytes - len(header)]


def loaded(info: ChunkInfo, stored: bytearray, layers: Span) -> bytearray:
    """A ranged read of ``layers``: verified, then decoded."""
    offset, nbytes = info.layer_range(layers)
    view = memoryview(stored)[offset : offset + nbytes]
    verify(info, layers, view)
    out = bytearray(b"\xff" * len(layers) * info.layout.layer_stride())
    decode_layers(info, layers, view, memoryview(out))
    return out


def spans(layers: int) -> Iterator[Span]:
    return (Span(a, b) for a in range(layers) for b in range(a + 1, layers + 1))


@given(data=st.data())
def test_lossless_is_bit_for_bit_whatever_the_bytes(data: st.DataObject) -> None:
    """zstd gives back every byte of every dtype: random ones, runs, not-a-numbers."""
    layout = KVLayout(
        num_layers=3,
        num_kv_heads=data.draw(st.integers(1, 2)),
        head_dim=data.draw(st.sampled_from([1, 3, 8])),
        dtype=data.draw(st.sampled_from(sorted(DTYPE_BYTES))),
        chunk_tokens=data.draw(st.sampled_from([1, 5, 16, 96])),
    )
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    alphabet = data.draw(st.sampled_from([b"\0", b"\0\x3f\x80", bytes(range(256)), b"\xff\x7f"]))
    used, stride = layout.layer_bytes(), layout.layer_stride()
    payload = bytearray()
    for _ in range(3):
        payload += bytes(chance.choices(alphabet, k=used)).ljust(stride, b"\0")
    kinds = [ChecksumKind.XXH3] if layout.head_bytes % 4 else list(ChecksumKind)
    info, stored = sealed(payload, layout, Codec.ZSTD, data.draw(st.sampled_from(kinds)))
    assert info.canonical
    assert not info.lossy
    assert len(stored) == info.nbytes <= info.payload_offset + len(payload)
    for layers in spans(3):
        part = payload[layers.start * stride : layers.stop * stride]
        assert loaded(info, stored, layers) == part


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("codec", ENCODED)
def test_any_layer_range_is_one_read(codec: Codec, dtype: str) -> None:
    """Smaller, on page boundaries, readable and decodable by any range of layers, and what the
    header says survives encoding it again."""
    layout = replace(LAYOUT, dtype=dtype)
    numbers = values(layout)
    info, stored = sealed(payload_of(numbers, layout), layout, codec)
    assert info.codec is codec
    assert len(stored) == info.nbytes < info.payload_offset + layout.payload_bytes()
    assert decode_header(encode_header(info)) == info == decode_header(stored)
    whole = loaded(info, stored, Span(0, 4))
    for layers in spans(4):
        assert info.layer_range(layers)[0] % PAGE == 0
        stride = layout.layer_stride()
        part = whole[layers.start * stride : layers.stop * stride]
        assert loaded(info, stored, layers) == part


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("codec", "most"), [(Codec.INT8, 0.012), (Codec.FP8, 0.07)])
def test_lossy_codecs_are_near(codec: Codec, most: float, dtype: str) -> None:
    """int8 is within half a step of each channel's largest value, fp8 within 1/16 of each value
    (and of the smallest steps there are)."""
    layout = replace(LAYOUT, dtype=dtype)
    numbers = values(layout)
    info, stored = sealed(payload_of(numbers, layout), layout, codec)
    found = torch.frombuffer(loaded(info, stored, Span(0, 4)), dtype=numbers.dtype).view(4, -1)
    found = found[:, : numbers[0].numel()].reshape(numbers.shape)
    error = (found.float() - numbers.float()).abs()
    if codec is Codec.INT8:
        allowed = numbers.float().abs().amax(3, keepdim=True) * most
    else:
        allowed = numbers.float().abs() * most + numbers.float().abs().amax((3, 4), True) / 2**15
    assert bool((error <= allowed).all())
    assert bool(error.any())


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_chunks_say_so(codec: Codec) -> None:
    """What a lossy codec changed is lossy and not canonical, even if the writer said it was."""
    info, _ = sealed(payload_of(values(LAYOUT), LAYOUT), LAYOUT, codec)
    assert info.lossy
    assert not info.canonical
    for wrong in (replace(info, lossy=False), replace(info, canonical=True)):
        with pytest.raises(ValueError, match="has to say so"):
            encode_header(wrong)


@pytest.mark.parametrize("codec", ENCODED)
def test_what_does_not_shrink_stays_as_it_is(codec: Codec) -> None:
    """Random bytes in lossless, values that are not finite in lossy codecs: such a layer is stored
    raw among encoded ones; a chunk of nothing else is a raw chunk, canonical as before."""
    numbers = values(LAYOUT)
    numbers[2, 1, 0, 5, 3] = float("inf")
    numbers[3, 0, 0, 1, 2] = float("nan")
    payload = payload_of(numbers, LAYOUT)
    stride = LAYOUT.layer_stride()
    if codec is Codec.ZSTD:
        payload[2 * stride :] = random.Random(1).randbytes(2 * stride)
    info, stored = sealed(payload, LAYOUT, codec)
    lengths = list(info.block_lengths(Span(0, 4)))
    assert lengths[2:] == [LAYOUT.layer_bytes()] * 2
    assert max(lengths[:2]) < LAYOUT.layer_bytes()
    assert loaded(info, stored, Span(2, 4)) == payload[2 * stride :]
    info, stored = sealed(payload[2 * stride :], LAYOUT, codec)
    assert (info.codec, info.canonical, info.lossy) == (Codec.RAW, True, False)
    assert stored[info.payload_offset :] == payload[2 * stride :]


@pytest.mark.parametrize("codec", ENCODED)
def test_every_changed_byte_of_an_encoded_payload_is_noticed(codec: Codec) -> None:
    """Before anything is decoded; padding included."""
    info, stored = sealed(payload_of(values(LAYOUT), LAYOUT), LAYOUT, codec)
    for at in [*range(info.payload_offset, info.nbytes, 211), info.nbytes - 1]:
        bad = bytearray(stored)
        bad[at] ^= 1 << at % 8
        with pytest.raises(IntegrityError, match=r"checksum of layer \d does not match"):
            loaded(info, bad, Span(0, 4))


@pytest.mark.parametrize("codec", ENCODED)
@given(data=st.data())
def test_nonsense_with_right_checksums_is_refused(codec: Codec, data: st.DataObject) -> None:
    """Whoever can write a store can make the checksums too: what cannot be decoded is an
    IntegrityError, nothing else, and what can be fills exactly its own place."""
    info, stored = sealed(payload_of(values(LAYOUT, layers=1), LAYOUT), LAYOUT, codec)
    block = bytearray(stored[info.payload_offset :])
    (length,) = info.block_lengths(Span(0, 1))
    for _ in range(data.draw(st.integers(1, 4))):
        block[data.draw(st.integers(0, min(length, 64) - 1))] = data.draw(st.integers(0, 255))
    length += data.draw(st.sampled_from([0, 0, -1, 1, -100]))
    block = bytearray(block.ljust(-(-length // PAGE) * PAGE, b"\0"))
    crafted = replace(info, lengths=struct.pack("<Q", length))
    out = bytearray(LAYOUT.layer_stride() + 64)
    view = memoryview(block)[: crafted.layer_range(Span(0, 1))[1]]
    with suppress(IntegrityError):
        decode_layers(crafted, Span(0, 1), view, memoryview(out)[: LAYOUT.layer_stride()])
    assert not any(out[LAYOUT.layer_stride() :])


def test_a_frame_cannot_make_its_reader_allocate() -> None:
    """A zstd frame that unpacks to gigabytes, or says so, is refused for what it says; the reader
    takes no memory for it."""
    huge = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 28))
    info, _ = sealed(payload_of(values(LAYOUT, layers=1), LAYOUT), LAYOUT, Codec.ZSTD)
    out = memoryview(bytearray(LAYOUT.layer_stride()))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for frame in (huge, silent):
        frame = frame[: LAYOUT.layer_bytes() - 1]
        crafted = replace(info, lengths=struct.pack("<Q", len(frame)))
        view = memoryview(bytearray(frame.ljust(crafted.layer_range(Span(0, 1))[1], b"\0")))
        with pytest.raises(IntegrityError, match="bytes where"):
            decode_layers(crafted, Span(0, 1), view, out)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_headers_with_impossible_lengths_are_refused() -> None:
    """A block is never empty and never longer than a raw one."""
    info, _ = sealed(payload_of(values(LAYOUT), LAYOUT), LAYOUT, Codec.ZSTD)
    for length in (0, LAYOUT.layer_bytes() + 1, 2**64 - 1):
        with pytest.raises(ValueError, match="length of a block"):
            encode_header(replace(info, lengths=struct.pack("<4Q", 1, 1, 1, length)))
    with pytest.raises(ValueError, match="4 layer blocks"):
        encode_header(replace(info, lengths=info.lengths[:24]))
    with pytest.raises(ValueError, match="entries"):
        encode_header(replace(info, codec=Codec.RAW, lengths=b""))


def test_an_engines_own_packing_is_not_taken_for_numbers() -> None:
    """Lossy codecs need numbers where the layout says; nothing is encoded in read-only memory."""
    data = payload_of(values(LAYOUT), LAYOUT)
    key = ObjectKey(DIGEST, Span(0, 4), Span(0, 2))
    with pytest.raises(ValueError, match="engine's own"):
        seal(
            key,
            LAYOUT,
            memoryview(data),
            grid_id="",
            segments=(),
            canonical=False,
            codec=Codec.INT8,
            layout_id="vllm-cpu",
        )
    frozen = memoryview(bytes(data))
    with pytest.raises(ValueError, match="writable"):
        seal(key, LAYOUT, frozen, grid_id="", segments=(), canonical=False, codec=Codec.ZSTD)
