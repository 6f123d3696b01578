"""vLLM's paged KV cache as plain bytes: whole blocks, copied in and out of staging memory.

On a CPU the attention kernels pack a block as they like, so a block is opaque here; all that has to
hold is that each layer keeps a block in one contiguous piece. Copies release the GIL and use no
thread of torch's, whose pool belongs to the forward pass.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cacheflow.types import Buffer, KVLayout, Span

__all__ = ["BlockMemory"]


class BlockMemory:
    """The caches of all layers, in order, each ``[blocks, ...]`` and contiguous.

    Raises:
        ConfigError: a layer's cache lies otherwise, or its blocks have another size than ``layout``
            says.
    """

    def __init__(self, caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self.layout = layout
        self._caches = tuple(caches)  # keeps the memory alive
        self._blocks = caches[0].shape[0]
        self._bytes = layout.layer_bytes()
        for layer, cache in enumerate(caches):
            nbytes = cache.numel() * cache.element_size()
            if not cache.is_contiguous() or nbytes != self._blocks * self._bytes:
                raise ConfigError(
                    f"layer {layer}: a KV cache of shape {tuple(cache.shape)} is not "
                    f"{self._blocks} contiguous blocks of {self._bytes} bytes"
                )
        self._bases = tuple(cache.data_ptr() for cache in caches)

    @property
    def nbytes(self) -> int:
        """Bytes of one block in staging: all layers, each at a page boundary."""
        return self.layout.payload_bytes()

    def read(self, block_id: int, into: Buffer) -> None:
        """Copy a block out."""
        for cache, staged in self._pairs(block_id, into, self._bases):
            ctypes.memmove(staged, cache, self._bytes)

    def write(self, block_id: int, staged: Buffer, layers: Span) -> None:
        """Copy verified bytes of ``layers`` in."""
        bases = self._bases[layers.start : layers.stop]
        for cache, source in self._pairs(block_id, staged, bases):
            ctypes.memmove(cache, source, self._bytes)

    def _pairs(self, block_id: int, buffer: Buffer, bases: Sequence[int]) -> list[tuple[int, int]]:
        stride, offset = self.layout.layer_stride(), block_id * self._bytes
        if not 0 <= block_id < self._blocks or buffer.nbytes != stride * len(bases):
            raise ValueError(f"block {block_id} of {self._blocks}, {buffer.nbytes} bytes")
        return [(base + offset, buffer.address + i * stride) for i, base in enumerate(bases)]
