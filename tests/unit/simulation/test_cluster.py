"""Many nodes: routing, what is stored where, shared links, and nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import ConfigError
from cacheflow.simulation.agents import Agents, AgentSettings
from cacheflow.simulation.cluster import Affinity, LeastWork, RoundRobin, load_router
from cacheflow.simulation.jobs import Cut, Job
from cacheflow.simulation.keeping import BlockStore
from cacheflow.simulation.placement import FixedPlacement, LearnedPlacement
from cacheflow.simulation.presets import load_link, load_machine
from cacheflow.simulation.scenario import Channel, Scenario, simulate
from cacheflow.simulation.traces import generate_trace, parse_trace
from cacheflow.simulation.workloads import Lengths, Synthetic, poisson, synthetic

if TYPE_CHECKING:
    from cacheflow.simulation.placement import Placement

CUT = Cut(8)
SCENARIO = Scenario(load_machine("h100:llama-3.1-8b"), (Channel(load_link("25gbps")),), gpus=3)


def named(name: str, blocks: tuple[int, ...], extra: int = 1) -> Job:
    total = len(blocks) * 512 + extra
    return Job(name, 0.0, total, hash_ids=(*blocks, -1), leaves=blocks)


def nowhere() -> Placement:
    return FixedPlacement(CUT, 1, {"net": 1.0})


def test_round_robin_takes_turns() -> None:
    """Whatever the nodes have to do."""
    router, job = RoundRobin(), Job("r", 0.0, 10)
    assert [router.choose(job, [9.0, 0.0, 0.0], nowhere()) for _ in range(4)] == [0, 1, 2, 0]


def test_least_work_goes_to_the_idlest() -> None:
    """The first of equals, so that runs repeat."""
    assert LeastWork().choose(Job("r", 0.0, 10), [5.0, 1.0, 1.0], nowhere()) == 1


def test_affinity_follows_blocks_but_not_into_a_queue() -> None:
    """The node with the longest match, unless it has far more to do than the mean."""
    placement = LearnedPlacement(CUT, 1, 3, shared="net")
    placement.served(named("a", (1, 2, 3)), 2)
    placement.served(named("b", (1, 2)), 1)
    job, router = named("c", (1, 2, 3, 4)), Affinity()
    assert router.choose(job, [0.0, 0.0, 0.0], placement) == 2
    assert router.choose(job, [0.0, 0.0, 90000.0], placement) == 1
    assert router.choose(named("d", (7,)), [5.0, 0.0, 5.0], placement) == 1


def test_unknown_routers_are_named() -> None:
    """The error lists those there are."""
    with pytest.raises(ConfigError, match="round-robin, least-work, affinity"):
        load_router("random")


def test_fixed_placement_deals_shares_out_from_the_end() -> None:
    """A half on one channel is the latter half; the next channel's share lies before it; whole
    shares have everything but holes."""
    placement = FixedPlacement(CUT, 100, {"dram": 0.5, "net": 1.0, "nvme": 0.25})
    placed = placement.place(Job("r", 0.0, 4097, prefix_tokens=4096, holes=frozenset({1})), 0)
    full = 255
    masks = {each.channel: [bool(mask) for mask in each.layers] for each in placed.coverage}
    assert masks["dram"] == [False] * 4 + [True] * 4
    assert masks["nvme"] == [False] * 2 + [True] * 2 + [False] * 4
    assert masks["net"] == [True, False, *[True] * 6]
    assert placed.stored == (full, 0, *[full] * 6)


def test_learned_placement_restores_what_was_left() -> None:
    """Nothing at first; later the prefix up to the last stored block, with holes where blocks are
    not stored; up to the end of that block's tile if it was stored as a whole, and the prompt has
    it; at least one token is always computed."""
    placement = LearnedPlacement(CUT, 100, 2, shared="net", local="dram", local_blocks=2)
    first = named("a", (1, 2, 3))
    assert placement.place(first, 0).spec.prefix_tokens == 0
    placement.served(first, 0)
    placed = placement.place(named("b", (1, 2, 9)), 0)
    assert placed.spec.prefix_tokens == 1024
    assert [each.channel for each in placed.coverage] == ["dram", "net"]
    dram, net = (list(map(bool, each.layers)) for each in placed.coverage)
    assert net == [True, True]
    assert dram == [True, True]
    assert placement.place(first, 1).coverage[0].layers == (0, 0, 0)
    exact = Job("c", 0.0, 1024, hash_ids=(1, 2), leaves=(1, 2))
    assert placement.place(exact, 0).spec.prefix_tokens == 512
    whole = LearnedPlacement(CUT, 100, 1, shared="net", shared_blocks=3)
    whole.served(named("w", (1, 2, 3, 4)), 0)
    for blocks, tokens in (((1, 2, 3, 4, 5), 2048), ((1, 2, 3, 9), 2048), ((1, 2, 3), 1536)):
        placed = whole.place(named("v", blocks), 0)
        assert placed.spec.prefix_tokens == tokens
        assert len(placed.coverage[0].layers) == tokens // 512


def test_block_stores_forget_the_least_recent() -> None:
    """Of one request the later blocks leave first; asking for more than fits keeps the cap."""
    store = BlockStore(3)
    store.add((1, 2))
    store.add((3, 4))
    assert [block in store for block in (1, 2, 3, 4)] == [True, False, True, True]
    store.add(range(10, 20))
    assert len(store) == 3
    assert [block for block in range(10, 20) if block in store] == [10, 11, 12]


@pytest.mark.no_cover  # many seconds of pure Python under a tracer; other tests go the same ways
@pytest.mark.parametrize("policy", ["recompute", "load", "adaptive"])
@pytest.mark.parametrize("router", ["round-robin", "least-work", "affinity"])
def test_a_cluster_serves_every_request(policy: str, router: str) -> None:
    """Every request has a first token, on some node, and none is left anywhere."""
    jobs = synthetic(40, Lengths("uniform", (1024, 16384)), chunk_tokens=512, seed=1)
    run = simulate(replace(SCENARIO, router=router), Synthetic("x", poisson(jobs, 0.05)), policy)
    assert {record.request_id for record in run.records} == {job.id for job in jobs}
    assert sum(run.summary.sources.values()) == pytest.approx(sum(j.prefix_tokens for j in jobs))
    assert all(node.unfinished == 0 for node in run.nodes)
    assert sum(len(node.records) for node in run.nodes) == 40


def test_a_shared_uplink_slows_all_nodes() -> None:
    """Three nodes that load at once through one link's worth take about three times as long."""
    jobs = synthetic(3, Lengths("fixed", (16384.0,)), chunk_tokens=512)
    one = simulate(SCENARIO, Synthetic("x", jobs), "load").summary.ttft
    link = load_link("25gbps")
    pipe = replace(SCENARIO, channels=(Channel(link, shared_bandwidth=link.bandwidth),))
    shared = simulate(pipe, Synthetic("x", jobs), "load").summary.ttft
    assert shared.longest == pytest.approx(3 * one.longest, rel=0.1)


