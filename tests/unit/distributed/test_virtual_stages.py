"""Stages in virtual time, with the real scheduler: near the bound, and what feeding costs."""

from __future__ import annotations

import pytest

from cacheflow.distributed import Mode
from cacheflow.testing.virtual_stages import Pipeline

LAYERS, LAYER_BYTES = 32, 4096
TOKENS = 32768


def pipeline(stages: int, hidden_bytes: int) -> Pipeline:
    return Pipeline(stages, LAYERS, lambda tile: 1e-6 * tile.width, LAYER_BYTES, hidden_bytes)


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_reach_their_bound_together(stages: int) -> None:
    """At balance all stages are within 2 % of the fluid bound with the activations' bytes; the
    activations loaded are those of the part that was recomputed."""
    line = pipeline(stages, 8192)
    bandwidth = line.stage_bytes(TOKENS) / line.compute_seconds(TOKENS)
    results = line.restore(TOKENS, bandwidth)
    assert max(r.bound for r in results) >= 0.98 * max(r.seconds for r in results)
    for number, result in enumerate(results):
        share = 8192 / (LAYER_BYTES * LAYERS / stages) if number else 0.0
        extra = share * result.recomputed * line.stage_bytes(TOKENS)
        assert result.hidden_bytes == pytest.approx(extra, rel=0.1)
        assert 0.3 < result.recomputed < 0.7


@pytest.mark.parametrize("attention", [0.0, 4e-5])
def test_eight_stages_reach_what_their_grid_allows(attention: float) -> None:
    """Four layers a stage, activations of half a tile's KV: within 1 % of the best that whole
    layers of whole tiles allow, although early tiles are computed faster than they are fed."""
    line = Pipeline(
        8,
        LAYERS,
        lambda tile: 1e-6 * tile.width * (1.0 + attention * tile.start),
        LAYER_BYTES,
        8192,
    )
    bandwidth = line.stage_bytes(TOKENS) / line.compute_seconds(TOKENS)
    first, *behind = line.restore(TOKENS, bandwidth)
    assert first.seconds < behind[0].seconds
    for result in behind:
        assert result.bound <= result.possible <= result.seconds
        assert result.possible >= 0.99 * result.seconds


def test_one_stage_after_the_other_pays_for_filling_the_pipeline() -> None:
    """Without activations each stage begins a tile behind the one before: slower in a short prefix,
    and not a byte more than the KV is loaded."""
    line = pipeline(4, 8192)
    bandwidth = line.stage_bytes(8192) / line.compute_seconds(8192)
    own = max(r.seconds for r in line.restore(8192, bandwidth))
    waiting = line.restore(8192, bandwidth, Mode.DEPENDENT)
    assert max(r.seconds for r in waiting) > own
    assert all(r.hidden_bytes == 0 for r in waiting)
    assert [r.recomputed for r in waiting] == sorted((r.recomputed for r in waiting), reverse=True)


def test_activations_as_large_as_the_kv_are_left_alone() -> None:
    """Nothing of them is loaded, in any stage, and loading takes what it takes alone."""
    line = pipeline(16, 2 * LAYER_BYTES)
    bandwidth = line.stage_bytes(TOKENS) / line.compute_seconds(TOKENS)
    first, *behind = line.restore(TOKENS, bandwidth)
    assert first.recomputed > 0.3
    assert all(r.hidden_bytes == 0 and r.recomputed == 0.0 for r in behind)
    assert behind[0].seconds == pytest.approx(behind[0].load_seconds, rel=0.01)
