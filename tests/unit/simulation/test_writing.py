"""Simulated stores: what a link carries both ways, bounds, and giving way to loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheflow.simulation import Channel, Scenario, Synthetic, load_link, load_machine, simulate
from cacheflow.simulation.cluster import Cluster, LeastWork
from cacheflow.simulation.events import EventLoop
from cacheflow.simulation.jobs import Cut, Job
from cacheflow.simulation.links import SerialLink, Transfer, Wire
from cacheflow.simulation.placement import LearnedPlacement
from cacheflow.simulation.traces import generate_trace, parse_trace
from cacheflow.simulation.writing import WriteBehind
from cacheflow.tiers.write_behind import AT_ONCE, MAX_QUEUED
from cacheflow.types import Load, Span

BLOCK = 512


def writer(loop: EventLoop, link: SerialLink, nbytes: int = 200) -> WriteBehind:
    return WriteBehind(loop, link, nbytes, BLOCK)


def load(nbytes: int) -> Transfer:
    return Transfer(Load(1, "r", "link", 0, Span(0, 1), (0,), nbytes), ok=True)


class Watched(SerialLink):
    """Notes when each of its transfers was given to it."""

    def __init__(self, loop: EventLoop, bandwidth: float) -> None:
        super().__init__(loop, bandwidth)
        self.sent: list[float] = []
        self.loop = loop

    def send(self, transfer: Wire, done: object) -> None:
        self.sent.append(self.loop.now())
        super().send(transfer, done)  # type: ignore[arg-type]


def test_slow_stores_go_a_few_at_once() -> None:
    """Each begins a moment after the last, until as many are under way as real savers have."""
    loop = EventLoop()
    link = Watched(loop, 100.0)
    stores = writer(loop, link)
    assert stores.store(3) == 3
    loop.run()
    assert link.sent == pytest.approx([0.0, 0.01, 0.02, 0.03, 1.0, 2.0])
    assert AT_ONCE == 4
    assert (stores.written_bytes, loop.now()) == (600, 6.0)


def test_quick_stores_follow_one_another() -> None:
    """One that is over before the moment lets the next begin at once."""
    loop = EventLoop()
    link = Watched(loop, 100e3)
    writer(loop, link).store(2)
    loop.run()
    assert link.sent == pytest.approx([0.0, 1e-3, 2e-3, 3e-3])


def test_stores_give_way_to_loads() -> None:
    """While a load is under way a store begins after ten times what the last one took; when it has
    ended, at once."""
    loop = EventLoop()
    link = Watched(loop, 100e3)
    stores = writer(loop, link)
    stores.load_began()
    stores.store(2)
    loop.run(limit=0.0105)
    assert link.sent == pytest.approx([0.0, 0.001])
    loop.at(0.0150, lambda _: stores.load_ended())
    loop.run()
    assert link.sent[1] == pytest.approx(0.001)
    assert link.sent[2:] == pytest.approx([0.011, 0.015])


def test_a_queue_of_stores_is_bounded() -> None:
    """What finds no room is dropped and counted, and is not stored after all: the first blocks of
    a prefix, which are the cheapest to recompute."""
    loop = EventLoop()
    stores = writer(loop, SerialLink(loop, 1.0))
    placement = LearnedPlacement(Cut(8), 1, 1, shared="net")
    placement.preload([7])

    class Node:
        """All that a cluster asks of one here."""

        def __init__(self) -> None:
            self.writers = {"net": stores}

    cluster = Cluster(
        loop,
        1,
        lambda index, ended: Node(),  # type: ignore[arg-type, return-value]
        router=LeastWork(),
        placement=placement,
        make_policy=None,  # type: ignore[arg-type]
        finished=None,  # type: ignore[arg-type]
    )
    blocks = tuple(range(MAX_QUEUED // 2 + 10))
    job = Job("r", 0.0, len(blocks) * BLOCK + 1, hash_ids=(*blocks, -1), leaves=blocks)
    cluster._store(job, 0)
    # 7 was stored before, and is not written again.
    assert stores.dropped_bytes == 9 * 200
    stored = placement.place(job, 0).stored
    assert [bool(mask) for mask in stored[:12]] == [i in (7, 10, 11) for i in range(12)]
    assert all(stored[12:])


def test_links_know_what_carries_both_ways() -> None:
    """Network ports and PCIe do, a flash drive does not, and a rate may say so."""
    assert load_link("25gbps").duplex
    assert load_link("pcie5").duplex
    assert not load_link("nvme").duplex
    shared = load_link("1.25gb/s-shared")
    assert (shared.name, shared.bandwidth, shared.duplex) == ("1.25gb/s-shared", 1.25e9, False)


@pytest.mark.no_cover  # seconds of pure Python under a tracer; other tests go the same ways
def test_stores_cost_those_who_load_only_where_they_share() -> None:
    """About as many bytes are written either way; first tokens come later where loads meet them, on
    one GPU as on two behind one pipe."""
    jobs = list(parse_trace(generate_trace(60, seed=3, gap_ms=300, conversations=8), "made up"))

    def summary(link: str, **options: object) -> tuple[float, int, int]:
        channel = Channel(load_link(link), **options)  # type: ignore[arg-type]
        scenario = Scenario(load_machine("h100:llama-3.1-8b"), (channel,))
        if options:
            scenario = replace(scenario, gpus=2)
        found = simulate(scenario, Synthetic("made up", jobs), "adaptive").summary
        return found.ttft.mean, found.written_bytes, found.unwritten_bytes

    for options in ({}, {"shared_bandwidth": 1.25e9}):
        apart, together = (summary(link, **options) for link in ("10gbps", "10gbps-shared"))
        # Which of two turns ends first, and so which pieces are written twice, may differ.
        assert apart[1] == pytest.approx(together[1], rel=0.01)
        assert apart[2] == together[2] == 0
        assert apart[0] < together[0] < 1.25 * apart[0]
