"""Attention over pages: each page mask-free, the diagonal causal, merged by log-sum-exp.

The softmax over a set of keys can be computed in parts that are merged by their log-sum-exp
(Milakov & Gimelshein, arXiv 1805.02867; FlashAttention-2). Here a tile of queries meets every
earlier page without a mask, the query heads of a group folded into the query axis so that K and V
are never repeated, and only its own diagonal block is causal. So wide tiles cost what a full pass
costs, and the arithmetic depends on the page edges alone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ATTENTION_NAME", "Past", "attend", "attention_forward", "current_past"]

ATTENTION_NAME: Final = "cacheflow"


@dataclass(frozen=True, slots=True)
class Past:
    """What the queries of one layer see besides their own diagonal block.

    ``blocks``: per query row (or one entry for a single row) the K and V of earlier keys, each
    ``[1, Hkv, n, D]``.
    """

    rows: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]


class _Current(threading.local):
    past: Past | None = None


current_past: Final = _Current()
"""Set by the walker around each layer, on its own thread."""


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

    ``key`` and ``value`` are the diagonal block ``[B, Hkv, n, D]``; the rest is in
    :data:`current_past`.
    """
    past = current_past.past
    if past is None:
        raise RuntimeError("cacheflow attention was called outside the engine's walk")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = [
        attend(query[i : i + 1], key[i : i + 1], value[i : i + 1], blocks, scale)
        for i, blocks in enumerate(past.rows)
    ]
    out = rows[0] if len(rows) == 1 else torch.cat(rows)
    return out.transpose(1, 2), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """One row: ``query [1, Hq, n, D]`` over ``blocks`` and causally over its own block."""
    query = query.contiguous()
    group = query.shape[1] // key.shape[1]
    own = (_repeat(key, group), _repeat(value, group))
    out, lse = _flash(query, *own, causal=query.shape[2] > 1, scale=scale)
    if not blocks:
        return out
    total, norm = out.float(), lse.contiguous()
    folded = query.view(1, key.shape[1], group * query.shape[2], query.shape[3])
    for past_key, past_value in blocks:
        part, part_lse = _flash(folded, past_key, past_value, causal=False, scale=scale)
        total, norm = _merge(
            total, norm, part.reshape(query.shape), part_lse.reshape(query.shape[:3])
        )
    return total.to(query.dtype)


def _merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over both key sets from the two separate ones; ``out`` (fp32) is updated in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - both).unsqueeze(-1))
    out.addcmul_(part.float(), torch.exp(part_lse - both).unsqueeze(-1))
    return out, both


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
