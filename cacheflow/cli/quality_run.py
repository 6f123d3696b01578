"""The runs behind ``cacheflow bench quality``: one history, its KV through every codec.

All copies decode the same tokens in one batch, so that they differ by their KV alone. Knows nothing
of how results are shown.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cacheflow.kv import decode_layers, seal
from cacheflow.types import ChunkKey, Codec, ObjectKey, Span, StagedPart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from cacheflow.types import KVLayout

__all__ = ["CodecFigures", "compare"]

_EXACT: Final = "exact"


@dataclass
class CodecFigures:
    """What one codec did, over all chunks and predictions."""

    codec: Codec
    raw_bytes: int = 0
    stored_bytes: int = 0
    encoding: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    """Seconds a chunk: the median of them counts."""
    divergences: list[float] = field(default_factory=list)
    """KL of each next-token distribution from the exact one, in nats."""
    same: int = 0
    """Predictions whose likeliest token is the exact one."""

    @property
    def predictions(self) -> int:
        return len(self.divergences)

    def _rate(self, seconds: list[float]) -> float:
        return self.raw_bytes / len(seconds) / statistics.median(seconds)

    def summary(self) -> dict[str, Any]:
        """The figures that are shown."""
        ordered = sorted(self.divergences)
        return {
            "codec": self.codec.value,
            "ratio": self.raw_bytes / self.stored_bytes,
            "encode_bytes_per_second": self._rate(self.encoding),
            "decode_bytes_per_second": self._rate(self.decoding),
            "kl_mean": sum(ordered) / len(ordered),
            "kl_p99": ordered[int(0.99 * (len(ordered) - 1))],
            "kl_max": ordered[-1],
            "same_token": self.same / len(ordered),
            "predictions": len(ordered),
        }


async def compare(
    engine: Any, pieces: Sequence[Sequence[int]], prefix: int, tell: Callable[[], None]
) -> list[CodecFigures]:
    """Store the KV of the first ``prefix`` tokens of each piece with every codec, and predict the
    rest of it, token by token."""
    found = [CodecFigures(codec) for codec in Codec if codec is not Codec.RAW]
    for tokens in pieces:
        names = [_EXACT, *(each.codec.value for each in found)]
        try:
            await _compute(engine, tokens[:prefix])
            for each in found:
                await _through(engine, each, tokens[:prefix])
            for token in tokens[prefix:]:
                logits = await engine.decode_logits(names, [token] * len(names))
                _judge(found, logits)
                tell()
        finally:
            for name in names:
                if name in engine.open_requests:
                    await engine.close(name)
    return found


async def _compute(engine: Any, tokens: Sequence[int]) -> None:
    await engine.open(_EXACT, tokens)
    await engine.prefill(_EXACT)


async def _through(engine: Any, each: CodecFigures, tokens: Sequence[int]) -> None:
    """A request of its own whose KV is the exact one's, stored and restored."""
    layout: KVLayout = engine.layout
    whole = Span(0, layout.num_layers)
    await engine.open(each.codec.value, tokens)
    for chunk in range(len(tokens) // layout.chunk_tokens):
        payload = memoryview(bytearray(layout.payload_bytes()))
        await engine.capture(_EXACT, [StagedPart(chunk, whole, payload)])
        restored = await asyncio.to_thread(_round_trip, each, layout, payload)
        await engine.publish(each.codec.value, [StagedPart(chunk, whole, restored)])


def _round_trip(each: CodecFigures, layout: KVLayout, payload: memoryview) -> memoryview:
    key = ObjectKey(ChunkKey(bytes(32)), Span(0, layout.num_layers), Span(0, layout.num_kv_heads))
    each.raw_bytes += len(payload)
    start = time.perf_counter()
    info, header = seal(
        key,
        layout,
        payload,
        grid_id="",
        segments=(),
        canonical=False,
        codec=each.codec,
    )
    each.encoding.append(time.perf_counter() - start)
    stored = payload[: info.nbytes - len(header)]
    each.stored_bytes += len(stored)
    out = memoryview(bytearray(layout.payload_bytes()))
    start = time.perf_counter()
    decode_layers(info, key.layers, stored, out)
    each.decoding.append(time.perf_counter() - start)
    return out


def _judge(found: Sequence[CodecFigures], logits: torch.Tensor) -> None:
    """``logits``: ``[1 + codecs, vocabulary]``, the exact ones first."""
    chances = logits.double().log_softmax(-1)
    exact = chances[0]
    for each, ours in zip(found, chances[1:], strict=True):
        divergence = float((exact.exp() * (exact - ours)).sum())
        each.divergences.append(max(divergence, 0.0))
        each.same += int(ours.argmax()) == int(exact.argmax())
