"""What a reader found damaged, told to its tier, which then deletes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from cacheflow.abc import StorageBackend
    from cacheflow.types import ChunkInfo

__all__ = ["tell_damaged"]


async def tell_damaged(tier: StorageBackend, read: Collection[ChunkInfo]) -> None:
    """``tier`` is not to be trusted with the objects ``read``, whose bytes were not what these say.
    It is asked again first: of what it says something else by now it hears nothing, for that was
    replaced while it was being read, and would be deleted good as it is.

    Raises:
        Exception: whatever the tier raises; it may be a third party's.
    """
    found = await tier.lookup(list({info.key.chunk for info in read}))
    there = {info for infos in found for info in infos}
    if damaged := [info.key for info in read if info in there]:
        tier.distrust(damaged)
