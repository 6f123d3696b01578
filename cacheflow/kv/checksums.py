"""64-bit checksums of payload runs: one for hosts, one that a device can compute too.

Knows runs and strides of bytes, not what is in them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64_intdigest

from cacheflow.types import ChecksumKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

__all__ = ["WSUM_WORD", "checksum", "run_checksums", "wsum"]

WSUM_WORD: Final = 4
"""Bytes that a run checksummed with :func:`wsum` must be a multiple of."""

_MASK: Final = (1 << 64) - 1
_STEP: Final = 0x9E3779B97F4A7C15
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""splitmix64's increment, then its shifts and multipliers (Steele, Lea, Flood 2014)."""

_QUIET_BYTES: Final = 64 << 10
"""xxhash keeps the GIL for inputs up to this size, which is where most models' runs are."""
_TURN_BYTES: Final = 2 << 20
"""Bytes a thread hashes (some 0.3 ms) before it lets the event loop and the compute thread in."""


class _Turn(threading.local):
    """What this thread has hashed since it last gave up the GIL."""

    nbytes = 0


_turn = _Turn()


def wsum(data: memoryview | bytes) -> int:
    """Sum over the little-endian 32-bit words of ``w[i] * (splitmix64(i) | 1)``, modulo 2**64.

    Multilinear hashing (Lemire and Kaser 2014): any change within one word changes the sum, as odd
    weights are invertible, and changes of several words cancel out by a chance of about 2**-31 at
    worst (the top bits of two words), 2**-64 mostly. Runs in torch with wrapping int64 arithmetic,
    so a device computes the same. The length must be a multiple of :data:`WSUM_WORD`.
    """
    import torch

    if len(data) % WSUM_WORD:
        raise ValueError(f"wsum needs a multiple of {WSUM_WORD} bytes, got {len(data)}")
    if not len(data):
        return 0
    view = memoryview(data)
    writable = bytearray(view) if view.readonly else view.cast("B")
    words = torch.frombuffer(writable, dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
    return int((words * _weights(len(words))).sum()) & _MASK


@lru_cache(maxsize=4)  # a payload has two lengths of run: the last of a layer covers its padding
def _weights(count: int) -> torch.Tensor:
    """int64 ``[count]``: ``splitmix64(i) | 1``."""
    import torch

    mixed = (torch.arange(count, dtype=torch.int64) + 1) * _signed(_STEP)
    for shift, factor in _MIX:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: torch's int64 one copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_KINDS: Final[Mapping[ChecksumKind, Callable[[memoryview], int]]] = {
    ChecksumKind.XXH3: xxh3_64_intdigest,
    ChecksumKind.WSUM: wsum,
}


def checksum(kind: ChecksumKind, data: memoryview) -> int:
    """Checksum of ``data``."""
    return _KINDS[kind](data)


def run_checksums(
    kind: ChecksumKind, payload: memoryview, *, run: int, runs: int, stride: int
) -> list[int]:
    """Checksums of every run of a payload of whole layer blocks, in payload order.

    A layer block is ``runs`` runs of ``run`` bytes, then padding up to ``stride``, which the
    last run of the layer covers. In a worker thread it gives up the GIL now and then, by sleeping.
    """
    function = _KINDS[kind]
    keeps_gil = kind is ChecksumKind.XXH3 and run <= _QUIET_BYTES
    sums: list[int] = []
    for block in range(0, len(payload), stride):
        last = block + (runs - 1) * run
        sums += [function(payload[at : at + run]) for at in range(block, last, run)]
        sums.append(function(payload[last : block + stride]))
        if keeps_gil:
            _take_turns(stride)
    return sums


def _take_turns(nbytes: int) -> None:
    """Counted across calls, because loads are verified in pieces smaller than a turn."""
    _turn.nbytes += nbytes
    if _turn.nbytes >= _TURN_BYTES:
        _turn.nbytes = 0
        if not _on_an_event_loop():  # small tools hash there, and a loop must not sleep
            time.sleep(0)


def _on_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
