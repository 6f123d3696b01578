"""The chunk format: what was stored comes back, and nothing else is ever taken for it."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cacheflow.errors import IntegrityError
from cacheflow.kv import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Stamp,
    check_layout,
    decode_header,
    encode_header,
    header_size,
    model_id,
    seal,
    tenant_id,
    verify,
)
from cacheflow.types import (
    PAGE,
    ChecksumKind,
    ChunkInfo,
    ChunkKey,
    KVLayout,
    ObjectKey,
    Segment,
    Span,
)

SUM_AT = 16
"""Where the checksum of the header is; it covers the lengths before it and all behind it."""
LAYOUT = KVLayout(num_layers=5, num_kv_heads=3, head_dim=8, dtype="bfloat16", chunk_tokens=32)
"""Layer blocks of 3,072 bytes: padded to 4,096."""
KEY = ObjectKey(ChunkKey(bytes(range(32))), Span(0, 5), Span(0, 3))


def payload(layout: KVLayout = LAYOUT, layers: int = 5, heads: int = 3, seed: int = 1) -> bytearray:
    data = bytearray(random.Random(seed).randbytes(layout.payload_bytes(layers, heads)))
    used, stride = layout.layer_bytes(heads), layout.layer_stride(heads)
    for layer in range(layers):
        data[layer * stride + used : (layer + 1) * stride] = bytes(stride - used)
    return data


def reseal(header: bytearray) -> bytes:
    """The header with the checksum it should have."""
    total = xxh3_64_intdigest(bytes(header[8:SUM_AT] + header[SUM_AT + 8 :]))
    struct.pack_into("<Q", header, SUM_AT, total)
    return bytes(header)


def sealed(
    kind: ChecksumKind = ChecksumKind.XXH3,
    key: ObjectKey = KEY,
    layout: KVLayout = LAYOUT,
    stamp: Stamp | None = None,
) -> tuple[ChunkInfo, bytes, bytearray]:
    data = payload(layout, len(key.layers), len(key.heads))
    info, header = seal(
        key,
        layout,
        memoryview(data),
        grid_id="grid=x;torch=1",
        segments=(Segment(0, 512, 512), Segment(512, 700, 188), Segment(700, 720, 1)),
        canonical=True,
        checksum_kind=kind,
        stamp=stamp or Stamp(),
    )
    return info, header, data


@pytest.mark.parametrize("kind", list(ChecksumKind))
def test_round_trip(kind: ChecksumKind) -> None:
    """A header decodes to what was sealed, also with the payload behind it; all bytes verify."""
    info, header, data = sealed(kind)
    assert decode_header(header) == info
    assert decode_header(header + data, expect=KEY) == info
    assert encode_header(info) == header
    assert info.payload_offset == len(header) == header_size(header)
    assert info.nbytes == len(header) + len(data)
    assert len(header) % PAGE == 0
    verify(info, Span(0, 5), memoryview(data))


@given(first=st.integers(0, 4), count=st.integers(1, 5))
def test_any_layer_range_can_be_read_and_verified_alone(first: int, count: int) -> None:
    """A range of layers is one byte range with checksums of its own."""
    info, header, data = sealed()
    layers = Span(first, min(5, first + count))
    offset, length = info.layer_range(layers)
    stored = header + data
    assert offset % PAGE == 0
    verify(info, layers, memoryview(stored)[offset : offset + length])


def test_a_shard_holds_absolute_ranges() -> None:
    """Layers 2-4 and heads 1-2 only: offsets count from the shard, names from the model."""
    key = ObjectKey(KEY.chunk, Span(2, 4), Span(1, 3))
    info, header, data = sealed(key=key)
    assert info.layer_offset(2) == len(header)
    verify(info, Span(3, 4), memoryview(data)[LAYOUT.layer_stride(2) :])
    with pytest.raises(ValueError, match="not"):
        info.layer_range(Span(0, 3))


@pytest.mark.parametrize("kind", list(ChecksumKind))
def test_every_changed_byte_of_a_payload_is_noticed(kind: ChecksumKind) -> None:
    """Padding included; the error names layer, half and head."""
    info, _, data = sealed(kind)
    chance = random.Random(2)
    places = [*range(0, len(data), 97), len(data) - 1, LAYOUT.layer_bytes() + 5]
    for at in places:
        bad = bytearray(data)
        bad[at] ^= 1 << chance.randrange(8)
        with pytest.raises(IntegrityError, match=f"layer {at // LAYOUT.layer_stride()},"):
            verify(info, Span(0, 5), memoryview(bad))


def test_every_changed_bit_of_a_header_is_noticed() -> None:
    """Each byte of the header, reserved ones and padding included."""
    _, header, _ = sealed()
    for at in range(len(header)):
        bad = bytearray(header)
        bad[at] ^= 1 << at % 8
        with pytest.raises(IntegrityError):
            decode_header(bytes(bad))


@given(cut=st.integers(0, PAGE - 1))
def test_truncated_headers_are_refused(cut: int) -> None:
    """Whatever is missing at the end."""
    _, header, _ = sealed()
    with pytest.raises(IntegrityError):
        decode_header(header[:cut])


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    """Random bytes are no chunk, and only ever an IntegrityError."""
    with pytest.raises(IntegrityError):
        decode_header(data)


@given(st.data())
def test_resealed_nonsense_is_refused_without_crashing(data: st.DataObject) -> None:
    """Bodies altered by someone who can compute the checksum: parsed safely or refused."""
    _, header, _ = sealed()
    _, size, body = struct.unpack_from("<8sII", header)
    bad = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(PREFIX_BYTES, PREFIX_BYTES + body - 1))
        bad[at] = data.draw(st.integers(0, 255))
    try:
        info = decode_header(reseal(bad))
    except IntegrityError:
        return
    assert info.nbytes < 1 << 60
    assert len(info.checksums) <= size


@pytest.mark.parametrize("claim", [MAX_HEADER_BYTES + PAGE, 2**32 - PAGE, 100, 0])
def test_oversized_and_crooked_sizes_are_refused_before_anything_is_read(claim: int) -> None:
    """A header cannot make its reader allocate."""
    _, header, _ = sealed()
    bad = bytearray(header)
    struct.pack_into("<I", bad, 8, claim)
    with pytest.raises(IntegrityError):
        header_size(bytes(bad[:PREFIX_BYTES]))


def test_another_version_is_refused_by_name() -> None:
    """A future format is an IntegrityError that says so."""
    _, header, _ = sealed()
    bad = bytearray(header)
    struct.pack_into("<I", bad, PREFIX_BYTES, 99)
    with pytest.raises(IntegrityError, match="version 99"):
        decode_header(reseal(bad))


def test_an_object_under_another_name_is_refused() -> None:
    """The full key is in the header: a wrong file is a miss, not a hit."""
    _, header, _ = sealed()
    other = ObjectKey(ChunkKey(bytes(32)), KEY.layers, KEY.heads)
    with pytest.raises(IntegrityError, match="another"):
        decode_header(header, expect=other)


@pytest.mark.parametrize(
    "other",
    [
        KVLayout(6, 3, 8, "bfloat16", 32),
        KVLayout(5, 6, 8, "bfloat16", 32),
        KVLayout(5, 3, 16, "bfloat16", 32),
        KVLayout(5, 3, 8, "float16", 32),
        KVLayout(5, 3, 8, "bfloat16", 64),
    ],
)
def test_another_geometry_or_dtype_is_refused(other: KVLayout) -> None:
    """float16 bits are never taken for bfloat16 ones of the same size."""
    info, _, _ = sealed()
    with pytest.raises(IntegrityError, match="stored with"):
        check_layout(info, other)
    with pytest.raises(IntegrityError, match="layout"):
        check_layout(info, LAYOUT, "vllm-cpu")


def test_sizes_follow_the_storage_dtype() -> None:
    """One byte an element in fp8, four in fp32."""
    sizes = {d: KVLayout(1, 1, 64, d, 64).layer_bytes() for d in ("float8_e4m3fn", "float32")}
    assert sizes == {"float8_e4m3fn": 2 * 64 * 64, "float32": 4 * 2 * 64 * 64}


def test_lengths_are_64_bits() -> None:
    """A chunk of more than 4 GiB has the right offsets."""
    layout = KVLayout(1000, 64, 256, "float32", 1024)
    info, _header, _ = sealed()
    huge = ChunkInfo(
        key=ObjectKey(KEY.chunk, Span(0, 1000), Span(0, 64)),
        layout=layout,
        grid_id="",
        segments=(),
        canonical=False,
        checksum_kind=info.checksum_kind,
        layout_id="canonical",
        checksums=bytes(8 * 1000 * 2 * 64),
        payload_offset=0,
        nbytes=0,
    )
    decoded = decode_header(encode_header(huge))
    assert decoded.nbytes > 100 << 30
    assert decoded.layer_offset(999) > 100 << 30


def test_a_payload_of_the_wrong_size_is_not_sealed() -> None:
    """Sealing checks what it is given."""
    with pytest.raises(ValueError, match="does not fit"):
        seal(KEY, LAYOUT, memoryview(bytes(100)), grid_id="", segments=(), canonical=False)
    info, _, data = sealed()
    with pytest.raises(IntegrityError, match="are not layers"):
        verify(info, Span(0, 2), memoryview(data))


def test_padding_never_carries_what_was_in_the_memory_before() -> None:
    """Staging memory is used again: its old bytes are not stored between the layers."""
    data = bytearray(b"\xff" * LAYOUT.payload_bytes())
    used, stride = LAYOUT.layer_bytes(), LAYOUT.layer_stride()
    info, _ = seal(KEY, LAYOUT, memoryview(data), grid_id="", segments=(), canonical=False)
    for layer in range(5):
        assert data[layer * stride : layer * stride + used] == b"\xff" * used
        assert not any(data[layer * stride + used : (layer + 1) * stride])
    verify(info, Span(0, 5), memoryview(data))
    dirty = memoryview(b"\xff" * len(data))
    with pytest.raises(ValueError, match="padding"):
        seal(KEY, LAYOUT, dirty, grid_id="", segments=(), canonical=False)


def test_provenance_is_never_cut_short() -> None:
    """More segments than a header takes are refused: fewer would tell another history."""
    many = tuple(Segment(i, i + 1, 1) for i in range(5000))
    data = memoryview(payload())
    with pytest.raises(ValueError, match="5000 segments"):
        seal(KEY, LAYOUT, data, grid_id="", segments=many, canonical=False)


def test_runs_that_wsum_cannot_sum_are_refused_in_the_header() -> None:
    """An IntegrityError when it is decoded, not a crash when it is verified."""
    layout = KVLayout(1, 1, 1, "float16", 1)
    key = ObjectKey(KEY.chunk, Span(0, 1), Span(0, 1))
    info, header, _ = sealed(key=key, layout=layout)
    with pytest.raises(ValueError, match="wsum"):
        encode_header(replace(info, checksum_kind=ChecksumKind.WSUM))
    with pytest.raises(IntegrityError, match="wsum"):
        decode_header(reseal(bytearray(header.replace(b"xxh3", b"wsum"))))


def test_a_header_larger_than_its_content_is_refused() -> None:
    """One content has one encoding: nothing can hide behind it."""
    _, header, _ = sealed()
    bad = bytearray(header) + bytes(PAGE)
    struct.pack_into("<I", bad, 8, len(bad))
    with pytest.raises(IntegrityError, match="claims"):
        decode_header(reseal(bad))


def test_nothing_can_hide_in_the_padding_of_a_header() -> None:
    """Zeros there are part of the format: a checksum over something else does not help."""
    _, header, _ = sealed()
    bad = bytearray(header)
    bad[-1] = 1
    with pytest.raises(IntegrityError, match="padding"):
        decode_header(reseal(bad))


def test_a_chunk_of_format_1_is_refused_by_name() -> None:
    """What an earlier version stored is an IntegrityError that says so: a miss, in the stores."""
    _, header, _ = sealed()
    old = b"CFLWKV1\n" + header[8:]
    with pytest.raises(IntegrityError, match="format 1, this version reads format 2"):
        header_size(old)
    with pytest.raises(IntegrityError, match="format 1"):
        decode_header(old)


def test_the_header_says_whose_chunk_it_is() -> None:
    """Model and tenant are named by 16 bytes each, which differ where the models or salts do."""
    stamp = Stamp(model_id({"model": "m"}), tenant_id(b"salt"))
    info, header, _ = sealed(stamp=stamp)
    assert (info.model_id, info.tenant_id) == (stamp.model_id, stamp.tenant_id)
    assert decode_header(header) == info
    others = {model_id({"model": "n"}), model_id({}), tenant_id(), tenant_id(b"other")}
    assert len(others | {stamp.model_id, stamp.tenant_id}) == 6
    assert {len(each) for each in others} == {16}
    with pytest.raises(ValueError, match="16 bytes"):
        sealed(stamp=Stamp(b"short"))


def test_what_was_computed_from_lossy_values_says_so() -> None:
    """A lossy segment marks its chunk, which is then never canonical."""
    lossy = (Segment(0, 512, 0, lossy=True), Segment(512, 700, 188))
    data = memoryview(payload())
    info, header = seal(KEY, LAYOUT, data, grid_id="", segments=lossy, canonical=False)
    assert info.lossy
    assert decode_header(header).segments == lossy
    with pytest.raises(ValueError, match="never canonical"):
        seal(KEY, LAYOUT, data, grid_id="", segments=lossy, canonical=True)
