"""What a run amounts to: times to first token, utilisation, efficiency, tokens by source.

Pure arithmetic on what nodes recorded. Knows no policies and no output formats.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cacheflow.simulation.bounds import batch_fluid_seconds, mean_lower_bound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.simulation.bounds import FluidRequest
    from cacheflow.simulation.node import Node
    from cacheflow.simulation.records import Record

__all__ = ["Quantiles", "Summary", "efficiency", "quantile", "summarise"]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of a list of seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Zeros for an empty list."""
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (quantile(ordered, q) for q in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of a sorted, non-empty list, between its neighbours (as ``numpy.quantile`` does it)."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on one workload. Times in virtual seconds, shares between 0 and 1."""

    policy: str
    requests: int
    ttft: Quantiles
    restore: Quantiles
    """Until the prefix was ready."""
    makespan: float
    """From the first arrival to the last first token."""
    utilisation: dict[str, float]
    """By resource: useful busy seconds / seconds in which a prefix waited to be restored."""
    efficiency: float
    """Fluid bound of each node's busy periods / their length."""
    mean_bound: float | None
    """Of a closed batch on one node: lower bound of the mean TTFT / mean TTFT."""
    sources: dict[str, float]
    """Restored tokens by source (a token counts by the share of its layers)."""
    computed_tokens: int
    """Suffix tokens: never restored."""
    failed_loads: int
    dropped_loads: int
    written_bytes: int
    """Stored behind the requests, where what is stored depends on the run."""
    unwritten_bytes: int
    """Found the queue of stores full."""

    def as_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self)


def summarise(
    policy: str,
    nodes: Sequence[Node],
    fluid: Sequence[tuple[Record, FluidRequest]],
    layer_blocks: int,
) -> Summary:
    """``fluid``: every finished request with its cells' seconds."""
    records = [record for record, _ in fluid]
    sources: dict[str, float] = {}
    for record in records:
        for source, cells in record.cells.items():
            sources[source] = sources.get(source, 0.0) + cells / layer_blocks
    writers = [writer for node in nodes for writer in node.writers.values()]
    arrivals = {record.arrival for record in records}
    closed = len(nodes) == 1 and len(arrivals) == 1
    ttft = Quantiles.of([record.ttft for record in records])
    bound = mean_lower_bound([cells for _, cells in fluid]) if closed else None
    return Summary(
        policy=policy,
        requests=len(records),
        ttft=ttft,
        restore=Quantiles.of([record.restored - record.arrival for record in records]),
        makespan=max((r.first_token for r in records), default=0.0) - min(arrivals, default=0.0),
        utilisation=_utilisation(nodes),
        efficiency=efficiency(nodes, fluid),
        mean_bound=None if bound is None or not ttft.mean else bound / ttft.mean,
        sources=dict(sorted(sources.items())),
        computed_tokens=sum(record.suffix_tokens for record in records),
        failed_loads=sum(record.failed_loads for record in records),
        dropped_loads=sum(record.dropped_loads for record in records),
        written_bytes=sum(writer.written_bytes for writer in writers),
        unwritten_bytes=sum(writer.dropped_bytes for writer in writers),
    )


def _utilisation(nodes: Sequence[Node]) -> dict[str, float]:
    pending = sum(node.pending_seconds for node in nodes)
    useful = {"compute": sum(node.compute.useful for node in nodes)}
    for name in nodes[0].links if nodes else ():
        useful[name] = sum(node.links[name].useful for node in nodes)
    # Sums of many floats may end a rounding error above the whole.
    return {name: min(s / pending, 1.0) if pending else 0.0 for name, s in useful.items()}


def efficiency(nodes: Sequence[Node], fluid: Sequence[tuple[Record, FluidRequest]]) -> float:
    """Fluid makespan of the requests of each busy period / its length, over all periods.

    A busy period of a node is a time in which it had a request without a first token; all work of
    its requests lies inside, so the fluid makespan is a lower bound of its length.
    """
    least = length = 0.0
    for node in nodes:
        periods = node.busy_periods
        starts = [start for start, _ in periods]
        members: list[list[FluidRequest]] = [[] for _ in periods]
        for record, cells in fluid:
            if record.node == node.index:
                members[max(0, bisect_right(starts, record.arrival) - 1)].append(cells)
        least += sum(batch_fluid_seconds(requests) for requests in members)
        length += sum(stop - start for start, stop in periods)
    return least / length if length else 1.0
