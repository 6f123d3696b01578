"""What is replaced between lookup and read is news, not damage."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cacheflow.kv import seal
from cacheflow.memory import buffer_from
from cacheflow.types import ObjectKey, Span, Write
from tests.unit.restore.test_restorer import TOKENS, rig
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import ChunkInfo, ChunkKey, Read


@pytest.mark.parametrize("replaced", [True, False])
async def test_only_what_is_damaged_is_distrusted(
    monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Somebody else stores other bytes under the same name after the lookup: the load fails, and
    the tier hears of nothing. Bytes that nobody stored are told."""
    async with rig() as r:
        await r.fill(len(TOKENS))
        told: list[ObjectKey] = []
        lookups = 0
        lookup, layout = r.store.lookup, r.engine.layout
        layers, heads = Span(0, layout.num_layers), Span(0, layout.num_kv_heads)
        name = ObjectKey(r.keys[-1], layers, heads)

        def hear(keys: Sequence[ObjectKey]) -> None:
            told.extend(keys)

        async def counted(keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
            nonlocal lookups
            found = await lookup(keys)
            lookups += 1
            return found

        async def change(read: Read) -> None:
            r.store.before_read = None
            if replaced:
                payload = bytes(layout.payload_bytes())
                info, header = seal(
                    name, layout, memoryview(payload), grid_id="x", segments=(), canonical=False
                )
                await r.store.store([Write(info, (buffer_from(header), buffer_from(payload)))])
            else:
                r.store.objects[name][-1] ^= 1

        monkeypatch.setattr(r.store, "distrust", hear)
        monkeypatch.setattr(r.store, "lookup", counted)
        r.store.before_read = change
        result = await r.restore("load")
        assert result.failed_loads > 0
        await until(lambda: lookups > 1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert told == ([] if replaced else [name])
