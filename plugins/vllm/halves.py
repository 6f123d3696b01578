"""The two halves of a connector, made from what vLLM says of itself: desk and depot."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from cacheflow.clock import SystemClock
from cacheflow.costs import COSTS_FILE, ComputeModel, CostStore, compute_key
from cacheflow.errors import ConfigError
from cacheflow.kv import model_id
from cacheflow.plugins.vllm.blocks import BlockMemory
from cacheflow.plugins.vllm.compat import installed_version
from cacheflow.plugins.vllm.depot import Depot
from cacheflow.plugins.vllm.desk import Desk
from cacheflow.plugins.vllm.keyring import Keyring
from cacheflow.plugins.vllm.pins import Pins
from cacheflow.plugins.vllm.restores import Limits
from cacheflow.plugins.vllm.saver import Provenance
from cacheflow.plugins.vllm.saves import SaveBook
from cacheflow.plugins.vllm.settings import OUTSIDE_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cacheflow.plugins.vllm.model import Model
    from cacheflow.plugins.vllm.settings import VllmSettings

__all__ = ["keep_costs", "make_depot", "make_desk", "numbered"]

_THIS_VLLM: Final = f"vllm={installed_version()};threads={os.cpu_count()}"
"""Under which compute costs are kept, beside the model's identity."""


def make_desk(
    settings: VllmSettings, model: Model, vllm_config: Any, kv_cache_manager: Any
) -> Desk:
    """The scheduler's half, which knows what earlier processes have learned of compute costs."""
    layout, rank = model.layout, model.shards[0].layout
    return Desk(
        settings=settings,
        limits=Limits(
            block=layout.chunk_tokens,
            budget=vllm_config.scheduler_config.max_num_batched_tokens,
            staged_blocks=int(settings.staging_bytes * OUTSIDE_SHARE) // rank.payload_bytes(),
            layers=layout.num_layers,
            ranks=len(model.shards),
            shares=bool(vllm_config.cache_config.enable_prefix_caching),
        ),
        keyring=Keyring(model.identity, settings.salt_bytes, layout.chunk_tokens),
        book=SaveBook(layout.chunk_tokens),
        costs=_learned(settings, model),
        clock=SystemClock(),
        pins=Pins(kv_cache_manager.block_pool),
        cache=kv_cache_manager,
    )


def make_depot(
    settings: VllmSettings,
    model: Model,
    rank: int,
    caches: Mapping[str, torch.Tensor],
    cache_dtype: str,
) -> Depot:
    """The half of the worker that is tensor-parallel rank ``rank``. ``caches``: layer name ->
    ``[blocks, heads, ...]``, the heads of this rank.

    Raises:
        ConfigError: they are not those of the model, or storage cannot be opened.
    """
    layout, shard = model.layout, model.shards[rank]
    ordered = [caches[name] for name in numbered(caches)]
    if len(ordered) != layout.num_layers:
        raise ConfigError(f"{len(ordered)} KV caches for {layout.num_layers} layers")
    first = ordered[0]
    isa = _get_attn_isa(first.dtype, layout.chunk_tokens, layout.head_dim, cache_dtype)
    shape = "x".join(map(str, (layout.num_kv_heads, *first.shape[2:])))
    grid = f"vllm={installed_version()};isa={isa};threads={torch.get_num_threads()}"
    return Depot(
        settings,
        BlockMemory(ordered, shard.layout),
        shard,
        Provenance(
            layout_id=f"vllm-cpu/{isa}/{shape}",
            grid_id=grid + _cut(model),
            model_id=model_id(model.identity),
        ),
    )


def numbered(names: Iterable[str]) -> list[str]:
    """Names of layers, by the layers' numbers.

    Raises:
        ConfigError: a name has no number.
    """
    return sorted(names, key=_layer_number)


def keep_costs(settings: VllmSettings, model: Model, costs: ComputeModel) -> None:
    """Leave what was learned of compute costs to later processes."""
    profile = costs.profile()
    if settings.keep_costs and profile is not None:
        CostStore(settings.cache_dir / COSTS_FILE).save({_costs_key(model): profile}, {})


def _learned(settings: VllmSettings, model: Model) -> ComputeModel:
    costs = ComputeModel(*model.flops)
    if settings.keep_costs:
        store = CostStore(settings.cache_dir / COSTS_FILE)
        if (profile := store.compute(_costs_key(model))) is not None:
            costs.prime(profile)
    return costs


def _costs_key(model: Model) -> str:
    return compute_key(model.identity, _THIS_VLLM + _cut(model))


def _cut(model: Model) -> str:
    """Sums over ranks come out otherwise, and in another time, than sums in one piece."""
    return f";tp={len(model.shards)}" if len(model.shards) > 1 else ""


def _layer_number(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    if found is None:
        raise ConfigError(f"KV cache {name!r} has no layer number in its name")
    return int(found[1])
