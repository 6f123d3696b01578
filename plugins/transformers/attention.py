"""Attention over pages: each page mask-free, the diagonal causal, merged by log-sum-exp.

The softmax over a set of keys can be computed in parts that are merged by their log-sum-exp
(Milakov & Gimelshein, arXiv 1805.02867; FlashAttention-2). Here a tile of queries meets every
earlier page without a mask, the query heads of a group folded into the query axis so that K and V
are never repeated, and only its own diagonal block is causal. So wide tiles cost what a full pass
costs, and the arithmetic depends on the page edges alone. In a decode step all requests that hold
the same page meet it in one call, so that a shared prefix is read once, not once a request.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ATTENTION_NAME",
    "Packed",
    "RowBlock",
    "Rows",
    "Tile",
    "attention_forward",
    "current_reach",
]

ATTENTION_NAME: Final = "cacheflow"

_FOREIGN: Final = {
    "sliding_window": "sliding-window attention",
    "softcap": "attention score capping",
    "s_aux": "attention sinks",
    "position_bias": "additive position biases",
}
"""Arguments with which transformers' attention layers ask for what we do not compute."""

KeyValue: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""K and V, each ``[1, Hkv, n, D]``."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One request's tile: its queries see all of ``blocks`` and, causally, their own block."""

    blocks: Sequence[KeyValue]


@dataclass(frozen=True, slots=True)
class Packed:
    """Tiles of several requests side by side in one pass: which tokens of it are whose, and what
    each sees before its own."""

    parts: Sequence[tuple[slice, Sequence[KeyValue]]]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """K and V that some rows of a decode step see; ``rows`` is a slice where they are adjacent."""

    rows: slice | torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """A decode step: one query a row; ``blocks`` hold everything seen, the new tokens included."""

    blocks: Sequence[RowBlock]


class _Current(threading.local):
    reach: Tile | Packed | Rows | None = None


current_reach: Final = _Current()
"""What the layer that is running may see; set by the walker around it, on its own thread."""


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: ``query [B, Hq, n, D]`` -> ``[B, n, Hq, D]``.

    ``key`` and ``value`` are the queries' own block ``[B, Hkv, n, D]``, as the page holds it (in a
    packed pass: as it was just computed); the rest is in :data:`current_reach`.

    Raises:
        RuntimeError: called outside the walk, or for a kind of attention that is not ours.
    """
    reach = current_reach.reach
    if reach is None:
        raise RuntimeError("cacheflow attention was called outside the engine's walk")
    for name, what in _FOREIGN.items():
        if kwargs.get(name) is not None:
            raise RuntimeError(f"its layers use {what} ({name})")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(reach, Tile):
        out = _attend_tile(query, key, value, reach.blocks, scale)
    elif isinstance(reach, Packed):
        parts = [
            _attend_tile(query[:, :, own], key[:, :, own], value[:, :, own], blocks, scale)
            for own, blocks in reach.parts
        ]
        out = torch.cat(parts, dim=2)
    else:
        out = _attend_rows(query, reach.blocks, scale)
    return out.transpose(1, 2), None


def _attend_tile(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[KeyValue],
    scale: float,
) -> torch.Tensor:
    """``query [1, Hq, n, D]`` over ``blocks`` and causally over its own block."""
    query = query.contiguous()
    group = query.shape[1] // key.shape[1]
    out, lse = _flash(query, _repeat(key, group), _repeat(value, group), causal=True, scale=scale)
    if not blocks:
        return out
    total, norm = out.float(), lse
    folded = query.view(1, key.shape[1], group * query.shape[2], query.shape[3])
    for past_key, past_value in blocks:
        part, part_lse = _flash(folded, past_key, past_value, causal=False, scale=scale)
        norm = _merge(total, norm, part.reshape(query.shape), part_lse.reshape(query.shape[:3]))
    return total.to(query.dtype)


def _attend_rows(query: torch.Tensor, blocks: Sequence[RowBlock], scale: float) -> torch.Tensor:
    """``query [B, Hq, 1, D]``, each row over the blocks that name it."""
    total = torch.zeros_like(query, dtype=torch.float32)
    norm = torch.full(query.shape[:3], -torch.inf, device=query.device)
    for block in blocks:
        if isinstance(block.rows, slice):
            some = total[block.rows]  # a view
            norm[block.rows] = _merge(
                some, norm[block.rows], *_fold(query[block.rows], block, scale)
            )
            continue
        part, part_lse = _fold(query.index_select(0, block.rows), block, scale)
        some, some_norm = total.index_select(0, block.rows), norm.index_select(0, block.rows)
        norm.index_copy_(0, block.rows, _merge(some, some_norm, part, part_lse))
        total.index_copy_(0, block.rows, some)
    return total.to(query.dtype)


def _fold(query: torch.Tensor, block: RowBlock, scale: float) -> KeyValue:
    """Rows and their query groups become the query axis: ``out [R, Hq, 1, D], lse [R, Hq, 1]``."""
    rows, heads, _, dim = query.shape
    kv_heads = block.key.shape[1]
    shape = (kv_heads, rows, heads // kv_heads)
    folded = query.reshape(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    out, lse = _flash(folded, block.key, block.value, causal=False, scale=scale)
    return (
        out.reshape(*shape, dim).transpose(0, 1).reshape(query.shape),
        lse.reshape(shape).transpose(0, 1).reshape(rows, heads, 1),
    )


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> torch.Tensor:
    """Join the softmaxes over two key sets: into ``out`` (fp32), the new log-sum-exp is returned.

    A key set that was empty so far (``lse`` of minus infinity) adds nothing.
    """
    both = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - both).unsqueeze(-1))
    out.addcmul_(part.float(), torch.exp(part_lse - both).unsqueeze(-1))
    return both


def _repeat(states: torch.Tensor, group: int) -> torch.Tensor:
    """``[1, Hkv, n, D]`` -> ``[1, Hq, n, D]``; only ever done to a tile's own block."""
    return states if group == 1 else states.repeat_interleave(group, dim=1)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out [1, H, n, D], lse [1, H, n] fp32)`` by the kernel of the device that returns both."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return out, lse
    if query.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return out, lse
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : query.shape[2]]
