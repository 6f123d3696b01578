"""What the scheduler's side and the workers' side tell each other, once a step each way.

Plain records, pickled by vLLM where the two live in different processes. Block numbers count a
request's blocks from 0; block ids are those of vLLM's pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "Found",
    "Opened",
    "Orders",
    "Overlap",
    "Progress",
    "Report",
    "SaveOrder",
    "SaveOutcome",
]


@dataclass(frozen=True, slots=True)
class Opened:
    """A restore begins: look for ``keys``, those of the blocks from ``first`` on."""

    restore: int
    first: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store the complete block ``block_id`` under ``key``; its scheduler keeps it pinned.

    ``start``: position of the block's first token; ``width``: tokens of the forward pass that
    computed the block's last token; ``tenant``: :func:`cacheflow.kv.tenant_id`.
    """

    save: int
    key: bytes
    block_id: int
    start: int
    width: int
    tenant: bytes


@dataclass(frozen=True, slots=True)
class Overlap:
    """A step reads blocks that are still being loaded: ``ids`` are those from block ``first`` to
    the restore's top. What is not there ``seconds`` after the step began is given up."""

    first: int
    ids: tuple[int, ...]
    seconds: float


@dataclass(slots=True)
class Orders:
    """One step's orders, the same to every worker, in the order in which they are carried out."""

    tops: dict[int, int] = field(default_factory=dict)
    """Restore -> blocks from this number on are not loaded: some other rank has not got them."""
    closed: list[int] = field(default_factory=list)
    """Restores that are over: write nothing more for them and say so (``Report.ended``)."""
    opened: list[Opened] = field(default_factory=list)
    claims: dict[int, int] = field(default_factory=dict)
    """Restore -> blocks below this number belong to compute from this step on."""
    targets: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Restore -> number of the first block and ids of it and those behind: where loads go."""
    tails: dict[int, int] = field(default_factory=dict)
    """Restore -> so many of the lowest blocks that are still to be loaded come by layers."""
    overlaps: dict[int, Overlap] = field(default_factory=dict)
    """Restore -> what a request of this step reads while it is still being loaded."""
    saves: list[SaveOrder] = field(default_factory=list)
    computes: bool = False
    """The step has a forward pass."""
    idle: bool = False
    """Nothing is computed in this step: the worker may wait a moment for a load."""

    def __bool__(self) -> bool:
        aims = self.tops or self.claims or self.targets or self.tails
        return bool(self.closed or self.opened or aims or self.saves)


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks ``[bottom, top)`` are stored (none: ``bottom == top``)."""

    bottom: int
    top: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the loads of one restore are."""

    low: int
    """Every block from here to the top is verified (and in place, once there are targets)."""
    waited: float
    """Seconds since something last arrived for it, or since it was opened."""
    block_seconds: float | None = None
    """What a block takes on the channel; None while nothing was ever loaded over it."""
    first_seconds: float = 0.0
    """Latency and the loads of others that the next block still has to wait for."""
    dead: bool = False
    """It will not get any lower: a load failed, was late, or nothing is left to load."""
    part: float = 0.0
    """What is there of the blocks below ``low``, in blocks."""
    row: bool = False
    """That includes the first layer of each block that is still to come."""
    whole: int = 0
    """Of those blocks, how many are on their way with all their layers at once."""


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """A save has ended. ``stored``: no tier would take the block if it were offered again."""

    save: int
    stored: bool


@dataclass(slots=True)
class Report:
    """The worker's answer at the end of a step. ``found`` and ``progress`` replace what was said
    before; the lists hold what is said once."""

    found: dict[int, Found] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    """Saves whose block is needed no more: it was copied, or the save is given up."""
    saves: list[SaveOutcome] = field(default_factory=list)
    missed: list[bytes] = field(default_factory=list)
    """Keys of blocks that were listed and could not be had."""
    by_layer: bool | None = None
    """Whether forward passes ask for each layer before they read it; None: nothing new."""
    lost: bool = False
    """The worker's storage thread has died: nothing will be loaded, stored or told any more. In
    what several workers' reports come to: that of one of them at least."""

    def __bool__(self) -> bool:
        told = self.ended or self.copied or self.saves or self.missed
        news = self.lost or self.by_layer is not None
        return bool(self.found or self.progress or told or news)
