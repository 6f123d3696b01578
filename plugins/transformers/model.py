"""Loading a Hugging Face model, naming it exactly, and refusing what cannot be restored exactly.

Knows configs and weights; no KV, no requests.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from cacheflow.errors import ConfigError
from cacheflow.plugins.transformers.attention import ATTENTION_NAME, attention_forward
from cacheflow.plugins.transformers.device import fast_dtype
from cacheflow.types import KVLayout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["identity_of", "kv_layout", "layer_flops", "load_model", "load_tokenizer"]

_VOLATILE: Final = frozenset(
    {
        "_name_or_path",
        "_attn_implementation",
        "attn_implementation",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "architectures",
    }
)
"""Config fields that do not decide KV values, or that the identity names on its own."""

_PARTS: Final = ("embed_tokens", "layers", "norm", "rotary_emb")
"""What a decoder must be made of to be walked from outside."""

_RECURRENT: Final = ("mamba_d_state", "ssm_cfg", "linear_attn", "block_types", "layers_block_type")
"""Fields of configs whose layers keep a state instead of keys and values."""

_WINDOWS: Final = ("sliding_window_size", "attention_window", "window_size", "local_attention")
"""Other names under which configs hide a window."""

_GROWING_ROPE: Final = frozenset({"dynamic", "longrope", "ntk"})
"""Rotary frequencies that depend on how long the sequence has become."""


def load_model(path: Path, dtype: str, device: torch.device) -> Any:
    """A causal LM in eval mode that attends over our pages.

    Raises:
        ConfigError: no model is there, it cannot be loaded, or it has a feature named in the text.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    if not path.exists():
        raise ConfigError(
            f"model {str(path)!r}: no such folder, and nothing is downloaded here; a model of the "
            f"Hugging Face Hub: `hf download NAME --local-dir FOLDER`, then give FOLDER"
        )
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {str(path)!r}: no config.json there; give a model's folder")
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model {str(path)!r} has a config that cannot be read: {error}"
        ) from error
    refuse_unsupported(config)
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    chosen = fast_dtype(device) if dtype == "auto" else dtype
    if chosen not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {dtype!r} is not one of auto, float32, bfloat16, float16")
    try:
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, chosen), attn_implementation="sdpa"
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"model {str(path)!r} cannot be loaded: {error}") from error
    _check_parts(model)
    return model.to(device).eval()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer in the model's folder; None where there is none."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path) if any(path.glob("tokenizer*")) else None


def refuse_unsupported(config: Any) -> None:
    """Raise ConfigError naming the first feature that forbids an exact restore."""
    feature = _unsupported(config)
    if feature:
        raise ConfigError(
            f"model type {getattr(config, 'model_type', '?')!r} cannot be restored exactly: "
            f"it uses {feature}"
        )


def _unsupported(config: Any) -> str:
    def has(name: str) -> Any:
        return getattr(config, name, None)

    kinds = set(has("layer_types") or ()) - {"full_attention"}
    window = has("sliding_window") if has("use_sliding_window") is not False else None
    window = window or next((has(name) for name in _WINDOWS if has(name)), None)
    rope = has("rope_parameters") or has("rope_scaling") or {}
    rope_type = str(rope.get("rope_type", rope.get("type", "default"))) if rope else "default"
    checks = {
        "an encoder": has("is_encoder_decoder"),
        f"layers of type {', '.join(sorted(kinds))}": kinds,
        f"sliding-window attention (window {window})": window,
        "latent (MLA) attention": has("kv_lora_rank"),
        "cross-layer KV sharing": has("num_kv_shared_layers"),
        "chunked attention": has("attention_chunk_size"),
        "attention score capping": has("attn_logit_softcapping"),
        "ALiBi positions": has("alibi"),
        "recurrent or hybrid layers": any(map(has, _RECURRENT)),
        f"rotary frequencies that change with length (rope type {rope_type})": (
            rope_type in _GROWING_ROPE
        ),
        "several modalities in one config": has("vision_config") or has("audio_config"),
        "no attention heads in its config": not has("num_attention_heads"),
    }
    return next((name for name, found in checks.items() if found), "")


def _check_parts(model: Any) -> None:
    """Raise ConfigError unless the model is one plain stack of decoder layers."""
    body = getattr(model, "model", None)
    parts = {"model": body, "lm_head": getattr(model, "lm_head", None)}
    parts |= {f"model.{n}": getattr(body, n, None) for n in _PARTS}
    missing = [name for name, part in parts.items() if part is None]
    if missing:
        raise ConfigError(
            f"{type(model).__name__} cannot be walked layer by layer: it has no {missing[0]}"
        )


def kv_layout(config: Any, dtype: torch.dtype, chunk_tokens: int) -> KVLayout:
    """Geometry of the model's KV cache."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        chunk_tokens=chunk_tokens,
    )


def layer_flops(model: Any) -> tuple[float, float]:
    """FLOPs of one layer: ``(per token, per token and key position)``."""
    layer = model.model.layers[0]
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    return 2.0 * parameters, 4.0 * heads * head_dim


def identity_of(
    model: Any, path: Path, layout: KVLayout, adapter: str = ""
) -> dict[str, str | int]:
    """What the key root binds. Any change of weights, config, dtype or layout changes it."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in _VOLATILE}
    canonical = json.dumps(config, sort_keys=True, default=str)
    return {
        "architecture": type(model).__name__,
        "config": hashlib.sha256(canonical.encode()).hexdigest(),
        "weights": weights_digest(path),
        "adapter": adapter,
        "kv_dtype": layout.dtype,
        "layers": layout.num_layers,
        "kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "chunk_tokens": layout.chunk_tokens,
        "layout": "layer,kv,head,token,dim",
    }


def weights_digest(path: Path) -> str:
    """SHA-256 over names and contents of the weight files."""
    files = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin"))
    if not files:
        raise ConfigError(f"model {str(path)!r}: no .safetensors or .bin weights there")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").digest()
        digest.update(len(file.name).to_bytes(4, "little") + file.name.encode() + content)
    return digest.hexdigest()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one over whatever is on the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
