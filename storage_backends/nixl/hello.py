"""What a store says of its memory to a client that greets it: where it is, how to get there.

::

    magic "NXL1" | u64 address of the arena | u64 bytes of it | u16 bytes of the agent's name
    the agent's name | NIXL's metadata of the agent
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

from cacheflow.errors import BackendError

__all__ = ["Hello"]

_MAGIC: Final = b"NXL1"
_HEAD: Final = struct.Struct("<4sQQH")


@dataclass(frozen=True, slots=True)
class Hello:
    """A store's arena, for the ranges of transfers; ``metadata`` is NIXL's and opaque."""

    agent: str
    """Another one for each start of a store."""
    address: int
    nbytes: int
    metadata: bytes

    def encode(self) -> bytes:
        """The bytes for :meth:`decode`."""
        name = self.agent.encode()
        head = _HEAD.pack(_MAGIC, self.address, self.nbytes, len(name))
        return head + name + self.metadata

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises BackendError if these are not the bytes of such a greeting."""
        if len(data) <= _HEAD.size:
            raise _unreadable(f"{len(data)} bytes")
        magic, address, nbytes, length = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise _unreadable(f"begins with {magic!r}")
        name, metadata = data[_HEAD.size :][:length], data[_HEAD.size + length :]
        if not metadata or not name.isascii():
            raise _unreadable("it is cut short")
        return cls(name.decode("ascii"), address, nbytes, metadata)


def _unreadable(what: str) -> BackendError:
    return BackendError(f"the store's NIXL greeting is not understood: {what}", operation="hello")
