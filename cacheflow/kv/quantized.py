"""Lossy codings of a layer block: 8 bits an element, with scales in front.

``int8``: symmetric integers, a float32 scale for each channel of each group of tokens (the largest
absolute value there is 127), because outliers of keys sit in fixed channels (KIVI, arXiv
2402.02750). ``fp8``: e4m3 floats with a float32 scale for each (K/V, head) that makes the largest
value 448. Values that are not finite cannot be coded; the caller then keeps the block as it is.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from cacheflow.types import KVLayout

__all__ = ["decode_fp8", "decode_int8", "encode_fp8", "encode_int8"]

_GROUP_TOKENS: Final = 64
"""Tokens that share the scale of a channel; part of the format, as are the two below."""
_INT8_MOST: Final = 127.0
_FP8_MOST: Final = 448.0
_LEAST_SCALE: Final = 1e-30
"""So that zeros have a scale to be divided by."""


def encode_int8(layout: KVLayout, heads: int, block: memoryview) -> bytearray | None:
    """float32 scales ``[2, heads, groups, dim]``, then int8 ``[2, heads, token, dim]``; or None."""
    import torch

    values = _floats(layout, block, _grouped(layout, heads))
    scales = _scales(values, (3,), _INT8_MOST)
    if scales is None:
        return None
    return _joined(scales, (values / scales).round_().clamp_(-127, 127).to(torch.int8))


def decode_int8(layout: KVLayout, heads: int, data: memoryview, out: memoryview) -> None:
    """Undo :func:`encode_int8` into ``out``. Raises ValueError if the sizes do not agree."""
    shape = _grouped(layout, heads)
    scales, codes, target = _parts(layout, data, out, (*shape[:3], 1, shape[4]))
    target.view(shape).copy_(codes.view(shape).float().mul_(scales))


def encode_fp8(layout: KVLayout, heads: int, block: memoryview) -> bytearray | None:
    """float32 scales ``[2, heads]``, then e4m3 ``[2, heads, token, dim]``; or None."""
    import torch

    values = _floats(layout, block, (2, heads, -1))
    scales = _scales(values, (2,), _FP8_MOST)
    if scales is None:
        return None
    return _joined(scales, (values / scales).to(torch.float8_e4m3fn))


def decode_fp8(layout: KVLayout, heads: int, data: memoryview, out: memoryview) -> None:
    """Undo :func:`encode_fp8` into ``out``. Raises ValueError if the sizes do not agree.

    Moved to the places that a float16 has for them, the bits of an e4m3 number are 1/256 of it
    (subnormal ones as well), which is several times as fast as torch's own cast on a CPU.
    """
    import torch

    scales, codes, target = _parts(layout, data, out, (2, heads, 1))
    bits = codes.to(torch.int16)
    sign = bits & -0x8000
    halves = bits.bitwise_and_(0x7F).bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16)
    target.view(2, heads, -1).copy_(halves.float().view(2, heads, -1).mul_(scales * 256.0))


def _grouped(layout: KVLayout, heads: int) -> tuple[int, ...]:
    """``[k, v][head][group][token][dim]``"""
    tokens = gcd(layout.chunk_tokens, _GROUP_TOKENS)
    return 2, heads, layout.chunk_tokens // tokens, tokens, layout.head_dim


def _floats(layout: KVLayout, block: memoryview, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(block, dtype=getattr(torch, layout.dtype)).float().view(shape)


def _scales(values: torch.Tensor, over: tuple[int, ...], most: float) -> torch.Tensor | None:
    scales = values.abs().amax(over, keepdim=True).div_(most).clamp_(min=_LEAST_SCALE)
    return scales if bool(scales.isfinite().all()) else None


def _joined(scales: torch.Tensor, codes: torch.Tensor) -> bytearray:
    import torch

    parts = [part.contiguous().view(torch.uint8).flatten() for part in (scales, codes)]
    out = bytearray(sum(part.numel() for part in parts))
    torch.cat(parts, out=torch.frombuffer(out, dtype=torch.uint8))
    return out


def _parts(
    layout: KVLayout, data: memoryview, out: memoryview, scale_shape: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scales, the codes (int8, flat) and where the values go (flat)."""
    import torch

    target = torch.frombuffer(out, dtype=getattr(torch, layout.dtype))
    size = 4 * torch.Size(scale_shape).numel()
    if len(data) != size + target.numel():
        raise ValueError(f"{len(data)} bytes where {size + target.numel()} should be")
    # torch warns of memory that is read-only, as is what a tier lends
    codes = bytearray(data) if data.readonly else data
    scales = torch.frombuffer(codes, dtype=torch.float32, count=size // 4).view(scale_shape)
    return scales, torch.frombuffer(codes, dtype=torch.int8, offset=size), target
