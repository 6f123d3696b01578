"""What a vLLM configuration says about the model: its geometry, identity and cost, or why CacheFlow
has to let all requests pass through untouched.

Reads vLLM's configuration objects; imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheflow.distributed import cut_layout
from cacheflow.errors import ConfigError
from cacheflow.plugins.vllm.identity import folder_digest
from cacheflow.types import DTYPE_BYTES, KVLayout, Shard

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Model", "describe"]

_NOT_IDENTITY = ("_name_or_path", "transformers_version", "_commit_hash")
"""Fields of a model's configuration that decide no values."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model as CacheFlow sees it."""

    layout: KVLayout
    """Of all ranks together; a chunk is one of vLLM's blocks."""
    shards: tuple[Shard, ...]
    """What each tensor-parallel rank holds: heads of every layer."""
    identity: Mapping[str, str | int]
    flops: tuple[float, float]
    """Of the whole model: linear a token, attention a token and key position."""


def describe(vllm_config: Any, kv_cache_config: Any) -> Model:
    """The model, if its KV cache is of the one kind that can be restored exactly here.

    Raises:
        ConfigError: it is not; the message says why.
    """
    _check_engine(vllm_config)
    spec = _only_spec(kv_cache_config)
    layout = _layout(vllm_config, spec)
    shards = _shards(layout, vllm_config.parallel_config.tensor_parallel_size, spec)
    flops = _flops(vllm_config.model_config, layout)
    return Model(layout, shards, _identity(vllm_config, layout), flops)


def _check_engine(vllm_config: Any) -> None:
    if vllm_config.device_config.device_type != "cpu":
        raise ConfigError("only vLLM's CPU backend is supported yet")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError("pipeline parallelism is not supported yet")
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise ConfigError("context parallelism is not supported yet")
    if vllm_config.speculative_config is not None:
        raise ConfigError("speculative decoding is not supported yet")


def _only_spec(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(f"the KV cache has {len(groups)} groups (hybrid attention)")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        raise ConfigError(f"the KV cache is of kind {type(spec).__name__}, not full attention")
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        raise ConfigError("attention looks at a window only")
    return spec


def _layout(vllm_config: Any, spec: Any) -> KVLayout:
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"a KV cache of {dtype} cannot be stored")
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return KVLayout(
        num_layers=model.get_num_layers(parallel),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=spec.head_size,
        dtype=dtype,
        chunk_tokens=spec.block_size,
    )


def _shards(layout: KVLayout, ranks: int, spec: Any) -> tuple[Shard, ...]:
    (shards,) = cut_layout(layout, ranks=ranks)
    if any(len(shard.heads) != spec.num_kv_heads for shard in shards):
        raise ConfigError(
            f"a rank's KV cache has {spec.num_kv_heads} heads, where {ranks} ranks share "
            f"{layout.num_kv_heads}"
        )
    return tuple(shards)


def _identity(vllm_config: Any, layout: KVLayout) -> dict[str, str | int]:
    model = vllm_config.model_config
    return {
        "engine": "vllm",
        "weights": _weights(model),
        "config": _config_digest(model.hf_config),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_dtype": layout.dtype,
        "layers": layout.num_layers,
        "kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
    }


def _weights(model: Any) -> str:
    """A digest of the folder, or the commit of the published model."""
    if Path(model.model).is_dir():
        return folder_digest(model.model).hex()
    commit = getattr(model.hf_config, "_commit_hash", None)
    if not commit:
        raise ConfigError(f"model {model.model!r} is neither a folder nor of a known revision")
    return f"{model.model}@{commit}"


def _config_digest(config: Any) -> str:
    """Rope, overrides and all: what decides values beside the weights."""
    fields = {name: v for name, v in config.to_dict().items() if name not in _NOT_IDENTITY}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _flops(model: Any, layout: KVLayout) -> tuple[float, float]:
    """Only their ratio matters: rates are learned."""
    config, hidden = model.hf_text_config, model.get_hidden_size()
    heads = getattr(config, "num_attention_heads", layout.num_kv_heads)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    qkvo = 2 * hidden * layout.head_dim * (heads + layout.num_kv_heads)
    linear = 2.0 * layout.num_layers * (qkvo + 3 * hidden * inner)
    return linear, 4.0 * layout.num_layers * heads * layout.head_dim
