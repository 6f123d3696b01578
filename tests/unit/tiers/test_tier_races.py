"""A tier whose object is stored while it is being deleted: the index stays what the medium has."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.testing.objects import make_object
from cacheflow.types import TransferStatus
from tests.unit.tiers.shelf import rig

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize("stored", ["after it was gone", "before it was gone"])
async def test_a_store_during_a_delete(stored: str) -> None:
    """Whichever came first in the backend, every byte that is there is accounted for, and what is
    not there is not counted."""
    async with rig(objects=5) as r:
        await r.store(0, 1)
        began, go = asyncio.Event(), asyncio.Event()
        real: Any = r.shelf.delete

        async def delete(keys: Sequence[Any]) -> list[bool]:
            deleted = await real(keys) if stored == "after it was gone" else []
            began.set()
            await go.wait()
            return deleted or await real(keys)

        r.shelf.delete = delete  # type: ignore[method-assign]
        deleting = asyncio.create_task(r.tier.delete([make_object(0).key]))
        await began.wait()
        assert await r.store(0) == [TransferStatus.OK]
        go.set()
        assert await deleting == [True]
        r.shelf.delete = real  # type: ignore[method-assign]
        assert r.there == ([0, 1] if stored == "after it was gone" else [1])
        await r.assert_exact()
