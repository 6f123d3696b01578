"""The vLLM internals this plugin touches, and the versions on which they were tested.

vLLM calls custom schedulers an unstable interface: everything that is overridden, called or written
is listed here with its parameters, checked when the plugin starts, and tested.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

from cacheflow.errors import ConfigError

__all__ = ["SUPPORTED", "TOUCHED", "check", "differences", "installed_version"]

SUPPORTED: Final = ((0, 32), (0, 33))
"""From this version on, up to but not including that one."""

_MANAGER: Final = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_POOL: Final = "vllm.v1.core.block_pool:BlockPool"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_CONNECTOR: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"

TOUCHED: Final[dict[str, tuple[str, ...]]] = {
    f"{_SCHEDULER}.schedule": ("self", "throttle_prefills"),
    f"{_SCHEDULER}.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    f"{_SCHEDULER}.reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    f"{_SCHEDULER}._preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
    f"{_SCHEDULER}._reserve_prefill_lookahead": (
        *("self", "request", "num_computed_tokens", "num_new_tokens"),
    ),
    f"{_MANAGER}.allocate_slots": (
        *("self", "request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"),
        *("num_lookahead_tokens", "num_external_computed_tokens", "delay_cache_blocks"),
        *("num_encoder_tokens", "full_sequence_must_fit", "reserved_blocks", "has_scheduled_reqs"),
        "skip_zeroing_group_ids",
    ),
    f"{_MANAGER}.cache_blocks": ("self", "request", "num_computed_tokens"),
    f"{_MANAGER}.evict_blocks": ("self", "block_ids"),
    f"{_MANAGER}.get_block_ids": ("self", "request_id"),
    f"{_MANAGER}.get_computed_blocks": ("self", "request"),
    f"{_POOL}.touch": ("self", "blocks"),
    f"{_POOL}.free_blocks": ("self", "ordered_blocks"),
    f"{_CONNECTOR}.__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    f"{_CONNECTOR}.bind_kv_cache_manager": ("self", "kv_cache_manager"),
    f"{_CONNECTOR}.bind_connector_metadata": ("self", "connector_metadata"),
    f"{_CONNECTOR}.build_connector_meta": ("self", "scheduler_output"),
    f"{_CONNECTOR}.build_connector_worker_meta": ("self",),
    f"{_CONNECTOR}.build_prom_metrics": (
        *("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    f"{_CONNECTOR}.get_block_ids_with_load_errors": ("self",),
    f"{_CONNECTOR}.get_kv_connector_stats": ("self",),
    f"{_CONNECTOR}.get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    f"{_CONNECTOR}.has_pending_push_work": ("self",),
    f"{_CONNECTOR}.on_new_request": ("self", "request"),
    f"{_CONNECTOR}.register_kv_caches": ("self", "kv_caches"),
    f"{_CONNECTOR}.reset_cache": ("self",),
    f"{_CONNECTOR}.save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata", "kwargs"),
    f"{_CONNECTOR}.start_load_kv": ("self", "forward_context", "kwargs"),
    f"{_CONNECTOR}.update_connector_output": ("self", "connector_output"),
    f"{_CONNECTOR}.update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    f"{_CONNECTOR}.wait_for_layer_load": ("self", "layer_name"),
    f"{_CONNECTOR}.wait_for_save": ("self",),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata.aggregate": (
        *("self", "other"),
    ),
    "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": (
        *("self", "outputs", "output_rank"),
    ),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": (),
    "vllm.v1.attention.backends.cpu_attn:_get_attn_isa": (
        *("dtype", "block_size", "head_size", "kv_cache_dtype"),
    ),
}
"""``module:qualified.name`` -> parameter names."""


def installed_version() -> str:
    """The version of the vLLM that is installed.

    Raises:
        ConfigError: there is none.
    """
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        raise ConfigError(f"vLLM cannot be imported ({error}); docs/vllm.md says how") from error


def check() -> None:
    """Refuse to start on a vLLM that this plugin does not know.

    Raises:
        ConfigError: naming the version found, the versions supported, and what differs.
    """
    version = installed_version()
    low, high = (".".join(map(str, part)) for part in SUPPORTED)
    supported = f"this CacheFlow supports vLLM {low} up to, but not including, {high}"
    if not SUPPORTED[0] <= _release(version) < SUPPORTED[1]:
        raise ConfigError(f"vLLM {version} is installed; {supported}")
    if found := differences():
        raise ConfigError(f"vLLM {version} is not as expected: {'; '.join(found)} ({supported})")


def differences(touched: dict[str, tuple[str, ...]] = TOUCHED) -> list[str]:
    """What is missing, or has other parameters than listed."""
    found = []
    for name, expected in touched.items():
        try:
            actual = tuple(inspect.signature(_resolve(name)).parameters)
        except (ImportError, AttributeError):
            found.append(f"{name} is missing")
            continue
        if actual != expected:
            found.append(f"{name} takes {', '.join(actual)}")
    return found


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _release(version: str) -> tuple[int, int]:
    numbers = version.split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        return (0, 0)