def test_traces_find_what_ran_before() -> None:
    """A trace's shared blocks are restored, not computed: far fewer tokens than it has in all."""
    jobs = list(parse_trace(generate_trace(60, seed=2, gap_ms=2000), "t"))
    run = simulate(replace(SCENARIO, router="affinity"), Synthetic("t", jobs), "adaptive")
    restored = sum(run.summary.sources.values())
    assert restored + run.summary.computed_tokens == pytest.approx(
        sum(job.total_tokens for job in jobs), abs=60 * 512 * 3
    )
    assert restored > 0.5 * sum(job.total_tokens for job in jobs)


def test_agents_come_back_to_what_was_stored() -> None:
    """Every turn is served once; from the second turn on most of the context is restored, from a
    local tier too."""
    agents = Agents(AgentSettings(sessions=6, turns=4, start_seconds=5.0), seed=3)
    channels = (Channel(load_link("dram")), Channel(load_link("25gbps")))
    scenario = replace(SCENARIO, channels=channels, router="affinity", local_blocks=100)
    run = simulate(scenario, agents, "adaptive")
    assert len(run.records) == 24
    late = [record for record in run.records if not record.request_id.endswith(".t0")]
    assert all(record.prefix_tokens > record.suffix_tokens / 4 for record in late)
    assert run.summary.sources.keys() >= {"dram"}


def test_a_run_that_cannot_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that nothing will ever serve are named, not waited for."""
    monkeypatch.setattr("cacheflow.simulation.node.Node.admit", lambda *_: None)
    jobs = synthetic(2, Lengths("fixed", (2048.0,)), chunk_tokens=512)
    with pytest.raises(RuntimeError, match="2 requests can never finish"):
        simulate(SCENARIO, Synthetic("x", jobs), "load")


def test_traces_need_chunks_of_their_blocks() -> None:
    """A trace names blocks of 512 tokens: another chunk size is an error, not a wrong answer."""
    jobs = list(parse_trace(generate_trace(2), "t"))
    with pytest.raises(ConfigError, match="512 tokens"):
        simulate(replace(SCENARIO, chunk_tokens=256), Synthetic("t", jobs), "load")


def test_blocks_of_another_size_are_played_where_chunks_are_as_large() -> None:
    """What decides is how many blocks the requests name, not the number 512."""
    ids = tuple(range(9))
    jobs = [Job(str(i), 10.0 * i, 2304 - 1, hash_ids=ids, leaves=ids[:8]) for i in range(2)]
    run = simulate(replace(SCENARIO, chunk_tokens=256), Synthetic("t", jobs), "load")
    assert [record.prefix_tokens for record in run.records] == [0, 2048]
