"""From settings to a run: hardware, links, placement and a workload, under one policy.

The only place where the parts of the simulation meet. Knows nothing of how results are shown.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from cacheflow.costs import ChannelProfile, ComputeModel
from cacheflow.errors import ConfigError
from cacheflow.scheduling import BatchScheduler, load_policy
from cacheflow.simulation.bounds import batch_fluid_seconds
from cacheflow.simulation.cluster import Cluster, load_router
from cacheflow.simulation.events import EventLoop
from cacheflow.simulation.jobs import WIDE, Cut
from cacheflow.simulation.keeping import Keeping
from cacheflow.simulation.links import SerialLink, SharedPipe
from cacheflow.simulation.node import Node
from cacheflow.simulation.placement import FixedPlacement, LearnedPlacement
from cacheflow.simulation.results import summarise
from cacheflow.simulation.writing import WriteBehind
from cacheflow.types import Tile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.simulation.bounds import FluidRequest
    from cacheflow.simulation.hardware import Machine
    from cacheflow.simulation.jobs import Job, Workload
    from cacheflow.simulation.links import Link
    from cacheflow.simulation.placement import Placed, Placement
    from cacheflow.simulation.presets import LinkPreset
    from cacheflow.simulation.records import Record
    from cacheflow.simulation.results import Summary
    from cacheflow.tiers.eviction import EvictionName
    from cacheflow.types import Load, Observer, TileGrid

__all__ = ["Channel", "Run", "Scenario", "mean_gap", "shown_tiles", "simulate"]

_MOST_GPUS: Final = 4096
"""Each has a scheduler of its own."""


@dataclass(frozen=True, slots=True)
class Channel:
    """A link of every node. ``share`` of each stored prefix is there (fixed placements).

    ``shared_bandwidth``: all nodes' links meet in one pipe of so many bytes a second.
    """

    link: LinkPreset
    share: float = 1.0
    shared_bandwidth: float | None = None

    @property
    def name(self) -> str:
        return self.link.name


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything but the workload and the policy.

    ``warm``: cost models start with what compute and links really do, else with nothing.
    ``failing``: probability that a load fails. ``local_blocks``: capacity of the first of two
    channels, which is then local to each node, where the workload names its blocks; ``eviction``
    and ``writes``: what leaves such stores when they are full, and what is stored at all.
    """

    machine: Machine
    channels: tuple[Channel, ...]
    gpus: int = 1
    chunk_tokens: int = 512
    grid: TileGrid = WIDE
    objective: str = "tail"
    router: str = "least-work"
    warm: bool = True
    failing: float = 0.0
    decode_share: float = 0.0
    local_blocks: int | None = None
    shared_blocks: int | None = None
    eviction: EvictionName = "lru"
    writes: Literal["all", "planned"] = "all"
    seed: int = 0

    def __post_init__(self) -> None:
        names = [channel.name for channel in self.channels]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"--link: each link once, at least one; got {', '.join(names)}")
        if not 1 <= self.gpus <= _MOST_GPUS:
            raise ConfigError(f"--gpus {self.gpus} must be from 1 to {_MOST_GPUS}")
        for option, share in (("failing", self.failing), ("decode-share", self.decode_share)):
            if not 0 <= share < 1:
                raise ConfigError(f"--{option} {share:g} must be from 0 to below 1")

    @property
    def cut(self) -> Cut:
        """How requests are cut into cells."""
        return Cut(self.machine.layer_blocks, self.chunk_tokens, self.grid)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of one node's channels together."""
        return sum(channel.link.bandwidth for channel in self.channels)

    def fluid(self, placed: Placed) -> FluidRequest:
        """The cells of a request for a bound."""
        spec = placed.spec
        return self.cut.fluid(spec, self.machine, self.bandwidth, placed.stored)

    @property
    def keeping(self) -> Keeping:
        """What stores keep, by what compute and links really do."""
        machine, size = self.machine, self.chunk_tokens
        rows = machine.layer_blocks / (1 - self.decode_share)
        return Keeping.of(
            self.eviction,
            self.writes,
            size,
            self.cut.grid,
            lambda tile: machine.block_seconds(tile) * rows,
            machine.block_bytes(size) * machine.layer_blocks / self.bandwidth,
        )

    def placement(self, *, named: bool) -> Placement:
        """``named``: the workload names its blocks, so what is stored depends on the run."""
        stride = self.machine.block_bytes(self.chunk_tokens)
        names = [channel.name for channel in self.channels]
        if not named:
            shares = {channel.name: channel.share for channel in self.channels}
            return FixedPlacement(self.cut, stride, shares)
        if len(names) > 2:
            raise ConfigError(
                "--link: traces and agents take one link, or a local and a remote one"
            )
        return LearnedPlacement(
            self.cut,
            stride,
            self.gpus,
            shared=names[-1],
            local=names[0] if len(names) == 2 else None,
            shared_blocks=self.shared_blocks,
            local_blocks=self.local_blocks,
            keeping=self.keeping,
        )


def shown_tiles(grid: TileGrid, suffix: int) -> list[Tile]:
    """Of what a server has computed before: tiles of every width, late ones too, and suffixes of
    so many tokens, for narrow passes cost more a token than wide ones."""
    tiles = [grid.tile(i) for i in (0, 3, 1, 8, 2, 5)]
    pieces = [Tile(0, start, start + suffix) for start in (tiles[0].stop, tiles[1].stop)]
    return [tile for _ in range(3) for tile in (pieces[0], *tiles, pieces[1])]


