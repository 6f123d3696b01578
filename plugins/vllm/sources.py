"""Where a rank's part of a block lies in a store: in one object, or in several of other layouts.

The CPU's kernels pack each layer of a block by KV heads, K and then V of each, so some heads are
one range of bytes whatever lies inside it: what one number of tensor-parallel ranks has stored is
read by another. (The order differs from that of :meth:`ChunkInfo.head_ranges`, as ``layout_id``
says.) Each head's K and V have checksums of their own. Pure arithmetic, but for the checking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cacheflow.errors import IntegrityError
from cacheflow.kv import checksum, verify
from cacheflow.tiers import cover
from cacheflow.types import Codec, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.tiers import Take
    from cacheflow.types import ChunkInfo, ObjectKey, Shard

__all__ = ["CorruptPart", "Range", "Source", "source"]


class Range(NamedTuple):
    """Bytes ``[offset, offset + nbytes)`` of an object, and where they go in what is read."""

    key: ObjectKey
    offset: int
    nbytes: int
    place: int


@dataclass(frozen=True, slots=True)
class Source:
    """One block of ``shard`` in ``tier``: ``takes`` together are all of it."""

    tier: str
    shard: Shard
    takes: tuple[Take, ...]

    @property
    def is_whole(self) -> bool:
        """It is one object, no more and no less: any layers are one range of bytes."""
        key = self.takes[0].info.key
        return len(self.takes) == 1 and key.heads == self.shard.heads

    def ranges(self, layers: Span) -> list[Range]:
        """What to read for ``layers``, for memory of as many of the shard's layer blocks."""
        if self.is_whole:
            info = self.takes[0].info
            return [Range(info.key, *info.layer_range(layers), 0)]
        return [part for part, _, _ in self._parts(layers)]

    def verify(self, layers: Span, data: memoryview) -> None:
        """Check ``layers``, read to ``data`` as :meth:`ranges` says.

        Raises:
            CorruptPart: naming the object that does not match.
        """
        if self.is_whole:
            info = self.takes[0].info
            try:
                verify(info, layers, data)
            except IntegrityError as error:
                raise CorruptPart(info, str(error)) from error
            return
        for part, take, layer in self._parts(layers):
            _verify_heads(take, layer, data[part.place : part.place + part.nbytes])

    def _parts(self, layers: Span) -> Iterator[tuple[Range, Take, int]]:
        layout = self.shard.whole
        head, stride = 2 * layout.head_bytes, self.shard.layout.layer_stride()
        for layer in layers:
            for take in self.takes:
                theirs, ours = take.info.key.heads.start, self.shard.heads.start
                offset = take.info.layer_offset(layer) + (take.heads.start - theirs) * head
                place = (layer - layers.start) * stride + (take.heads.start - ours) * head
                nbytes = len(take.heads) * head
                yield Range(take.info.key, offset, nbytes, place), take, layer


class CorruptPart(IntegrityError):
    """Bytes of the object ``info`` are not what was stored."""

    def __init__(self, info: ChunkInfo, message: str) -> None:
        super().__init__(message)
        self.info = info


def source(tier: str, infos: Sequence[ChunkInfo], shard: Shard) -> Source | None:
    """A block of ``shard`` from the objects of its chunk that ``tier`` has; None: not all of it is
    there, or not in a form of which some heads can be read alone."""
    exact = [info for info in infos if info.key.heads == shard.heads]
    able = exact[:1] or [info for info in infos if _can_be_cut(info)]
    try:
        return Source(tier, shard, tuple(cover(able, shard.layers, shard.heads)))
    except LookupError:
        return None


def _can_be_cut(info: ChunkInfo) -> bool:
    """Without padding between layers, which the last head's checksum would cover: so are blocks of
    32 tokens and more in all but odd head sizes."""
    heads, layout = len(info.key.heads), info.layout
    return info.codec is Codec.RAW and layout.layer_stride(heads) == layout.layer_bytes(heads)


def _verify_heads(take: Take, layer: int, data: memoryview) -> None:
    info, run = take.info, take.info.layout.head_bytes
    first = 2 * ((layer - info.key.layers.start) * len(info.key.heads))
    first += 2 * (take.heads.start - info.key.heads.start)
    for number in range(2 * len(take.heads)):
        found = checksum(info.checksum_kind, data[number * run : (number + 1) * run])
        at = 8 * (first + number)
        if found.to_bytes(8, "little") != info.checksums[at : at + 8]:
            head, half = divmod(number, 2)
            where = f"layer {layer}, head {take.heads.start + head}, {'V' if half else 'K'}"
            raise CorruptPart(info, f"checksum of {where} does not match")
