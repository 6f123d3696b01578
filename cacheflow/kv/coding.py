"""Payloads as they are stored: layer blocks encoded one by one, and decoded again.

Every block stands for itself, so any range of layers can be read and decoded alone. A block that a
codec does not make smaller by a page, or cannot take, stays as it is: its length then says so.
Knows nothing of checksums: what is decoded here has been verified before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from cacheflow.errors import IntegrityError
from cacheflow.kv.quantized import decode_fp8, decode_int8, encode_fp8, encode_int8
from cacheflow.kv.shuffled import decode_zstd, encode_zstd
from cacheflow.types import PAGE, ChunkInfo, Codec, KVLayout, Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["decode_layers", "encode_payload", "import_coders"]

_Encoder: TypeAlias = "Callable[[KVLayout, int, memoryview], bytes | bytearray | None]"
_Decoder: TypeAlias = "Callable[[KVLayout, int, memoryview, memoryview], None]"

_CODERS: Final[Mapping[Codec, tuple[_Encoder, _Decoder]]] = {
    Codec.ZSTD: (encode_zstd, decode_zstd),
    Codec.INT8: (encode_int8, decode_int8),
    Codec.FP8: (encode_fp8, decode_fp8),
}


def import_coders() -> None:
    """Import what codecs need: it takes seconds, and a store's deadline is no place for that."""
    import torch  # noqa: F401 - that it is loaded is all
    import zstandard  # noqa: F401 - as above


def encode_payload(codec: Codec, layout: KVLayout, heads: int, payload: memoryview) -> list[int]:
    """Encode the layer blocks of ``payload`` where they lie, each moved up to the end of the last.

    Returns the length of each block; each begins on a page, with zeros up to it. Nothing is ever
    longer than it was, so the blocks fit wherever the payload did.
    """
    used, stride = layout.layer_bytes(heads), layout.layer_stride(heads)
    encode, _ = _CODERS[codec]
    lengths, at = [], 0
    for first in range(0, len(payload), stride):
        block = payload[first : first + used]
        data: bytes | bytearray | memoryview | None = encode(layout, heads, block)
        if data is None or _padded(len(data)) >= stride:
            data = block
        size, padded = len(data), _padded(len(data))
        payload[at : at + size] = data
        payload[at + size : at + padded] = bytes(padded - size)
        lengths.append(size)
        at += padded
    return lengths


def decode_layers(info: ChunkInfo, layers: Span, stored: memoryview, out: memoryview) -> None:
    """Decode verified layer blocks of an object into ``out``, laid out as a raw payload is.

    Raises:
        IntegrityError: they are not what the codec makes; ``out`` then holds anything.
    """
    layout, heads = info.layout, len(info.key.heads)
    used, stride = layout.layer_bytes(heads), layout.layer_stride(heads)
    if len(stored) != info.layer_range(layers)[1] or len(out) != len(layers) * stride:
        raise IntegrityError(f"{len(stored)} bytes are not layers {layers} of the object")
    sizes = zip(info.block_lengths(layers), info.block_sizes(layers), strict=True)
    at = 0
    for number, (length, size) in enumerate(sizes):
        data, first = stored[at : at + length], number * stride
        target = out[first : first + used]
        if length == used:
            target[:] = data
        else:
            _decode(info, layers.start + number, data, target)
        out[first + used : first + stride] = bytes(stride - used)
        at += size


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _decode(info: ChunkInfo, layer: int, data: memoryview, target: memoryview) -> None:
    try:
        _CODERS[info.codec][1](info.layout, len(info.key.heads), data, target)
    except ValueError as error:
        raise IntegrityError(f"layer {layer} cannot be decoded: {error}") from error
