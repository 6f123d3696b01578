"""A loaded model, cut to what one rank computes: some heads, and some columns of the MLP.

Query, key and value projections, gate and up keep the rows of the rank's heads and columns, the
output and down projections the columns that go with them; the sum of all ranks' outputs of those
two is the layer's. Embedding, norms and the output layer are whole on every rank. By hand and not
by transformers' own plan, for that wants another package and cannot share one KV head among ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from cacheflow.distributed import cut_heads
from cacheflow.errors import ConfigError
from cacheflow.types import Span

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cut_model"]

_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")


def cut_model(
    model: Any, rank: int, ranks: int, add_up: Callable[[torch.Tensor], torch.Tensor]
) -> Span:
    """Cut ``model`` in place; the KV heads that are left. ``add_up``: the sum over all ranks.

    Raises:
        ConfigError: its layers are not of the usual parts, or its heads do not go among ``ranks``.
    """
    config = model.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % ranks:
        raise ConfigError(
            f"{heads} attention heads cannot be shared out among {ranks} tensor-parallel ranks"
        )
    kept, _ = cut_heads(kv_heads, ranks)[rank]
    queries = Span(rank * heads // ranks, (rank + 1) * heads // ranks)
    for layer in model.model.layers:
        attention, mlp = _parts(model, layer)
        dim = attention.q_proj.out_features // heads
        _keep_rows(attention.q_proj, queries, dim)
        _keep_rows(attention.k_proj, kept, dim)
        _keep_rows(attention.v_proj, kept, dim)
        _keep_columns(attention.o_proj, queries, dim, rank, add_up)
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = len(queries) // len(kept)
        width = mlp.gate_proj.out_features
        columns = Span(rank * width // ranks, (rank + 1) * width // ranks)
        _keep_rows(mlp.gate_proj, columns)
        _keep_rows(mlp.up_proj, columns)
        _keep_columns(mlp.down_proj, columns, 1, rank, add_up)
    return kept


def _parts(model: Any, layer: Any) -> tuple[Any, Any]:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    parts = [(attention, f"self_attn.{name}") for name in _ATTENTION]
    parts += [(mlp, f"mlp.{name}") for name in _MLP]
    for owner, name in parts:
        if not isinstance(getattr(owner, name.partition(".")[2], None), torch.nn.Linear):
            raise ConfigError(
                f"{type(model).__name__} cannot be cut over tensor-parallel ranks: its layers have "
                f"no linear {name}"
            )
    return attention, mlp


def _keep_rows(linear: torch.nn.Linear, span: Span, unit: int = 1) -> None:
    rows = slice(span.start * unit, span.stop * unit)
    linear.weight = _kept(linear.weight[rows])
    if linear.bias is not None:
        linear.bias = _kept(linear.bias[rows])
    linear.out_features = linear.weight.shape[0]


def _keep_columns(
    linear: torch.nn.Linear,
    span: Span,
    unit: int,
    rank: int,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    linear.weight = _kept(linear.weight[:, span.start * unit : span.stop * unit])
    linear.in_features = linear.weight.shape[1]
    if linear.bias is not None and rank:
        linear.register_parameter("bias", None)  # it is added once
    linear.register_forward_hook(lambda _module, _inputs, partial: add_up(partial))


def _kept(part: torch.Tensor) -> torch.nn.Parameter:
    """A copy, or the whole weight would stay in memory."""
    return torch.nn.Parameter(part.detach().clone(), requires_grad=False)
