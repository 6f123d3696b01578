"""A twentieth of the mutation campaign (`make bench-fuzz`)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "benchmarks" / "bench_fuzz.py"


def test_no_mutation_is_accepted() -> None:
    """10,000 random damages of raw, compressed, quantized and authenticated chunks, a quarter of
    them with all checksums made right again: none is served, none crashes, memory stays flat."""
    spec = importlib.util.spec_from_file_location("bench_fuzz", BENCH)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bench  # dataclasses look their module up
    try:
        spec.loader.exec_module(bench)
        found = bench.run(10_000, seed=1)
    finally:
        del sys.modules[spec.name]
    assert found["mutations"] > 9_500
    assert found["with_right_checksums"] > 2_000
    assert (found["accepted"], found["crashes"]) == (0, 0)
    assert found["growth_mib"] < 64
