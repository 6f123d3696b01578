"""What `cacheflow bench quality` measures."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from cacheflow.cli.quality_run import compare
from cacheflow.plugins.transformers import TransformersEngine
from cacheflow.types import Codec, TileGrid

if TYPE_CHECKING:
    from pathlib import Path


async def test_what_codecs_cost_is_measured(model_folder: Path) -> None:
    """Lossless: no divergence at all and the same tokens. Lossy: some, though little, in fewer
    bytes. Every prediction counts once, and no request is left open."""
    engine: Any = await TransformersEngine.open_model(
        model_folder, dtype="float32", grid=TileGrid((256,), 256), kv_bytes=1 << 28
    )
    chance = random.Random(3)
    pieces = [[chance.randrange(320) for _ in range(256 + 6)] for _ in range(2)]
    told: list[None] = []
    try:
        found = await compare(engine, pieces, 256, lambda: told.append(None))
        assert engine.open_requests == []
    finally:
        await engine.aclose()
    by_codec = {each.codec: each.summary() for each in found}
    assert len(told) == 12
    assert {summary["predictions"] for summary in by_codec.values()} == {12}
    lossless = by_codec.pop(Codec.ZSTD)
    assert (lossless["kl_max"], lossless["same_token"]) == (0.0, 1.0)
    assert lossless["ratio"] > 1.0
    for lossy in by_codec.values():
        assert 0.0 < lossy["kl_mean"] < 0.05
        assert lossy["ratio"] > 3.0
        assert lossy["decode_bytes_per_second"] > 0.0
