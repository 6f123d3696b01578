"""What the plugin counts is what dashboards ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cacheflow.plugins.vllm.counts import METRICS
from tests.unit.vllm_plugin.test_restores import SLOW, STEP, TOKENS, learned, stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.vllm_plugin.minivllm import MiniVllm

DASHBOARD = Path(__file__).parents[3] / "dashboards" / "grafana" / "vllm.json"


def test_the_dashboard_asks_for_counters_that_there_are() -> None:
    """Every series of the plugin in the dashboard beside vLLM exists, with the labels asked for."""
    texts = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    asked = [
        (re.split(", ", labels), name)
        for text in texts
        for labels, name in re.findall(r"by \(([\w, ]+)\) \(rate\((vllm:cacheflow_\w+)_total", text)
    ]
    assert len(asked) >= 5
    assert sum(text.count("vllm:cacheflow_") for text in texts) == len(asked)
    for labels, name in asked:
        assert set(labels) <= set(METRICS[name][1]), name


def test_tokens_of_a_race_are_told_apart(engine: Callable[..., MiniVllm]) -> None:
    """Of a prefix that was restored from both ends: so many tokens loaded, the rest computed."""
    mini = learned(engine(bandwidth=SLOW, step_seconds=STEP))
    stored(mini)
    mini.add("warm", TOKENS, "load")
    mini.run()
    mini.desk.counts.take()
    both = mini.add("both", TOKENS)
    mini.run()
    sums = mini.desk.counts.take()
    loaded = sums.get("vllm:cacheflow_restore_tokens\tload", 0.0)
    computed = sums.get("vllm:cacheflow_restore_tokens\trecompute", 0.0)
    assert loaded == 400 - both.computed
    # On a busy machine it may not come to a race: then all of the prefix is loaded, or there is no
    # restore.
    assert loaded + computed in (0.0, 384.0)
