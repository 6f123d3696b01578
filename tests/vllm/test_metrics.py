"""The dashboard beside vLLM asks for series that vLLM, with the connector in it, really has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from tests.vllm.prompts import LONG

if TYPE_CHECKING:
    from tests.vllm.serving import Serving

BOARD = Path(__file__).parents[2] / "dashboards" / "grafana" / "vllm.json"


def test_every_series_of_the_dashboard_is_there(serving: Serving) -> None:
    """After one request that was restored; counters that count no failure yet are families."""
    serving.generate([LONG], "adaptive")
    known = set()
    for family in REGISTRY.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
        known |= {family.name + each for each in suffixes.get(family.type, ("",))}
    asked = set(re.findall(r"vllm:\w+", BOARD.read_text(encoding="utf-8")))
    assert len(asked) >= 15
    assert asked <= known, asked - known
