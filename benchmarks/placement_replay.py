"""The real run's traces in the simulator: what the two placements should come to there.

The very prompts, one after the other, the engine's grid, chunks and work, the same capacity, and
one link for loads and stores of the same ratio to compute. What a turn leaves in memory for the
next one is not modelled, nor is staging memory, so it loads and recomputes a little more. Prints
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from cacheflow.simulation import Channel, Device, Job, Machine, ModelShape, Scenario, simulate
from cacheflow.simulation import load_link as link_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.cli.bench_rig import Rig
    from cacheflow.simulation import Record
    from cacheflow.tiers.eviction import EvictionName

__all__ = ["Replay"]

_LATENCY: Final = 1e-3


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """A request arrives when the last one has its first token."""

    jobs: Sequence[Job]
    name: str = "one by one"

    def first(self) -> Sequence[Job]:
        return self.jobs[:1]

    def then(self, job: Job, record: Record) -> Job | None:
        after = int(job.id) + 1
        return (
            replace(self.jobs[after], arrival=record.first_token)
            if after < len(self.jobs)
            else None
        )


class Replay:
    """``seconds``: to compute all ``tokens`` of a prompt on the engine of ``rig``; ``ratio``: how
    many times faster than that the link brings them."""

    def __init__(self, rig: Rig, tokens: int, seconds: float, ratio: float) -> None:
        layout, (linear, attention) = rig.engine.layout, rig.engine.layer_flops
        layers = layout.num_layers
        flops = layers * (linear * tokens + attention * tokens * tokens / 2)
        # All work at one rate: what matters is what it takes beside the link.
        device = Device("measured", flops / seconds, 1.0, 0.0, 0.0, "", 1.0, 0.0)
        shape = ModelShape("measured", layers, 1, 1, round(attention / 4), linear / 2, "")
        machine = Machine(device, shape, layers_per_block=1)
        link = replace(
            link_of("10gbps-shared"),
            bandwidth=ratio * tokens * shape.token_bytes / seconds,
            latency=_LATENCY,
        )
        self._size = layout.chunk_tokens
        self._scenario = Scenario(
            machine, (Channel(link),), chunk_tokens=self._size, grid=rig.engine.grid
        )

    def mean(
        self,
        prompts: Sequence[Sequence[int]],
        share: float,
        eviction: EvictionName,
        writes: Literal["all", "planned"],
    ) -> float:
        """Mean TTFT in seconds, at ``share`` of all different chunks."""
        jobs = self._jobs(prompts)
        chunks = len({block for job in jobs for block in job.leaves})
        run = replace(
            self._scenario,
            shared_blocks=max(1, round(share * chunks)),
            eviction=eviction,
            writes=writes,
        )
        return simulate(run, _OneByOne(jobs), "adaptive").summary.ttft.mean

    def _jobs(self, prompts: Sequence[Sequence[int]]) -> list[Job]:
        names = dict[int, int]()
        jobs = []
        for number, prompt in enumerate(prompts):
            stops = range(self._size, len(prompt) + self._size, self._size)
            ids = tuple(names.setdefault(hash(tuple(prompt[:s])), len(names)) for s in stops)
            leaves = ids[: len(prompt) // self._size]
            jobs.append(Job(str(number), 0.0, len(prompt), hash_ids=ids, leaves=leaves))
        return jobs
