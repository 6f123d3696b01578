"""Lossless coding of a layer block: bytes of equal rank side by side, then zstd.

In the numbers of a KV cache the first byte (sign and exponent) repeats and the last one does not;
side by side, each plane is as compressible as it can be. Both steps give up the GIL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from cacheflow.types import KVLayout

__all__ = ["decode_zstd", "encode_zstd"]

_LEVEL: Final = 1
"""Higher ones take several times as long and gain nothing (docs/compression.md)."""


def encode_zstd(layout: KVLayout, heads: int, block: memoryview) -> bytes:
    """``block`` (writable) as one zstd frame that says how much comes out of it."""
    import torch
    import zstandard

    planes = bytearray(len(block))
    out = torch.frombuffer(planes, dtype=torch.uint8).view(layout.itemsize, -1)
    words = torch.frombuffer(block, dtype=_word(layout))
    for rank, plane in enumerate(out):
        plane.copy_(words >> 8 * rank)  # the cast keeps the lowest byte
    return zstandard.ZstdCompressor(level=_LEVEL).compress(planes)


def decode_zstd(layout: KVLayout, heads: int, data: memoryview, out: memoryview) -> None:
    """Undo :func:`encode_zstd` into ``out``.

    Raises:
        ValueError: it is not one frame that holds exactly as many bytes; nothing is allocated on
            the word of the frame.
    """
    import torch

    planes = torch.frombuffer(_unpacked(data, len(out)), dtype=torch.uint8)
    *lower, last = planes.view(layout.itemsize, -1)
    words = last.to(_word(layout))
    for plane in reversed(lower):
        words.bitwise_left_shift_(8).bitwise_or_(plane)
    torch.frombuffer(out, dtype=words.dtype).copy_(words)


def _unpacked(data: memoryview, size: int) -> bytearray:
    import zstandard

    try:
        claimed = zstandard.get_frame_parameters(data).content_size
        if claimed != size:
            raise ValueError(f"a frame of {claimed} bytes where {size} should be")
        unpacker = zstandard.ZstdDecompressor()
        whole = unpacker.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"not a frame: {error}") from None
    if len(whole) != size:
        raise ValueError(f"{len(whole)} bytes where {size} should be")
    return bytearray(whole)


def _word(layout: KVLayout) -> torch.dtype:
    """Integers as wide as the elements."""
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[layout.itemsize]
