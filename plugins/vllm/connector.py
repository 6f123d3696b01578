"""vLLM's KV connector over CacheFlow: the two halves, and the doors vLLM knows them by.

In the engine core it holds the ``Desk``, in each worker a ``Depot``; each method passes on to one
of them. Where the model or the set-up is of a kind that cannot be restored exactly, one line says
so and every request passes through untouched.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from cacheflow.errors import ConfigError
from cacheflow.plugins.vllm.compat import check
from cacheflow.plugins.vllm.halves import keep_costs, make_depot, make_desk, numbered
from cacheflow.plugins.vllm.messages import StepOrders, StepReport
from cacheflow.plugins.vllm.metrics import CacheFlowPromMetrics, CacheFlowStats
from cacheflow.plugins.vllm.model import Model, describe
from cacheflow.plugins.vllm.records import Orders
from cacheflow.plugins.vllm.settings import VllmSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from cacheflow.plugins.vllm.depot import Depot
    from cacheflow.plugins.vllm.desk import Desk

__all__ = ["CacheFlowConnector"]

_log = logging.getLogger("vllm.cacheflow")  # vLLM shows what is logged below its own name


class CacheFlowConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """``--kv-transfer-config`` with ``kv_connector`` "CacheFlowConnector" and
    ``kv_connector_module_path`` "cacheflow.plugins.vllm.connector".

    Raises:
        ConfigError: this vLLM is not supported, or a setting cannot be used.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check()
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = VllmSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.desk: Desk | None = None
        self.depot: Depot | None = None
        self._rank = 0
        self._requests: dict[str, Any] = {}
        self._layers: dict[str, int] = {}
        """A layer's name -> its number."""
        self._model = self._describe(vllm_config, kv_cache_config)

    def _describe(self, vllm_config: Any, kv_cache_config: Any) -> Model | None:
        try:
            if not self.settings.tiers:
                raise ConfigError("no tiers are set (setting tiers)")
            return describe(vllm_config, kv_cache_config)
        except ConfigError as error:
            if self.role is KVConnectorRole.SCHEDULER:
                _log.warning("CacheFlow lets every request pass through: %s", error)
            return None

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing else."""
        return False

    # -- the scheduler's side ------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._model is None:
            return
        self.desk = make_desk(self.settings, self._model, self._vllm_config, kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request
        if self.desk is not None:
            self.desk.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.desk is None:
            return 0, False
        return self.desk.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.desk is not None:
            self.desk.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.desk is None:
            return StepOrders(Orders())
        return StepOrders(
            self.desk.orders(
                scheduler_output.num_scheduled_tokens,
                self._requests,
                tuple(scheduler_output.preempted_req_ids or ()),
            )
        )

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        if self.desk is not None and isinstance(news, StepReport):
            self.desk.heard(news.reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        if self.desk is not None:
            self.desk.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Steps go on until the worker has said that every pinned block is free."""
        return self.desk is not None and self.desk.pending

    def reset_cache(self) -> bool:
        """Nothing stored so far is used again by this engine: its weights may have changed."""
        if self.desk is not None:
            self.desk.reset()
        return True

    # -- the worker's side ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if self._model is None:
            return
        self._rank = get_tensor_model_parallel_rank()
        self._layers = {name: number for number, name in enumerate(numbered(kv_caches))}
        cache_dtype = self._vllm_config.cache_config.cache_dtype
        self.depot = make_depot(self.settings, self._model, self._rank, kv_caches, cache_dtype)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before a forward pass: claims hold and staged prefixes are in place on return."""
        super().bind_connector_metadata(connector_metadata)
        if self.depot is not None and isinstance(connector_metadata, StepOrders):
            self.depot.carry_out(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started when the metadata came; they need no forward context."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer's attention: what the step reads of it is in place on return, or named in
        :meth:`get_block_ids_with_load_errors`."""
        # A layer that is not known has no cache of its own: it reads that of one before it.
        if self.depot is not None and (layer := self._layers.get(layer_name)) is not None:
            self.depot.overlaps.wait(layer)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that the step has read and that were not there: vLLM drops what it said for the
        requests that have them."""
        return self.depot.overlaps.take_invalid() if self.depot is not None else set()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole blocks are saved, after the step that completes them."""

    def wait_for_save(self) -> None:
        """After a forward pass: its complete blocks may be copied. Waits for nothing."""
        metadata = self._connector_metadata
        if self.depot is not None and isinstance(metadata, StepOrders):
            self.depot.save(metadata.orders)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self.depot is None:
            return None
        report = self.depot.report()
        return StepReport({self._rank: report}) if report else None

    # -- metrics -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CacheFlowStats | None:
        """Called in both processes; each tells what it has counted."""
        source = self.desk or self.depot
        sums = source.counts.take() if source is not None else {}
        return CacheFlowStats(data=sums) if sums else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CacheFlowStats:
        return CacheFlowStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> CacheFlowPromMetrics:
        return CacheFlowPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.desk is not None and self._model is not None:
            keep_costs(self.settings, self._model, self.desk.costs)
        if self.depot is not None:
            self.depot.close()
