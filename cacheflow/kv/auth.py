"""Keyed authentication of chunks, so that a store need not be trusted.

Tags are 128 bits of keyed BLAKE3. Every layer block has its own, about its bytes and its place
(which object, which layer), so a ranged read is checked alone; the header has one about everything
else, those tags included. Who cannot make them can withhold chunks or bring back old ones of the
same name, and nothing else. Knows no files and no settings.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

from cacheflow.errors import IntegrityError
from cacheflow.kv.header import authenticated_bytes
from cacheflow.kv.keys import format_name
from cacheflow.types import MAC_BYTES

if TYPE_CHECKING:
    from cacheflow.types import ChunkInfo, Span

__all__ = ["ChunkAuth"]

_HEADER_CONTEXT: Final = "cacheflow 2026-11 chunk header tag"
_BLOCK_CONTEXT: Final = "cacheflow 2026-11 chunk layer block tag"
_MISSING: Final = "it is not authenticated, and setting auth_key asks for that"


class ChunkAuth:
    """Makes and checks tags under one secret, which it does not keep and never shows."""

    __slots__ = ("_block_key", "_header_key")

    def __init__(self, secret: bytes) -> None:
        from blake3 import blake3  # here and below: most processes authenticate nothing

        self._header_key = blake3(secret, derive_key_context=_HEADER_CONTEXT).digest()
        self._block_key = blake3(secret, derive_key_context=_BLOCK_CONTEXT).digest()

    def __repr__(self) -> str:
        return "ChunkAuth(...)"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not to be copied out of the process")

    def header_tag(self, info: ChunkInfo) -> bytes:
        """The tag of the header of ``info``, whatever ``info.mac`` is."""
        from blake3 import blake3

        return blake3(authenticated_bytes(info), key=self._header_key).digest(MAC_BYTES)

    def block_tags(self, info: ChunkInfo, layers: Span, data: memoryview) -> bytes:
        """The tags of these layer blocks, as they are stored with their padding."""
        from blake3 import blake3

        name, tags, at = format_name(info.key), [], 0
        for layer, size in zip(layers, info.block_sizes(layers), strict=True):
            place = f"{name}/{layer}\0".encode()
            tag = blake3(place, key=self._block_key).update(data[at : at + size])
            tags.append(tag.digest(MAC_BYTES))
            at += size
        return b"".join(tags)

    def check_header(self, info: ChunkInfo) -> None:
        """Raise IntegrityError unless who wrote the header had the secret."""
        if not info.mac:
            raise IntegrityError(_MISSING)
        if not hmac.compare_digest(self.header_tag(info), info.mac):
            raise IntegrityError("the header's tag does not match setting auth_key")

    def check_blocks(self, info: ChunkInfo, layers: Span, data: memoryview) -> None:
        """Raise IntegrityError unless who wrote these layer blocks had the secret."""
        if not info.macs:
            raise IntegrityError(_MISSING)
        first = MAC_BYTES * (layers.start - info.key.layers.start)
        stored = info.macs[first : first + MAC_BYTES * len(layers)]
        if not hmac.compare_digest(self.block_tags(info, layers, data), stored):
            raise IntegrityError(f"a tag of layers {layers} does not match setting auth_key")
