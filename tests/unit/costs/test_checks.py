"""Predictions held against outcomes, told once a request."""

from __future__ import annotations

import pytest

from cacheflow.costs import ChannelModel, ComputeModel, CostChecks
from cacheflow.metrics import PrometheusObserver
from cacheflow.types import CostChecked, Event, LookedUp, RestoreEnded, Tile

TILE = Tile(0, 0, 32)


def ended(request_id: str) -> RestoreEnded:
    return RestoreEnded(request_id, "adaptive", "restored", 0.0, 1.0, 2.0, 32, 1, 4)


def test_one_event_a_request_and_kind() -> None:
    """However many layers and loads there were: their median, when the request has ended."""
    compute, channels = ComputeModel(1.0, 1e-3), {"a": ChannelModel(), "b": ChannelModel()}
    events: list[Event] = []
    watch = CostChecks(events.append, compute, channels, channels.__getitem__)
    for seconds in (1.0, 1.0, 1.1, 1.3):
        compute.observe(TILE, seconds)
    for number in range(3):
        channels["b"].started(number, 100, 10.0 * number)
        channels["b"].ended(number, 10.0 * number + 1, delivered=True)
    looked = LookedUp("r", "a", 1, 0, 0.0, 0.0)
    watch(looked)
    assert events == [looked]
    watch(ended("r"))
    layer, load = events[2:]
    assert isinstance(layer, CostChecked)
    assert isinstance(load, CostChecked)
    assert (layer.request_id, layer.kind, layer.channel, layer.count) == ("r", "layer", "", 3)
    assert layer.ratio == pytest.approx(1.1, rel=0.05)
    assert (load.request_id, load.kind, load.channel, load.count) == ("r", "load", "b", 2)
    assert load.ratio == pytest.approx(1.0)
    watch(ended("s"))
    assert events[4:] == [ended("s")]


def test_errors_become_a_histogram() -> None:
    """``cacheflow_cost_error{kind}``: how far outcomes were from predictions."""
    observer = PrometheusObserver()
    observer(CostChecked("r", "layer", "", 1.1, 5, 0.0))
    observer(CostChecked("r", "load", "a", 0.5, 5, 0.0))
    value = observer.registry.get_sample_value
    assert value("cacheflow_cost_error_sum", {"kind": "layer"}) == pytest.approx(0.1)
    assert value("cacheflow_cost_error_sum", {"kind": "load"}) == pytest.approx(0.5)
    assert value("cacheflow_cost_error_count", {"kind": "load"}) == 1
