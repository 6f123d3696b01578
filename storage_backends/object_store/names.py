"""Where an object lies under the store's prefix: one folder a chunk, in it one name an object.

A listing by prefix finds all shards of a chunk in one request, and nothing has to be remembered.
Both ways are injective: what was not written by :func:`path_of` has no key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheflow.kv import format_name, parse_name

if TYPE_CHECKING:
    from cacheflow.types import ChunkKey, ObjectKey

__all__ = ["folder_of", "key_of", "path_of"]


def folder_of(chunk: ChunkKey) -> str:
    """The prefix of all objects of ``chunk``."""
    return chunk.digest.hex()


def path_of(key: ObjectKey) -> str:
    """The object's path below the store's prefix."""
    return f"{folder_of(key.chunk)}/{format_name(key)}"


def key_of(path: str) -> ObjectKey | None:
    """The inverse of :func:`path_of`; None for what is no object of ours."""
    folder, _, name = path.partition("/")
    try:
        key = parse_name(name)
    except ValueError:
        return None
    return key if folder_of(key.chunk) == folder else None
