"""A hundred simulated restores, counted by the same observer as real ones: the sums agree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from cacheflow.metrics import PrometheusObserver, Timeline
from cacheflow.simulation import (
    Channel,
    Lengths,
    Scenario,
    SerialLink,
    Synthetic,
    load_link,
    load_machine,
    mean_gap,
    poisson,
    simulate,
    synthetic,
)
from cacheflow.types import FirstToken, LoadEnded, LoadOutcome, RestoreEnded

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheflow.simulation import Run
    from cacheflow.simulation.links import Transfer
    from cacheflow.types import Event

COUNT = 100
FAST, SLOW = "100gbps", "10gbps"


class Moved:
    """Bytes that links were given, counted where they flow: below the events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_channel: dict[str, int] = {}
        send = SerialLink.send

        def counted(link: SerialLink, transfer: Transfer, done: Callable[..., None]) -> None:
            if transfer.ok:
                channel = transfer.load.channel
                moved = self.by_channel.get(channel, 0)
                self.by_channel[channel] = moved + transfer.load.nbytes
            send(link, transfer, done)

        monkeypatch.setattr(SerialLink, "send", counted)


class Node:
    """All that one node tells, counted and kept."""

    def __init__(self) -> None:
        self.counted = PrometheusObserver()
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.counted(event)
        self.events.append(event)

    def value(self, name: str, **labels: str) -> float:
        return self.counted.registry.get_sample_value(f"cacheflow_{name}", labels) or 0.0

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def run(
    policy: str, failing: float, gpus: int = 1, *, at_once: bool = False
) -> tuple[Run, list[Node]]:
    scenario = Scenario(
        load_machine("h100:llama-3.1-8b"),
        (Channel(load_link(FAST), share=0.4), Channel(load_link(SLOW), share=0.5)),
        gpus=gpus,
        failing=failing,
    )
    jobs = synthetic(COUNT, Lengths("lognormal", (6000.0, 1.0)), chunk_tokens=512, seed=1)
    if not at_once:
        jobs = poisson(jobs, mean_gap(scenario, jobs, 0.8), 1)
    nodes = [Node() for _ in range(gpus)]
    return simulate(scenario, Synthetic("x", jobs), policy, observe=nodes.__getitem__), nodes


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
@pytest.mark.parametrize("at_once", [True, False], ids=["all at once", "arriving"])
@pytest.mark.parametrize(
    ("policy", "failing"), [("adaptive", 0.0), ("adaptive", 0.1), ("cake", 0.0)]
)
def test_a_hundred_simulated_restores_add_up(
    policy: str, failing: float, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens by source are the prompts' tokens, bytes are those that crossed the links, and no
    resource was busy for longer than the clock ran."""
    moved = Moved(monkeypatch)
    found, [node] = run(policy, failing, at_once=at_once)
    answered = [event for event in node.events if isinstance(event, FirstToken)]
    assert len(answered) == len(found.records) == COUNT
    for event in answered:
        assert sum(event.cells.values()) == event.prompt_tokens * event.num_layers
    prompts = sum(record.prefix_tokens + record.suffix_tokens for record in found.records)
    by_source = {s: node.value("prompt_tokens_total", source=s) for s in _sources(answered)}
    assert math.fsum(by_source.values()) == pytest.approx(prompts, rel=1e-12)
    assert by_source["suffix"] == sum(record.suffix_tokens for record in found.records)
    for source, tokens in found.summary.sources.items():
        assert node.value("restore_tokens_total", source=source) == pytest.approx(tokens)

    wall = max(event.at for event in answered)
    [simulated] = found.nodes
    for channel in (FAST, SLOW):
        labels = {"tier": channel, "direction": "load"}
        assert node.value("transfer_bytes_total", **labels) == moved.by_channel[channel] > 0
        busy = node.value("io_busy_seconds_total", **labels)
        assert busy == pytest.approx(simulated.links[channel].busy)
        last = max(e.stop for e in node.events if isinstance(e, LoadEnded))
        assert 0 < busy <= max(wall, last) * (1 + 1e-12)
    stages = (node.value("compute_busy_seconds_total", stage=s) for s in ("prefix", "suffix"))
    computed = math.fsum(stages)
    assert computed == pytest.approx(simulated.compute.busy)
    assert 0 < computed <= wall * (1 + 1e-12)


def _sources(answered: list[FirstToken]) -> set[str]:
    return {source for event in answered for source in event.cells}


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
def test_failures_and_drops_are_counted_as_they_happen() -> None:
    """What the nodes' own records say: failed loads by reason, loads whose cells were taken."""
    found, nodes = run("adaptive", 0.15, gpus=4)
    assert sum(len(node.of(FirstToken)) for node in nodes) == COUNT
    failed = sum(
        node.value("load_failures_total", tier=tier, reason="failed")
        for node in nodes
        for tier in (FAST, SLOW)
    )
    assert failed == found.summary.failed_loads > 0
    dropped = sum(
        event.outcome is LoadOutcome.DROPPED
        for node in nodes
        for event in node.events
        if isinstance(event, LoadEnded)
    )
    assert dropped == found.summary.dropped_loads


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
def test_a_restore_alone_takes_what_was_expected() -> None:
    """With warm cost models and nobody beside it; among others it takes longer."""
    _, [node] = run("adaptive", 0.0, at_once=True)
    crowded = [e for e in node.events if isinstance(e, RestoreEnded) and e.expected]
    assert len(crowded) == COUNT
    last = max(crowded, key=lambda event: event.stop)
    assert last.expected / (last.stop - last.arrival) < 0.5
    scenario = Scenario(load_machine("h100:llama-3.1-8b"), (Channel(load_link("25gbps")),))
    jobs = synthetic(1, Lengths("lognormal", (16000.0, 0.1)), chunk_tokens=512, seed=1)
    alone = Node()
    simulate(scenario, Synthetic("x", jobs), "adaptive", observe=lambda _: alone)
    [ended] = [event for event in alone.events if isinstance(event, RestoreEnded)]
    assert ended.expected / (ended.stop - ended.arrival) == pytest.approx(0.95, abs=0.15)
    labels = {"policy": "adaptive"}
    assert alone.value("predicted_efficiency_count", **labels) == 1


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
def test_a_simulated_restore_has_a_timeline() -> None:
    """The same lanes as a real one, in virtual seconds."""
    _, [node] = run("adaptive", 0.0)
    timeline = Timeline()
    for event in node.events:
        timeline(event)
    spans = timeline.trace()["traceEvents"]
    lanes = {each["args"]["name"] for each in spans if each["name"] == "thread_name"}
    assert {"compute", f"load {FAST}", f"load {SLOW}"} <= lanes
