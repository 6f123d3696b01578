"""How KV was computed: the grid's identity, and which tokens a recompute repeats bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cacheflow.types import Segment, Span, TileGrid

__all__ = ["canonical_tokens", "clip_segments", "exact_tokens", "is_packed", "make_grid_id"]


_PACKED: Final = ";mode=fast"


def make_grid_id(
    *,
    grid: TileGrid,
    torch_version: str,
    device: str,
    attention: str,
    threads: int,
    tensor_parallel: int = 1,
    packed: bool = False,
) -> str:
    """Everything outside the key that decides bits, as one short line of text.

    ``packed``: several tiles may have been computed in one pass (fast mode): no line of text says
    which, so nothing under such an id is repeated bit for bit.

    Raises:
        ConfigError: a name holds a ``;``, which would make two environments look the same.
    """
    for name in (torch_version, device, attention):
        if ";" in name:
            raise ConfigError(f"{name!r} cannot be part of a grid id: it holds a ';'")
    return (
        f"grid={grid.name};torch={torch_version};dev={device};attn={attention}"
        f";threads={threads};tp={tensor_parallel}{_PACKED if packed else ''}"
    )


def is_packed(grid_id: str) -> bool:
    """Whether an engine with this id computes in fast mode."""
    return grid_id.endswith(_PACKED)


def clip_segments(segments: Iterable[Segment], tokens: Span) -> tuple[Segment, ...]:
    """The segments that overlap ``tokens``, whole: a cut one would look like another."""
    return tuple(s for s in segments if s.start < tokens.stop and tokens.start < s.stop)


def canonical_tokens(segments: Sequence[Segment], grid: TileGrid) -> int:
    """How many leading tokens were computed on exactly the tiles of ``grid``.

    Inductive from token 0, because a tile's KV depends on the KV before it.
    """
    edge = 0
    for index, segment in enumerate(segments):
        tile = grid.tile(index)
        ours = (segment.start, segment.stop, segment.width)
        if segment.lossy or ours != (tile.start, tile.stop, tile.width):
            break
        edge = tile.stop
    return edge


def exact_tokens(segments: Iterable[Segment], tokens: int) -> int:
    """How many of the first ``tokens`` tokens no lossy codec has touched.

    Everything behind a token that was stored lossily was computed from it, so it counts as well.
    """
    return min((s.start for s in segments if s.lossy), default=tokens)
