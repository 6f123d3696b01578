"""Which part of a model's KV cache one rank holds: a range of layers, a range of KV heads.

Pure numbers, for boundary activations as well, which are a kind of their own. Objects in stores are
named by the same absolute ranges, never by ranks, so whoever holds another part can read them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cacheflow.types.geometry import Span
from cacheflow.types.objects import ObjectKind

if TYPE_CHECKING:
    from cacheflow.types.geometry import KVLayout

__all__ = ["Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """``layers`` and ``heads`` (absolute) of the KV cache whose shape is ``whole``.

    ``stores``: whether this rank is the one that stores the part. Of ranks that hold the same part
    (fewer KV heads than ranks) one is. ``kind``: of what.
    """

    whole: KVLayout
    layers: Span
    heads: Span
    stores: bool = True
    kind: ObjectKind = ObjectKind.KV

    def __post_init__(self) -> None:
        all_layers, all_heads = Span(0, self.whole.num_layers), Span(0, self.whole.num_kv_heads)
        inside = all_layers.covers(self.layers) and all_heads.covers(self.heads)
        if not (len(self.layers) and len(self.heads) and inside):
            raise ValueError(f"no part of {self.whole!r}: {self.layers}, {self.heads}")

    @classmethod
    def of(cls, layout: KVLayout) -> Shard:
        """All of it."""
        return cls(layout, Span(0, layout.num_layers), Span(0, layout.num_kv_heads))

    @property
    def layout(self) -> KVLayout:
        """Shape of the part, as its rank sees it: layers and heads counted from 0."""
        return replace(self.whole, num_layers=len(self.layers), num_kv_heads=len(self.heads))

    def absolute(self, layers: Span) -> Span:
        """The rank's own ``layers`` as the model counts them."""
        first = self.layers.start
        return Span(first + layers.start, first + layers.stop) if first else layers
