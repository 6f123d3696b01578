"""Which request goes first: objectives and the orders that policies bring along.

An order gives every request a number, smallest first, from what is left of it. The same number
holds for compute and for every channel wherever both should work on one request from its two ends
(the *gang* rule); orders that send them to different requests look at ``resource``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Protocol

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cacheflow.scheduling.frontier import Frontier

__all__ = [
    "COMPUTE",
    "OBJECTIVES",
    "Deadline",
    "FirstCome",
    "LongestLeft",
    "Makespan",
    "Order",
    "Shortest",
    "ShortestPrompt",
    "load_objective",
]

COMPUTE: Final = "compute"
"""The resource that is not a channel."""


class Order(Protocol):
    """A request's place in the queue of one resource."""

    pools: ClassVar[bool]
    """Whether a cell is computed for the good of all requests together, not of its own."""
    gang: ClassVar[bool]
    """Whether a request has the same key for every resource."""

    def key(self, request: Frontier, resource: str, now: float) -> float:
        """Smallest first; ``resource`` is :data:`COMPUTE` or a channel."""
        ...


class Shortest:
    """Shortest remaining time first, with ageing: ``remaining + beta * arrival``.

    Serving the shortest first has the least mean; ``beta`` bounds what that costs the others. A
    request that arrived at ``a`` with ``r`` seconds left is not overtaken by any that arrives after
    ``a + r / beta``.
    """

    pools: ClassVar[bool] = False
    gang: ClassVar[bool] = True

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def key(self, request: Frontier, resource: str, now: float) -> float:
        return request.remaining(now) + self._beta * request.spec.arrival


class Deadline:
    """Earliest deadline first. A request without one has as long as it needs, plus a minute."""

    pools: ClassVar[bool] = False
    gang: ClassVar[bool] = True

    _NONE: ClassVar[float] = 60.0

    def key(self, request: Frontier, resource: str, now: float) -> float:
        spec = request.spec
        if spec.deadline is not None:
            return spec.deadline
        return spec.arrival + request.remaining(now) + self._NONE


class Makespan:
    """All resources busy to the end: compute where cells are cheapest, channels where dearest.

    Attention makes late cells dearer to recompute and a byte is a byte, so over a whole batch the
    least total work computes all heads before any tail. Requests whose suffix takes longer than
    their loads are loaded first, shortest first, so that compute has suffixes to work on: Johnson's
    rule for two machines in line (Naval Research Logistics Quarterly 1, 1954). Ageing in tokens a
    second keeps a stream of new requests from starving old ones.
    """

    pools: ClassVar[bool] = True
    gang: ClassVar[bool] = False
    _TOKENS_A_SECOND: ClassVar[float] = 1000.0
    _FIRST: ClassVar[float] = -1e6

    def key(self, request: Frontier, resource: str, now: float) -> float:
        age = self._TOKENS_A_SECOND * request.spec.arrival
        if resource == COMPUTE:
            return age + request.position
        load, suffix = request.loads_left(now, alone=True), request.suffix_seconds
        if load is not None and load < suffix:
            return age + self._FIRST + load
        return age - request.last_free


class FirstCome:
    """In order of arrival."""

    pools: ClassVar[bool] = False
    gang: ClassVar[bool] = True

    def key(self, request: Frontier, resource: str, now: float) -> float:
        return request.spec.arrival


class ShortestPrompt:
    """Shortest prompt first, whatever is left of it."""

    pools: ClassVar[bool] = False
    gang: ClassVar[bool] = True

    def key(self, request: Frontier, resource: str, now: float) -> float:
        return request.spec.total_tokens


class LongestLeft:
    """Compute advances all requests alike; channels serve the one with most left to restore."""

    pools: ClassVar[bool] = False
    gang: ClassVar[bool] = False

    def key(self, request: Frontier, resource: str, now: float) -> float:
        return request.position if resource == COMPUTE else -request.free.linear


OBJECTIVES: Final[Mapping[str, Callable[[], Order]]] = {
    "tail": lambda: Shortest(1.0),
    "mean": lambda: Shortest(0.05),
    "deadline": Deadline,
    "makespan": Makespan,
}


def load_objective(name: str) -> Order:
    """The order that serves the objective called ``name``; ConfigError lists those there are."""
    if name not in OBJECTIVES:
        raise ConfigError(f"objective {name!r} is not one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]()
