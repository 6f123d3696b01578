"""Drawing tokens from logits. Knows no requests: the same logits and the same position give the
same token, whatever else is in the batch.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.types import Sampling

__all__ = ["choose", "draw"]


_COLDEST: Final = 1e-30
"""Logits divided by less would leave what fp32 can say."""


def choose(
    logits: torch.Tensor, sampling: Sequence[Sampling | None], positions: Sequence[int]
) -> list[int]:
    """The next token of each row of ``logits`` ``[requests, vocabulary]``, whose place in its
    sequence is its position."""
    likeliest: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, how in enumerate(sampling) if how is not None]
    if drawn:
        rows = logits[drawn].float().cpu()
        for row, values in zip(drawn, rows, strict=True):
            how = sampling[row]
            assert how is not None
            likeliest[row] = draw(values, how, positions[row])
    return likeliest


def draw(logits: torch.Tensor, how: Sampling, position: int) -> int:
    """One token of ``logits`` ``[vocabulary]`` (fp32, on the CPU)."""
    weights = torch.softmax(logits / max(how.temperature, _COLDEST), dim=-1)
    if not weights.isfinite().all():  # nothing to draw by; and who decodes beside it is not to fail
        return int(logits.argmax())
    if how.top_p < 1.0:
        ordered, places = weights.sort(descending=True)
        # A token stays if those likelier than it have less than top_p. The first always does, also
        # of a top_p that is nothing in fp32.
        gone = ordered.cumsum(0) - ordered >= how.top_p
        gone[0] = False
        weights[places[gone]] = 0.0
    generator = torch.Generator().manual_seed(_mixed(how.seed, position))
    return int(torch.multinomial(weights, 1, generator=generator))


def _mixed(seed: int, position: int) -> int:
    content = struct.pack("<QQ", seed & (1 << 64) - 1, position)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
