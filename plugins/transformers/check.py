"""A self-check at open: does walking the layers give what the model itself gives?

Catches every model whose forward does more than embed, layers, norm and head (scaled embeddings,
residual multipliers, unknown masks), whether or not its config says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers.attention import ATTENTION_NAME

if TYPE_CHECKING:
    from cacheflow.plugins.transformers.engine import TransformersEngine

__all__ = ["check_walk"]

_TOKENS: Final = 24
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
"""Of the largest logit; wrong models miss it by far, right ones by rounding only."""


async def check_walk(engine: TransformersEngine, model: Any) -> None:
    """Compare last-token logits of a short prompt, then hand attention over to the engine.

    Raises:
        ConfigError: the layers cannot be walked, or the logits differ.
    """
    tokens = [(7 * i + 3) % model.config.vocab_size for i in range(_TOKENS)]
    expected = await engine.reference_logits(tokens)
    model.config._attn_implementation = ATTENTION_NAME
    await engine.open("self-check", tokens)
    try:
        await engine.prefill("self-check")
        found = await engine.last_logits("self-check")
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be walked layer by layer: {error}"
        ) from error
    finally:
        await engine.close("self-check")
    off = float((expected - found).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not off <= _TOLERANCE[model.dtype]:
        raise ConfigError(
            f"{type(model).__name__} does more than its layers: walked logits are off by {off:.2g}"
        )
