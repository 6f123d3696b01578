"""Which chunks of a restored request are worth a copy in a faster tier. Pure.

After a restore the engine has every chunk whole, verified or recomputed: what was loaded from a
slow tier need not be read again to be stored in a faster one. Whether that has it already, how many
may wait and what is worth storing at all is decided where it is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["promotions"]


def promotions(
    tiers: Sequence[str], loaded: Mapping[str, Collection[int]]
) -> dict[str, tuple[int, ...]]:
    """By tier: the chunks, in order, of which some part was loaded from a slower tier.

    ``tiers``: fastest first. ``loaded``: by channel, the chunks that it delivered anything of;
    channels that are no tiers do not count.
    """
    wanted: dict[str, tuple[int, ...]] = {}
    slower: set[int] = set()
    for tier in reversed(tiers):
        if slower:
            wanted[tier] = tuple(sorted(slower))
        slower.update(loaded.get(tier, ()))
    return wanted
