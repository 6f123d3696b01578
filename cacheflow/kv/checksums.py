"""64-bit checksums of payload runs: one for hosts, one that a device can compute too."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

from cacheflow.types import ChecksumKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["checksum", "run_checksums", "wsum"]

_WSUM_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, so that every weight ``1 + 2 * i * step`` is odd and no flipped bit cancels out."""
_MASK: Final = (1 << 64) - 1


def wsum(data: memoryview | bytes) -> int:
    """Sum over the little-endian 64-bit words ``w[i] * (1 + 2 * i * step)``, modulo 2**64.

    Any change within one word changes it (odd weights are invertible). Runs in torch with
    wrapping int64 arithmetic, on whatever device the words are. The length must be a multiple of 8.
    """
    import torch

    if len(data) % 8:
        raise ValueError(f"wsum needs a multiple of 8 bytes, got {len(data)}")
    if not len(data):
        return 0
    view = memoryview(data)
    writable = bytearray(view) if view.readonly else view.cast("B")
    words = torch.frombuffer(writable, dtype=torch.int64)
    step = struct.unpack("<q", struct.pack("<Q", 2 * _WSUM_STEP & _MASK))[0]
    weights = torch.arange(len(words), dtype=torch.int64, device=words.device) * step + 1
    return int((words * weights).sum()) & _MASK


_KINDS: Final[Mapping[ChecksumKind, Callable[[memoryview], int]]] = {
    ChecksumKind.XXH3: xxh3_64_intdigest,
    ChecksumKind.WSUM: wsum,
}


def checksum(kind: ChecksumKind, data: memoryview) -> int:
    """Checksum of ``data``; xxhash and torch both release the GIL on runs of this size."""
    return _KINDS[kind](data)


def run_checksums(
    kind: ChecksumKind, payload: memoryview, *, run: int, runs: int, stride: int
) -> list[int]:
    """Checksums of every run of a payload of whole layer blocks, in payload order.

    A layer block is ``runs`` runs of ``run`` bytes, then padding up to ``stride``, which the
    last run of the layer covers.
    """
    function = _KINDS[kind]
    sums: list[int] = []
    for block in range(0, len(payload), stride):
        last = block + (runs - 1) * run
        sums += [function(payload[at : at + run]) for at in range(block, last, run)]
        sums.append(function(payload[last : block + stride]))
    return sums
