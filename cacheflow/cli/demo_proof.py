"""Byte-for-byte comparison of KV caches by digests of their cells.

Reads the KV through the engine's contract (``capture``), after the clocks have stopped. Does not
know how a cell came to be.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import xxhash

from cacheflow.types import Span, StagedPart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.abc import Engine
    from cacheflow.session import CacheFlow
    from cacheflow.types import KVLayout

__all__ = ["Proof", "cell_digests"]


async def cell_digests(engine: Engine, request_id: str, tokens: int) -> tuple[bytes, ...]:
    """128-bit digests of the (chunk, layer) cells of ``tokens`` leading tokens, chunk by chunk."""
    layout = engine.layout
    digests: list[bytes] = []
    staging = bytearray(layout.payload_bytes())
    for chunk in range(tokens // layout.chunk_tokens):
        part = StagedPart(chunk, Span(0, layout.num_layers), memoryview(staging))
        await engine.capture(request_id, [part])
        digests += await asyncio.to_thread(_digest_layers, staging, layout)
    return tuple(digests)


def _digest_layers(payload: bytearray, layout: KVLayout) -> list[bytes]:
    stride = layout.layer_stride()
    view = memoryview(payload)
    starts = range(0, len(payload), stride)
    return [xxhash.xxh3_128_digest(view[start : start + stride]) for start in starts]


@dataclass(frozen=True, slots=True)
class Proof:
    """The KV of the run that never forgot, and which of its chunks grid recompute must repeat."""

    never_forgot: tuple[bytes, ...]
    canonical: tuple[bool, ...]
    """By chunk: every copy of it in the store was computed on grid tiles from the first token."""
    layers: int

    @classmethod
    async def of(cls, flow: CacheFlow, prompt: Sequence[int], digests: tuple[bytes, ...]) -> Self:
        """From the digests of a run whose history is in the store of ``flow``."""
        (backend,) = flow.backends.values()
        layers = flow.engine.layout.num_layers
        keys = flow.keys(prompt)[: len(digests) // layers]
        found = await backend.lookup(keys)
        canonical = tuple(bool(infos) and all(i.canonical for i in infos) for infos in found)
        return cls(digests, canonical, layers)

    def exact(self, restored: Sequence[bytes], recomputed: Sequence[bytes]) -> int:
        """Cells equal to the run that never forgot, or to the cold recompute of them."""
        both = zip(restored, self.never_forgot, recomputed, strict=True)
        return sum(cell in (reference, cold) for cell, reference, cold in both)

    def canonical_identical(self, restored: Sequence[bytes]) -> bool:
        """Whether no byte of a canonical chunk differs from the run that never forgot."""
        pairs = enumerate(zip(restored, self.never_forgot, strict=True))
        return all(a == b for i, (a, b) in pairs if self.canonical[i // self.layers])
