"""Authenticated chunks: what the secret's owner did not write is not taken, and no secret shown."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest

from cacheflow.errors import IntegrityError
from cacheflow.kv import (
    ChunkAuth,
    Stamp,
    check_stamp,
    decode_header,
    encode_header,
    seal,
    tenant_id,
    verify,
)
from cacheflow.types import ChunkInfo, ChunkKey, Codec, KVLayout, ObjectKey, Span

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16", chunk_tokens=32)
WHOLE = Span(0, 3)
SECRET = b"a secret of some length"
OURS, THEIRS = ChunkAuth(SECRET), ChunkAuth(b"another secret of some length")


def sealed(
    auth: ChunkAuth | None = OURS, number: int = 0, codec: Codec = Codec.RAW
) -> tuple[ChunkInfo, bytes, bytearray]:
    payload = bytearray(LAYOUT.payload_bytes())
    for layer in range(3):  # few different bytes, so that zstd has something to do
        at = layer * LAYOUT.layer_stride()
        part = random.Random(number).choices(b"\1\2\3\4", k=LAYOUT.layer_bytes())
        payload[at : at + len(part)] = bytes(part)
    info, header = seal(
        ObjectKey(ChunkKey(bytes([number]) * 32), WHOLE, Span(0, 2)),
        LAYOUT,
        memoryview(payload),
        grid_id="g",
        segments=(),
        canonical=True,
        stamp=Stamp(auth=auth),
        codec=codec,
    )
    return info, header, payload[: info.nbytes - len(header)]


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.ZSTD])
def test_what_we_wrote_is_ours(codec: Codec) -> None:
    """Header and any range of layers check alone; who has no secret reads it all the same."""
    info, header, payload = sealed(codec=codec)
    assert decode_header(header) == info
    assert len(info.mac) == 16
    assert len(info.macs) == 3 * 16
    check_stamp(info, Stamp(auth=OURS))
    for layers in (WHOLE, Span(1, 2), Span(1, 3)):
        at, size = info.layer_range(layers)
        at -= info.payload_offset
        verify(info, layers, memoryview(payload)[at : at + size], OURS)
        verify(info, layers, memoryview(payload)[at : at + size])


@pytest.mark.parametrize("auth", [None, THEIRS])
def test_other_writers_are_refused(auth: ChunkAuth | None) -> None:
    """A chunk without a tag, or with one under another secret, is an IntegrityError."""
    info, _, payload = sealed(auth)
    with pytest.raises(IntegrityError, match="auth_key"):
        check_stamp(info, Stamp(auth=OURS))
    with pytest.raises(IntegrityError, match="auth_key"):
        verify(info, WHOLE, memoryview(payload), OURS)


def test_right_checksums_do_not_help() -> None:
    """Who cannot make tags cannot change a header or a payload, though anybody can checksum."""
    info, _, payload = sealed()
    forged = decode_header(encode_header(replace(info, grid_id="other")))
    with pytest.raises(IntegrityError, match="header's tag"):
        check_stamp(forged, Stamp(auth=OURS))
    changed = bytearray(payload)
    changed[5] ^= 1
    theirs, _ = seal(
        info.key,
        LAYOUT,
        memoryview(changed),
        grid_id="g",
        segments=(),
        canonical=True,
        stamp=Stamp(auth=THEIRS),
    )
    for made in (replace(theirs, mac=info.mac), replace(theirs, macs=info.macs, mac=info.mac)):
        verify(made, WHOLE, memoryview(changed))
        with pytest.raises(IntegrityError, match="tag of layers"):
            verify(made, WHOLE, memoryview(changed), OURS)
        with pytest.raises(IntegrityError, match="header's tag"):
            check_stamp(made, Stamp(auth=OURS))


def test_blocks_stay_where_they_were_written() -> None:
    """A block with its own tag, in the place of another layer or in another chunk, is refused."""
    info, _, payload = sealed()
    other, _, theirs = sealed(number=1)
    stride = LAYOUT.layer_stride()
    assert payload[:stride] == payload[stride : 2 * stride]
    swapped = replace(info, macs=info.macs[16:32] + info.macs[:16] + info.macs[32:])
    with pytest.raises(IntegrityError, match="tag of layers"):
        verify(swapped, WHOLE, memoryview(payload), OURS)
    with pytest.raises(IntegrityError, match="tag of layers"):
        verify(replace(info, macs=other.macs), WHOLE, memoryview(theirs), OURS)


def test_models_and_tenants_are_told_apart() -> None:
    """A header that names another tenant is refused; one that names none is not."""
    info, _, _ = sealed(None)
    ours = Stamp(tenant_id=tenant_id(b"ours"))
    check_stamp(replace(info, tenant_id=ours.tenant_id), ours)
    check_stamp(info, ours)
    with pytest.raises(IntegrityError, match="another tenant's"):
        check_stamp(replace(info, tenant_id=tenant_id(b"theirs")), ours)
    with pytest.raises(IntegrityError, match="another model's"):
        check_stamp(replace(info, model_id=bytes(15) + b"1"), Stamp(model_id=bytes(15) + b"2"))


def test_the_secret_is_kept() -> None:
    """Neither it nor the keys made of it are in any text about it, and it cannot be copied out."""
    for shown in (repr(OURS), str(OURS), repr(Stamp(auth=OURS))):
        assert "ChunkAuth(...)" in shown
    with pytest.raises(TypeError, match="secret"):
        copy.deepcopy(OURS)
    info, header, _ = sealed()
    assert SECRET not in header
    assert SECRET.decode() not in repr(info)
