"""What happened, as plain records: for metrics, timelines and tests.

Times are seconds on the restorer's monotonic clock. Observers get events on the event loop.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cacheflow.types.geometry import Span

__all__ = [
    "Admitted",
    "CostChecked",
    "Event",
    "Evicted",
    "FirstToken",
    "LayersComputed",
    "LoadEnded",
    "LoadOutcome",
    "LookedUp",
    "Observer",
    "Published",
    "RestoreEnded",
    "StoreDropped",
    "StoreEnded",
    "TierDown",
    "TierUp",
    "TierUsage",
    "tell",
]

_log = logging.getLogger(__name__)


class LoadOutcome(StrEnum):
    """How one load ended."""

    PUBLISHED = "published"
    DROPPED = "dropped"
    """Verified, but recompute had the cells first."""
    MISSING = "missing"
    SHORT = "short"
    FAILED = "failed"
    CORRUPT = "corrupt"
    LATE = "late"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    """The tier was set aside as sick."""


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A tier answered (or failed to, ``error``) which chunks it has."""

    request_id: str
    channel: str
    asked: int
    found: int
    start: float
    stop: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What tiers answered by ``start`` was handed to the scheduler: it may claim cells now."""

    request_id: str
    policy: str
    start: float
    stop: float
    stored_tokens: int
    """Tokens of the prefix that some tier is known to have."""
    expected: float
    """Seconds from ``stop`` until the suffix is computed, alone; 0: nothing is known."""


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """Compute pushed a tile through ``layers``; ``starts`` has each layer's start."""

    request_id: str
    tile: int
    width: int
    is_suffix: bool
    layers: Span
    starts: tuple[float, ...]
    stop: float


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load came to its end, one way or another."""

    request_id: str
    channel: str
    tile: int
    layers: Span
    chunks: int
    nbytes: int
    start: float
    stop: float
    outcome: LoadOutcome
    reason: str = ""
    hidden: bool = False
    """It was about boundary activations; ``layers`` are those of them."""


@dataclass(frozen=True, slots=True)
class Published:
    """Verified cells were copied into the KV cache."""

    request_id: str
    tile: int
    layers: Span
    nbytes: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class RestoreEnded:
    """Prefix restored and suffix computed, or given up (``outcome``)."""

    request_id: str
    policy: str
    outcome: str
    arrival: float
    restored: float
    """When the last cell of the prefix was ready."""
    stop: float
    """When the suffix was computed too."""
    prefix_tokens: int
    suffix_tokens: int
    num_layers: int
    cells: Mapping[str, int] = field(default_factory=dict)
    """Token-layers by source: ``recompute`` and one entry a channel."""
    stored_tokens: int = 0
    """Tokens of the prefix that some tier had."""
    stage_balance: float | None = None
    """In a pipeline: mean over the longest of the stages' restores before this one, which all
    stages know alike; None before there was any."""
    expected: float = 0.0
    """What ``stop - arrival`` was expected to be, on admission, with all resources to itself (0:
    nothing was known)."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request has its first token.

    ``outcome``: ``resident`` (it went on from KV in memory), ``hit`` (every restorable token was
    stored), ``partial``, or ``miss``. ``cells``: token-layers by where they came from
    (``resident``, ``suffix``, ``recompute``, or a channel); their sum is the prompt times the
    layers.
    """

    request_id: str
    policy: str
    outcome: str
    arrival: float
    at: float
    prompt_tokens: int
    cached_tokens: int
    """Resident or stored somewhere."""
    num_layers: int
    cells: Mapping[str, int]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """Chunks were written to a tier, or dropped (``outcome``)."""

    channel: str
    chunks: int
    nbytes: int
    start: float
    stop: float
    outcome: str


@dataclass(frozen=True, slots=True)
class CostChecked:
    """How good predictions were: the median of outcome over prediction since the last check.

    ``kind`` is ``layer`` or ``load`` (of ``channel``); at most one of each a request, told when it
    has ended. Requests that run at the same time share the outcomes.
    """

    request_id: str
    kind: str
    channel: str
    ratio: float
    count: int
    """Predictions checked."""
    at: float


@dataclass(frozen=True, slots=True)
class TierDown:
    """A tier was set aside as sick: asked for nothing until a probe says that it is well.

    ``direction`` is ``load`` (then it is not written to either) or ``store`` (still read from).
    """

    channel: str
    direction: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Evicted:
    """Objects left a tier. ``reason`` is what made them: ``capacity``, ``quota``, ``full`` (the
    backend had no room), ``ttl``, ``pin`` (one was broken), ``corrupt``, ``deleted`` (through the
    tier) or ``vanished`` (nobody knows by whom)."""

    channel: str
    reason: str
    objects: int
    nbytes: int
    at: float
    chunks: tuple[bytes, ...] = ()
    """Digests of the keys of their chunks."""


@dataclass(frozen=True, slots=True)
class TierUp:
    """A tier that was set aside is used again."""

    channel: str
    direction: str
    seconds: float
    """For how long it had been set aside."""
    at: float


@dataclass(frozen=True, slots=True)
class StoreDropped:
    """A tier did not take objects, for want of room: ``capacity`` or ``quota`` (larger than all of
    it), ``leased`` (what is there is in use), ``opening`` (what is there is not known yet),
    ``full`` (the backend refused) or ``worth`` (what would have to leave is worth more)."""

    channel: str
    reason: str
    objects: int
    nbytes: int
    at: float


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds, after a change. ``capacity_bytes`` is 0 where only the backend has one."""

    channel: str
    objects: int
    used_bytes: int
    capacity_bytes: int
    at: float


Event: TypeAlias = (
    LookedUp
    | Admitted
    | LayersComputed
    | LoadEnded
    | Published
    | RestoreEnded
    | FirstToken
    | StoreEnded
    | CostChecked
    | TierDown
    | TierUp
    | Evicted
    | StoreDropped
    | TierUsage
)
Observer: TypeAlias = "Callable[[Event], None]"
"""Must not raise; what it raises is logged and dropped."""


def tell(observer: Observer, event: Event) -> None:
    """Tell ``observer``; what it raises is logged and reaches nobody (promise 9)."""
    try:
        observer(event)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # An observer may raise anything, and must not be able to break serving. Nothing is awaited
        # here: a CancelledError is one of its own making, not the end of the task that tells.
        _log.exception("an observer failed on %s", type(event).__name__)
