"""Many nodes in one virtual time: arrivals, routing, what is stored after each request.

Knows nothing of what a node does with a request, nor of where results go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cacheflow.scheduling import Policy
    from cacheflow.simulation.events import EventLoop
    from cacheflow.simulation.jobs import Job, Workload
    from cacheflow.simulation.node import Node
    from cacheflow.simulation.placement import Placed, Placement
    from cacheflow.simulation.records import Record

__all__ = [
    "ROUTERS",
    "Affinity",
    "Cluster",
    "LeastWork",
    "RoundRobin",
    "Router",
    "load_router",
]


class Router(Protocol):
    """Chooses the node of a request."""

    def choose(self, job: Job, outstanding: Sequence[float], placement: Placement) -> int:
        """Index of a node. ``outstanding``: tokens of unfinished requests by node."""
        ...


class RoundRobin:
    """One node after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, job: Job, outstanding: Sequence[float], placement: Placement) -> int:
        node = self._next % len(outstanding)
        self._next += 1
        return node


class LeastWork:
    """The node with the fewest tokens of unfinished requests; the first of equals."""

    def choose(self, job: Job, outstanding: Sequence[float], placement: Placement) -> int:
        return outstanding.index(min(outstanding))


class Affinity:
    """The node on which most leading blocks were left, unless it is far busier than the others.

    The balance is SGLang's: among the nodes within ``slack`` times the mean work, the longest
    match; equal matches go to the least work.
    """

    def __init__(self, slack: float = 1.5) -> None:
        self._slack = slack

    def choose(self, job: Job, outstanding: Sequence[float], placement: Placement) -> int:
        allowed = self._slack * (sum(outstanding) + job.total_tokens) / len(outstanding)
        least = min(outstanding)
        fit = [i for i, work in enumerate(outstanding) if work <= max(allowed, least)]
        return min(fit, key=lambda i: (-placement.nearby(job, i), outstanding[i], i))


ROUTERS: Final[Mapping[str, Callable[[], Router]]] = {
    "round-robin": RoundRobin,
    "least-work": LeastWork,
    "affinity": Affinity,
}


def load_router(name: str) -> Router:
    """The router called ``name``; ConfigError lists the names there are."""
    if name not in ROUTERS:
        raise ConfigError(f"--router {name!r} is not one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()


class Cluster:
    """Runs a workload over nodes. ``finished(placed, record)`` hears of every first token.

    Nodes are made by ``make_node(index, ended)``; ``ended`` has to reach the node as ``finished``.
    """

    def __init__(
        self,
        loop: EventLoop,
        count: int,
        make_node: Callable[[int, Callable[[Record], None]], Node],
        *,
        router: Router,
        placement: Placement,
        make_policy: Callable[[], Policy],
        finished: Callable[[Placed, Record], None],
    ) -> None:
        self.nodes = [make_node(index, self._ended) for index in range(count)]
        self._loop = loop
        self._router = router
        self._placement = placement
        self._make_policy = make_policy
        self._finished = finished
        self._outstanding = [0.0] * count
        self._jobs: dict[str, tuple[Job, Placed]] = {}
        self._workload: Workload | None = None

    def run(self, workload: Workload) -> None:
        """Until every request of ``workload`` has its first token.

        Raises:
            RuntimeError: nothing can happen any more although requests are unfinished.
        """
        self._workload = workload
        for job in workload.first():
            self._loop.at(job.arrival, self._arrive, job)
        self._loop.run()
        if self._jobs:
            some = ", ".join(list(self._jobs)[:3])
            raise RuntimeError(
                f"{len(self._jobs)} requests can never finish (the first: {some}); a load that "
                "never answers needs a load_deadline"
            )

    def _arrive(self, job: Job) -> None:
        node = self._router.choose(job, self._outstanding, self._placement)
        placed = self._placement.place(job, node)
        self._outstanding[node] += job.total_tokens
        self._jobs[job.id] = (job, placed)
        self.nodes[node].admit(placed.spec, self._make_policy(), placed.coverage)

    def _ended(self, record: Record) -> None:
        job, placed = self._jobs.pop(record.request_id)
        self._outstanding[record.node] -= job.total_tokens
        self._store(job, record.node)
        self._finished(placed, record)
        assert self._workload is not None
        following = self._workload.then(job, record)
        if following is not None:
            self._loop.at(following.arrival, self._arrive, following)

    def _store(self, job: Job, node: int) -> None:
        for channel, blocks in self._placement.served(job, node).items():
            queued = self.nodes[node].writers[channel].store(len(blocks))
            # The last ones of a prefix are queued first: they are the dearest to recompute.
            self._placement.lost(blocks[: len(blocks) - queued], channel, node)
