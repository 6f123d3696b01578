"""Why a prompt's chunks are found or not: what each tier says of them, and what it holds instead.

Pure: is given what lookups and scans answered. Keys are chained, so they say more than they seem
to: a stored chunk proves that every token before it is the same, and that a missing one in front of
it was taken away or never written. Knows no backends, prompts or words for people but its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cacheflow.errors import IntegrityError
from cacheflow.kv import check_stamp
from cacheflow.types import NO_ID, ObjectKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cacheflow.kv import Stamp
    from cacheflow.types import ChunkInfo, KVLayout

__all__ = [
    "ABSENT",
    "STORED",
    "Others",
    "State",
    "absent",
    "differences",
    "first_miss",
    "judge",
    "others",
]


@dataclass(frozen=True, slots=True)
class State:
    """What one tier has of one chunk; ``usable`` if all of it could be restored from there."""

    what: str
    usable: bool = False


ABSENT = State("absent")
STORED = State("stored", usable=True)


_LEFT = {
    "capacity": "evicted (capacity)",
    "quota": "evicted (quota of its tenant)",
    "full": "evicted (backend full)",
    "pin": "evicted (its pin was broken)",
    "ttl": "expired",
    "corrupt": "deleted (it was corrupt)",
    "deleted": "deleted",
    "vanished": "taken away from outside",
}


def absent(reason: str, *, all_known: bool) -> State:
    """What a tier has not: ``reason`` it left it the last time (empty: it is not known to have
    been there). ``all_known``: everything that ever left it is known."""
    if reason:
        return State(_LEFT.get(reason, reason))
    return State("never written (no trace of it)") if all_known else ABSENT


@dataclass(frozen=True, slots=True)
class Others:
    """Objects of a tier that belong to other prompts.

    ``kin``: of the same model and tenant. ``strangers``: the rest, by what is different.
    """

    kin: int
    strangers: dict[tuple[str, ...], int]


def judge(infos: Sequence[ChunkInfo], layout: KVLayout, stamp: Stamp, layout_id: str) -> State:
    """What a tier's answer for one chunk is worth to a model with ``layout``."""
    infos = [info for info in infos if info.key.kind is ObjectKind.KV]
    if not infos:
        return ABSENT
    good, bad = 0, ""
    for info in infos:
        if parts := differences(info, layout, stamp, layout_id):
            bad = f"not usable: another {', '.join(parts)}"
            continue
        try:
            check_stamp(info, stamp)
        except IntegrityError as error:
            bad = f"not usable: {error}"
            continue
        if len(info.key.heads) == layout.num_kv_heads:
            good |= (1 << info.key.layers.stop) - (1 << info.key.layers.start)
    if good == (1 << layout.num_layers) - 1:
        return State("stored, lossy", usable=True) if _all_lossy(infos) else STORED
    if good:
        return State(f"{good.bit_count()} of {layout.num_layers} layers")
    return State(bad or "some heads only")


def differences(info: ChunkInfo, layout: KVLayout, stamp: Stamp, layout_id: str) -> tuple[str, ...]:
    """Names of what keeps an object from being this model's and tenant's (empty: nothing does)."""
    parts = []
    if info.layout != layout:
        fields = ("dtype", "num_layers", "num_kv_heads", "head_dim", "chunk_tokens")
        found = [
            f"{name} ({getattr(info.layout, name)}, here {getattr(layout, name)})"
            for name in fields
            if getattr(info.layout, name) != getattr(layout, name)
        ]
        parts += found or ["layout"]
    if info.layout_id != layout_id:
        parts.append(f"engine layout ({info.layout_id}, here {layout_id})")
    if info.model_id != stamp.model_id and NO_ID not in (info.model_id, stamp.model_id):
        parts.append("model (config, weights, adapter or dtype)")
    if info.tenant_id != stamp.tenant_id and NO_ID not in (info.tenant_id, stamp.tenant_id):
        parts.append("tenant (salt)")
    return tuple(parts)


def others(infos: Iterable[ChunkInfo], layout: KVLayout, stamp: Stamp, layout_id: str) -> Others:
    """Sort a tier's objects by whether this model and tenant could have written them."""
    counts = Counter(
        differences(info, layout, stamp, layout_id)
        for info in infos
        if info.key.kind is ObjectKind.KV
    )
    return Others(counts.pop((), 0), dict(counts.most_common()))


def first_miss(states: Sequence[Sequence[State]]) -> int | None:
    """The first chunk that no tier has whole; ``states``: of every chunk, in every tier."""
    for number, tiers in enumerate(states):
        if not any(state.usable for state in tiers):
            return number
    return None


def _all_lossy(infos: Iterable[ChunkInfo]) -> bool:
    return all(info.lossy for info in infos)