def mean_gap(scenario: Scenario, jobs: Sequence[Job], load: float) -> float:
    """Mean seconds between arrivals at which ``jobs`` are ``load`` of what all GPUs and links
    together could carry (by the fluid bound of all of them at once)."""
    if not load > 0:
        raise ConfigError(f"--load {load:g} must be 0 (all at once) or more, such as 0.6")
    place = scenario.placement(named=False).place
    seconds = batch_fluid_seconds(scenario.fluid(place(job, 0)) for job in jobs)
    return seconds / len(jobs) / scenario.gpus / load


@dataclass(slots=True)
class Run:
    """A finished run: the nodes with all they recorded, and the summary."""

    policy: str
    summary: Summary
    nodes: list[Node]
    records: list[Record] = field(default_factory=list)


def simulate(
    scenario: Scenario,
    workload: Workload,
    policy: str,
    *,
    progress: Callable[[int], None] | None = None,
    record: bool = False,
    timeline: bool = False,
    observe: Callable[[int], Observer] | None = None,
) -> Run:
    """Run ``workload`` under ``policy``; ``progress(finished)`` after every first token.

    ``observe``: who is told what happens on the node of an index, as a restorer's observer is.

    Raises:
        ConfigError: no such policy, objective or router.
    """
    load_policy(policy)
    loop = EventLoop()
    size, first = scenario.chunk_tokens, workload.first()
    named = any(job.hash_ids for job in first)
    if named and any(len(job.hash_ids) != -(-job.total_tokens // size) for job in first):
        raise ConfigError(f"--chunk {size}: traces name blocks of 512 tokens")
    done: list[tuple[Record, FluidRequest]] = []

    def finished(placed: Placed, record: Record) -> None:
        done.append((record, scenario.fluid(placed)))
        if progress is not None:
            progress(len(done))

    builder = _Builder(scenario, loop, observe, record=record, timeline=timeline)
    cluster = Cluster(
        loop,
        scenario.gpus,
        builder.node,
        router=load_router(scenario.router),
        placement=scenario.placement(named=named),
        make_policy=lambda: load_policy(policy),
        finished=finished,
    )
    cluster.run(workload)
    summary = summarise(policy, cluster.nodes, done, scenario.machine.layer_blocks)
    return Run(policy, summary, cluster.nodes, [record for record, _ in done])


class _Builder:
    """Makes the nodes of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        loop: EventLoop,
        observe: Callable[[int], Observer] | None,
        *,
        record: bool,
        timeline: bool,
    ) -> None:
        self._scenario = scenario
        self._loop = loop
        self._observe = observe
        self._options = {"record": record, "timeline": timeline}
        self._pipes = self._shared_pipes()
        self._up = self._shared_pipes()
        """The other direction of those that have one."""

    def _shared_pipes(self) -> dict[str, SharedPipe]:
        return {
            channel.name: SharedPipe(
                self._loop,
                channel.shared_bandwidth,
                channel.link.latency,
                port_bandwidth=channel.link.bandwidth,
            )
            for channel in self._scenario.channels
            if channel.shared_bandwidth is not None
        }

    def node(self, index: int, ended: Callable[[Record], None]) -> Node:
        scenario = self._scenario
        compute = ComputeModel(*scenario.machine.block_flops)
        scheduler = BatchScheduler(compute, self._loop, objective=scenario.objective)
        if scenario.warm:
            self._warm(scheduler, compute)
        links = {channel.name: self._link(channel, self._pipes) for channel in scenario.channels}
        return Node(
            self._loop,
            scheduler,
            scenario.machine.block_seconds,
            links,
            index=index,
            fate=self._fate(index),
            decode_share=scenario.decode_share,
            observer=None if self._observe is None else self._observe(index),
            finished=ended,
            writers={
                channel.name: self._writer(channel, links[channel.name])
                for channel in scenario.channels
            },
            **self._options,
        )

    def _writer(self, channel: Channel, link: Link) -> WriteBehind:
        machine, tokens = self._scenario.machine, self._scenario.chunk_tokens
        nbytes = machine.block_bytes(tokens) * machine.layer_blocks
        if channel.link.duplex:
            link = self._link(channel, self._up)
        return WriteBehind(self._loop, link, nbytes, tokens)

    def _link(self, channel: Channel, pipes: Mapping[str, SharedPipe]) -> Link:
        pipe = pipes.get(channel.name)
        if pipe is not None:
            return pipe.port()
        return SerialLink(self._loop, channel.link.bandwidth, channel.link.latency)

    def _fate(self, index: int) -> Callable[[Load, float], bool | None] | None:
        chance = random.Random(f"fate:{self._scenario.seed}:{index}")
        failing = self._scenario.failing
        return (lambda load, now: chance.random() >= failing) if failing else None

    def _warm(self, scheduler: BatchScheduler, compute: ComputeModel) -> None:
        """Let the models see a few true costs, as earlier requests would have shown them."""
        scenario = self._scenario
        stretch, tail = 1 / (1 - scenario.decode_share), scenario.cut.grid.tail
        for tile in shown_tiles(scenario.cut.grid, scenario.chunk_tokens):
            compute.observe(tile, scenario.machine.block_seconds(tile) * stretch)
        for channel in scenario.channels:
            link, unit = channel.link, float(scenario.machine.block_bytes(tail))
            profile = ChannelProfile(link.latency, 1 / link.bandwidth, unit)
            scheduler.channel(channel.name).prime(profile)
